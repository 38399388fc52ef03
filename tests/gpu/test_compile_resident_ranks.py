"""Many steps per launch with collectives, on GPUs: the tokens of single launches, lost and interrupted ranks."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_gpu import ENV, WORLD, run, start
from support.launcher import Job
from support.processes import signal_quietly
from support.rank import Rank
from test_compile_ranks import CONFIG, LOST_BOUND_S, compiled, shard, small_llama
from torch import Tensor

from ark_torch import resident

pytestmark = pytest.mark.timeout(300)
ALONE = {"choose": "ark", "fallback": False}
LONG = 1 << 30  # steps: for hours


def _resident(rank: Rank, steps: int) -> None:
    """Many steps per launch give the tokens of single launches on all ranks, with eager collectives in between."""
    device = start(rank, timeout=40)
    group = dist.group.WORLD
    assert group is not None
    model = shard(small_llama(torch.float32, device), group).to(device)

    def decode(ids: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        return model(ids, where).argmax(-1, keepdim=True), (where + 1) % CONFIG.max_len

    call, _ = compiled(decode)
    begin = torch.ones(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    (ids, where), wanted = begin, []
    with torch.no_grad():
        for _ in range(steps):
            ids, where = call(ids, where)
            wanted.append(ids)
    loop = resident(decode, options=ALONE)
    for _ in range(3):
        got = loop(*begin, steps=steps)
        assert got.done == steps and not loop.reason
        assert torch.equal(got.kept[0], torch.stack(wanted))
        dist.all_reduce(torch.ones(1, device=device))


def test_many_steps_a_launch() -> None:
    run(_resident, 200, timeout=120)


def _for_ever(rank: Rank) -> None:
    device = start(rank, timeout=120)
    group = dist.group.WORLD

    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 0.5, "avg", group).tanh()

    loop = resident(step, keep=(), options=ALONE)
    loop(torch.ones(100, device=device), steps=3)
    rank.report("running")
    try:
        loop(torch.ones(100, device=device), steps=LONG)
    except (dist.DistBackendError, KeyboardInterrupt) as error:
        rank.report("raised", f"{type(error).__name__}: {error}")
    assert torch.ones(3, device=device).sum() == 3, "the context goes on"


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_rank_that_leaves_is_named(how: str) -> None:
    """Ctrl-C on one rank: KeyboardInterrupt there, and an error that names it on the others."""
    victim = WORLD - 1
    with Job(_for_ever, WORLD, env=ENV, destroy=False) as job:
        job.wait_all("running", 120)
        time.sleep(0.3)
        since = time.monotonic()
        if how == "killed":
            job.kill(victim)
        else:
            signal_quietly(job.pids[victim], signal.SIGINT)
            assert "KeyboardInterrupt" in job.wait_event(victim, "raised", timeout=60)
        for survivor in range(victim):
            text = job.wait_event(survivor, "raised", timeout=60)
            assert time.monotonic() - since < LOST_BOUND_S
            ended, _, left = text.partition("; ark::")  # the cause and the remedy; where the steps stopped
            assert f"rank {victim}" in ended and "Destroy the process group" in ended, text
            assert "worker" in left and "all_reduce" in left, text
        outcomes = job.wait_outcomes(list(range(victim)), timeout=30)
        assert [o.kind for o in outcomes] == ["result"] * victim, [o.describe() for o in outcomes]
