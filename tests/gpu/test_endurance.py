"""Long runs: groups that come and go leak nothing, and a group under mixed load neither fails nor grows.

ARK_TEST_SOAK_SECONDS=300 makes a long run.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import ENV, WORLD, resources, start
from random_operations import Runner
from random_plan import make_groups
from support import tables
from support.launcher import Job
from support.rank import Rank

pytestmark = [pytest.mark.nightly, pytest.mark.alone]

GROUPS = 200
SOAK_S = float(os.environ.get("ARK_TEST_SOAK_SECONDS", "10"))
# A hundredth of one group's arena. Smaller growth does not come from the groups.
MEMORY_SLACK = 8 << 20


def _come_and_go(rank: Rank) -> list[dict[str, int]]:
    device = start(rank)
    seen = []
    small, large = torch.ones(1000, device=device), torch.ones(3 << 20, device=device)
    for step in range(1, GROUPS + 1):
        group = dist.new_group()
        for tensor in (small, large):
            tensor.fill_(1)
            work = dist.all_reduce(tensor, group=group, async_op=step % 2 == 0)
            if work is not None:
                work.wait()
        if step % 10 == 0:  # ends with pending work and an unused result
            dist.all_gather_into_tensor(torch.empty(1000 * rank.world_size, device=device), small, group=group)
        assert small[0].item() == large[-1].item() == rank.world_size
        dist.destroy_process_group(group)
        del group
        if step in (GROUPS // 5, GROUPS // 2, GROUPS):
            dist.barrier()
            seen.append(resources())
            dist.barrier()
    return seen


@pytest.mark.timeout(400)
def test_groups_come_and_go() -> None:
    begun = time.monotonic()
    with Job(_come_and_go, WORLD, env=ENV) as job:
        values = job.values(350)
    for rank, seen in enumerate(values):
        for at, held in zip((GROUPS // 5, GROUPS // 2, GROUPS), seen, strict=True):
            tables.add("cuda_groups_come_and_go", rank=rank, groups=at, **held, s=time.monotonic() - begun)
        first, *later = seen
        for held in later:
            assert abs(held["device"] - first["device"]) < MEMORY_SLACK, f"rank {rank}: {seen}"
            assert held["descriptors"] <= first["descriptors"] + 2, f"rank {rank}: {seen}"
            assert held["threads"] <= first["threads"] + 1, f"rank {rank}: {seen}"
            assert held["mappings"] <= first["mappings"] + 20, f"rank {rank}: {seen}"


class _Beside:
    """A thread with its own group and stream, whose sums are known. Its steps follow the main thread's."""

    def __init__(self, device: torch.device) -> None:
        self.group, self.done, self.failure = dist.new_group(), 0, ""
        self._allowed = threading.Semaphore(0)
        self._over = False
        self._steps(2, device, dist.get_world_size())  # loads its kernels, which would wait for the main thread's work
        torch.cuda.synchronize()
        self._thread = threading.Thread(target=self._run, args=(device, dist.get_world_size()), daemon=True)
        self._thread.start()

    def _run(self, device: torch.device, world: int) -> None:
        try:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream()):
                wrong = self._steps(0, device, world)
                while True:
                    self._allowed.acquire()
                    if self._over:
                        break
                    wrong += self._steps(200, device, world)
                    self.done += 200
                assert wrong.item() == 0, f"{wrong.item()} elements of the group beside are wrong"
        except Exception as error:
            self.failure = repr(error)

    def _steps(self, count: int, device: torch.device, world: int) -> torch.Tensor:
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for step in range(count):
            tensor = torch.full((1 + step * 911 % 70_001,), step % 7, dtype=torch.int32, device=device)
            dist.all_reduce(tensor, group=self.group)
            wrong += (tensor != world * (step % 7)).sum()
        return wrong

    def allow(self) -> None:
        self._allowed.release()

    def end(self) -> None:
        self._over = True
        self._allowed.release()
        self._thread.join(60)
        assert not self._thread.is_alive() and not self.failure, self.failure or "the thread hangs"


def _soak(rank: Rank, seconds: float) -> dict[str, Any]:
    device = start(rank)
    runner = Runner(device, make_groups("nccl", device), 77)
    # Kernels are loaded before two threads are at work (README, Troubleshooting).
    runner.run(1500)
    beside = _Beside(device)
    until, rounds, held = time.monotonic() + seconds, 0, []
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(50_000, device=device)
    dist.all_reduce(static)  # ranks cannot meet under capture
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(4):
            dist.all_reduce(static, dist.ReduceOp.AVG)
    going = torch.ones(1)
    while going.item() > 0:
        beside.allow()
        runner.run(500)
        static.fill_(float(rank.rank))
        for _ in range(50):
            graph.replay()
        mean = sum(range(rank.world_size)) / rank.world_size
        assert static.unique().tolist() == [mean], f"round {rounds}: {static.unique().tolist()}"
        passing = dist.new_group()
        dist.all_reduce(static, group=passing)
        dist.destroy_process_group(passing)
        rounds += 1
        if rounds in (2, 3):
            held.append(resources())
        going.fill_(float(time.monotonic() < until or rounds < 4))
        dist.all_reduce(going, dist.ReduceOp.MIN)  # on the CPU: all ranks continue, or none
    beside.end()
    held.append(resources())
    return {"rounds": rounds, "random": runner.done, "beside": beside.done, "held": held}


@pytest.mark.timeout(SOAK_S + 200)
def test_soak() -> None:
    with Job(_soak, WORLD, SOAK_S, env=ENV) as job:
        for rank, value in enumerate(job.values(SOAK_S + 150)):
            held = value.pop("held")
            tables.add("cuda_soak", rank=rank, s=SOAK_S, **value, **held[-1])
            assert held[-1]["device"] < held[0]["device"] + (32 << 20), f"rank {rank}: {held}"
            assert held[-1]["descriptors"] <= held[0]["descriptors"] + 4, f"rank {rank}: {held}"
            assert held[-1]["threads"] <= held[0]["threads"] + 1, f"rank {rank}: {held}"
