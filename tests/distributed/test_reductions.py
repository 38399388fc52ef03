"""all_reduce, reduce and reduce_scatter with every dtype, operation, odd size and layout, bit for bit.

Each is compared with a local reference, over shared memory and over Gloo (support/grid.py). Outputs are poisoned before
the call.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from support.grid import DTYPES, LARGE, LAYOUTS, OPS, SMALL, SPREAD, cases, each_world, expected_of, op_of, run
from support.launcher import run_ranks
from support.layouts import Placed, poison
from support.rank import Rank
from support.reference import COMPLEX, assert_same_bits, make_input, reduce, supported


def _all_reduce(rank: Rank) -> int:
    rank.init()
    world, me = rank.world_size, rank.rank
    done = 0
    for seed, ((dtype, op), count) in enumerate(itertools.product(cases(), SMALL)):
        what = f"all_reduce {dtype} {op} {count}"
        tensor = make_input(dtype, count, seed, me)
        dist.all_reduce(tensor, op_of(op, me))
        assert_same_bits(tensor, expected_of(dtype, count, seed, world, op), what)
        done += 1
    return done


@pytest.mark.by_day("1", "3")
@each_world
def test_all_reduce_every_dtype_and_op(world: int, carrier: str) -> None:
    assert all(done > 300 for done in run(_all_reduce, world, carrier))


def _all_reduce_large(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype, count in itertools.product((*SPREAD, torch.float16, torch.float64), LARGE):
        for op in ("SUM", "MAX", "AVG"):
            if not supported(dtype, op) or (count > 1 << 20 and op != "SUM"):
                continue
            expected = expected_of(dtype, count, 7, world, op)
            for repeat in range(3):
                tensor = make_input(dtype, count, 7, me)
                dist.all_reduce(tensor, op_of(op, me))
                assert_same_bits(tensor, expected, f"all_reduce {dtype} {op} {count} repeat {repeat}")


@pytest.mark.by_day("2")
@each_world
def test_all_reduce_large(world: int, carrier: str) -> None:
    run(_all_reduce_large, world, carrier)


def _all_reduce_layouts(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype, layout, count in itertools.product(SPREAD, LAYOUTS, (1, 6, 1023, 65537)):
        what = f"all_reduce {dtype} {layout} {count}"
        placed = Placed(make_input(dtype, count, 3, me), layout)
        dist.all_reduce(placed.tensor)
        assert_same_bits(placed.tensor.reshape(-1), expected_of(dtype, count, 3, world, "SUM"), what)
        placed.check(what)


@pytest.mark.by_day("3")
@each_world
def test_all_reduce_layouts(world: int, carrier: str) -> None:
    run(_all_reduce_layouts, world, carrier)


def _reduce(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    grid = itertools.product(SPREAD, ("SUM", "AVG", "MAX", "PREMUL_SUM"), SMALL + LARGE[:1], ("plain", "strided"))
    for seed, (dtype, op, count, layout) in enumerate(grid):
        if not supported(dtype, op):
            continue
        root = seed % world
        what = f"reduce {dtype} {op} {count} {layout} to {root}"
        placed = Placed(make_input(dtype, count, seed, me), layout)
        dist.reduce(placed.tensor, root, op_of(op, me))
        if me == root:
            assert_same_bits(placed.tensor.reshape(-1), expected_of(dtype, count, seed, world, op), what)
        else:  # like NCCL's: only the root's tensor changes
            assert_same_bits(placed.tensor.reshape(-1), make_input(dtype, count, seed, me), what + " (not root)")
        placed.check(what)


@pytest.mark.by_day("3")
@each_world
def test_reduce(world: int, carrier: str) -> None:
    run(_reduce, world, carrier)


def _reduce_scatter(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    grid = itertools.product(SPREAD, ("SUM", "AVG", "MIN", "PREMUL_SUM"), SMALL + LARGE[:1], ("plain", "strided"))
    for seed, (dtype, op, count, layout) in enumerate(grid):
        if not supported(dtype, op):
            continue
        what = f"reduce_scatter {dtype} {op} {count} {layout}"
        mine = make_input(dtype, count * world, seed, me)
        expected = expected_of(dtype, count * world, seed, world, op)[count * me : count * (me + 1)]
        output = Placed(poison(torch.empty(count, dtype=dtype)), layout)
        inputs = [Placed(part.clone(), layout) for part in mine.split(count)] if count else []
        inputs = inputs or [Placed(mine, "plain") for _ in range(world)]
        dist.reduce_scatter(output.tensor, [placed.tensor for placed in inputs], op_of(op, me))
        assert_same_bits(output.tensor.reshape(-1), expected, what)
        output.check(what)
        whole = Placed(mine, layout)
        single = Placed(poison(torch.empty(count, dtype=dtype)), layout)
        dist.reduce_scatter_tensor(single.tensor, whole.tensor, op_of(op, me))
        assert_same_bits(single.tensor.reshape(-1), expected, what + " single")
        assert_same_bits(whole.tensor.reshape(-1), mine, what + " input changed")
        single.check(what)


@pytest.mark.by_day("2")
@each_world
def test_reduce_scatter(world: int, carrier: str) -> None:
    run(_reduce_scatter, world, carrier)


def _unsupported(rank: Rank) -> int:
    rank.init()
    refused = 0
    for dtype, op in itertools.product(DTYPES, OPS):
        if supported(dtype, op):
            continue
        tensor = make_input(dtype, 5, 1, rank.rank)
        before = tensor.clone()
        try:
            dist.all_reduce(tensor, op_of(op, rank.rank))
        except (ValueError, TypeError, RuntimeError) as error:
            # PyTorch itself refuses some operations on complex tensors before a backend sees them.
            told = op in str(error) and (str(dtype).split(".")[1] in str(error) or dtype in COMPLEX)
            assert told, f"{dtype} {op}: the message names neither: {error}"
        else:
            raise AssertionError(f"all_reduce {dtype} {op} was accepted")
        assert_same_bits(tensor, before, f"{dtype} {op} after the refusal")
        refused += 1
    check = torch.ones(3)
    dist.all_reduce(check)
    assert check.tolist() == [rank.world_size] * 3, "the group is usable after refusals"
    return refused


@pytest.mark.quick
def test_meaningless_operations_are_refused_and_the_group_stays_usable() -> None:
    assert min(run_ranks(_unsupported, 2)) > 40


def _special_values(rank: Rank) -> None:
    rank.init()
    nan, inf = float("nan"), float("inf")
    table = [
        [nan, 1.0, inf, -inf, inf, 0.0, -0.0, 65504.0],
        [1.0, nan, 1.0, inf, inf, -0.0, -0.0, 65504.0],
        [2.0, 2.0, inf, 1.0, 1.0, 0.0, -0.0, 1.0],
        [0.0, 5.0, 2.0, 2.0, inf, -0.0, -0.0, 1.0],
    ]
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
    for dtype, op in itertools.product(dtypes, ("SUM", "AVG", "MIN", "MAX", "PRODUCT")):
        inputs = [torch.tensor(table[r] * 20).to(dtype) for r in range(rank.world_size)]
        tensor = inputs[rank.rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        expected = reduce(inputs, op)
        assert_same_bits(tensor, expected, f"special values {dtype} {op}")


@pytest.mark.by_day("3")
@each_world
def test_nan_infinities_and_zero_signs(world: int, carrier: str) -> None:
    run(_special_values, world, carrier)
