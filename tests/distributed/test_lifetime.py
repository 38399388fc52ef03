"""Processes start and end cleanly many times, nothing grows over thousands of operations, and idling costs nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import processes, tables
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank
from support.start import base_environment

ark_only = pytest.mark.skipif(BACKEND != "ark", reason="what only ark promises")

EXITS = ("destroy", "no destroy", "async in flight", "subgroups kept", "group deleted", "exit in a thread's callback")


def _start_and_exit(rank: Rank, how: str) -> float:
    """All ways in which programs exit. The interpreter's shutdown must not abort (Gloo's sometimes does)."""
    rank.init()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if how == "destroy":
        dist.destroy_process_group()
    elif how == "async in flight":
        for _ in range(20):
            dist.all_reduce(torch.ones(10_000), async_op=True)
    elif how == "subgroups kept":
        globals()["_kept"] = [dist.new_group([0, 1]) for _ in range(3)]
        for group in globals()["_kept"]:
            dist.all_reduce(torch.ones(5), group=group, async_op=True)
    elif how == "group deleted":
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(5), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
    elif how == "exit in a thread's callback":
        globals()["_kept"] = dist.all_reduce(torch.ones(5), async_op=True).get_future().then(lambda f: time.sleep(0.05))
    return tensor[0].item()


@pytest.mark.by_day("no destroy", "async in flight")
@pytest.mark.parametrize("how", EXITS)
def test_starts_and_exits(how: str, request: pytest.FixtureRequest) -> None:
    """Four forked processes per way, 34 at night. values() fails on any exit code but 0."""
    for _ in range(17 if request.config.getoption("--night") else 2):
        assert run_ranks(_start_and_exit, 2, how, destroy=False, timeout=30) == [2.0, 2.0]


@pytest.mark.quick
def test_a_plain_script_starts_and_exits() -> None:
    """A user's plain script without launcher, warm process or destroy_process_group."""
    code = (
        "import os, torch, torch.distributed as dist\n"
        f"dist.init_process_group('{BACKEND}', init_method='tcp://127.0.0.1:29777',"
        " rank=int(os.environ['RANK']), world_size=2)\n"
        "t = torch.ones(3); dist.all_reduce(t); assert t.tolist() == [2.0] * 3\n"
    )
    code = code.replace("29777", str(20000 + os.getpid() % 20000))
    env = base_environment()
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=env | {"RANK": str(r)}) for r in range(2)]
    assert [p.wait(60) for p in ranks] == [0, 0]


def _figures() -> dict[str, int]:
    gc.collect()
    found = processes.open_descriptors()
    return {
        "descriptors": len(found),
        "memfds": sum("memfd" in link for link in found.values()),
        "shared_kib": processes.shared_memory_kib(),
        "rss_kib": processes.resident_kib(),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _soak_operations(rank: Rank, rounds: int) -> list[dict[str, int]]:
    rank.init()
    world = rank.world_size
    seen = []
    for _ in range(rounds):
        for i in range(250):
            count = 1 + (i * 397) % 20_000
            a = torch.ones(count)
            work = dist.all_reduce(a, async_op=True)
            outs = [torch.empty(count) for _ in range(world)]
            dist.all_gather(outs, torch.ones(count))
            part = torch.empty(64)
            dist.reduce_scatter_tensor(part, torch.ones(64 * world))
            peer = 1 - rank.rank
            sent = dist.isend(torch.ones(count), peer, tag=i)
            dist.recv(torch.empty(count), peer, tag=i)
            sent.wait()
            work.wait()
            if i % 50 == 0:
                strided = torch.ones(2 * count)[::2]
                dist.all_reduce(strided)
                dist.all_reduce(torch.eye(20).to_sparse())
                dist.barrier()
        seen.append(_figures())
    return seen


def _check_flat(name: str, figures: list[dict[str, int]], slack_kib: int) -> None:
    early, late = figures[len(figures) // 3], figures[-1]
    tables.add("soak", case=name, rounds=len(figures), **{f"{k} early/late": f"{early[k]}/{late[k]}" for k in early})
    for key in ("descriptors", "memfds"):
        assert late[key] <= early[key], f"{key} grow: {[f[key] for f in figures]}"
    # A second progress thread starts when a callback finds the first one busy, perhaps late. There must be no third.
    assert late["threads"] <= early["threads"] + 1, f"threads grow: {[f['threads'] for f in figures]}"
    for key in ("shared_kib", "rss_kib"):
        assert late[key] <= early[key] + slack_kib, f"{key} grows: {[f[key] for f in figures]}"


@ark_only
def test_soak_thousands_of_operations() -> None:
    """6 rounds of 250 mixed steps (about 7,500 operations): descriptors, shared memory and memory must not grow."""
    for figures in run_ranks(_soak_operations, 2, 6, timeout=200):
        _check_flat("operations", figures, 6_000)


def _soak_groups(rank: Rank, rounds: int) -> list[dict[str, int]]:
    rank.init()
    seen = []
    for _ in range(rounds):
        for _ in range(20):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1000), group=group)
            dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
            del group
        seen.append(_figures())
    return seen


@ark_only
def test_soak_two_hundred_groups() -> None:
    for figures in run_ranks(_soak_groups, 2, 10, timeout=200):
        _check_flat("groups", figures, 8_000)


def _soak_worlds(rank: Rank, rounds: int) -> list[dict[str, int]]:
    seen = []
    for _ in range(rounds):
        for _ in range(5):
            rank.init()
            dist.all_reduce(torch.ones(1000), async_op=True).wait()
            dist.destroy_process_group()
        seen.append(_figures())
    return seen


@pytest.mark.nightly
@ark_only
def test_soak_init_and_destroy() -> None:
    for figures in run_ranks(_soak_worlds, 2, 8, timeout=200):
        _check_flat("init and destroy", figures, 8_000)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@ark_only
def test_soak_for_long() -> None:
    for figures in run_ranks(_soak_operations, 2, 150, timeout=1700):
        _check_flat("operations, long", figures, 6_000)


def _idle(rank: Rank) -> dict[str, Any]:
    """An idle group, one that waits for a late peer, and one with pending async work."""
    rank.init(timeout=60)
    side = dist.new_group([0, 1])
    for group in (None, side):
        dist.all_reduce(torch.ones(1000), group=group)
        dist.all_reduce(torch.ones(1000), group=group, async_op=True).wait()
    dist.barrier()
    time.sleep(0.2)
    began = time.process_time()
    time.sleep(2.0)
    idle = time.process_time() - began
    dist.barrier()
    waiting = 0.0
    if rank.rank == 0:
        began = time.process_time()
        dist.all_reduce(torch.ones(10))  # rank 1 comes two seconds late
        waiting = time.process_time() - began
    else:
        time.sleep(2.0)
        dist.all_reduce(torch.ones(10))
    began = time.process_time()
    pending = 0.0
    if rank.rank == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        time.sleep(2.0)
        pending = time.process_time() - began
        work.wait()
    else:
        time.sleep(2.0)
        dist.all_reduce(torch.ones(10))
    return {"idle": idle, "waiting": waiting, "pending": pending}


@pytest.mark.nightly
@ark_only
@pytest.mark.alone
def test_idle_ranks_cost_no_cpu() -> None:
    """Measures CPU seconds over two seconds of wall time. The bound allows for the interpreter and slow machines."""
    for rank, used in enumerate(run_ranks(_idle, 2)):
        tables.add("idle", rank=rank, **{f"{name}: CPU s of 2 s": value for name, value in used.items()})
        assert used["idle"] < 0.05 and used["waiting"] < 0.1 and used["pending"] < 0.1, used


def _oversubscribed(rank: Rank) -> float:
    rank.init()
    for _ in range(20):
        dist.all_reduce(torch.ones(100))
    began = time.monotonic()
    for _ in range(200):
        dist.all_reduce(torch.ones(100))
    return time.monotonic() - began


@pytest.mark.nightly
@pytest.mark.alone
def test_more_ranks_than_cores_do_not_collapse() -> None:
    """Not a benchmark: an unbounded spin would take minutes here."""
    ranks = max(6, 2 * (os.cpu_count() or 1) + 2)
    seconds = run_ranks(_oversubscribed, ranks, timeout=120)
    tables.add("more ranks than cores", ranks=ranks, s_for_200=max(seconds))
    assert max(seconds) < 30


def _exit_codes(rank: Rank) -> None:
    rank.init()
    dist.barrier()
    raise SystemExit(3 if rank.rank == 1 else 0)


def test_exit_codes_are_the_programs_own() -> None:
    with Job(_exit_codes, 2, destroy=False) as job:
        assert [o.exit_code for o in job.finish(30)] == [0, 3]
