"""Steps that cannot be captured run eagerly with a reason, and leave device, streams and random numbers intact."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from on_gpu import run
from support import training as small
from support.rank import Rank
from torch import Tensor, nn
from training_support import WORLDS, adam, assert_equal_runs, batch_of, begin, by_hand, model_of, seed

from ark_torch.train import capture


def _item(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    if value.detach().item() > 1e9:
        raise AssertionError
    return value


def _branch(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    return value * 2 if value > 1e9 else value


def _mask(model: Any, batch: Any) -> Tensor:
    logits = model(batch["inputs"])
    chosen = batch["labels"] > 3
    return nn.functional.cross_entropy(logits[chosen], batch["labels"][chosen])


def _waits(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    torch.cuda.synchronize()
    return value


class _HookWaits(torch.autograd.Function):
    """A hook of the backward pass that reads a value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        assert gradient.sum().item() < 1e9
        return gradient


def _in_backward(model: Any, batch: Any) -> Tensor:
    value: Tensor = _HookWaits.apply(small.loss(model, batch))
    return value


def _cumprod(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    products = (value / 8).exp().expand(4).cumprod(0)  # its backward pass, in C++, looks for zeros on the host
    return products.sum()


def _hook_reads(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    value.register_hook(lambda gradient: gradient if gradient.item() < 1e9 else gradient * 2)
    return value


def _runs_out(model: Any, batch: Any) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    return small.loss(model, batch)


def _raises(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    if torch.cuda.is_current_stream_capturing():
        raise KeyError("only in captures")
    return value


# The loss, the reason's text, and the line of the loss, or of another function, that it names (0: none).
CANNOT: dict[str, tuple[Any, str, int]] = {
    "item": (_item, "makes the host wait", 2),
    "branch": (_branch, "makes the host wait", 2),
    "mask": (_mask, "makes the host wait", 3),
    "backward": (_in_backward, "in the backward pass (_HookWaitsBackward) makes the host wait", 2),
    "node": (_cumprod, "CumprodBackward0, the backward pass of `products = ", 2),
    "hook": (_hook_reads, "in the backward pass (", 2),
    "synchronize": (_waits, "captur", 2),
    "memory": (_runs_out, "the GPU's memory did not suffice", 0),
    "raises": (_raises, "the step itself raised KeyError('only in captures')", 3),
}


def _cannot(rank: Rank, world: int, what: str) -> str:
    """The step runs eagerly with the loop's bits, dropout included. The device and its streams still work."""
    device = begin(rank, world)
    loss, _, _ = CANNOT[what]
    expected = by_hand(rank, world, "gpt2", device, 0.2, loss=loss, steps=8)
    model = model_of("gpt2", device, 0.2)
    step = capture(model, adam(model, device), loss, bucket_mb=0.02)
    seed(rank.rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [step(batch_of("gpt2", number, rank.rank, device)) for number in range(8)]
    assert not step.captured and [w for w in told if "runs steps eagerly" in str(w.message)]
    assert_equal_runs((torch.stack(losses).cpu(), small.weights(model)), expected, what)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        noise = torch.randn(1000, device=device)
    noise.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    assert noise.isfinite().all().item()
    other = model_of("gpt2", device, 0.2)  # another step can still be captured
    again = capture(other, adam(other, device), small.loss, bucket_mb=0.02)
    for number in range(6):
        again(batch_of("gpt2", number, rank.rank, device))
    assert again.captured, again.reason
    again.close()
    return step.reason


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_be_captured_runs_eagerly(what: str, world: int) -> None:
    loss, text, line = CANNOT[what]
    where = _HookWaits.backward if what == "backward" else loss
    for reason in run(_cannot, world, what, world=world):
        assert text in reason, reason
        if line:
            assert f"{os.path.basename(__file__)}:{where.__code__.co_firstlineno + line}" in reason, reason
