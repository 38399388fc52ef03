"""The same values in different memory layouts: contiguous, at an odd offset, strided, transposed.

Every tensor is inside a larger buffer filled with a pattern. `Placed.check()` checks that only the tensor's own
elements were written.
"""

from __future__ import annotations

import torch

POISON = 0xA5
LAYOUTS = ("plain", "offset", "strided", "transposed")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills the tensor's own elements with bytes that no result contains by chance."""
    flat = torch.full((tensor.numel() * tensor.element_size(),), POISON, dtype=torch.uint8, device=tensor.device)
    tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tensor


class Placed:
    """A tensor in its own buffer, with the memory around it checked."""

    def __init__(self, values: torch.Tensor, layout: str, device: torch.device | str = "cpu") -> None:
        count, dtype = values.numel(), values.dtype
        shape = values.shape
        slack = 2 * count + 11 if layout in ("strided", "transposed") else count + 11
        self._buffer = torch.full((slack * values.element_size(),), POISON, dtype=torch.uint8, device=device)
        elements = self._buffer.view(dtype)
        if layout == "plain":
            self.tensor = elements[:count].view(shape)
        elif layout == "offset":
            self.tensor = elements[3 : 3 + count].view(shape)
        elif layout == "strided":
            self.tensor = elements[1 : 1 + 2 * count : 2].view(shape) if count else elements[:0].view(shape)
        else:
            rows = next(r for r in (4, 3, 2, 1) if count % r == 0)
            self.tensor = elements[:count].view(count // rows, rows).t() if count else elements[:0].view(shape)
            values = values.reshape(self.tensor.shape)
        self.tensor.copy_(values)
        mask = torch.zeros(slack, dtype=torch.bool)
        mask[torch.as_strided(torch.arange(slack), self.tensor.shape, self.tensor.stride(), self._start(elements))] = (
            True
        )
        self._around = (~mask.repeat_interleave(values.element_size())).to(device)

    def _start(self, elements: torch.Tensor) -> int:
        return self.tensor.storage_offset() - elements.storage_offset()

    def check(self, what: str) -> None:
        assert bool((self._buffer[self._around] == POISON).all()), f"{what}: wrote outside the tensor"
