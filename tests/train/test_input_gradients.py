"""Losses with gradients with respect to the batch (forces, gradient penalties), in every kind of call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_graphs
import pytest
import torch
from torch import Tensor, nn

import ark_torch.train.graphs
from ark_torch.train import capture

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _recorder_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ark_torch.train.graphs, "recorder_for", ark_torch.train.graphs.recorder_for)
    yield


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def _energy_and_forces(model: Any, x: Tensor) -> Tensor:
    energy = model(x).sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + forces.square().sum()


def _asks(model: Any, x: Tensor) -> Tensor:
    return _energy_and_forces(model, x.requires_grad_())


def _positions(number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def _by_hand(accumulate: int) -> list[Tensor]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(8):
        optimizer.zero_grad()
        for part in range(accumulate):
            (_asks(model, _positions(10 * number + part)) / accumulate).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("who", ["loss", "caller"])
def test_gradients_of_the_batch(who: str, graphs: bool, accumulate: int) -> None:
    if graphs:
        fake_graphs.use()
    model = _model()
    loss = _asks if who == "loss" else _energy_and_forces
    step = capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss, accumulate=accumulate)
    for number in range(8):
        batches = [_positions(10 * number + part).requires_grad_(who == "caller") for part in range(accumulate)]
        step(batches if accumulate > 1 else batches[0])
        assert all(x.grad is None and x.requires_grad == (who == "caller") for x in batches)
    assert step.captured == graphs, step.reason
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), _by_hand(accumulate), strict=True))


def test_gradients_do_not_add_up_from_call_to_call() -> None:
    """A backward pass adds to a leaf's gradient: each run of a step has leaves without one."""
    fake_graphs.use()
    model, seen = _model(), []

    def loss(model: Any, x: Tensor) -> Tensor:
        assert x.grad is None
        x.requires_grad_().register_hook(lambda gradient: seen.append(gradient.clone()))
        value: Tensor = model(x).sum()
        return value

    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.0), loss)
    for _ in range(5):
        step(torch.ones(2, 3))
    assert step.captured and len(seen) == 5 and all(torch.equal(one, seen[0]) for one in seen)


def test_a_tensor_that_requires_gradients_tells_graphs_apart() -> None:
    recorder = fake_graphs.use()
    model = _model()

    def loss(model: Any, x: Tensor) -> Tensor:
        return _energy_and_forces(model, x) if x.requires_grad else model(x).sum()

    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for number in range(10):
        step(_positions(number).requires_grad_(number % 2 == 0))
    assert step.captured and recorder.counts["records"] == 2
