"""Tests the launcher itself: it must detect failures and hangs, because a test that cannot fail proves nothing."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from support.launcher import Job, run_ranks
from support.outcome import RanksFailed
from support.rank import Rank

pytestmark = pytest.mark.quick


def _sum(rank: Rank, offset: int) -> float:
    rank.init()
    tensor = torch.full((3,), float(rank.rank + offset))
    dist.all_reduce(tensor)
    return tensor[0].item()


@pytest.mark.by_day("False")
@pytest.mark.parametrize("spawn", [False, True])
def test_values_come_back_in_rank_order(spawn: bool) -> None:
    assert run_ranks(_sum, 2, 5, spawn=spawn) == [11.0, 11.0]


def _fail_on_one(rank: Rank) -> int:
    if rank.rank == 1:
        raise ValueError("on purpose")
    return rank.rank


def test_an_exception_on_one_rank_fails_the_test() -> None:
    with pytest.raises(RanksFailed, match="on purpose"):
        run_ranks(_fail_on_one, 2)


def _hang(rank: Rank) -> None:
    rank.report("here")
    time.sleep(60)


def test_a_hang_is_ended_and_its_stacks_shown() -> None:
    with Job(_hang, 2) as job:
        job.wait_all("here")
        started = time.monotonic()
        with pytest.raises(RanksFailed, match="_hang"):
            job.values(timeout=0.5)
    assert time.monotonic() - started < 10


def _die(rank: Rank) -> None:
    if rank.rank == 0:
        os._exit(7)


def test_a_rank_that_vanishes_is_seen() -> None:
    with pytest.raises(RanksFailed, match="rank 0: lost, exit code 7"):
        run_ranks(_die, 2)


def test_kill_and_stop() -> None:
    with Job(_hang, 2) as job:
        job.wait_all("here")
        job.kill(0)
        job.stop(1)
        (first,) = job.finish(5, ranks=[0])
        assert (first.kind, first.exit_code) == ("killed", -9)


def _leave_file(rank: Rank) -> None:
    open(os.path.join(os.environ["TMPDIR"], "left"), "w").close()


def test_a_file_left_behind_is_seen() -> None:
    with pytest.raises(AssertionError, match="left behind"):
        run_ranks(_leave_file, 1)
