"""NaN and Inf in results, told once a layer. They arrive as they are: nothing is clipped.

On the CPU a result is looked at before it is handed on. On a CUDA device looking would make the host wait: a norm of
each layer is copied to the host behind the exchange, and read at the next exchange of the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ark_torch.distributed.compression.agree import log
from ark_torch.distributed.compression.layers import Layer


class Watch:
    """Remembers whom it has told of."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._pending: dict[tuple[int, ...], tuple[Tensor, torch.cuda.Event, list[Layer]]] = {}

    def look(self, layers: Sequence[Layer], results: Sequence[Tensor], given: Sequence[Tensor], rank: int) -> None:
        """`results` of an exchange of `given`, layer by layer; `given` tells the rank that it comes from."""
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
        key = tuple(map(id, layers))
        before = self._pending.get(key)
        if before is not None and _passed(before[1]):
            for layer, norm in zip(before[2], before[0].tolist(), strict=True):
                if layer.name not in self._told and not norm < float("inf"):
                    self._tell(layer, rank, "the gradient of an earlier step")
        if before is None or _passed(before[1]):
            norms = torch.stack(torch._foreach_norm(list(results), float("inf"))).float()
            host = torch.empty(norms.shape, pin_memory=True)
            host.copy_(norms, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._pending[key] = (host, event, list(layers))

    def _tell(self, layer: Layer, rank: int, whose: str) -> None:
        self._told.add(layer.name)
        log.warning(
            "compression: [rank %d] NaN or Inf in %s of %s %s: the averaged gradient has it too (told once a layer)",
            rank, whose, layer.name, layer.shape,
        )  # fmt: skip


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _finite(tensor: Tensor) -> bool:
    """A sum is quicker than a look at each element, and finite sums have finite terms."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
