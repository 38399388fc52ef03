"""Conversions between every two types at their limits, bit for bit as in eager PyTorch on the same device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
TYPES = [*FLOATS, *INTEGERS, torch.bool]
# The types of ark's kernels. The rest of a graph runs on Inductor.
OURS = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]


def numbers(dtype: torch.dtype) -> Tensor:
    """Returns zeros, ties, both sides of every type's limits, infinities and NaN, as far as the type has them."""
    powers = [sign * 2**power for power in (7, 8, 15, 16, 31, 32, 63) for sign in (1, -1)]
    ends = [float(one + off) for one in powers for off in (-1, 0, 1)]
    small = [0.0, -0.0, 0.4, 0.5, -0.5, 1.0, 1.5, -1.5, 2.5, 3e9, -3e9, 1e-8, 65504.0, 65519.0, 65520.0, 3.39e38]
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        least = [torch.finfo(dtype).tiny, -torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max]
        all_of_them = [*small, *ends, *least, 1e300, float("inf"), -float("inf"), float("nan")]
        return torch.tensor(all_of_them, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    some = [info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max, 2**24 + 1, 2**53 + 1, 2**31, 2**32 + 5, 1000]
    return torch.tensor([n for n in some if info.min <= n <= info.max], dtype=dtype)


def bits(x: Tensor) -> Tensor:
    """Treats NaN as one value, because its bits are not specified."""
    if x.dtype.is_floating_point:
        x = torch.where(x.double().isnan(), torch.nan, x.double()).view(torch.int64)
    return x


def check(dtype: torch.dtype, targets: list[torch.dtype], call: Any, device: str) -> None:
    x = numbers(dtype).to(device)
    for target, got in zip(targets, call(x), strict=True):
        wanted = x.to(target)
        assert got.dtype == target
        wrong = bits(got) != bits(wanted)
        told = [f"{a} -> {b}, not {c}" for a, b, c in zip(x[wrong], got[wrong], wanted[wrong], strict=True)]
        assert not told, f"{dtype} -> {target}: {told}"


@pytest.mark.by_day("torch.float32", "torch.bool")
@pytest.mark.parametrize("dtype", OURS, ids=str)
def test_of_our_types(dtype: torch.dtype, compiled: Any) -> None:
    targets = [one for one in OURS if one != dtype]
    call, report = compiled(lambda x: tuple(x.to(one) for one in targets))
    check(dtype, targets, call, "cpu")
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"], report


@pytest.mark.by_day("torch.float8_e4m3fn", "torch.int64")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_of_every_type(dtype: torch.dtype) -> None:
    """ark's region is one part of the graph, Inductor converts the rest."""
    targets = [one for one in TYPES if one != dtype]
    call = torch.compile(lambda x: tuple(x.to(one) for one in targets), backend="ark", options={"choose": "ark"})
    check(dtype, targets, call, "cpu")
