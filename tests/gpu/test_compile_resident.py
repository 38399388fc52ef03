"""ark_torch.resident on a GPU: many steps from one launch give the bits of single launches; stops, Ctrl-C, streams."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ark_torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "compile"))

import models

pytestmark = pytest.mark.timeout(200)
DEVICE = torch.device("cuda", 0)
ALONE = {"choose": "ark", "fallback": False}


def number(value: int) -> Tensor:
    return torch.tensor([value], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_single_launches(dtype: torch.dtype) -> None:
    """Sampling inside, with given noise; then again on another stream, and for fewer steps."""
    torch.manual_seed(0)
    config = models.Config(dim=256, heads=8, kv_heads=2, ffn=512, max_len=128)
    model = models.Llama(config, 1, dtype).eval().requires_grad_(False).to(DEVICE)
    noise = -torch.empty(100, 1, config.vocab, device=DEVICE).exponential_().log()

    def step(token: Tensor, where: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        return (model(token, where).float() + random).argmax(-1, keepdim=True), where + 1

    single = torch.compile(step, backend="ark", options=ALONE, dynamic=False)
    token, where = torch.ones(1, 1, dtype=torch.int64, device=DEVICE), number(0)
    wanted = []
    with torch.no_grad():
        for row in noise:
            token, where = single(token, where, row)
            wanted.append(token)
    loop = ark_torch.resident(step, options=ALONE)
    begin = torch.ones(1, 1, dtype=torch.int64, device=DEVICE), number(0)
    for steps, stream in ((100, torch.cuda.current_stream()), (100, torch.cuda.Stream()), (7, torch.cuda.Stream())):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = loop(*begin, steps=steps, inputs=(noise,))
            assert got.done == steps and not loop.reason
            assert torch.equal(got.kept[0], torch.stack(wanted[:steps])), steps
            assert got.state[1].item() == steps and begin[1].item() == 0


def test_the_graph_says_stop() -> None:
    """All workers stop after the same step."""

    def step(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return torch.softmax(x @ x.T, -1) @ x + 0.1, count + 1

    def eager(steps: int) -> Tensor:
        at, count = x, number(0)
        for _ in range(steps):
            at, count = step(at, count)
        return at

    torch.manual_seed(0)
    x = torch.randn(300, 64, device=DEVICE)
    for last in (1, 2, 37):
        loop = ark_torch.resident(step, keep=(1,), stop=lambda _, count, last=last: count >= last, options=ALONE)
        for _ in range(3):
            got = loop(x, number(0), steps=60)
            assert got.done == last and got.kept[0].flatten().tolist() == list(range(1, last + 1))
            torch.testing.assert_close(got.state[0], eager(last), rtol=1e-3, atol=1e-4)


def test_ctrl_c_ends_a_launch() -> None:
    loop = ark_torch.resident(lambda x: (x @ x.T).softmax(-1) @ x, keep=(), options=ALONE)
    x = torch.randn(300, 64, device=DEVICE)
    want = loop(x, steps=3).state[0]
    threading.Timer(1.0, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop(x, steps=1 << 23)  # for minutes
    assert time.monotonic() - began < 10
    assert torch.equal(loop(x, steps=3).state[0], want), "the next launch counts on"
