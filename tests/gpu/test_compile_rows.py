"""Row and pointwise programs of many rows on one GPU: close to float64, equal bits wherever operands lie."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compile_support import DEVICE, compiled, on_one_kernel
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

import row_programs

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_compiler")]


def behind(x: Tensor) -> Tensor:
    """A copy at an address that is a multiple of the element's size only."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("rows", [300, 1100])
@pytest.mark.parametrize("columns", [512, 768, 1000, 2048, 4096])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_many_rows(dtype: torch.dtype, close: float, columns: int, rows: int) -> None:
    given = row_programs.inputs(rows, columns, dtype, str(DEVICE))
    exact = row_programs.programs(*(x.double() if x.is_floating_point() else x for x in given))
    call, report = compiled(row_programs.programs, fallback=False)
    first = call(*given)
    for number, (got, wanted) in enumerate(zip(first, exact, strict=True)):
        if wanted.is_floating_point():
            assert float((got.double() - wanted).norm() / wanted.norm()) < close, number
        elif number == 5:  # equal numbers have several places
            y = given[1]
            assert torch.equal(y.gather(1, got[:, None])[:, 0], y.amax(-1)), number
        else:
            assert torch.equal(got, wanted), number
    for odd in range(len(given)):
        moved = [behind(x) if i == odd else x for i, x in enumerate(given)]
        for number, (got, wanted) in enumerate(zip(call(*moved), first, strict=True)):
            assert torch.equal(got, wanted), (odd, number)
    on_one_kernel(report)


@pytest.mark.parametrize("rows, columns", [(2, 64), (40, 1024), (3000, 64), (700, 8)])
def test_copies_of_many_rows(rows: int, columns: int) -> None:
    """Rows of a table, and rows into one: in order, out of order, repeated."""
    table = torch.randn(4096, columns, dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)

    def copies(table: Tensor, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return table[places], table.index_copy(0, places, x)

    call, report = compiled(copies, fallback=False)
    increasing = torch.randperm(4096, device=DEVICE)[:rows].sort().values
    for places in (increasing, increasing.flip(0)):
        for got, wanted in zip(call(table, x, places), copies(table, x, places), strict=True):
            assert torch.equal(got, wanted)
    places = torch.zeros_like(increasing)  # the last one stays
    got = call(table, x, places)
    assert torch.equal(got[0], table[places]) and torch.equal(got[1][0], x[-1]) and torch.equal(got[1][1:], table[1:])
    on_one_kernel(report)
