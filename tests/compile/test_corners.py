"""Programs that a review found wrong, crashing or refused; each runs by ark where it can, and is equal to eager."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class FirstToken(nn.Module):
    """What it returns is the beginning of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(torch.tanh(self.linear(x))[:, 0])
        return result


BF16 = torch.tensor([0.1, 256.0, 0.3, 257.0, -0.1], dtype=torch.bfloat16)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a clone of a part": (lambda x: torch.tanh(x * 2)[:8].clone(), (torch.randn(512, 64),)),
    "as_strided of an argument": (
        lambda a: torch.as_strided(a * 1, (3, 4), (2, 1), 1) * 2,
        (torch.arange(40.0)[7:27],),
    ),
    "as_strided where it lies": (lambda a: torch.as_strided(a, (3, 4), (2, 1), 1) * 2 + 1, (torch.arange(40.0)[7:27],)),
    "bfloat16 beside numbers": (lambda x: ((x == 0.1), (x <= 0.1), (x < 257), (x == 257), (x * 2) > 0.6), (BF16,)),
    "70 operands": (lambda *xs: functools.reduce(operator.add, xs), tuple(torch.randn(64, 64) for _ in range(70))),
    "130 operands": (lambda *xs: functools.reduce(operator.mul, xs), tuple(torch.rand(8, 8) + 0.5 for _ in range(130))),
    "a long sum": (lambda x: x.sum() * 1 + 0, (torch.full((1 << 22,), 0.1),)),
    "a long sum of infinity": (lambda x: x.sum(-1) * 1, (torch.full((3, 5000), float("inf")),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, compiled: Any) -> None:
    program, inputs = PROGRAMS[name]
    call, _ = compiled(program)
    torch.testing.assert_close(call(*inputs), program(*inputs), rtol=2e-6, atol=1e-6)


def test_the_beginning_of_a_tensor(compiled: Any) -> None:
    model = FirstToken().eval()
    call, _ = compiled(model)
    x = torch.randn(1, 512, 64)
    torch.testing.assert_close(call(x), model(x))


def test_a_position_in_a_tensor_is_measured(compiled: Any) -> None:
    """Measuring runs the step many times, and the position must not leave the cache."""

    def step(cache: Tensor, position: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, position, x * 2)
        position.add_(1)
        return cache.sum(0) + x

    call, report = compiled(step, choose="measure")
    ours = torch.zeros(16, 32), torch.zeros(1, dtype=torch.int64)
    theirs = torch.zeros(16, 32), torch.zeros(1, dtype=torch.int64)
    for count in range(1, 5):
        x = torch.randn(1, 32)
        torch.testing.assert_close(call(*ours, x), step(*theirs, x))
        assert torch.equal(ours[0], theirs[0]) and ours[1].tolist() == [count]
    (piece,) = report.regions
    assert piece.runs_on in ("ark", "inductor") and piece.ark_us > 0 and piece.inductor_us > 0


def test_a_cache_with_gaps_is_measured(compiled: Any) -> None:
    def step(cache: Tensor, position: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, position, x * 2)
        return cache.sum(0) + x

    call, report = compiled(step, choose="measure")
    whole = torch.zeros(16, 64)
    x = torch.randn(1, 32)
    torch.testing.assert_close(
        call(whole[:, :32], torch.tensor([3]), x), step(torch.zeros(16, 32), torch.tensor([3]), x)
    )
    assert not whole[:, 32:].any()
    assert report.regions[0].ark_us > 0
