"""The failure table, rows 1 to 3: peers that are killed, stopped and resumed.

Every survivor must raise in time and name the failed rank, the operation, its sequence number and a remedy.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.failures import KILL_BOUND_S, SLACK_S, TIMEOUT_S, check_message, record
from support.launcher import BACKEND, Job
from support.rank import Rank

pytestmark = pytest.mark.skipif(BACKEND != "ark", reason="the failure table is ark's promise")


# -- row 1: SIGKILL


def _loop(rank: Rank, count: int) -> None:
    """Runs all_reduce until the error ends it."""
    rank.init(timeout=120)
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    rank.report("running")
    while True:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)


def _victim_idle(rank: Rank, how: str) -> None:
    """The victim (the last rank) does nothing. The others wait for it in various ways."""
    rank.init(timeout=120)
    dist.barrier()
    victim = rank.world_size - 1
    rank.report("running")
    if rank.rank == victim:
        time.sleep(300)
    if how == "sync":
        dist.all_reduce(torch.ones(10))
    elif how == "async":
        dist.all_reduce(torch.ones(10), async_op=True).wait()
    elif how == "future":
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
    elif how == "polling":
        work = dist.all_reduce(torch.ones(10), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
    elif how == "broadcast":
        dist.broadcast(torch.ones(10), victim)
    elif how == "barrier":
        dist.barrier()
    elif how == "recv":
        dist.recv(torch.ones(10), victim)
    elif how == "later":  # no rank is inside an operation when it happens
        rank.wait_for("go")
        dist.all_reduce(torch.ones(10))
    elif how == "subgroup":
        raise AssertionError("not here")


def _kill(job: Job, victim: int, survivors: list[int], operation: str, row: str, case: str) -> None:
    sent = job.kill(victim)
    outcomes = job.wait_outcomes(survivors, timeout=30)
    seconds = [o.ended - sent for o in outcomes]
    texts = [check_message(o, victim, operation) for o in outcomes]
    record(row, case, f"{KILL_BOUND_S} s", seconds, texts[0])
    assert max(seconds) < KILL_BOUND_S, f"noticed after {seconds} s"
    codes = [o.exit_code for o in job.finish(10, survivors)]
    assert all(code == 1 for code in codes), f"survivors' exit codes {codes}"


@pytest.mark.by_day("2-small")
@pytest.mark.quick
@pytest.mark.parametrize("count", [16, 4 << 20], ids=["small", "large"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_row_1_killed_inside_an_operation(count: int, victim: int) -> None:
    with Job(_loop, 3, count, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.15 + 0.01 * victim)
        _kill(
            job,
            victim,
            [r for r in range(3) if r != victim],
            "all_reduce",
            "1",
            f"inside, {count} elements, rank {victim}",
        )


@pytest.mark.by_day("sync", "recv")
@pytest.mark.parametrize("how", ["sync", "async", "future", "polling", "broadcast", "barrier", "recv"])
def test_row_1_killed_while_others_wait(how: str) -> None:
    operation = how if how in ("broadcast", "barrier", "recv") else "all_reduce"
    with Job(_victim_idle, 3, how, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.3)
        _kill(job, 2, [0, 1], operation, "1", f"others wait: {how}")


def test_row_1_killed_while_idle() -> None:
    with Job(_victim_idle, 3, "later", destroy=False) as job:
        job.wait_all("running")
        job.kill(2)
        job.finish(5, [2])
        time.sleep(0.2)
        sent = time.monotonic()
        job.go(0, "go")
        job.go(1, "go")
        outcomes = job.wait_outcomes([0, 1], timeout=30)
        seconds = [o.ended - sent for o in outcomes]
        text = check_message(outcomes[0], 2, "all_reduce")
        check_message(outcomes[1], 2, "all_reduce")
        record("1", "idle; next operation", f"{KILL_BOUND_S} s", seconds, text)
        assert max(seconds) < KILL_BOUND_S
        job.finish(10, [0, 1])


def _subgroup_survives(rank: Rank) -> float:
    """A death outside a subgroup does not fail the subgroup."""
    rank.init(timeout=30)
    pair = dist.new_group([0, 1])
    dist.barrier()
    rank.report("running")
    if rank.rank == 2:
        time.sleep(300)
    rank.wait_for("go")
    for _ in range(20):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=pair)
        assert tensor[0].item() == 2
    return tensor[0].item()


def test_row_1_a_group_without_the_dead_rank_goes_on() -> None:
    with Job(_subgroup_survives, 3, destroy=False) as job:
        job.wait_all("running")
        job.kill(2)
        job.finish(5, [2])
        job.go(0, "go")
        job.go(1, "go")
        outcomes = job.finish(30, [0, 1])
        assert [o.kind for o in outcomes] == ["result", "result"], [o.describe() for o in outcomes]


def _start_up(rank: Rank, victim: int, delay: float) -> None:
    rank.report("here")
    rank.wait_for("go")
    if rank.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if delay == 0:
            time.sleep(60)
    rank.init(timeout=4)
    while True:
        dist.all_reduce(torch.ones(3))


@pytest.mark.by_day("5")
@pytest.mark.parametrize("delay_ms", [0, 2, 5, 10, 20, 40])
def test_row_1_killed_during_start_up(delay_ms: int) -> None:
    """Before the victim has connected, only the group's timeout (4 s) detects it. Afterwards detection is immediate."""
    victim = delay_ms // 2 % 3
    survivors = [r for r in range(3) if r != victim]
    with Job(_start_up, 3, victim, delay_ms / 1000, destroy=False) as job:
        job.wait_all("here")
        job.go_all("go")
        (dead,) = job.wait_outcomes([victim], 20)
        outcomes = job.wait_outcomes(survivors, 30)
        seconds = [o.ended - dead.ended for o in outcomes]
        for outcome in outcomes:
            assert outcome.kind == "error", outcome.describe()
            assert re.search(rf"\b(rank|ranks) [\d, ]*\b{victim}\b", outcome.message), outcome.message
        record("1", f"start-up, {delay_ms} ms", "5 s", seconds, outcomes[0].message)
        assert max(seconds) < 5.5
        assert all(o.exit_code for o in job.finish(10, survivors))


# -- rows 2 and 3: SIGSTOP


def _stopped(rank: Rank, timeout: float, inside: bool) -> float:
    rank.init(timeout=timeout)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    rank.report("running")
    if not inside:
        rank.wait_for("go")
        dist.all_reduce(tensor.fill_(1.0))
        return tensor[0].item()
    while True:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)


@pytest.mark.by_day("inside")
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
def test_row_2_stopped(inside: bool) -> None:
    with Job(_stopped, 3, TIMEOUT_S, inside, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.2)
        since = job.stop(1)
        if not inside:
            since = time.monotonic()
            job.go(0, "go")
            job.go(2, "go")
        outcomes = job.wait_outcomes([0, 2], timeout=30)
        seconds = [o.ended - since for o in outcomes]
        texts = [check_message(o, 1, "all_reduce") for o in outcomes]
        record(
            "2",
            f"SIGSTOP {'inside' if inside else 'before'} an operation, T = {TIMEOUT_S} s",
            f"T to T + {SLACK_S} s",
            seconds,
            texts[0],
        )
        assert min(seconds) >= TIMEOUT_S - 0.1 and max(seconds) < TIMEOUT_S + SLACK_S, seconds
        assert all(o.exit_code == 1 for o in job.finish(10, [0, 2]))


def _paused(rank: Rank) -> float:
    rank.init(timeout=30)
    dist.barrier()
    rank.report("running")
    total = 0.0
    for step in range(400):
        tensor = torch.full((10_000,), float(rank.rank + step))
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0 + 3 * step]
        total += tensor[0].item()
        if step == 150:
            rank.report("half")
        time.sleep(0.001)
    return total


def test_row_3_stopped_and_resumed() -> None:
    with Job(_paused, 3) as job:
        job.wait_event(1, "half")
        since = job.stop(1)
        time.sleep(1.5)
        job.resume(1)
        values = job.values(60)
        record("3", "SIGSTOP 1.5 s, SIGCONT", "right answer", time.monotonic() - since)
        assert values == [sum(3.0 + 3 * step for step in range(400))] * 3
