"""Special numbers on a GPU give eager PyTorch's results there, by the tables of tests/compile."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compile_support import DEVICE, compiled, on_one_kernel

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

import test_conversions as conversions
import test_integers as integers
import test_special_values as special

# Triton converts only some 8-bit floats, refuses the rest, and saturates where eager PyTorch has NaN.
ALL_BUT_8_BITS = [one for one in conversions.TYPES if one not in (torch.float8_e4m3fn, torch.float8_e5m2)]
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("dtype", [*special.FLOATS, *special.INTEGERS], ids=str)
def test_special_values_of_one(dtype: torch.dtype) -> None:
    special.check(special.UNARY, (special.specials(dtype).to(DEVICE),), compiled)


@pytest.mark.parametrize("dtype", [*special.FLOATS, *special.INTEGERS], ids=str)
def test_special_values_of_two(dtype: torch.dtype) -> None:
    x, y = torch.meshgrid(special.specials(dtype), special.specials(dtype), indexing="ij")
    special.check(special.BINARY, (x.flatten().to(DEVICE), y.flatten().to(DEVICE)), compiled)


@pytest.mark.parametrize("dtype", conversions.OURS, ids=str)
def test_conversions_of_our_types(dtype: torch.dtype) -> None:
    targets = [one for one in conversions.OURS if one != dtype]
    call, report = compiled(lambda x: tuple(x.to(one) for one in targets))
    conversions.check(dtype, targets, call, "cuda")
    on_one_kernel(report)


@pytest.mark.parametrize("dtype", ALL_BUT_8_BITS, ids=str)
def test_conversions_of_every_type(dtype: torch.dtype) -> None:
    targets = [one for one in ALL_BUT_8_BITS if one != dtype]
    call, _ = compiled(lambda x: tuple(x.to(one) for one in targets))
    conversions.check(dtype, targets, call, "cuda")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_wrap_around(dtype: torch.dtype) -> None:
    integers.check_wrapping(dtype, compiled, "cuda")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16], ids=str)
def test_shifts_by_any_count(dtype: torch.dtype) -> None:
    integers.check_shifts(dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_to_a_negative_power(dtype: torch.dtype) -> None:
    """For a tensor of exponents, eager PyTorch's values are the reference. It refuses a single negative exponent."""
    x = torch.tensor([-2, -1, 0, 1, 2, 7], dtype=dtype, device=DEVICE)
    powers = torch.tensor([-1, -2, -3, -1, -64, 0], dtype=dtype, device=DEVICE)
    call, _ = compiled(lambda x, y: torch.pow(x + 0, y))
    assert torch.equal(call(x, powers), torch.pow(x, powers))
    integers.check_negative_powers(dtype, "cuda")
