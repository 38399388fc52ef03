"""Updates of DTensors by fused SGD.

DTensor has no rule for aten::_fused_sgd_, and SGD's other forms read the rate on the host, which a graph cannot. The
operator works element by element, so a rank runs it on its own shards. Gradients are brought to the placement of their
parameters first; momenta get it from the gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode


def on_shards(optimizer: Optimizer) -> contextlib.AbstractContextManager[Any]:
    """A context for the optimizer's step, gradients being ready. Does nothing unless it is a fused SGD of DTensors."""
    fused = isinstance(optimizer, SGD) and any(group.get("fused") for group in optimizer.param_groups)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    if not fused or not parameters:
        return contextlib.nullcontext()
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return _OnShards()


class _OnShards(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch._fused_sgd_ or not any(isinstance(p, DTensor) for p in args[0]):
            return func(*args, **kwargs)
        parameters, gradients, momenta = args
        func(*([_shard(one) for one in tensors] for tensors in args), **kwargs)
        torch.autograd.graph.increment_version([*parameters, *gradients, *momenta])
        return None


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
