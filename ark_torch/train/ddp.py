"""Replaces the reducer of a DistributedDataParallel by our buckets, and keeps the wrapper usable.

The reducer is dropped: it holds its own flat buckets, and nodes of the backward graph that belong to the stream on
which the wrapper was made (the legacy default stream, which a capture must not touch). A training call of the wrapper
outside the step creates a new reducer, on the capture stream; calls without gradients need none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Standby:
    """Stands in for the reducer until the wrapper is called again."""

    def __init__(self, ddp: DistributedDataParallel, stream: Any) -> None:
        self._ddp, self._stream = ddp, stream
        self.in_step = False
        self._drop()
        self._hook = ddp.register_forward_pre_hook(self._called)

    def _drop(self) -> None:
        attributes: Any = self._ddp
        attributes.reducer = attributes.logger = None

    def _called(self, module: Any, inputs: Any) -> None:
        if self.in_step:
            raise RuntimeError(
                "ark: train.capture: loss() called the DistributedDataParallel object, whose gradients the step "
                "averages itself: call the model that loss() is given."
            )
        if self._ddp.reducer is None and torch.is_grad_enabled():
            self._build()

    def _build(self) -> None:
        """Same steps as in DDP for an unpickled copy."""
        ddp = self._ddp
        if self._stream is None:
            self._init()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._init()
        torch.cuda.current_stream().wait_stream(self._stream)
        assert ddp.reducer is not None

    def _init(self) -> None:
        ddp: Any = self._ddp
        parameters, sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
        for hook, state in ddp._comm_hooks:
            dist._register_comm_hook(ddp.reducer, state, hook)
        if ddp.static_graph:
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()

    def close(self) -> None:
        """Returns the wrapper to normal use."""
        self._hook.remove()
        if self._ddp.reducer is None:
            self._build()
