"""ark_torch.resident: many steps from one launch give the same bits as single-step launches."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ark_torch
from ark_torch.errors import InvalidOption, UnsupportedGraph

pytestmark = pytest.mark.timeout(200)
ALONE = {"choose": "ark", "fallback": False}
LENGTH = 50


def decoder() -> tuple[models.Llama, Any]:
    model = models.Llama(models.Config(max_len=64), 1).eval()

    def step(token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        return model(token, position).argmax(-1, keepdim=True), position + 1

    return model, step


def one_by_one(
    model: models.Llama, step: Any, *state: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Returns tokens and caches after LENGTH launches of one step."""
    for cache in model.caches():
        cache.zero_()
    single = torch.compile(step, backend="ark", options=ALONE)
    tokens = []
    for number in range(LENGTH):
        state = single(*state, *([] if rows is None else [rows[number]]))
        tokens.append(state[0])
    caches = [cache.clone() for cache in model.caches()]
    for cache in model.caches():
        cache.zero_()
    return torch.stack(tokens), caches


START = (torch.tensor([[7]]), torch.tensor([0]))


@pytest.mark.quick
def test_fifty_tokens() -> None:
    model, step = decoder()
    tokens, caches = one_by_one(model, step, *START)
    places = [cache.data_ptr() for cache in model.caches()]
    loop = ark_torch.resident(step, options=ALONE)
    for _ in range(2):
        ran = loop(*START, steps=LENGTH)
        assert ran.done == LENGTH and loop.reason == ""
        assert torch.equal(ran.kept[0], tokens) and torch.equal(ran.state[0], tokens[-1])
        assert ran.state[1].item() == LENGTH and START[1].item() == 0
        for got, wanted in zip(model.caches(), caches, strict=True):
            assert torch.equal(got, wanted)
    assert places == [cache.data_ptr() for cache in model.caches()]
    assert len(loop.report.regions) == 1 and "all steps in one launch" in str(loop.report)
    assert '"multi_step":true' in loop.report.regions[0].plan_json.replace(" ", "")


@pytest.mark.nightly
def test_stops_early() -> None:
    model, step = decoder()
    tokens, _ = one_by_one(model, step, *START)
    line = tokens.flatten().tolist()
    end = torch.tensor([[0]])
    loop = ark_torch.resident(step, stop=lambda token, position: token == end, keep=(1, 0), options=ALONE)
    for token in dict.fromkeys([line[0], line[20], line[-1], -1]):
        end.fill_(token)
        done = line.index(token) + 1 if token in line else LENGTH
        ran = loop(*START, steps=LENGTH)
        assert ran.done == done
        assert torch.equal(ran.kept[1], tokens[:done])
        assert ran.kept[0].flatten().tolist() == list(range(1, done + 1))
        # No further step ran: its position of the caches is untouched.
        assert all((cache[:, :, done:] == 0).all() for cache in model.caches())
        for cache in model.caches():
            cache.zero_()
    assert loop(*START, steps=0).kept[0].shape == (0, 1)


@pytest.mark.nightly
def test_sampling_follows_the_seed() -> None:
    model, _ = decoder()

    def step(token: Tensor, position: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return (model(token, position) / 0.9 + noise).argmax(-1, keepdim=True), position + 1

    def noise(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return -torch.empty(LENGTH, 1, model.config.vocab).exponential_().log()

    loop = ark_torch.resident(step, options=ALONE)
    drawn = [loop(*START, steps=LENGTH, inputs=(noise(seed),)).kept[0] for seed in (1, 2, 1)]
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    tokens, _ = one_by_one(model, step, *START, rows=noise(1))
    assert torch.equal(drawn[0], tokens)


@pytest.mark.quick
def test_arguments_that_change_places() -> None:
    """The next step gets what this one returned, even if that is another of its own arguments."""

    def step(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return b, a + b, c.t()

    c = torch.randn(3, 3)
    loop = ark_torch.resident(step, keep=(0, 1, 2), options=ALONE)
    ran = loop(torch.tensor(0), torch.tensor(1), c, steps=11)
    assert ran.kept[0].tolist() == [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    assert [x.item() for x in ran.state[:2]] == [89, 144]
    assert torch.equal(ran.kept[2][0], c.t()) and torch.equal(ran.state[2], c.t())
    swap = ark_torch.resident(lambda a, b: (b, a), options={**ALONE, "minimum": 1})
    assert swap(torch.tensor(3), torch.tensor(4), steps=5).kept[0].tolist() == [4, 3, 4, 3, 4]


@pytest.mark.nightly
def test_falls_back_to_launches_of_one_step(caplog: pytest.LogCaptureFixture) -> None:
    def unsupported(x: Tensor) -> Tensor:
        return F.conv_transpose1d((x * 3 + 1)[None, None], torch.ones(1, 1, 3), padding=1)[0, 0].abs() + x

    def breaks(x: Tensor) -> Tensor:
        y = x * 2
        if y.sum() > 1e9:
            y = y - 1
        return y + 1

    x = torch.randn(5)
    for step, why in ((unsupported, "convolution"), (breaks, "not one graph")):
        caplog.clear()
        loop = ark_torch.resident(step, stop=lambda x: x.sum() > 1e4, options={"choose": "ark"})
        wanted, rows = x, []
        for _ in range(64):
            wanted = step(wanted)
            rows.append(wanted)
            if wanted.sum() > 1e4:
                break
        for _ in range(2):
            ran = loop(x, steps=64)
            torch.testing.assert_close(ran.kept[0], torch.stack(rows))
            assert ran.done == len(rows) < 64
        assert why in loop.reason
        assert sum("a launch of its own" in record.getMessage() for record in caplog.records) == 1
        with pytest.raises(UnsupportedGraph, match=why):
            ark_torch.resident(step, options=ALONE)(x, steps=2)


@pytest.mark.quick
def test_what_cannot_be_a_step() -> None:
    x = torch.zeros(3)
    with pytest.raises(InvalidOption, match="threds"):
        ark_torch.resident(lambda x: x, options={"threds": 2})
    for step, message in (
        (lambda x: (x, x), "as many tensors as it takes, 1, not 2"),
        (lambda x: x[:2] + 1, r"result 0 of a step is torch.float32 \[2\]"),
        (lambda x: x.to(torch.bfloat16) + 1, "result 0 of a step is torch.bfloat16"),
    ):
        with pytest.raises(TypeError, match=message):
            ark_torch.resident(step)(x, steps=2)
    with pytest.raises(TypeError, match="one element"):
        ark_torch.resident(lambda x: x * 2 + 1, stop=lambda x: x > 1)(x, steps=2)
    loop = ark_torch.resident(lambda x, noise: (x + noise) * 2)
    with pytest.raises(ValueError, match="a row for each of 3"):
        loop(x, steps=3, inputs=(torch.zeros(2, 3),))
    with pytest.raises(ValueError, match="steps is -1"):
        loop(x, steps=-1)
    with pytest.raises(TypeError, match=r"state\[0\] is int"):
        loop(1, steps=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep names result 1 of 1"):
        ark_torch.resident(lambda x: x * 2 + 1, keep=(1,))(x, steps=1)


@pytest.mark.nightly
def test_weights_that_change() -> None:
    model, step = decoder()
    loop = ark_torch.resident(step, options=ALONE)
    loop(*START, steps=3)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    tokens, _ = one_by_one(model, step, *START)
    assert torch.equal(loop(*START, steps=LENGTH).kept[0], tokens)
    model.to(torch.bfloat16)
    tokens, _ = one_by_one(model, step, *START)
    assert torch.equal(loop(*START, steps=LENGTH).kept[0], tokens)


@pytest.mark.quick
def test_interrupted() -> None:
    """Ctrl-C ends an endless launch within a second, and the loop runs again."""

    def step(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ x).softmax(-1), n + 1

    loop = ark_torch.resident(step, keep=(), options=ALONE)
    x, n = torch.eye(64), torch.tensor(0)
    assert loop(x, n, steps=3).state[1].item() == 3
    for _ in range(2):
        sent = []

        def interrupt(sent: list[float] = sent) -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.3, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            loop(x, n, steps=1 << 40)
        assert time.monotonic() - sent[0] < 1
        timer.join()
        assert loop(x, n, steps=5).state[1].item() == 5
