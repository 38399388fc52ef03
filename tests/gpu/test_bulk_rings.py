"""Collectives of few blocks, by bulk rings and by rings of chunks: unchanged bits; lost peers are reported as usual.

The dispatch here uses bulk rings for every size. The measured table does so for large ones on up to four ranks.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import ENV, SPREAD, WORLD, device_of, go_on_without_the_last, op, run, same
from support.failures import record
from support.launcher import Job
from support.layouts import Placed
from support.rank import Rank
from support.reference import make_input, supported

import ark_torch
from ark_torch.distributed import register
from ark_torch.distributed.group import complete
from ark_torch.memory import pool

NEVER = (1 << 63) - 1
COUNTS = (1, 1023, 65537, (1 << 20) + 3, 12 << 20)


def _start(rank: Rank, blocks: int, landings_from: int = 1, **options: Any) -> torch.device:
    device = device_of(rank)
    torch.cuda.set_device(device)
    chosen = complete(ark_torch.Options())
    never = ("copy_engine_from", "all_gather_engine_from", "relay_from")
    numbers = {"one_shot_to": 0, "bulk_from": 1, "bulk_move_from": 1, "bulk_send_from": 1, "ring_blocks": blocks}
    numbers |= {"landings_from": landings_from} | dict.fromkeys(never, NEVER)
    chosen.cuda_dispatch = [(8, numbers)]
    rank.init(pg_options=chosen, **options)
    return device


def _sums(rank: Rank, blocks: int) -> None:
    device = _start(rank, blocks)
    for seed, (dtype, name, count) in enumerate(itertools.product(SPREAD, ("SUM", "AVG", "MAX", "PREMUL_SUM"), COUNTS)):
        if not supported(dtype, name) or (count > 1 << 20 and (name != "SUM" or dtype != torch.bfloat16)):
            continue
        values = make_input(dtype, count, seed, rank.rank)
        expected = values.clone()
        dist.all_reduce(expected, op(name, rank.rank))
        for repeat in range(3):
            placed = Placed(values, ("plain", "strided")[seed % 2], device)
            dist.all_reduce(placed.tensor, op(name, rank.rank))
            same(placed.tensor, expected, f"all_reduce {dtype} {name} {count} repeat {repeat}")
            placed.check(f"all_reduce {dtype} {name} {count}")
    for count in (1, 30_001):
        values = make_input(torch.bfloat16, count * rank.world_size, 5, rank.rank)
        expected, found = values[:count].clone(), torch.empty(count, dtype=torch.bfloat16, device=device)
        dist.reduce_scatter_tensor(expected, values)
        dist.reduce_scatter_tensor(found, values.to(device))
        same(found, expected, f"reduce_scatter {count}")
        expected, found = values.clone(), values.to(device)
        dist.reduce(expected, rank.world_size - 1)
        dist.reduce(found, rank.world_size - 1)
        if rank.rank == rank.world_size - 1:
            same(found, expected, f"reduce {count}")


@pytest.mark.parametrize("blocks", [1, 5, 16, 64])
def test_sums(blocks: int) -> None:
    run(_sums, blocks, own=True)


def _moves(rank: Rank, blocks: int) -> None:
    """What only moves, in place and not, at any alignment, registered on all or some ranks, eager and in a graph."""
    device = _start(rank, blocks, landings_from=1 << 12)
    size, own = rank.world_size, rank.rank
    after, before = (own + 1) % size, (own - 1) % size
    with torch.cuda.use_mem_pool(pool(device)):
        mine = torch.empty(size * (4 << 20) + 64, dtype=torch.bfloat16, device=device)
    plain = torch.empty_like(mine)
    for registered in (False, True):
        if registered:
            assert register(mine)
        for count, offset, mixed in itertools.product((1, 4_099, 1_000_001, 4 << 20), (0, 3), (0, 1)):
            if mixed and not registered:
                continue
            whole = (plain if mixed and own % 2 else mine)[offset : offset + size * count]
            values = [make_input(torch.bfloat16, count, count + r, r).to(device) for r in range(size)]
            part = whole[own * count :][:count]  # in place
            apart, others = torch.empty_like(values[0]), list(whole.split(count))

            def exchange() -> None:  # with both neighbours at once, which are one peer if there are two ranks
                sends = [dist.P2POp(dist.isend, values[own], peer) for peer in {before, after}]  # noqa: B023
                takes = [dist.P2POp(dist.irecv, others[peer], peer) for peer in {before, after}]  # noqa: B023
                for work in dist.batch_isend_irecv(sends + takes):
                    work.wait()

            operations: list[tuple[str, Any, list[int]]] = [
                ("all_gather", lambda: dist.all_gather_into_tensor(whole, values[own]), list(range(size))),  # noqa: B023
                ("in place", lambda: dist.all_gather_into_tensor(whole, part), list(range(size))),  # noqa: B023
                ("exchange", exchange, [own, before, after]),
            ]
            for root in range(size):
                operations += [
                    (f"broadcast {root}", lambda root=root: dist.broadcast(others[root], root), [own, root]),  # noqa: B023
                    (
                        f"gather {root}",
                        lambda root=root: dist.gather(part, others if own == root else None, dst=root),  # noqa: B023
                        list(range(size)) if own == root else [own],
                    ),
                ]

            def check(name: str, call: Any, filled: list[int], what: str) -> None:
                whole.fill_(-1.0)  # noqa: B023
                part.copy_(values[own])  # noqa: B023
                call()
                for r in range(size):
                    wanted = values[r] if r in filled else torch.full_like(values[r], -1.0)  # noqa: B023
                    same(others[r], wanted.cpu(), f"{name} of {count} at {offset}, {what}, of rank {r}")  # noqa: B023

            for name, call, filled in operations:
                what = f"registered {registered}, mixed {mixed}"
                check(name, call, filled, what)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
                for _ in range(2):
                    check(name, graph.replay, filled, f"{what}, in a graph")
            for root in range(size):
                dist.scatter(apart, values if own == root else None, src=root)
                same(apart, values[own].cpu(), f"scatter {root} of {count} at {offset}")


@pytest.mark.parametrize("blocks", [1, 5, 16, 64])
def test_moves(blocks: int) -> None:
    run(_moves, blocks, own=True)


def _few(rank: Rank, blocks: int) -> None:
    """Moves and sums in chunks by other numbers of blocks, between some in lines, eager and in a graph."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    chosen = complete(ark_torch.Options())
    never = ("copy_engine_from", "bulk_from", "all_gather_engine_from")
    numbers = {"one_shot_to": 0, "chunks_from": 1 << 14, "landings_from": 1 << 17, "relay_from": 1 << 15}
    numbers |= {"move_blocks": blocks, "sum_blocks": blocks + 1} | dict.fromkeys(never, NEVER)
    chosen.cuda_dispatch = [(8, numbers)]
    rank.init(pg_options=chosen)
    size = rank.world_size
    with torch.cuda.use_mem_pool(pool(device)):
        memory = torch.empty(size * (3 << 20), dtype=torch.bfloat16, device=device)
    for registered in (False, True):
        if registered:
            assert register(memory)
        for seed, count in enumerate((513, 40_007, (3 << 20) - 5, 8_200)):
            values = make_input(torch.bfloat16, size * count, seed, rank.rank)
            whole = memory[: size * count]
            # Rank r sends r + 1 parts of all to the last rank, which takes some in lines and some in chunks.
            parts = [count // (r + 1) for r in range(size)]

            def operations(whole: torch.Tensor, part: torch.Tensor) -> Any:
                yield lambda: dist.all_reduce(whole)
                yield lambda: dist.all_gather_into_tensor(whole, part)
                yield lambda: dist.reduce_scatter_tensor(part, whole)
                yield lambda: dist.broadcast(whole, size - 1)
                mine, others = [parts[rank.rank]] * size, parts  # noqa: B023
                sent, taken = whole[: sum(mine)], torch.empty(sum(others), dtype=whole.dtype, device=whole.device)

                def exchange() -> None:
                    dist.all_to_all_single(taken, sent, others, mine)
                    whole[: taken.numel()].copy_(taken)

                yield exchange

            expected, first = values.clone(), values[:count].clone()
            part = first.to(device)
            on_host, on_device = operations(expected, first), operations(whole, part)
            for number, (wanted, found) in enumerate(zip(on_host, on_device, strict=True)):
                what = f"operation {number} of {count}, registered {registered}"
                whole.copy_(expected)
                part.copy_(first)
                before = expected.clone(), first.clone()
                wanted()
                found()
                same(whole, expected, what)
                same(part, first, what)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found()
                for _ in range(2):
                    whole.copy_(before[0])
                    part.copy_(before[1])
                    graph.replay()
                    same(whole, expected, f"{what}, in a graph")
                    same(part, first, f"{what}, in a graph")


@pytest.mark.parametrize("blocks", [1, 7, 32])
def test_moves_and_sums_of_few_blocks(blocks: int) -> None:
    run(_few, blocks, own=True)


def grids(profile: torch.profiler.profile) -> dict[str, int]:
    """The blocks of each kernel that ran."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    return {event["name"]: event["args"]["grid"][0] for event in events if "grid" in event.get("args", {})}


def _steps(rank: Rank, blocks: int) -> None:
    """What captured steps have of their own: the bits of other calls, between such calls, by kernels of few blocks."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    chosen = complete(ark_torch.Options())
    step = ("step_all_reduce_from", "step_reduce_scatter_from", "step_move_from", "step_send_from")
    numbers = dict.fromkeys(step, 1 << 18) | {"ring_blocks": 2, "bulk_from": 1 << 30}
    fewer = (blocks + 1) // 2
    numbers |= {"step_blocks": blocks, "step_all_reduce_blocks": fewer, "relay_from": 1 << 40}
    chosen.cuda_dispatch = [(8, numbers)]
    rank.init(pg_options=chosen)
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    size, own = rank.world_size, rank.rank
    for count in (1 << 18, (3 << 20) + 5):
        values = [make_input(torch.bfloat16, size * count, r, r).to(device) for r in range(size)]
        found, part = torch.empty_like(values[0]), torch.empty(count, dtype=torch.bfloat16, device=device)
        after, before = (own + 1) % size, (own - 1) % size

        def exchange() -> None:
            pairs = [dist.P2POp(dist.isend, values[own], after), dist.P2POp(dist.irecv, found, before)]  # noqa: B023
            for work in dist.batch_isend_irecv(pairs):
                work.wait()

        def broadcast() -> None:
            found.copy_(values[own])  # noqa: B023
            dist.broadcast(found, size - 1)  # noqa: B023

        def all_reduce() -> None:
            found.copy_(values[own])  # noqa: B023
            dist.all_reduce(found)  # noqa: B023

        calls = {
            "all_reduce": (all_reduce, "bulk_two_shot"),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, values[own]), "bulk_two_shot"),  # noqa: B023
            "all_gather": (lambda: dist.all_gather_into_tensor(found, values[own][:count]), "bulk_move"),  # noqa: B023
            "broadcast": (broadcast, "bulk_move"),
            "exchange": (exchange, "bulk_transfer"),
        }
        for name, (call, kernel) in calls.items():
            what = f"{name} of {count}"
            found.zero_(), part.zero_()
            call()  # as other calls go
            wanted = found.clone(), part.clone()
            torch.cuda.synchronize()
            graphs = []
            for captures in (False, True):
                graph = torch.cuda.CUDAGraph()
                backend._captures_step = captures
                with torch.cuda.graph(graph):
                    call()
                backend._captures_step = False
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    graph.replay()
                    torch.cuda.synchronize()
                ran = grids(profile)
                assert any(kernel in one for one in ran) == captures, (what, captures, ran)
                if captures and name != "exchange":
                    wanted_blocks = fewer if name == "all_reduce" else blocks
                    assert [grid for one, grid in ran.items() if kernel in one] == [wanted_blocks], (what, ran)
                graphs.append((captures, graph))
            for captures, graph in 2 * graphs:
                found.zero_(), part.zero_()
                graph.replay()
                same(found, wanted[0].cpu(), f"{what}, captures {captures}")
                same(part, wanted[1].cpu(), f"{what}, captures {captures}")
                found.zero_(), part.zero_()
                call()
                same(found, wanted[0].cpu(), f"{what}, eager between")


def _engines(rank: Rank) -> None:
    """Copy engines in captured steps alone: an eager call makes their memory, and rings carry it."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    chosen = complete(ark_torch.Options())
    chosen.cuda_dispatch = [(8, {"copy_engine_from": 1 << 40, "step_copy_engine_from": 1 << 20, "step_blocks": 0})]
    rank.init(pg_options=chosen)
    backend = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    values = make_input(torch.bfloat16, (4 << 20) + 5, rank.rank, rank.rank).to(device)
    expected, found = values.clone(), values.clone()
    dist.all_reduce(expected)
    for captures in (True, False):
        graph = torch.cuda.CUDAGraph()
        backend._captures_step = captures
        with torch.cuda.graph(graph):
            dist.all_reduce(found.copy_(values))
        backend._captures_step = False
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        ran = {event.name for event in profile.events()}
        assert any("add" in name for name in ran) == captures, ran
        assert any("two_shot" in name for name in ran) != captures, ran
        same(found, expected.cpu(), f"captures {captures}")


def test_copy_engines_in_captured_steps() -> None:
    run(_engines, own=True)


@pytest.mark.parametrize("blocks", [3, 32])
def test_captured_steps(blocks: int) -> None:
    run(_steps, blocks, own=True)


def _places(rank: Rank) -> None:
    """Unaligned, registered on all or some ranks, and in graphs that are replayed between eager calls."""
    device = _start(rank, 8)
    with torch.cuda.use_mem_pool(pool(device)):
        mine = torch.empty((8 << 20) + 64, dtype=torch.bfloat16, device=device)
    plain = torch.empty_like(mine)
    for registered in (False, True):
        if registered:
            assert register(mine)
        for count, offset, mixed in itertools.product((4_099, 1_000_001, 8 << 20), (0, 3, 8 * rank.rank), (0, 1)):
            memory = plain if mixed and rank.rank % 2 else mine
            tensor = memory[offset : offset + count]
            values = make_input(torch.bfloat16, count, count + offset, rank.rank)
            expected = values.clone()
            dist.all_reduce(expected)
            what = f"{count} at {offset}, registered {registered}, mixed {mixed}"
            tensor.copy_(values)
            dist.all_reduce(tensor)
            same(tensor, expected, what)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                dist.all_reduce(tensor)
            for _ in range(2):
                tensor.copy_(values)
                graph.replay()
                same(tensor, expected, f"{what}, in a graph")


def test_places() -> None:
    run(_places, own=True)


def _loop(rank: Rank, kind: str) -> float:
    device = _start(rank, 4, timeout=120)
    tensor, whole = torch.ones(16 << 20, device=device), torch.empty(16 << 20, device=device)
    part = tensor[: whole.numel() // rank.world_size]

    def call() -> None:
        if kind == "sum":
            dist.all_reduce(tensor.fill_(1.0))
        elif kind == "move":
            dist.all_gather_into_tensor(whole[: part.numel() * rank.world_size], part)
        else:
            after, before = (rank.rank + 1) % rank.world_size, (rank.rank - 1) % rank.world_size
            pairs = [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, whole, before)]
            for work in dist.batch_isend_irecv(pairs):
                work.wait()
        torch.cuda.synchronize()

    call()
    rank.report("running")
    try:
        while True:
            call()
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device)


@pytest.mark.parametrize("kind", ["sum", "move", "transfer"])
def test_lost_rank(kind: str) -> None:
    victim, bound = WORLD - 1, 5.0
    with Job(_loop, WORLD, kind, env=ENV) as job:
        job.wait_all("running", timeout=120)
        time.sleep(0.3)
        since = job.kill(victim)
        seconds = []
        for survivor in range(victim):
            text = job.wait_event(survivor, "raised", timeout=60)
            seconds.append(time.monotonic() - since)
            assert f"rank {victim}" in text.partition("] ")[2], text
        record("1", "CUDA rings in bulk", f"{bound} s", seconds)
        assert max(seconds) < bound
        outcomes = job.finish(60, list(range(victim)))
        assert [o.value for o in outcomes] == [sum(range(victim))] * victim, [o.describe() for o in outcomes]
