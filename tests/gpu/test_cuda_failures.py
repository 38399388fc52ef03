"""Killed and stopped peers: survivors raise in time, keep their CUDA context, and continue in a new group."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_gpu import ENV, WORLD, go_on_without_the_last, start
from support.failures import SLACK_S, TIMEOUT_S, record
from support.launcher import Job, Outcome
from support.rank import Rank

KILL_BOUND_S = 5.0


def _loop(rank: Rank, how: str, count: int) -> float:
    """Runs all_reduce until it fails, then reports and restarts without the victim, the last rank."""
    device = start(rank, timeout=120)
    tensor = torch.ones(count, device=device)
    dist.all_reduce(tensor)  # compiles the kernels, which may take longer than the short timeout
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)) if how == "stopped" else None
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if how == "graph":
        with torch.cuda.graph(graph):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
    rank.report("running")
    try:
        while True:
            if how == "graph":
                graph.replay()
                torch.cuda.synchronize()
                dist.all_reduce(tensor, dist.ReduceOp.AVG)
            elif how == "send":
                works = [dist.isend(tensor, (rank.rank + 1) % rank.world_size)]
                works.append(dist.irecv(torch.empty_like(tensor), (rank.rank - 1) % rank.world_size))
                for work in works:
                    work.wait()
            elif how == "barrier":
                dist.barrier()
            else:
                dist.all_reduce(tensor, dist.ReduceOp.AVG, group, async_op=how == "async")
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device, count)


def _fused(rank: Rank, operator: str) -> float:
    """Same, in an operator whose computation and communication form one kernel."""
    from ark_torch import ops
    from ark_torch.distributed import compressed_all_reduce

    device = start(rank, timeout=120)
    count = 4096
    tensor = torch.ones(count, device=device)
    dist.all_reduce(tensor)
    world = rank.world_size
    x = torch.randn(256, 1024, device=device, dtype=torch.bfloat16)
    w = torch.randn(1024, 1024, device=device, dtype=torch.bfloat16)
    ids = torch.arange(256 * 2, device=device).view(256, 2) % (2 * world)
    scores = torch.full((256, 2), 0.5, device=device)
    w1, w2 = w.repeat(2, 1, 1), torch.randn(2, 1024, 512, device=device, dtype=torch.bfloat16)
    indices, offsets = torch.arange(64 * world, device=device), torch.arange(64 * world, device=device)
    calls = {
        "embedding": lambda: ops.embedding_bag_all_to_all([w], [indices], [offsets], tables_per_rank=[1] * world),
        "matmul": lambda: ops.matmul_all_reduce(x, w),
        "moe": lambda: ops.moe_layer(x, ids, scores, w1, w2),
        "compressed": lambda: compressed_all_reduce(x, bits=4),
    }
    calls[operator]()
    torch.cuda.synchronize()
    rank.report("running")
    try:
        while True:
            calls[operator]()
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device, count)


@pytest.mark.parametrize("operator", ["embedding", "matmul", "moe", "compressed"])
def test_killed_in_a_fused_operator(operator: str) -> None:
    victim = WORLD - 1
    with Job(_fused, WORLD, operator, env=ENV) as job:
        job.wait_all("running")
        time.sleep(0.3)
        seconds = _told(job, victim, job.kill(victim))
        record("1", f"CUDA, killed, fused {operator}", f"{KILL_BOUND_S} s", seconds)
        assert max(seconds) < KILL_BOUND_S
        _go_on(job.finish(60, list(range(victim))))


def _told(job: Job, victim: int, since: float) -> list[float]:
    seconds = []
    for survivor in range(job.count):
        if survivor == victim:
            continue
        text = job.wait_event(survivor, "raised", timeout=60)
        seconds.append(time.monotonic() - since)
        assert text.startswith(f"ark: [rank {survivor}] "), text
        assert f"rank {victim}" in text.partition("] ")[2], f"does not name rank {victim}: {text}"
    return seconds


def _go_on(outcomes: list[Outcome]) -> None:
    survivors = len(outcomes)
    assert [o.kind for o in outcomes] == ["result"] * survivors, [o.describe() for o in outcomes]
    assert [o.value for o in outcomes] == [sum(range(survivors))] * survivors


@pytest.mark.parametrize("count", [16, 64 << 20], ids=["small", "large"])
@pytest.mark.parametrize("how", ["sync", "async", "graph", "send", "barrier"])
def test_killed(how: str, count: int) -> None:
    victim = WORLD - 1
    with Job(_loop, WORLD, how, count, env=ENV) as job:
        job.wait_all("running")
        time.sleep(0.3)
        seconds = _told(job, victim, job.kill(victim))
        record("1", f"CUDA, killed, {how}, {count} elements", f"{KILL_BOUND_S} s", seconds)
        assert max(seconds) < KILL_BOUND_S
        _go_on(job.finish(60, list(range(victim))))


def test_stopped() -> None:
    victim = WORLD - 1
    with Job(_loop, WORLD, "stopped", 4096, env=ENV) as job:
        job.wait_all("running")
        time.sleep(0.3)
        seconds = _told(job, victim, job.stop(victim))
        bound = TIMEOUT_S + SLACK_S
        record("2", "CUDA, stopped", f"{bound} s", seconds)
        assert max(seconds) < bound
        _go_on(job.finish(60, list(range(victim))))


def _uneven(rank: Rank) -> str:
    """One rank never calls: the others' kernels time out, and the next operation reports it."""
    device = start(rank)
    tensor = torch.ones(100, device=device)
    dist.all_reduce(tensor)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    if rank.rank == 0:
        time.sleep(8)
        return ""
    dist.all_reduce(tensor, group=group)
    with pytest.raises(dist.DistBackendError) as caught:
        torch.cuda.synchronize()
        while True:
            dist.all_reduce(tensor, group=group, async_op=True).wait()
            time.sleep(0.1)
    return str(caught.value)


def test_a_rank_that_does_not_call() -> None:
    with Job(_uneven, WORLD, env=ENV, destroy=False) as job:
        for value in job.values(60)[1:]:
            assert "rank 0" in value, value
