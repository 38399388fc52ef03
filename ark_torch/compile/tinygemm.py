"""Int4 weights in the order of PyTorch's CUDA kernel (aten._weight_int4pack_mm, "tinygemm"; torchao and GPT-fast).

Codes are packed for that kernel's tensor core tiles: [n / 8, k / (16 t), 32 lanes, t / 2] words of eight codes, where t
is inner_k_tiles. Loop kernels read rows of codes, and copy the groups' scales of a column at once. So a region takes
codes unpacked, and the scales of a model by column: the first call makes them, and later calls take what the first one
made, as long as the storage is the same and no operator has written it (a write to `tensor.data` is not seen). It is a
second copy of the weight, of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Boxed = Callable[[list[Any]], Sequence[Any]]


def sizes(packed: Tensor) -> tuple[int, int] | None:
    """Columns and depth of a weight; None if it is not packed in this order."""
    if packed.dim() != 4 or packed.dtype != torch.int32 or packed.shape[2] != 32 or packed.shape[3] not in (1, 2, 4):
        return None
    return packed.shape[0] * 8, packed.shape[1] * packed.shape[3] * 32


def unpack(packed: Tensor) -> Tensor:
    """Rows of codes [n, k / 2], uint8, the even depth's code in the low half of a byte.

    Lane 4 c + q of a tile holds column c. Of its word w, the half byte r is the code at depth 32 w + 2 q + 8 r, and the
    half byte r + 4 the one behind that.
    """
    known = sizes(packed)
    assert known is not None
    tiles, outer, _, words = packed.shape
    lanes = packed.view(tiles, outer, 8, 4, words)
    pairs = [(lanes >> 4 * r & 15) | (lanes >> 4 * (r + 4) & 15) << 4 for r in range(4)]
    codes = torch.stack(pairs, -1).to(torch.uint8)  # [tile, outer, column, q, word, r]
    return codes.permute(0, 2, 1, 4, 5, 3).reshape(known[0], known[1] // 2)


def by_column(scales: Tensor) -> Tensor:
    """Scales and zeros [groups, n, 2] as [2, n, groups]."""
    return scales.permute(2, 1, 0).contiguous()


class _Unpacked:
    """One weight's rows, or its scales, made anew if it is another tensor or was written."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._storage: Any = None  # weakly: a new one may lie at the same address
        self._rows: Tensor | None = None

    def rows(self, packed: Tensor) -> Tensor:
        now = (packed.data_ptr(), 0 if packed.is_inference() else packed._version)
        if self._rows is not None and self._of == now and not self._storage.expired():
            return self._rows
        rows = unpack(packed) if packed.dim() == 4 else by_column(packed)
        # What a CUDA graph captures exists only when it is replayed.
        if not (packed.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._of, self._rows, self._storage = now, rows, StorageWeakRef(packed.untyped_storage())  # type: ignore[no-untyped-call]
        return rows


def around(run: Boxed, positions: Iterable[int]) -> Boxed:
    """Gives `run` the rows of the weights, and their scales by column, at these positions of its arguments."""
    weights = [(position, _Unpacked()) for position in positions]
    if not weights:
        return run

    def unpacked(inputs: list[Any]) -> Sequence[Any]:
        for position, weight in weights:
            inputs[position] = weight.rows(inputs[position])
        return run(inputs)

    return unpacked
