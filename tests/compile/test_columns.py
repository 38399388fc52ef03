"""Reductions over dimensions that are not contiguous in memory: lanes are then rows, each with its own sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.timeout(120)


def reductions(x: Tensor, y: Tensor, flags: Tensor, half: Tensor) -> list[Tensor]:
    n = (x * 4).long()
    return [
        (x * 2).sum(0),
        x.amax(0) + 1,
        x.amin(0) * 2,
        x.var(0),
        torch.logsumexp(x, 0),
        (x.sum(0) * x).sum(0),  # the sum is one number per row for the second one
        y.mean(1),
        y.sum((0, 1)),
        torch.softmax(y, 1),
        F.layer_norm(y.transpose(1, 2), (y.shape[1],)).transpose(1, 2) * 1,
        (y + x[: y.shape[0], None, : y.shape[2]]).amax(1),
        flags.any(0),
        flags.sum(0),
        half.sum(0) * 2,
        n.sum(0),
        n.amax(0),
        n.amin(0),
        x[:, :3].sum(0),  # too few for lanes
        x.argmax(0),
    ]


def given() -> tuple[Tensor, ...]:
    return torch.randn(257, 77), torch.randn(8, 64, 50), torch.rand(33, 41) > 0.9, torch.randn(66, 40).bfloat16()


def test_eagers_numbers_and_the_same_bits_whatever_the_workers(compiled: Any) -> None:
    arguments = given()
    right = reductions(*arguments)
    found = []
    for threads in (1, 3):
        torch._dynamo.reset()
        call, report = compiled(reductions, fallback=False, threads=threads)
        found.append(call(*arguments))
        assert len(report.regions) == 1
        source = report.regions[0].region.source()
        assert source.count(".each()") >= 12, "no lane is a row"
    for number, (one, other) in enumerate(zip(found[0], right, strict=True)):
        near = {"rtol": 1e-2, "atol": 1e-1} if other.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(one, other, **near, msg=lambda text, i=number: f"result {i}: {text}")
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_special_values(compiled: Any) -> None:
    """NaN wins, infinities of both signs add to NaN, and neighbouring lanes are not affected."""
    x = torch.randn(70, 40)
    x[3, 1], x[69, 2], x[0, 5], x[1, 5], x[2, 7] = torch.nan, torch.inf, torch.inf, -torch.inf, -torch.inf

    def run(x: Tensor) -> list[Tensor]:
        return [x.sum(0), x.amax(0), x.amin(0), x.mean(0)]

    call, _ = compiled(run, fallback=False)
    for one, other in zip(call(x), run(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_long_sum_keeps_its_digits(compiled: Any) -> None:
    """100,000 terms of one sign: the error stays that of one rounding."""
    x = torch.rand(100_000, 16) + 1
    call, _ = compiled(lambda x: (x * 1.0).sum(0) + 0, fallback=False, minimum=1)
    exact = x.double().sum(0)
    assert ((call(x).double() - exact).abs() / exact).max() < 1e-7
