"""Asynchrony: operations that run without their caller, futures, callbacks, timeouts.

Some tests wait for something that happens only if another part makes progress by itself. The launcher's limit protects
them: a deadlock becomes a failure with every thread's stack.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input, reduce


def _sum(count: int, seed: int, world: int) -> torch.Tensor:
    return reduce([make_input(torch.float32, count, seed, r) for r in range(world)], "SUM")


def _async_forms(rank: Rank) -> None:
    """Issues every collective with async_op=True, many in flight, and waits in reverse order."""
    rank.init()
    world, me = rank.world_size, rank.rank
    pending: list[tuple[Any, Callable[[], None]]] = []

    def later(work: Any, check: Callable[[], None]) -> None:
        assert work is not None and hasattr(work, "wait")
        pending.append((work, check))

    for seed in range(20):
        count = 1 + 977 * seed
        a = make_input(torch.float32, count, seed, me)
        later(
            dist.all_reduce(a, async_op=True),
            lambda a=a, c=count, s=seed: assert_same_bits(a, _sum(c, s, world), f"all_reduce {s}"),
        )
        b = make_input(torch.float32, count, seed, me)
        later(
            dist.broadcast(b, seed % world, async_op=True),
            lambda b=b, c=count, s=seed: assert_same_bits(b, make_input(torch.float32, c, s, s % world), "broadcast"),
        )
        outs = [torch.full((count,), float("nan")) for _ in range(world)]
        later(
            dist.all_gather(outs, make_input(torch.float32, count, seed, me), async_op=True),
            lambda o=outs, c=count, s=seed: [
                assert_same_bits(o[r], make_input(torch.float32, c, s, r), "all_gather") for r in range(world)
            ],
        )
        whole = torch.full((count * world,), float("nan"))
        later(
            dist.all_gather_into_tensor(whole, make_input(torch.float32, count, seed, me), async_op=True),
            lambda o=whole, c=count, s=seed: assert_same_bits(
                o, torch.cat([make_input(torch.float32, c, s, r) for r in range(world)]), "all_gather_into_tensor"
            ),
        )
        part = torch.full((count,), float("nan"))
        later(
            dist.reduce_scatter_tensor(part, make_input(torch.float32, count * world, seed, me), async_op=True),
            lambda o=part, c=count, s=seed: assert_same_bits(
                o, _sum(c * world, s, world)[c * me : c * me + c], "reduce_scatter_tensor"
            ),
        )
        moved = torch.full((count * world,), float("nan"))
        later(
            dist.all_to_all_single(moved, make_input(torch.float32, count * world, seed, me), async_op=True),
            lambda o=moved, c=count, s=seed: assert_same_bits(
                o,
                torch.cat([make_input(torch.float32, c * world, s, r)[c * me : c * me + c] for r in range(world)]),
                "all_to_all_single",
            ),
        )
        later(dist.barrier(async_op=True), lambda: None)
    for work, check in reversed(pending):
        work.wait()
        assert work.is_completed()
        check()


@pytest.mark.by_day("3")
@pytest.mark.quick
@pytest.mark.parametrize("world", [1, 2, 3])
def test_many_operations_in_flight(world: int) -> None:
    run_ranks(_async_forms, world)


def _progress_without_caller(rank: Rank) -> None:
    """An operation finishes while its caller does nothing."""
    rank.init()
    tensor = torch.full((100_000,), float(rank.rank))
    work = dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline, "no progress without wait()"
        time.sleep(0.005)
    assert tensor[0].item() == sum(range(rank.world_size))
    work.wait()


@pytest.mark.quick
def test_progress_without_the_caller() -> None:
    run_ranks(_progress_without_caller, 2)


def _returns_at_once(rank: Rank) -> float:
    """async_op=True returns although the peer has not called yet."""
    rank.init()
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
    started = time.monotonic()
    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(8)]
    took = time.monotonic() - started
    if rank.rank == 0:
        assert not works[0].is_completed()
        rank.report("issued")
    for work in works:
        work.wait()
    return took


def test_issuing_returns_before_the_peer_arrives() -> None:
    with Job(_returns_at_once, 2) as job:
        job.wait_event(0, "issued", timeout=30)  # rank 1 has not called yet: this requires asynchrony
        job.go(1, "go")
        job.values()


def _futures(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    work = dist.all_reduce(torch.full((4,), float(me)), async_op=True)
    future = work.get_future()
    doubled = future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    assert doubled.wait().tolist() == [sum(range(world)) * 2 + 1.0] * 4
    assert future.done() and isinstance(future.value(), list) and len(future.value()) == 1
    work.wait()
    # A list of tensors, which DDP's reducer accepts.
    tensors = [torch.full((3,), float(me)), torch.full((2, 2), 1.0)]
    value = dist.all_reduce_coalesced(tensors, async_op=True).wait()  # PyTorch returns the future itself
    flat = value if isinstance(value[0], torch.Tensor) else value[0]
    assert [tuple(t.shape) for t in flat] == [(3,), (2, 2)] and flat[1][0, 0].item() == world
    # A callback added after the end runs as well. If one raises, the waiter gets its error.
    done = dist.all_reduce(torch.ones(1), async_op=True)
    done.wait()
    late = done.get_future().then(lambda f: f.value()[0].item())
    assert late.wait() == world
    broken = done.get_future().then(lambda f: 1 / 0)
    with pytest.raises(Exception, match="division"):
        broken.wait()
    collected = torch.futures.collect_all(
        [dist.all_reduce(torch.ones(2), async_op=True).get_future() for _ in range(5)]
    )
    assert [f.value()[0][0].item() for f in collected.wait()] == [world] * 5
    assert work.result() is not None


@pytest.mark.quick
def test_futures_and_then() -> None:
    run_ranks(_futures, 2)


def _collective_in_callback(rank: Rank) -> None:
    """As in PowerSGD: a `then` callback runs collectives and waits for them, chained two deep."""
    rank.init()
    world = rank.world_size

    def again(future: torch.futures.Future[Any]) -> list[torch.Tensor]:
        tensor = future.value()[0] / world
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor)
        return [tensor / world**2]

    for repeat in range(100):  # one at a time, because all ranks must issue in the same order
        future = dist.all_reduce(torch.full((1000,), float(repeat)), async_op=True).get_future().then(again).then(again)
        assert future.wait()[0].unique().tolist() == [float(repeat) * world]


@pytest.mark.by_day("2")
@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 3])
def test_a_callback_may_run_collectives_and_wait(world: int) -> None:
    run_ranks(_collective_in_callback, world, timeout=60)


def _wait_timeout(rank: Rank) -> float:
    rank.init(timeout=60)
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    work = dist.all_reduce(torch.ones(4), async_op=True)
    started = time.monotonic()
    try:
        work.wait(timedelta(seconds=1.5))
    except Exception as error:
        took = time.monotonic() - started
        rank.report("raised", str(error))
        return took
    raise AssertionError("wait(1.5 s) returned although rank 1 never came")


def test_wait_with_a_timeout() -> None:
    with Job(_wait_timeout, 2, destroy=False) as job:
        text = job.wait_event(0, "raised", timeout=20)
        job.go(1, "go")
        took = job.finish(30)[0].value
    assert 1.4 <= took < 6.5, f"wait(1.5 s) took {took:.2f} s"
    assert BACKEND != "ark" or ("all_reduce #2" in text and "1500 ms" in text), text


def _dropped_works(rank: Rank) -> None:
    """Nobody keeps the works and tensors. The operation still happens, and its memory stays until then."""
    rank.init()
    for i in range(200):
        dist.all_reduce(torch.full((2000,), float(i)), async_op=True)
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check.item() == rank.world_size


@pytest.mark.quick
def test_works_that_nobody_keeps() -> None:
    run_ranks(_dropped_works, 2)
