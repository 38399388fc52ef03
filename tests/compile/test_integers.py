"""Integers wrap around at the ends of their range, as in eager PyTorch: no compiler may reason that they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def wrapping(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Each can be decided without arithmetic by a compiler that takes overflow for impossible."""
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


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_ends_of_the_range(dtype: torch.dtype, compiled: Any) -> None:
    least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ends = torch.tensor([least, least + 1, greatest // 2 + 1, -1, 0, 1, greatest - 1, greatest], dtype=dtype)
    x, y = (part.flatten() for part in torch.meshgrid(ends, ends, indexing="ij"))
    call, report = compiled(wrapping)
    for position, (got, right) in enumerate(zip(call(x, y), wrapping(x, y), strict=True)):
        assert torch.equal(got, right), (position, got, right)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"], report
