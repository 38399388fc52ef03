"""Collectives inside compiled regions: real processes on an ark group, with no part of the graph left to Inductor."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.failures import KILL_BOUND_S, check_message
from support.launcher import Job, run_ranks
from support.rank import Rank
from torch import Tensor

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.model import Llama, LlamaConfig, shard  # in examples/

ALONE = {"choose": "ark", "fallback": False}


def _every(x: Tensor, splits: list[int], received: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Each collective between other operators, some in a row, one on a strided view."""
    total = funcol.all_reduce(x * 2, "sum", group)
    largest = funcol.all_reduce(total - x[0], "max", group)
    mean = funcol.all_reduce(x[:, ::2], "avg", group)
    gathered = funcol.all_gather_tensor(x + 1, 0, group)
    part = funcol.reduce_scatter_tensor(gathered * 3, "sum", 0, group)
    moved = funcol.all_to_all_single(x[: sum(splits)] + 5, received, splits, group)
    return [total + 1, largest * 2, mean + largest[:, ::2], gathered - 1, part + 1, moved * 2]


def _forms(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD
    assert group is not None
    splits = [[1 + (s + d) % 2 for d in range(world)] for s in range(world)]
    received = [row[me] for row in splits]
    compiled = torch.compile(_every, backend="ark", options=ALONE)
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(2 * world, 6, generator=torch.Generator().manual_seed(10 * step + me))
            wanted = [t + 0 for t in _every(x, splits[me], received, group)]
            # An eager collective is in flight, before and after.
            beside = torch.full((5,), float(me))
            work = dist.all_reduce(beside, async_op=True)
            got = compiled(x, splits[me], received, group)
            assert work is not None
            work.wait()
            assert beside.tolist() == [float(sum(range(world)))] * 5
            for name, a, b in zip(("sum", "max", "avg", "gather", "scatter", "all_to_all"), got, wanted, strict=True):
                torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def _many_rows(rank: Rank) -> tuple[str, str]:
    """Returns the reports of unmeasured graphs: with the most rows that a loop kernel takes, and with one row more."""
    from ark_torch.compile import backend
    from ark_torch.compile.options import parse
    from ark_torch.compile.report import Report

    rank.init()
    backend._FEW_ROWS["cpu"] = 8
    backend.meeting.group_of = lambda collectives: None  # the ranks do not measure
    backend.inductor_fallback.whole = lambda graph, *given: graph.forward  # it takes seconds
    group = dist.group.WORLD
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))

    def model(x: Tensor) -> Tensor:
        return torch.relu(funcol.all_reduce(x @ weight, "sum", group))

    told = []
    for rows in (8, 9):
        report = Report()
        torch._dynamo.reset()
        compiled = torch.compile(
            model, backend=lambda g, x, r=report: backend.compile_graph(g, x, parse(None, {}), r), dynamic=False
        )
        with torch.no_grad():
            x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rank.rank))
            torch.testing.assert_close(compiled(x), model(x))
        told.append(str(report))
    return told[0], told[1]


def test_many_rows_are_inductors() -> None:
    for few, many in run_ranks(_many_rows, 2):
        assert "rows" not in few and "its collectives have 9 rows, and Inductor's products win there" in many, many


def test_every_collective() -> None:
    run_ranks(_forms, 2)
    run_ranks(_forms, 3)


def _coalesced(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    world = group.size()
    sums = funcol.all_reduce_coalesced([x * 2, x[0] + 1], "sum", group)
    gathered = funcol.all_gather_into_tensor_coalesced([x[:, :3] * 2, sums[1] + 1], group)
    parts = funcol.reduce_scatter_tensor_coalesced([x * 3, gathered[0] - 1], "sum", [0, 0], group)
    return [t + 1 for t in (sums[0], gathered[0], gathered[1][: 2 * world], *parts)]


def _written(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """torch.distributed's own calls that write tensors. Dynamo turns them into functional collectives."""
    world = group.size()
    total = x * 2
    dist.all_reduce(total, group=group)
    gathered = torch.empty(world * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(gathered, total - x, group=group)
    part = torch.empty(x.shape[0] // world, x.shape[1])
    dist.reduce_scatter_tensor(part, x * 3, group=group)
    moved = torch.empty_like(x)
    dist.all_to_all_single(moved, x + 5, group=group)
    listed = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(listed, x * 4, group=group)
    dist.all_reduce(x, group=group)  # an argument
    return [total + 1, gathered + 1, part + 1, moved + 1, listed[-1] + x]


def _waited(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    return [x * 2 + 1]


def _other_forms(rank: Rank) -> None:
    rank.init()
    group = dist.group.WORLD
    assert group is not None
    for body in (_coalesced, _written, _waited):
        compiled = torch.compile(body, backend="ark", options=ALONE)
        with torch.no_grad():
            for step in range(2):
                x = torch.randn(2 * rank.world_size, 6, generator=torch.Generator().manual_seed(10 * step + rank.rank))
                given = [funcol.all_reduce(x, "sum", group) if body is _waited else x.clone() for _ in range(2)]
                wanted = body(given[0], group)
                for a, b in zip(compiled(given[1], group), wanted, strict=True):
                    torch.testing.assert_close(a, b, msg=lambda text, body=body: f"{body.__name__}: {text}")
                assert torch.equal(*given)


@pytest.mark.nightly
def test_coalesced_and_in_place() -> None:
    """Also an argument with a pending eager reduction (AsyncCollectiveTensor)."""
    run_ranks(_other_forms, 2)


def _llama(rank: Rank) -> None:
    rank.init()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(hidden=64, layers=2, heads=8, kv_heads=4, ffn=96, vocabulary=52, max_len=12, head_dim=8)
    whole = Llama(config).eval().requires_grad_(False)
    group = dist.group.WORLD
    assert group is not None
    models = [shard(whole, group) for _ in range(2)]
    # Two models on one group, in turns.
    steps = [torch.compile(model, backend="ark", options=ALONE) for model in models]
    places = [cache.data_ptr() for model in models for cache in model.caches()]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for position in range(config.max_len):
            ids = torch.randint(0, config.vocabulary, (1, 1), generator=generator)
            where = torch.tensor([position])
            logits = [step(ids, where) for step in steps]
            torch.testing.assert_close(logits[0], whole(ids, where), rtol=2e-5, atol=2e-5)
            assert torch.equal(*logits)
            alike = [torch.empty_like(logits[0]) for _ in range(rank.world_size)]
            dist.all_gather(alike, logits[0])
            assert all(torch.equal(other, logits[0]) for other in alike)
    assert places == [cache.data_ptr() for model in models for cache in model.caches()]


@pytest.mark.nightly
def test_tensor_parallel_llama() -> None:
    run_ranks(_llama, 2)
    run_ranks(_llama, 4)


def _measured(rank: Rank) -> Any:
    """Returns who runs the graph, and the times of all that were measured."""
    rank.init()
    group, report = dist.group.WORLD, Report()

    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(torch.tanh(x) * 2, "sum", group) + x

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, options.parse(None, None), report)

    compiled = torch.compile(step, backend=run)
    with torch.no_grad():
        x = torch.full((64, 64), float(rank.rank))
        for _ in range(3):
            want = sum(torch.tanh(torch.tensor(float(r))) * 2 for r in range(rank.world_size)) + rank.rank
            torch.testing.assert_close(compiled(x), torch.full_like(x, float(want)))
    choice = report.graphs[0].choice
    assert choice is not None
    return choice.runs_on, dict(choice.us), choice.busy


@pytest.mark.nightly
def test_ranks_choose_together() -> None:
    """Measured, with the same times on both ranks; then remembered, or measured again if the machine was busy."""
    first = run_ranks(_measured, 2)
    assert first[0] == first[1] and set(first[0][1]) == {"ark", "inductor", "eager"}
    again = run_ranks(_measured, 2)
    assert again[0] == again[1] and (first[0][2] or again == first)


def _for_ever(rank: Rank) -> None:
    rank.init(timeout=120)
    group = dist.group.WORLD

    @torch.compile(backend="ark", options=ALONE)
    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 0.5, "sum", group) + 1

    with torch.no_grad():
        x = step(torch.ones(100))
        rank.report("running")
        while True:
            x = step(x).clamp(-1, 1)


def test_a_killed_rank_is_named() -> None:
    with Job(_for_ever, 3, destroy=False) as job:
        job.wait_all("running", 120)
        sent = job.kill(2)
        outcomes = job.wait_outcomes([0, 1], timeout=30)
        for outcome in outcomes:
            check_message(outcome, 2, "all_reduce")
        assert max(outcome.ended - sent for outcome in outcomes) < KILL_BOUND_S


def _again(rank: Rank) -> None:
    """The name now belongs to another group. The region looks it up, and keeps no group alive."""
    compiled = torch.compile(
        lambda x: funcol.all_reduce(x * 2, "sum", "0") + 1, backend="ark", options={**ALONE, "minimum": 1}
    )
    with torch.no_grad():
        for _ in range(3):
            rank.init()
            group = dist.group.WORLD
            assert group is not None and group.group_name == "0"
            got = compiled(torch.ones(5))
            assert got.tolist() == [2.0 * rank.world_size + 1] * 5
            dist.destroy_process_group()
            with pytest.raises(RuntimeError, match="no process group '0'"):
                compiled(torch.ones(5))
        rank.init()


@pytest.mark.nightly
def test_a_group_made_again() -> None:
    run_ranks(_again, 2)


def _aborted(rank: Rank) -> None:
    """A kernel that waits for a rank ends when another thread aborts the group."""
    rank.init(timeout=120)
    group = dist.group.WORLD
    assert group is not None

    @torch.compile(backend="ark", options=ALONE)
    def step(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 0.5, "sum", group) + 1

    with torch.no_grad():
        x = step(torch.ones(100))
        if rank.rank == 1:
            rank.wait_for("aborted")
            return
        threading.Timer(0.3, group.abort).start()
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="abort"):
            for _ in range(2):
                x = step(x)
        assert time.monotonic() - begin < 20
        rank.report("aborted")


@pytest.mark.nightly
def test_an_abort_ends_a_kernel() -> None:
    with Job(_aborted, 2, destroy=False) as job:
        job.wait_event(0, "aborted")
        job.go(1, "aborted")
        job.finish()
