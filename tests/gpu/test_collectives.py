"""Every reduction of CUDA tensors with every dtype, operation, odd size and layout gives the CPU path's bits.

Outputs are poisoned, and the memory around a tensor is checked.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from on_gpu import LARGE, OPS, SMALL, SPREAD, WORLD, cases, op, run, same, start
from support.layouts import LAYOUTS, Placed, poison
from support.rank import Rank
from support.reference import ALL_DTYPES, make_input, supported

WORLDS = sorted({1, 2, WORLD} if WORLD > 1 else {1})
each_world = pytest.mark.parametrize("world", WORLDS)


def _all_reduce(rank: Rank) -> int:
    device = start(rank)
    done = 0
    for seed, ((dtype, name), count) in enumerate(itertools.product(cases(), SMALL)):
        what = f"all_reduce {dtype} {name} {count}"
        expected = make_input(dtype, count, seed, rank.rank)
        tensor = expected.to(device)
        dist.all_reduce(tensor, op(name, rank.rank))
        dist.all_reduce(expected, op(name, rank.rank))
        same(tensor, expected, what)
        done += 1
    return done


@each_world
def test_all_reduce_every_dtype_and_op(world: int) -> None:
    assert all(done > 300 for done in run(_all_reduce, world=world))


def _all_reduce_large(rank: Rank) -> None:
    device = start(rank)
    for dtype, count in itertools.product((*SPREAD, torch.float16, torch.float64), (*LARGE, (24 << 20) + 5)):
        for name in ("SUM", "MAX", "AVG"):
            if not supported(dtype, name) or (count > 1 << 20 and name != "SUM"):
                continue
            values = make_input(dtype, count, 7, rank.rank)
            expected = values.clone()
            dist.all_reduce(expected, op(name, rank.rank))
            for repeat in range(3):
                tensor = values.to(device)
                dist.all_reduce(tensor, op(name, rank.rank))
                same(tensor, expected, f"all_reduce {dtype} {name} {count} repeat {repeat}")


@each_world
def test_all_reduce_large(world: int) -> None:
    run(_all_reduce_large, world=world)


def _all_reduce_layouts(rank: Rank) -> None:
    device = start(rank)
    for dtype, layout, count in itertools.product(SPREAD, LAYOUTS, (1, 6, 1023, 65537)):
        what = f"all_reduce {dtype} {layout} {count}"
        expected = make_input(dtype, count, 3, rank.rank)
        placed = Placed(expected, layout, device)
        dist.all_reduce(placed.tensor)
        dist.all_reduce(expected)
        same(placed.tensor, expected, what)
        placed.check(what)


@each_world
def test_all_reduce_layouts(world: int) -> None:
    run(_all_reduce_layouts, world=world)


def _every_alignment(rank: Rank) -> None:
    """Every start within 16 bytes, different on each rank, and every length around a vector's."""
    device = start(rank)
    for dtype, shift, count in itertools.product((torch.uint8, torch.bfloat16, torch.float32), range(9), range(15, 34)):
        values = make_input(dtype, count, shift, rank.rank)
        buffer = torch.zeros(count + 32, dtype=dtype, device=device)
        at = shift + rank.rank
        tensor = buffer[at : at + count]
        tensor.copy_(values)
        dist.all_reduce(tensor)
        dist.all_reduce(values)
        same(tensor, values, f"{dtype} at {at}, {count}")
        assert not buffer[:at].any() and not buffer[at + count :].any(), f"{dtype} at {at}, {count}: wrote outside"


@each_world
def test_every_alignment(world: int) -> None:
    run(_every_alignment, world=world)


def _reduce(rank: Rank) -> None:
    device = start(rank)
    grid = itertools.product(SPREAD, ("SUM", "AVG", "MAX", "PREMUL_SUM"), SMALL + LARGE[:1], ("plain", "strided"))
    for seed, (dtype, name, count, layout) in enumerate(grid):
        if not supported(dtype, name):
            continue
        root = seed % rank.world_size
        what = f"reduce {dtype} {name} {count} {layout} to {root}"
        expected = make_input(dtype, count, seed, rank.rank)
        placed = Placed(expected, layout, device)
        dist.reduce(placed.tensor, root, op(name, rank.rank))
        dist.reduce(expected, root, op(name, rank.rank))
        same(placed.tensor, expected, what)
        placed.check(what)


@each_world
def test_reduce(world: int) -> None:
    run(_reduce, world=world)


def _reduce_scatter(rank: Rank) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    grid = itertools.product(SPREAD, ("SUM", "AVG", "MIN", "PREMUL_SUM"), SMALL + LARGE[:1], ("plain", "strided"))
    for seed, (dtype, name, count, layout) in enumerate(grid):
        if not supported(dtype, name):
            continue
        what = f"reduce_scatter {dtype} {name} {count} {layout}"
        mine = make_input(dtype, count * world, seed, me)
        expected = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(expected, mine, op(name, me))
        whole, single = Placed(mine, layout, device), Placed(poison(torch.empty(count, dtype=dtype)), layout, device)
        dist.reduce_scatter_tensor(single.tensor, whole.tensor, op(name, me))
        same(single.tensor, expected, what + " tensor")
        same(whole.tensor, mine, what + " input changed")
        single.check(what)
        parts = [Placed(mine[count * r : count * (r + 1)], layout, device) for r in range(world)]
        output = Placed(poison(torch.empty(count, dtype=dtype)), layout, device)
        dist.reduce_scatter(output.tensor, [part.tensor for part in parts], op(name, me))
        same(output.tensor, expected, what + " list")
        output.check(what)
    # Parts of different sizes.
    inputs = [make_input(torch.float32, 10 + 7 * r, 5, me) for r in range(world)]
    expected, output = torch.empty(10 + 7 * me), torch.full((10 + 7 * me,), float("nan"), device=device)
    dist.reduce_scatter(expected, inputs)
    dist.reduce_scatter(output, [part.to(device) for part in inputs])
    same(output, expected, "reduce_scatter uneven")
    for dtype in (torch.float32, torch.int8, torch.bfloat16):
        whole = [make_input(dtype, 10 + 70001 * r, 6, r) for r in range(world)]
        gathered = [poison(torch.empty_like(part)).to(device) for part in whole]
        dist.all_gather(gathered, whole[me].to(device))
        for got, part in zip(gathered, whole, strict=True):
            same(got, part, f"all_gather uneven {dtype}")
    with pytest.raises(ValueError, match=rf"tensor_list\[{me}\] has 10 elements, but 3 are needed"):
        dist.all_gather(
            [torch.empty(10 + (r != me), device=device) for r in range(world)], torch.ones(3, device=device)
        )


@each_world
def test_reduce_scatter(world: int) -> None:
    run(_reduce_scatter, world=world)


def _about_steps(rank: Rank) -> None:
    """Sizes at which parts that differ by some bytes are divided differently among lanes."""
    device = start(rank)
    world = rank.world_size
    lanes = 512 if world <= 2 else 256 if world <= 4 else 128
    for step in range(1, 5):
        for parts in {world, max(world - 1, 1)}:
            middle = lanes * 480 * step * parts // 4
            for count in sorted({middle + off for off in range(-4 * world - 1, 6)}):
                for name in ("all_reduce", "reduce", "broadcast"):
                    expected = make_input(torch.float32, count, step, rank.rank)
                    tensor = expected.to(device)
                    for each in (tensor, expected):
                        if name == "all_reduce":
                            dist.all_reduce(each)
                        elif name == "reduce":
                            dist.reduce(each, world - 1)
                        else:
                            dist.broadcast(each, world - 1)
                    if name != "reduce" or rank.rank == world - 1:
                        same(tensor, expected, f"{name} of {count}")


@each_world
def test_sizes_about_steps(world: int) -> None:
    run(_about_steps, world=world)


def _special_values(rank: Rank) -> None:
    device = start(rank)
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1.0, inf, -inf, inf, 0.0, -0.0, 65504.0], [1.0, nan, 1.0, inf, inf, -0.0, -0.0, 65504.0]]
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn)
    for dtype, name in itertools.product(dtypes, ("SUM", "AVG", "MIN", "MAX", "PRODUCT")):
        expected = torch.tensor(rows[rank.rank % 2] * 20).to(dtype)
        tensor = expected.to(device)
        dist.all_reduce(tensor, op(name, 0))
        dist.all_reduce(expected, op(name, 0))
        same(tensor, expected, f"special values {dtype} {name}")


@each_world
def test_nan_infinities_and_zero_signs(world: int) -> None:
    run(_special_values, world=world)


def _refused(rank: Rank) -> int:
    device = start(rank)
    refused = 0
    for dtype, name in itertools.product(ALL_DTYPES, OPS):
        if supported(dtype, name):
            continue
        values = make_input(dtype, 5, 1, rank.rank)
        tensor = values.to(device)
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            dist.all_reduce(tensor, op(name, rank.rank))
        same(tensor, values, f"{dtype} {name} after the refusal")
        refused += 1
    check = torch.ones(3, device=device)
    dist.all_reduce(check)
    assert check.tolist() == [rank.world_size] * 3, "the group is usable after refusals"
    return refused


def test_meaningless_operations_are_refused() -> None:
    assert min(run(_refused)) > 40
