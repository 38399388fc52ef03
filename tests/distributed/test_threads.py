"""Threads: several with their own groups, or in turn on one, autograd's threads, and works with several waiters.

Some tests wait for something that happens only if another part makes progress by itself. The launcher's limit protects
them: a deadlock becomes a failure with every thread's stack.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input, reduce


def _sum(count: int, seed: int, world: int) -> torch.Tensor:
    return reduce([make_input(torch.float32, count, seed, r) for r in range(world)], "SUM")


def _threads_and_groups(rank: Rank) -> None:
    """Four threads at once, each with its own group, then one group from four threads in turn."""
    rank.init()
    world, me = rank.world_size, rank.rank
    groups = [dist.new_group(list(range(world))) for _ in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for i in range(150):
                seed = index * 1000 + i
                count = 1 + (seed * 7919) % 5000
                tensor = make_input(torch.float32, count, seed, me)
                if i % 3 == 0:
                    dist.all_reduce(tensor, group=groups[index])
                else:
                    dist.all_reduce(tensor, group=groups[index], async_op=True).wait()
                assert_same_bits(tensor, _sum(count, seed, world), f"thread {index} step {i}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    turn = threading.Lock()
    barrier = threading.Barrier(4)
    order: list[int] = []

    def in_turn(index: int) -> None:
        for step in range(40):
            barrier.wait()
            for holder in range(4):
                if holder == index:
                    with turn:
                        order.append(index)
                        tensor = make_input(torch.float32, 100, step * 4 + index, me)
                        dist.all_reduce(tensor)
                        if not torch.equal(tensor, _sum(100, step * 4 + index, world)):
                            failures.append(AssertionError(f"thread {index} step {step}"))
                barrier.wait()

    threads = [threading.Thread(target=in_turn, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("world", [2, 3])
def test_several_threads_and_groups(world: int) -> None:
    run_ranks(_threads_and_groups, world)


def _waiters(rank: Rank) -> None:
    """Several threads wait for one work; a thread waits for a work that it did not issue."""
    rank.init()
    world = rank.world_size
    for _ in range(30):
        tensor = torch.full((5000,), 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        seen: list[float] = []

        def wait(work: Any = work, tensor: torch.Tensor = tensor, seen: list[float] = seen) -> None:
            work.wait()
            seen.append(tensor[17].item())

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [float(world)] * 4


@pytest.mark.quick
def test_several_threads_wait_for_one_work() -> None:
    run_ranks(_waiters, 2)


def _autograd_threads(rank: Rank) -> None:
    """Gradient hooks issue collectives on autograd's thread, while the main thread issues others."""
    rank.init()
    world, me = rank.world_size, rank.rank
    side = dist.new_group(list(range(world)))
    weights = [torch.nn.Parameter(torch.full((50,), 1.0)) for _ in range(6)]
    works: list[Any] = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
    for step in range(10):
        for weight in weights:
            weight.grad = None
        aside = dist.all_reduce(torch.ones(3), group=side, async_op=True)
        torch.stack([w * (me + 1) for w in weights]).sum().backward()
        for work in works:
            work.wait()
        works.clear()
        aside.wait()
        for weight in weights:
            assert weight.grad is not None
            assert weight.grad.tolist() == [float(sum(range(1, world + 1)))] * 50, f"step {step}"


def test_collectives_from_autograd_threads() -> None:
    run_ranks(_autograd_threads, 2)
