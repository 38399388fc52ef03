"""Reports NaN and Inf in results, once per layer. They arrive unchanged: nothing is clipped.

On the CPU a result is checked before it is returned. On a CUDA device the check would stall the host, so each layer's
norm is copied to the host after the exchange and read in a later call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ark_torch.distributed.compression.agree import log
from ark_torch.distributed.compression.layers import Layer

MOST_PENDING = 64


class Watch:
    """Remembers which layers it has reported."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._pending: deque[tuple[Tensor, torch.cuda.Event, list[Layer]]] = deque()

    def look(self, layers: Sequence[Layer], results: Sequence[Tensor], given: Sequence[Tensor], rank: int) -> None:
        """Checks the `results` of an exchange of `given`, layer by layer; `given` shows whether this rank caused
        them."""
        if not results:
            return
        if results[0].is_cuda:
            self._look_later(layers, results, rank)
            return
        for layer, result, mine in zip(layers, results, given, strict=True):
            if layer.name in self._told or _finite(result):
                continue
            self._tell(layer, rank, "this rank's gradient" if not _finite(mine) else "another rank's gradient")

    def _look_later(self, layers: Sequence[Layer], results: Sequence[Tensor], rank: int) -> None:
        while self._pending and _passed(self._pending[0][1]):
            norms, _, earlier = self._pending.popleft()
            for layer, norm in zip(earlier, norms.tolist(), strict=True):
                if layer.name not in self._told and not norm < float("inf"):
                    self._tell(layer, rank, "the gradient of an earlier step")
        if len(self._pending) == MOST_PENDING:  # the host is far ahead: check again when the device has caught up
            return
        filled = [(layer, result) for layer, result in zip(layers, results, strict=True) if result.numel()]
        norms = torch.stack(torch._foreach_norm([result for _, result in filled], float("inf"))).float()
        host = torch.empty(norms.shape, pin_memory=True)
        host.copy_(norms, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        self._pending.append((host, event, [layer for layer, _ in filled]))

    def _tell(self, layer: Layer, rank: int, whose: str) -> None:
        self._told.add(layer.name)
        log.warning(
            "compression: [rank %d] NaN or Inf in %s of %s %s: the averaged gradient has it too (told once a layer)",
            rank, whose, layer.name, layer.shape,
        )  # fmt: skip


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _finite(tensor: Tensor) -> bool:
    """Tries the sum first, which is faster than checking each element: a finite sum has finite terms."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
