"""Functional collectives (used by traced and compiled programs), their gradients, and waiting on another thread.

Each is compared bit for bit with a local reference, over shared memory and over Gloo (support/grid.py).
"""

from __future__ import annotations

import itertools
import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.grid import each_world, expected_of, run, uneven_splits
from support.launcher import run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input, supported


def _functional(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD

    def mine(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return make_input(dtype, count, seed, me)

    for dtype, op in itertools.product((torch.float32, torch.bfloat16, torch.int64), ("sum", "avg", "max", "min")):
        if not supported(dtype, op.upper()):
            continue
        got = funcol.all_reduce(mine(101, 1, dtype), op, group)
        assert_same_bits(got + 0, expected_of(dtype, 101, 1, world, op.upper()), f"functional all_reduce {dtype} {op}")
        got = funcol.reduce_scatter_tensor(mine(world * 10, 2, dtype), op, 0, group)
        want = expected_of(dtype, world * 10, 2, world, op.upper())[me * 10 : me * 10 + 10]
        assert_same_bits(got + 0, want, f"functional reduce_scatter {dtype} {op}")
    for dimension in (0, 1):
        got = funcol.all_gather_tensor(mine(12, 3).view(3, 4), dimension, group)
        want = torch.cat([make_input(torch.float32, 12, 3, r).view(3, 4) for r in range(world)], dimension)
        assert_same_bits(got + 0, want, f"functional all_gather dimension {dimension}")
    assert_same_bits(funcol.broadcast(mine(9, 4), 0, group) + 0, make_input(torch.float32, 9, 4, 0), "broadcast")
    splits = uneven_splits(world, 2)
    received = [row[me] for row in splits]
    got = funcol.all_to_all_single(mine(sum(splits[me]), 5), received, splits[me], group)
    parts = [make_input(torch.float32, sum(splits[s]), 5, s).split(splits[s])[me] for s in range(world)]
    assert_same_bits(got + 0, torch.cat(parts), "functional all_to_all_single")
    counts = (5, 64, 1)
    many = funcol.all_reduce_coalesced([mine(count, 6) for count in counts], "sum", group)
    for got, count in zip(many, counts, strict=True):
        assert_same_bits(got + 0, expected_of(torch.float32, count, 6, world, "SUM"), "functional coalesced all_reduce")
    many = funcol.all_gather_into_tensor_coalesced([mine(count, 7) for count in counts], group)
    for got, count in zip(many, counts, strict=True):
        want = torch.cat([make_input(torch.float32, count, 7, r) for r in range(world)])
        assert_same_bits(got + 0, want, "functional coalesced all_gather")
    inputs = [mine(count * world, 8) for count in counts]
    many = funcol.reduce_scatter_tensor_coalesced(inputs, "sum", [0] * len(counts), group)
    for got, count in zip(many, counts, strict=True):
        want = expected_of(torch.float32, count * world, 8, world, "SUM")[me * count : (me + 1) * count]
        assert_same_bits(got + 0, want, "functional coalesced reduce_scatter")
    moved = funcol.permute_tensor(mine(6, 9), [(r + 1) % world for r in range(world)], group)
    assert_same_bits(moved + 0, make_input(torch.float32, 6, 9, (me - 1) % world), "functional permute")
    # Through autograd: the gradient of a sum over ranks is the sum of all ranks' gradients.
    x = torch.ones(world * 2, requires_grad=True)
    y = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    (y * (me + 1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [float(r + 1) for r in range(world) for _ in range(2)]


@each_world
def test_functional_collectives(world: int, carrier: str) -> None:
    run(_functional, world, carrier)


def _functional_other_thread(rank: Rank) -> None:
    """Calls wait_tensor from a thread that did not issue the operation."""
    rank.init()
    pending = [funcol.all_reduce(torch.full((100,), float(i)), "sum", dist.group.WORLD) for i in range(20)]
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.extend(funcol.wait_tensor(t)[3].item() for t in pending))
    thread.start()
    thread.join()
    assert seen == [float(i * rank.world_size) for i in range(20)]


def test_wait_tensor_on_another_thread() -> None:
    run_ranks(_functional_other_thread, 2)
