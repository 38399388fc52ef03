"""A DistributedDataParallel whose work our buckets do, and which stays usable beside.

Its reducer goes: it holds flat buckets of its own, and nodes of the backward graph that belong to the stream on which
the wrapper was made (the legacy default stream, which no capture may touch). Who calls the wrapper for training outside
of the step gets a new reducer, on the stream of captures; calls without gradients need none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


class Standby:
    """Holds the wrapper's place until somebody calls it again."""

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
        """As DDP does for a copy that was unpickled."""
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
        if ddp.static_graph:
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()

    def close(self) -> None:
        """The wrapper is the user's again."""
        self._hook.remove()
        if self._ddp.reducer is None:
            self._build()
