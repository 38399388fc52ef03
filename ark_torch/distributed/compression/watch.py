"""Reports NaN and Inf in results, once per layer. They arrive unchanged: nothing is clipped.

On the CPU a result is checked before it is returned. On a CUDA device the check would stall the host or cost launches,
so the kernel that writes the result notes the smallest index of a NaN or Inf in a word of pinned memory, a slot, which
the host reads in a later call. Of several such layers in one exchange, a slot names the first.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ark_torch.distributed.compression.agree import log
from ark_torch.distributed.compression.layers import Layer

NOTHING = 2**63 - 1  # a slot's value while all results are finite
_PAGE = 512  # words that are pinned at a time

# Pinned words are never freed or used again: launches and captured graphs may outlive their state and still write.
_pages: list[Tensor] = []
_unused: list[Tensor] = []
_lock = threading.Lock()


def _pinned_word() -> Tensor:
    with _lock:
        if not _unused:
            _pages.append(torch.empty(_PAGE, dtype=torch.int64, pin_memory=True))
            _unused.extend(_pages[-1].chunk(_PAGE))
        return _unused.pop()


class Slot:
    """`word`, int64 `[1]`, to which kernels write; `numels`: elements of each layer in the result, in its order."""

    def __init__(self, word: Tensor, layers: Sequence[Layer], numels: Sequence[int]) -> None:
        self.word, self.numels = word.fill_(NOTHING), list(numels)
        self._layers, self._ends = list(layers), list(accumulate(numels))
        self._value = ctypes.c_int64.from_address(word.data_ptr())  # a plain load, without PyTorch's dispatcher

    def take(self) -> Layer | None:
        """The layer of the noted element; the slot is empty afterwards."""
        index = self._value.value
        if index == NOTHING:
            return None
        self._value.value = NOTHING
        return self._layers[bisect_right(self._ends, index)]


class Watch:
    """Remembers which layers it has reported."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self.slots: dict[tuple[int, ...], Slot] = {}  # by the ids of the layers

    def slot(self, layers: Sequence[Layer], numels: Sequence[int]) -> Slot:
        """The slot of a CUDA result that holds these layers."""
        key = tuple(map(id, layers))
        if key not in self.slots or self.slots[key].numels != numels:
            self.slots[key] = Slot(_pinned_word(), layers, numels)
        return self.slots[key]

    def look(self, rank: int, slot: Slot | None = None) -> None:
        """Reports what kernels have noted since the last look, in `slot` or in all slots."""
        for one in self.slots.values() if slot is None else (slot,):
            layer = one.take()
            if layer is not None and layer.name not in self._told:
                self._tell(layer, rank, "the gradient of an earlier step")

    def check(self, layers: Sequence[Layer], results: Sequence[Tensor], given: Sequence[Tensor], rank: int) -> None:
        """Checks the CPU `results` of an exchange of `given`, layer by layer; `given` shows whether this rank caused
        them."""
        for layer, result, mine in zip(layers, results, given, strict=True):
            if layer.name in self._told or _finite(result):
                continue
            self._tell(layer, rank, "this rank's gradient" if not _finite(mine) else "another rank's gradient")

    def _tell(self, layer: Layer, rank: int, whose: str) -> None:
        self._told.add(layer.name)
        log.warning(
            "compression: [rank %d] NaN or Inf in %s of %s %s: the averaged gradient has it too (told once a layer)",
            rank, whose, layer.name, layer.shape,
        )  # fmt: skip


def _finite(tensor: Tensor) -> bool:
    """Tries the sum first, which is faster than checking each element: a finite sum has finite terms."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
