"""Integers wrap around as in eager PyTorch. No compiler may assume that they do not overflow.

Shifts follow PyTorch's rule for negative counts and counts of at least the width: 0, or the sign.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

COUNTS = [-(2**31), -1, 0, 1, 31, 32, 33, 63, 64, 70, 127]


def wrapping(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """A compiler that assumes no overflow could decide each of these without arithmetic."""
    return (
        (x + y) > x,
        (x + 1) > x,
        (x - 1) < x,
        torch.where(x + y < x, -1, 1),
        (x * 2) // 2 == x,
        -x > 0,
        x.abs() >= 0,
        x + y,
        x - y,
        x * y,
        -x,
        x.abs(),
    )


def check_wrapping(dtype: torch.dtype, compiled: Any, device: str) -> None:
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ends = torch.tensor(
        [least, least + 1, greatest // 2 + 1, -1, 0, 1, greatest - 1, greatest], dtype=dtype, device=device
    )
    x, y = (part.flatten() for part in torch.meshgrid(ends, ends, indexing="ij"))
    call, report = compiled(wrapping)
    for position, (got, right) in enumerate(zip(call(x, y), wrapping(x, y), strict=True)):
        assert torch.equal(got, right), (position, got, right)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"], report


def check_shifts(dtype: torch.dtype, device: str) -> None:
    """Constant counts, and counts in a tensor, as far as the type can represent them."""
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.min + 1, info.max // 2, 3, 1, info.max], dtype=dtype, device=device)
    held = [c for c in COUNTS if info.min <= c <= info.max]
    counts = torch.tensor(held, dtype=dtype, device=device)

    def shifts(x: Tensor, counts: Tensor) -> list[Tensor]:
        whole = [one for c in held for one in (x >> c, x << c)]
        return [*whole, x[:, None] >> counts, x[:, None] << counts]

    call = torch.compile(shifts, backend="ark", options={"choose": "ark"})
    for i, (got, want) in enumerate(zip(call(x, counts), shifts(x, counts), strict=True)):
        assert torch.equal(got, want), f"result {i}"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_ends_of_the_range(dtype: torch.dtype, compiled: Any) -> None:
    check_wrapping(dtype, compiled, "cpu")


@pytest.mark.by_day("torch.int32")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16], ids=str)
def test_shifts_by_any_count(dtype: torch.dtype) -> None:
    check_shifts(dtype, "cpu")


def check_negative_powers(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([-2, -1, 1, 2, 7], dtype=dtype, device=device)
    for chosen in ("ark", "inductor"):
        torch._dynamo.reset()
        call = torch.compile(lambda x: (x + 0) ** -1, backend="ark", options={"choose": chosen})
        with pytest.raises(RuntimeError, match="negative integer powers"):
            call(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_negative_powers_are_refused(dtype: torch.dtype) -> None:
    """As in eager PyTorch."""
    check_negative_powers(dtype, "cpu")
