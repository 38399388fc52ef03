"""Loops of steps with collectives: real processes on an ark group."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.failures import KILL_BOUND_S, check_message
from support.launcher import Job, run_ranks
from support.processes import signal_quietly
from support.rank import Rank
from torch import Tensor

import ark_torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.model import Llama, LlamaConfig, shard  # in examples/

pytestmark = pytest.mark.timeout(300)
ALONE = {"choose": "ark", "fallback": False}
LENGTH = 50


def _llama(rank: Rank) -> list[int]:
    rank.init()
    torch.manual_seed(0)
    config = LlamaConfig(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocabulary=128, head_dim=16, max_len=64)
    with torch.no_grad():
        whole = Llama(config).eval().requires_grad_(False)
        for parameter in whole.parameters():
            parameter.mul_(3)  # makes the tokens vary
        model = shard(whole, dist.group.WORLD) if rank.world_size > 1 else whole

        def step(token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            return model(token, position).argmax(-1, keepdim=True), position + 1

        start = torch.tensor([[3]]), torch.tensor([0])
        single = torch.compile(step, backend="ark", options=ALONE)
        state, tokens = start, []
        for _ in range(LENGTH):
            state = single(*state)
            tokens.append(state[0])
        caches = [cache.clone() for cache in model.caches()]
        end = torch.tensor([[-1]])
        loop = ark_torch.resident(step, stop=lambda token, position: token == end, options=ALONE)
        for _ in range(2):
            for cache in model.caches():
                cache.zero_()
            ran = loop(*start, steps=LENGTH)
            assert torch.equal(ran.kept[0], torch.stack(tokens))
            assert all(torch.equal(a, b) for a, b in zip(model.caches(), caches, strict=True))
            if rank.world_size > 1:
                dist.barrier()  # eager collectives before, between and after
        line = [token.item() for token in tokens]
        for token in (line[30], line[0], line[-1]):
            end.fill_(token)
            assert loop(*start, steps=LENGTH).done == line.index(token) + 1
        return line


@pytest.mark.nightly
def test_fifty_tokens_of_a_shared_llama() -> None:
    lines = [line for ranks in (1, 2) for line in run_ranks(_llama, ranks)]
    assert len(set(lines[0])) > 10
    assert all(line == lines[0] for line in lines)


def _for_ever(rank: Rank) -> str:
    rank.init(timeout=120)
    group = dist.group.WORLD

    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 0.5, "avg", group).tanh()

    loop = ark_torch.resident(step, keep=(), options=ALONE)
    loop(torch.ones(100), steps=3)
    rank.report("running")
    loop(torch.ones(100), steps=1 << 40)
    return "the end"


def test_a_killed_rank_is_named() -> None:
    with Job(_for_ever, 3, destroy=False) as job:
        job.wait_all("running", 120)
        time.sleep(0.3)
        sent = job.kill(2)
        outcomes = job.wait_outcomes([0, 1], timeout=30)
        for outcome in outcomes:
            check_message(outcome, 2, "all_reduce")
        assert max(outcome.ended - sent for outcome in outcomes) < KILL_BOUND_S


@pytest.mark.nightly
def test_an_interrupted_rank_is_named() -> None:
    """Ctrl-C on one rank: KeyboardInterrupt there, and an error that names it on the others."""
    with Job(_for_ever, 3, destroy=False) as job:
        job.wait_all("running", 120)
        time.sleep(0.3)
        sent = time.monotonic()
        signal_quietly(job.pids[1], signal.SIGINT)
        interrupted, *others = job.wait_outcomes([1, 0, 2], timeout=30)
        assert interrupted.value["type"] == "KeyboardInterrupt", interrupted.describe()
        for outcome in others:
            check_message(outcome, 1, "all_reduce")
        assert max(outcome.ended - sent for outcome in (interrupted, *others)) < KILL_BOUND_S


def _alone_beside_a_group(rank: Rank) -> None:
    """Without collectives in the step, the group still works after Ctrl-C."""
    rank.init()
    loop = ark_torch.resident(lambda x: (x @ x).softmax(-1), keep=(), options=ALONE)
    loop(torch.eye(32), steps=2)
    if rank.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            loop(torch.eye(32), steps=1 << 40)
    total = torch.tensor([float(rank.rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(rank.world_size))


def test_a_group_beside_an_interrupted_loop() -> None:
    run_ranks(_alone_beside_a_group, 2)
