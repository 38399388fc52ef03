"""Errors of whole models against float64, compared with Inductor's on the same inputs.

The reference is the model entirely in float64, also where it asks for float32 (norms, rotary embeddings). Errors are
relative, by the root of the sum of squares over all results of a run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FACTOR = 1.5  # times Inductor's error, at most

Run = Callable[[Any, torch.dtype], Sequence[Tensor]]


class Float64(TorchFunctionMode):
    """Replaces requests for float32 by float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wider(argument: Any) -> Any:
            return torch.float64 if argument is torch.float32 else argument

        return func(*map(wider, args), **{name: wider(argument) for name, argument in (kwargs or {}).items()})


def exact(model: nn.Module, run: Run) -> list[Tensor]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the type of tensors made from numbers
    try:
        with Float64():
            return list(run(copy.deepcopy(model).double(), torch.float64))
    finally:
        torch.set_default_dtype(usual)


def error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    differences = sum(float((a.double() - b).square().sum()) for a, b in zip(got, wanted, strict=True))
    return (differences / sum(float(b.square().sum()) for b in wanted)) ** 0.5


def check(model: nn.Module, run: Run, compiled: Callable[..., Any], **options: Any) -> Any:
    """Compares ark's error with Inductor's, and checks that two runs give the same bits. Returns ark's report.

    `run` calls a model from its initial state each time.
    """
    dtype = next(model.parameters()).dtype
    wanted = exact(model, run)
    inductor = error(run(torch.compile(copy.deepcopy(model), dynamic=False), dtype), wanted)
    call, report = compiled(model, dynamic=False, **options)
    got = run(call, dtype)
    assert error(got, wanted) <= FACTOR * inductor, (error(got, wanted), inductor)
    assert inductor < (1e-5 if dtype == torch.float32 else 0.1)  # otherwise the reference is wrong
    assert all(torch.equal(a, b) for a, b in zip(run(call, dtype), got, strict=True))
    return report
