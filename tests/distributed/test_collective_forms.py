"""Other forms of collectives: sparse, coalesced, of objects, of scalars, of very many elements.

Each is compared bit for bit with a local reference, over shared memory and over Gloo (support/grid.py).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.grid import CARRIERS, each_world, expected_of, run
from support.launcher import BACKEND, run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input


def _sparse(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype, dense_dims in itertools.product((torch.float32, torch.float64, torch.int64), ((), (3,))):
        inputs = []
        for r in range(world):
            entries = 0 if r == 1 else 3 + 2 * r  # one rank has no entries; indices repeat (not coalesced)
            indices = torch.tensor([[(7 * i + r) % 10 for i in range(entries)], [(i + r) % 4 for i in range(entries)]])
            values = make_input(torch.int8, entries * max(1, sum(dense_dims)), 4, r).to(dtype)
            shape = (10, 4, *dense_dims)
            inputs.append(
                torch.sparse_coo_tensor(indices.view(2, entries).long(), values.view(entries, *dense_dims), shape)
            )
        tensor = inputs[me].clone()
        dist.all_reduce(tensor)
        expected = functools.reduce(torch.add, [x.to_dense() for x in inputs])
        assert tensor.is_sparse, "the result stays sparse"
        assert_same_bits(tensor.to_dense(), expected, f"sparse all_reduce {dtype} {dense_dims}")
    # Half types add in float32 and round once: small numbers matter together even if each alone would be lost.
    for dtype, small in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        value = torch.tensor([1.0 if me == 0 else small], dtype=dtype)
        tensor = torch.sparse_coo_tensor(torch.tensor([[3]]), value, (10,))
        dist.all_reduce(tensor)
        total = torch.tensor(1 + (world - 1) * small).to(dtype)
        assert_same_bits(tensor.to_dense()[3], total, f"sparse all_reduce {dtype}, rounded once")


@pytest.mark.by_day("3")
@each_world
def test_sparse_all_reduce(world: int, carrier: str) -> None:
    run(_sparse, world, carrier)


def _coalesced(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD
    counts = (1, 0, 1000, 33)

    def inputs(r: int) -> list[torch.Tensor]:
        return [make_input(torch.float32, count, i, r) for i, count in enumerate(counts)]

    sums = [expected_of(torch.float32, count, i, world, "SUM") for i, count in enumerate(counts)]
    tensors = inputs(me)
    dist.all_reduce_coalesced(tensors)
    for got, want in zip(tensors, sums, strict=True):
        assert_same_bits(got, want, "all_reduce_coalesced")
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = inputs(me)
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for got, want in zip(tensors, sums, strict=True):
        assert_same_bits(got, want, "coalescing manager, all_reduce")
    lists = [[torch.full((count,), float("nan")) for count in counts] for _ in range(world)]
    dist.all_gather_coalesced(lists, inputs(me))
    for r in range(world):
        for got, want in zip(lists[r], inputs(r), strict=True):
            assert_same_bits(got, want, "all_gather_coalesced")
    outputs = [torch.full((count * world,), float("nan")) for count in counts]
    group.allgather_into_tensor_coalesced(outputs, inputs(me)).wait()
    for i, got in enumerate(outputs):
        assert_same_bits(got, torch.cat([inputs(r)[i] for r in range(world)]), "allgather_into_tensor_coalesced")
    wide = [make_input(torch.float32, count * world, i, me) for i, count in enumerate(counts)]
    outputs = [torch.full((count,), float("nan")) for count in counts]
    group.reduce_scatter_tensor_coalesced(outputs, wide).wait()
    for i, (got, count) in enumerate(zip(outputs, counts, strict=True)):
        want = expected_of(torch.float32, count * world, i, world, "SUM")[count * me : count * (me + 1)]
        assert_same_bits(got, want, "reduce_scatter_tensor_coalesced")
    # Tensors of several dtypes in one coalesced call. Each keeps its own arithmetic.
    mixed = [make_input(dtype, 77, 5, me) for dtype in (torch.float32, torch.bfloat16, torch.int32)]
    options = dist.AllreduceCoalescedOptions()
    try:
        group.allreduce_coalesced(mixed, options).wait()
    except (ValueError, TypeError) as error:
        assert "dtype" in str(error) or "type" in str(error), f"mixed dtypes: {error}"
    else:
        for got in mixed:
            assert_same_bits(got, expected_of(got.dtype, 77, 5, world, "SUM"), "allreduce_coalesced mixed")


@pytest.mark.by_day("3")
@each_world
def test_coalesced_forms(world: int, carrier: str) -> None:
    run(_coalesced, world, carrier)


def _objects(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    payload = {"rank": me, "blob": list(range(me * 1000))}
    everything: list[Any] = [None] * world
    dist.all_gather_object(everything, payload)
    assert [x["rank"] for x in everything] == list(range(world)) and len(everything[-1]["blob"]) == (world - 1) * 1000
    shared = [payload if me == 0 else None, "x" * (10 + me)]
    dist.broadcast_object_list(shared, 0)
    assert shared[0]["rank"] == 0 and len(shared[1]) == 10
    gathered = [None] * world if me == world - 1 else None
    dist.gather_object(me * 11, gathered, dst=world - 1)
    assert gathered is None or gathered == [11 * r for r in range(world)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"to {r}" for r in range(world)] if me == 0 else [None] * world, src=0)
    assert mine == [f"to {me}"]
    dist.barrier()


@pytest.mark.by_day("2")
@each_world
def test_object_collectives(world: int, carrier: str) -> None:
    run(_objects, world, carrier)


def _scalars(rank: Rank) -> None:
    """Tensors without dimensions, and one element with a stride, which counts as contiguous but is hard to view as
    bytes.
    """
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype in (torch.float32, torch.int64, torch.bfloat16):

        def scalar(value: float, strided: bool, dtype: torch.dtype = dtype) -> torch.Tensor:
            if strided:
                return torch.full((4,), value, dtype=dtype)[1:3:2]
            return torch.tensor(value, dtype=dtype)

        for strided in (False, True):
            tensor = scalar(me + 1, strided)
            dist.all_reduce(tensor)
            assert tensor.item() == world * (world + 1) // 2
            tensor = scalar(me, strided)
            dist.broadcast(tensor, world - 1)
            assert tensor.item() == world - 1
            outs = [scalar(-1, strided) for _ in range(world)]
            dist.all_gather(outs, scalar(me, strided))
            assert [x.item() for x in outs] == list(range(world))
            whole = torch.full((world,), -1, dtype=dtype)
            dist.all_gather_into_tensor(whole, scalar(me, strided))
            assert whole.tolist() == list(range(world))
            tensor = scalar(-1, strided)
            dist.reduce_scatter_tensor(tensor, torch.arange(world).to(dtype))
            assert tensor.item() == me * world
            dist.scatter(tensor, [scalar(10 + r, strided) for r in range(world)] if me == 0 else None, src=0)
            assert tensor.item() == 10 + me
            if world > 1:
                work = dist.isend(scalar(me, strided), (me + 1) % world)
                dist.recv(tensor, (me - 1) % world)
                work.wait()
                assert tensor.item() == (me - 1) % world


@pytest.mark.by_day("2")
@each_world
def test_tensors_without_dimensions(world: int, carrier: str) -> None:
    run(_scalars, world, carrier)


def _both_carriers_agree(rank: Rank) -> list[bytes]:
    rank.init()
    found = []
    for dtype, count in itertools.product((torch.float32, torch.bfloat16, torch.float16), (5, 4099, 300001)):
        tensor = make_input(dtype, count, 99, rank.rank)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        found.append(tensor.view(torch.uint8).numpy().tobytes())
        out = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(out, make_input(dtype, count * rank.world_size, 98, rank.rank))
        found.append(out.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.by_day("2")
@pytest.mark.skipif(BACKEND != "ark", reason="compares ark's two carriers")
@pytest.mark.parametrize("world", [2, 3])
def test_shared_memory_and_gloo_carry_the_same_bits(world: int) -> None:
    over_shm = run_ranks(_both_carriers_agree, world)
    over_gloo = run_ranks(_both_carriers_agree, world, env=CARRIERS["gloo"])
    assert over_shm == over_gloo


def _huge(rank: Rank) -> None:
    """More than 2^31 elements of one byte: indices must be wider than 32 bits."""
    rank.init(timeout=400)
    count = (1 << 31) + 5
    tensor = torch.zeros(count, dtype=torch.uint8)
    tensor[-3:] = rank.rank + 1
    tensor[0] = 1
    dist.all_reduce(tensor)
    assert tensor[-1].item() == rank.world_size * (rank.world_size + 1) // 2
    assert tensor[0].item() == rank.world_size and not tensor[1:-3].any()
    tensor[-1] = 40 + rank.rank
    dist.broadcast(tensor, 1)
    assert tensor[-1].item() == 41


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_more_than_two_to_the_31_elements() -> None:
    run_ranks(_huge, 2, timeout=500)
