"""A group's own state: sequence numbers, timeouts, monitored barriers, hooks, errors, names, debug level.

PyTorch's module-level monitored_barrier and sequence numbers refuse third-party backends by name, so the tests use the
group object, as a program would.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only, backend_of, total
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank

import ark_torch
from ark_torch.distributed.group import complete


def _sequence_numbers(rank: Rank) -> None:
    """Uses the backend, because ProcessGroup's own method refuses third parties by their type."""
    backend = backend_of(rank.init())
    backend._set_sequence_number_for_group()
    first = backend._get_sequence_number_for_group()
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    last = backend._get_sequence_number_for_group()
    assert last - first == 6, f"{first} -> {last} after six operations"
    other = dist.new_group([0, 1])
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2), group=other)
    assert backend._get_sequence_number_for_group() == before, "a group counts its own operations"
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, last)
    assert everyone == [last, last], "the ranks agree"


@pytest.mark.quick
@ark_only
def test_sequence_numbers() -> None:
    run_ranks(_sequence_numbers, 2)


def _set_timeout(rank: Rank) -> float:
    group = rank.init(timeout=600)
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    group.set_timeout(timedelta(seconds=1))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        dist.all_reduce(torch.ones(3))
    rank.report("raised")
    return time.monotonic() - started


@ark_only
def test_set_timeout_is_obeyed() -> None:
    with Job(_set_timeout, 2, destroy=False) as job:
        job.wait_event(0, "raised", timeout=30)
        job.go(1, "go")
        took = job.finish(30)[0].value
    assert took is not None and 0.9 <= took < 6


def _monitored(rank: Rank, missing: list[int], wait_all: bool) -> str:
    group = rank.init()
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=wait_all)
    if rank.rank in missing:
        rank.wait_for("go")
        return ""
    try:
        group.monitored_barrier(timedelta(seconds=2), wait_all_ranks=wait_all)
    except RuntimeError as error:
        rank.report("raised", str(error))
        return str(error)
    raise AssertionError("the barrier passed without everybody")


@pytest.mark.by_day("False")
@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_the_missing(wait_all: bool) -> None:
    missing = [1, 3]
    with Job(_monitored, 4, missing, wait_all, destroy=False) as job:
        text = job.wait_event(0, "raised", timeout=40)
        job.wait_event(2, "raised", timeout=40)
        for rank in missing:
            job.go(rank, "go")
        job.finish(40)
    named = [str(r) for r in range(1, 4) if str(r) in text.replace("2000", "").replace("2 s", "")]
    assert "1" in named and (not wait_all or "3" in named), text


def _hooks(rank: Rank) -> None:
    group = rank.init()
    seen: list[Any] = []
    group._register_on_completion_hook(lambda info: seen.append((info.op_type, info.seq, info.active_duration)))
    assert group._has_hooks()
    for _ in range(4):
        dist.all_reduce(torch.ones(10))
    work = dist.broadcast(torch.ones(10), 0, async_op=True)
    work.wait()
    group._wait_for_pending_works()
    deadline = time.monotonic() + 10
    while len(seen) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(seen) == 5, seen
    assert [str(kind).rpartition(".")[2] for kind, _, _ in seen] == ["ALLREDUCE"] * 4 + ["BROADCAST"]
    sequence = [number for _, number, _ in seen]
    assert sequence == sorted(set(sequence))


@ark_only
def test_completion_hooks() -> None:
    run_ranks(_hooks, 2)


def _detail(rank: Rank) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in PyTorch's checker."""
    import torch.distributed._functional_collectives as funcol

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    rank.init()
    world, me = rank.world_size, rank.rank
    assert total(None, 1.0) == world
    outs = [torch.empty(4) for _ in range(world)]
    dist.all_gather(outs, torch.full((4,), float(me)))
    assert [x[0].item() for x in outs] == list(range(world))
    part = torch.empty(5)
    dist.reduce_scatter_tensor(part, torch.ones(5 * world))
    assert part.tolist() == [float(world)] * 5
    dist.barrier()
    if torch.__version__.startswith("2.11."):  # its wrapper does not forward these for any backend
        with pytest.raises(RuntimeError, match="does not support allgather_into_tensor_coalesced"):
            funcol.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
        with pytest.raises(RuntimeError, match="does not support reduce_scatter_tensor_coalesced"):
            funcol.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, dist.group.WORLD)
    else:
        got = funcol.all_gather_tensor(torch.full((2,), float(me)), 0, dist.group.WORLD) + 0
        assert got.tolist() == [float(r) for r in range(world) for _ in range(2)]
        got = funcol.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, dist.group.WORLD) + 0
        assert got.tolist() == [float(world)] * 2
    group = dist.new_group(list(range(world)))
    assert total(group, 2.0) == 2 * world
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def test_debug_detail() -> None:
    run_ranks(_detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


@pytest.mark.quick
@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL])
def test_debug_level_turns_comparing_on(level: dist.DebugLevel) -> None:
    """Enables ark's own comparison of calls. If both are on, PyTorch's checker hides it."""
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        assert complete(ark_torch.Options()).debug is (level == dist.DebugLevel.DETAIL)
    finally:
        dist.set_debug_level(before)


def _get_error_of_a_lost_peer(rank: Rank) -> None:
    backend = backend_of(rank.init())
    dist.barrier()
    rank.report("ready")
    if rank.rank == 1:
        rank.wait_for("go")
    deadline = time.monotonic() + 20
    while (error := str(backend.get_error()).rpartition(".")[2]) == "SUCCESS" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert error == "REMOTE_ERROR"


@ark_only
def test_get_error_names_a_lost_peer_before_any_operation() -> None:
    with Job(_get_error_of_a_lost_peer, 2, destroy=False) as job:
        job.wait_all("ready", timeout=30)
        job.kill(1)
        (outcome,) = job.wait_outcomes([0], timeout=30)
    assert outcome.kind == "result", outcome


def _get_error(rank: Rank) -> None:
    group = rank.init()
    backend = backend_of(group)
    assert str(backend.get_error()).rpartition(".")[2] == "SUCCESS"
    group.set_timeout(timedelta(seconds=0.5))
    if rank.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        assert str(backend.get_error()).rpartition(".")[2] != "SUCCESS"
        rank.report("done")
    else:
        rank.wait_for("go")


@ark_only
def test_get_error() -> None:
    with Job(_get_error, 2, destroy=False) as job:
        job.wait_event(0, "done", timeout=30)
        job.go(1, "go")
        outcomes = job.finish(30)
    assert [o.kind for o in outcomes] == ["result", "result"], outcomes


def _names_and_flags(rank: Rank) -> None:
    group = rank.init(group_name="", pg_options=None)
    backend = backend_of(group)
    assert backend.name() == BACKEND and dist.get_backend() == BACKEND
    assert backend.rank() == rank.rank and backend.size() == rank.world_size
    assert backend is backend_of(group)
    assert not getattr(backend, "supports_time_estimate", False), "time estimation is off"  # 2.15 has no such attribute
    assert group._get_backend(torch.device("cpu")) is group._get_backend(torch.device("cuda")), "one instance for both"


@pytest.mark.quick
@ark_only
def test_names_and_flags() -> None:
    run_ranks(_names_and_flags, 2)
