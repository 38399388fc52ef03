"""NCCL as an entry of the dispatch table: results, streams, graphs, and the loss of a peer during its operations."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import ENV, WORLD, busy, go_on_without_the_last, run, same, start
from support.failures import SLACK_S, TIMEOUT_S
from support.launcher import Job
from support.rank import Rank
from support.reference import make_input

import ark_torch
from ark_torch import _C

NAMES = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
FROM = 1 << 20
COUNT = (1 << 19) + 24 * WORLD  # float32: more than FROM


def _group(rank: Rank, reduction: str = "exact", timeout: float = 60.0) -> Any:
    options = ark_torch.Options()
    options.reduction = reduction
    options.cuda_dispatch = [(rank.world_size, {f"nccl_{name}_from": FROM for name in NAMES})]
    return dist.new_group(pg_options=options, timeout=timedelta(seconds=timeout))


def _calls(rank: Rank, seed: int) -> dict[str, tuple[torch.Tensor, Any]]:
    """Maps a name to a tensor that the operation writes (and may read), and call(group, async)."""
    me, size, device = rank.rank, rank.world_size, torch.device("cuda", rank.rank)
    count = COUNT // size * size
    mine = [make_input(torch.float32, count, seed + index, me) for index in range(4)]

    def at(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    a, b, part, c, d = at(mine[0]), at(mine[1]), at(mine[2][: count // size]), at(mine[3]), at(mine[3])
    gathered, scattered, swapped = (torch.full((n,), -1.0, device=device) for n in (count, count // size, count))
    return {
        "all_reduce": (a, lambda group, later: dist.all_reduce(a, group=group, async_op=later)),
        "reduce_scatter": (
            scattered,
            lambda group, later: dist.reduce_scatter_tensor(scattered, c, group=group, async_op=later),
        ),
        "all_gather": (gathered, lambda group, later: dist.all_gather_into_tensor(gathered, part, group, later)),
        "broadcast": (b, lambda group, later: dist.broadcast(b, group_src=size - 1, group=group, async_op=later)),
        "all_to_all": (swapped, lambda group, later: dist.all_to_all_single(swapped, d, group=group, async_op=later)),
    }


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = ark_torch.flight_record()["entries"]
    return entries


def _results(rank: Rank) -> None:
    """In stream order and in any form, the results are those of a group without NCCL."""
    start(rank)
    earlier = len(_entries())  # from other tests on these ranks
    plain, exact, fast = dist.new_group(), _group(rank), _group(rank, "fast")
    sums = ("all_reduce", "reduce_scatter")
    for seed, later in enumerate((False, True)):
        expected = {name: (call(plain, False), tensor)[1] for name, (tensor, call) in _calls(rank, seed).items()}
        for group, carried in ((exact, 3), (fast, 5)):
            backend = group._get_backend(torch.device("cuda"))
            before = backend.cuda_carried
            calls = _calls(rank, seed)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                busy(5)  # anything that does not wait for the stream comes too early
                for tensor, call in calls.values():
                    work = call(group, later)
                    if later:
                        work.wait()
                    tensor.add_(1.0)
                torch.cuda.current_stream().synchronize()
            assert backend.cuda_carried - before == carried
            for name, (tensor, _) in calls.items():
                if group is fast and name in sums:
                    torch.testing.assert_close(tensor, expected[name] + 1.0, rtol=1e-4, atol=1e-4, equal_nan=True)
                else:
                    same(tensor, expected[name] + 1.0, f"{name}, later={later}, carried={carried}")
    torch.cuda.synchronize()
    assert {entry["state"] for entry in _entries()[earlier:]} == {"completed"}


def test_results_and_order() -> None:
    run(_results)


def _graph(rank: Rank) -> None:
    device = start(rank)
    group = _group(rank)
    tensor = torch.full((COUNT,), -1.0, device=device)
    dist.broadcast(tensor, 0, group=group)  # ranks meet, and NCCL is created
    backend = group._get_backend(torch.device("cuda"))
    assert backend.cuda_carried == 1
    graph = torch.cuda.CUDAGraph()
    small = torch.zeros(100, device=device)
    with torch.cuda.graph(graph):
        dist.all_reduce(small, group=group)
        dist.broadcast(tensor, 1, group=group)
        tensor.mul_(2.0)
        dist.broadcast(tensor, 0, group=group)
        dist.all_reduce(small, group=group)
    assert backend.cuda_carried == 3
    for step in range(5):
        tensor.fill_(float(rank.rank + 10 * step))
        small.fill_(1.0)
        graph.replay()
        other = torch.full((COUNT,), float(rank.rank), device=device)
        dist.broadcast(other, 0, group=group)
        assert tensor.unique().tolist() == [2.0 * (1 + 10 * step)], f"replay {step}"
        assert small.unique().tolist() == [float(rank.world_size**2)] and other.unique().tolist() == [0.0]
    torch.cuda.synchronize()
    del graph


def test_in_graphs() -> None:
    run(_graph)


def _by_default(rank: Rank) -> list[str]:
    """Sums of the sizes that NCCL has by default on these GPUs, eager and in a graph, against a group without NCCL."""
    device = start(rank)
    me, size = rank.rank, rank.world_size
    fast, without = ark_torch.Options(), ark_torch.Options()
    fast.reduction = "fast"
    without.cuda_dispatch = [(size, {})]
    group, alone = dist.new_group(pg_options=fast), dist.new_group(pg_options=without)
    backend = group._get_backend(device)
    numbers = _C._default_cuda_dispatch(size, torch.cuda.get_device_name(device))
    carried = [name for name in ("all_reduce", "reduce_scatter") if numbers[f"nccl_{name}_from"] < 1 << 40]
    for name in carried:
        count = numbers[f"nccl_{name}_from"] // 4 // size * size + 4 * size
        # Whole numbers have the same sum in any order.
        source = torch.arange(count, device=device).remainder_(1000).add_(me).float()
        into = torch.full((count // (size if name == "reduce_scatter" else 1),), -1.0, device=device)

        def call(group: Any, name: str = name, source: torch.Tensor = source, into: torch.Tensor = into) -> None:
            if name == "reduce_scatter":
                dist.reduce_scatter_tensor(into, source, group=group)
            else:
                into.copy_(source)
                dist.all_reduce(into, group=group)

        call(alone)
        expected = into.clone()
        before = backend.cuda_carried
        into.fill_(-1.0)
        call(group)
        same(into, expected, f"{name}, eager")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(group)
        assert backend.cuda_carried == before + 2, name
        into.fill_(-1.0)
        graph.replay()
        torch.cuda.synchronize()
        same(into, expected, f"{name}, in a graph")
        del graph
    assert alone._get_backend(device).cuda_carried == 0
    return carried


def test_what_it_carries_by_default() -> None:
    run(_by_default)


def _lost(rank: Rank) -> float:
    """Broadcasts until the last rank is killed. The others continue without it."""
    device = start(rank, timeout=120)
    group = _group(rank, timeout=120)
    tensor = torch.ones(16 << 20, device=device)
    dist.broadcast(tensor, 0, group=group)
    torch.cuda.synchronize()
    assert group._get_backend(torch.device("cuda")).cuda_carried == 1
    rank.report("running")
    try:
        while True:
            for _ in range(20):
                dist.broadcast(tensor, 0, group=group)
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device, COUNT)


def test_killed() -> None:
    victim = WORLD - 1
    with Job(_lost, WORLD, env=ENV) as job:
        job.wait_all("running")
        time.sleep(0.3)
        since = job.kill(victim)
        for survivor in range(victim):
            text = job.wait_event(survivor, "raised", timeout=60)
            assert time.monotonic() - since < 5, text
            assert f"rank {victim}" in text.partition("] ")[2], text
        outcomes = job.finish(60, list(range(victim)))
        assert [o.value for o in outcomes] == [sum(range(victim))] * victim, [o.describe() for o in outcomes]


def _late(rank: Rank) -> str:
    """Rank 0 never calls: the others time out before NCCL, which would wait forever."""
    device = start(rank)
    tensor = torch.ones(COUNT, device=device)
    group = _group(rank, timeout=TIMEOUT_S)
    dist.broadcast(tensor, 0, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    if rank.rank == 0:
        time.sleep(TIMEOUT_S + SLACK_S + 3)
        return ""
    began = time.monotonic()
    dist.broadcast(tensor, 0, group=group)
    with pytest.raises(dist.DistBackendError) as caught:
        torch.cuda.synchronize()
        while True:
            dist.all_reduce(tensor[:16], group=group, async_op=True).wait()
            time.sleep(0.1)
    assert time.monotonic() - began < TIMEOUT_S + SLACK_S
    return str(caught.value)


def test_a_rank_that_does_not_call() -> None:
    with Job(_late, WORLD, env=ENV, destroy=False) as job:
        for value in job.values(60)[1:]:
            assert "rank 0" in value, value
