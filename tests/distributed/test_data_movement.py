"""Collectives that only move data: broadcast, the gathers, scatter, all_to_all, send and recv, bit for bit.

Every dtype, odd sizes and layouts, over shared memory and over Gloo (support/grid.py). Outputs are poisoned before the
call.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from support.grid import DTYPES, LARGE, LAYOUTS, SIZED, each_world, run, uneven_splits
from support.launcher import run_ranks
from support.layouts import Placed, poison
from support.rank import Rank
from support.reference import assert_same_bits, join, make_input


def _broadcast(rank: Rank) -> None:
    rank.init()
    for seed, ((dtype, count), layout) in enumerate(itertools.product(SIZED, LAYOUTS)):
        root = seed % rank.world_size
        what = f"broadcast {dtype} {count} {layout} from {root}"
        values = make_input(dtype, count, seed, root)
        mine = values if rank.rank == root else poison(torch.empty(count, dtype=dtype))
        placed = Placed(mine, layout if rank.rank % 2 == 0 else "plain")
        dist.broadcast(placed.tensor, root)
        assert_same_bits(placed.tensor.reshape(-1), values, what)
        placed.check(what)
    big = make_input(torch.float32, LARGE[1], 1, 0) if rank.rank == 0 else torch.full((LARGE[1],), float("nan"))
    dist.broadcast(big, 0)
    assert_same_bits(big, make_input(torch.float32, LARGE[1], 1, 0), "broadcast large")


@pytest.mark.by_day("3")
@each_world
def test_broadcast(world: int, carrier: str) -> None:
    run(_broadcast, world, carrier)


def _all_gather(rank: Rank) -> None:
    rank.init()
    world = rank.world_size
    for seed, ((dtype, count), layout) in enumerate(itertools.product(SIZED, ("plain", "strided"))):
        what = f"all_gather {dtype} {count} {layout}"
        expected = [make_input(dtype, count, seed, r) for r in range(world)]
        mine = Placed(expected[rank.rank], layout)
        outputs = [Placed(poison(torch.empty(count, dtype=dtype)), layout) for _ in range(world)]
        dist.all_gather([placed.tensor for placed in outputs], mine.tensor)
        for r, placed in enumerate(outputs):
            assert_same_bits(placed.tensor.reshape(-1), expected[r], f"{what} [{r}]")
            placed.check(what)
        whole = Placed(poison(torch.empty(world * count, dtype=dtype)), layout)
        dist.all_gather_into_tensor(whole.tensor, mine.tensor)
        joined = join(expected)
        assert_same_bits(whole.tensor.reshape(-1), joined, what + " into_tensor")
        whole.check(what)
        # As FSDP2 calls it: the input is this rank's part of the output.
        flat = poison(torch.empty(world * count, dtype=dtype))
        part = flat.narrow(0, rank.rank * count, count)
        part.copy_(expected[rank.rank])
        dist.all_gather_into_tensor(flat, part)
        assert_same_bits(flat, joined, what + " in place")


@pytest.mark.by_day("2")
@each_world
def test_all_gather(world: int, carrier: str) -> None:
    run(_all_gather, world, carrier)


def _all_gather_aliasing(rank: Rank) -> None:
    rank.init()
    world = rank.world_size
    buffer = torch.full((world, 1000), float("nan"))
    dist.all_gather(list(buffer.unbind(0)), make_input(torch.float32, 1000, 5, rank.rank))
    for r in range(world):
        assert_same_bits(buffer[r], make_input(torch.float32, 1000, 5, r), f"all_gather into rows of one buffer [{r}]")
    columns = torch.full((1000, world), float("nan"))
    dist.all_gather(list(columns.unbind(1)), make_input(torch.float32, 1000, 6, rank.rank))
    for r in range(world):
        assert_same_bits(columns[:, r], make_input(torch.float32, 1000, 6, r), f"all_gather into columns [{r}]")
    # All entries are the same tensor. PyTorch promises only that it is one of the inputs, unmixed.
    same = torch.full((1000,), float("nan"))
    dist.all_gather([same] * world, torch.full((1000,), float(rank.rank)))
    assert same[0].item() in range(world) and bool((same == same[0]).all()), "all_gather into one tensor"
    # The input is one of the outputs.
    outputs = [torch.full((7,), float("nan")) for _ in range(world)]
    outputs[rank.rank].copy_(make_input(torch.float32, 7, 8, rank.rank))
    dist.all_gather(outputs, outputs[rank.rank])
    for r in range(world):
        assert_same_bits(outputs[r], make_input(torch.float32, 7, 8, r), f"all_gather of an output [{r}]")
    # A matrix, gathered along dimension 0 and stacked.
    matrix = make_input(torch.float32, 12, 9, rank.rank).view(3, 4)
    for shape in ((3 * world, 4), (world, 3, 4)):
        out = torch.full(shape, float("nan"))
        dist.all_gather_into_tensor(out, matrix)
        expected = torch.cat([make_input(torch.float32, 12, 9, r) for r in range(world)])
        assert_same_bits(out.reshape(-1), expected, f"all_gather_into_tensor {shape}")


@pytest.mark.by_day("3")
@each_world
def test_all_gather_aliasing(world: int, carrier: str) -> None:
    run(_all_gather_aliasing, world, carrier)


def _gather_scatter(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for seed, ((dtype, count), layout) in enumerate(itertools.product(SIZED, ("plain", "strided"))):
        root = seed % world
        what = f"gather {dtype} {count} {layout} to {root}"
        expected = [make_input(dtype, count, seed, r) for r in range(world)]
        mine = Placed(expected[me], layout)
        outputs = [Placed(poison(torch.empty(count, dtype=dtype)), layout) for _ in range(world)] if me == root else []
        dist.gather(mine.tensor, [placed.tensor for placed in outputs] if me == root else None, dst=root)
        for r, placed in enumerate(outputs):
            assert_same_bits(placed.tensor.reshape(-1), expected[r], f"{what} [{r}]")
            placed.check(what)
        what = f"scatter {dtype} {count} {layout} from {root}"
        output = Placed(poison(torch.empty(count, dtype=dtype)), layout)
        inputs = [Placed(x, layout).tensor for x in expected] if me == root else None
        dist.scatter(output.tensor, inputs, src=root)
        assert_same_bits(output.tensor.reshape(-1), expected[me], what)
        output.check(what)


@pytest.mark.by_day("3")
@each_world
def test_gather_and_scatter(world: int, carrier: str) -> None:
    run(_gather_scatter, world, carrier)


def _gather_lists_of_others(rank: Rank) -> None:
    """What non-roots pass to the group object: both [] and [[]] occur."""
    rank.init()
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD
    for not_root in ([], [[]]):
        options = dist.GatherOptions()
        options.rootRank = world - 1
        outputs = [torch.full((4,), float("nan")) for _ in range(world)]
        lists: list[list[torch.Tensor]] = [outputs] if me == world - 1 else not_root
        group.gather(lists, [torch.full((4,), float(me))], options).wait()
        if me == world - 1:
            assert [x[0].item() for x in outputs] == list(range(world))
    for not_root in ([], [[]]):
        scatter = dist.ScatterOptions()
        scatter.rootRank = 0
        output = torch.full((4,), float("nan"))
        inputs = [[torch.full((4,), float(r)) for r in range(world)]] if me == 0 else not_root
        group.scatter([output], inputs, scatter).wait()
        assert output.tolist() == [me] * 4


@pytest.mark.by_day("2")
@pytest.mark.quick
@pytest.mark.parametrize("world", [1, 2, 3])
def test_empty_lists_of_non_roots(world: int) -> None:
    run_ranks(_gather_lists_of_others, world)


def _all_to_all(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for seed, (dtype, layout) in enumerate(itertools.product(DTYPES, LAYOUTS[:3])):
        what = f"all_to_all {dtype} {layout}"
        splits = uneven_splits(world, seed)
        sent = [list(make_input(dtype, sum(splits[s]), seed, s).split(splits[s])) for s in range(world)]
        expected = [sent[s][me] for s in range(world)]
        outputs = [Placed(poison(torch.empty(splits[s][me], dtype=dtype)), layout) for s in range(world)]
        inputs = [Placed(x, layout).tensor for x in sent[me]]
        dist.all_to_all([placed.tensor for placed in outputs], inputs)
        for s, placed in enumerate(outputs):
            assert_same_bits(placed.tensor, expected[s], f"{what} list from {s}")
            placed.check(what)
        joined = join(expected)
        whole = Placed(poison(torch.empty(joined.numel(), dtype=dtype)), layout)
        mine = Placed(make_input(dtype, sum(splits[me]), seed, me), layout)
        dist.all_to_all_single(whole.tensor, mine.tensor, [row[me] for row in splits], splits[me])
        assert_same_bits(whole.tensor, joined, what + " single with splits")
        whole.check(what)
        for count in (0, 1, 129, 20000):
            even = [make_input(dtype, count * world, seed, s) for s in range(world)]
            out = Placed(poison(torch.empty(count * world, dtype=dtype)), layout)
            dist.all_to_all_single(out.tensor, Placed(even[me], layout).tensor)
            parts = join([e[count * me : count * (me + 1)] for e in even])
            assert_same_bits(out.tensor, parts, f"{what} single even {count}")
            out.check(what)
    # Input and output overlap, and need several rounds.
    count = 600_000
    even = [make_input(torch.float32, count * world, 3, s) for s in range(world)]
    both = torch.cat([even[me], torch.empty(count)])
    out = both[count:]
    dist.all_to_all_single(out, both[:-count])
    assert_same_bits(out, join([e[count * me : count * (me + 1)] for e in even]), "all_to_all_single over its input")
    # Splits count rows of a matrix.
    rows = uneven_splits(world, 1)
    matrix = make_input(torch.float32, sum(rows[me]) * 5, 2, me).view(-1, 5)
    received = torch.full((sum(row[me] for row in rows), 5), float("nan"))
    dist.all_to_all_single(received, matrix, [row[me] for row in rows], rows[me])
    parts = [make_input(torch.float32, sum(rows[s]) * 5, 2, s).view(-1, 5).split(rows[s])[me] for s in range(world)]
    assert_same_bits(received, torch.cat(parts), "all_to_all_single of rows")


@pytest.mark.by_day("3")
@each_world
def test_all_to_all(world: int, carrier: str) -> None:
    run(_all_to_all, world, carrier)


def _all_to_all_in_one_storage(rank: Rank) -> None:
    """Input and output of one storage are copied only if they overlap."""
    rank.init()
    world, me = rank.world_size, rank.rank
    count = 1000 * world
    every = [make_input(torch.float32, count, 4, s) for s in range(world)]
    expected = join([one[1000 * me : 1000 * (me + 1)] for one in every])
    for apart, as_list in itertools.product((count, 7), (False, True)):
        storage = torch.full((2 * count,), float("nan"))
        source, target = storage[:count], storage[apart : apart + count]
        source.copy_(every[me])
        with torch.profiler.profile() as profile:
            if as_list:
                dist.all_to_all(list(target.chunk(world)), list(source.chunk(world)))
            else:
                dist.all_to_all_single(target, source)
        what = f"all_to_all {apart} elements on, as a list: {as_list}"
        assert_same_bits(target, expected, what)
        clones = sum(event.name == "aten::clone" for event in profile.events())
        assert (clones > 0) == (apart < count), what


@pytest.mark.quick
@pytest.mark.parametrize("world", [1, 3])
def test_all_to_all_in_one_storage(world: int) -> None:
    run_ranks(_all_to_all_in_one_storage, world)


def _send_recv(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    after, before = (me + 1) % world, (me - 1) % world
    for seed, ((dtype, count), layout) in enumerate(itertools.product(SIZED, ("plain", "strided"))):
        what = f"send/recv {dtype} {count} {layout}"
        sent = Placed(make_input(dtype, count, seed, me), layout)
        got = Placed(poison(torch.empty(count, dtype=dtype)), layout if me % 2 else "plain")
        work = dist.isend(sent.tensor, after, tag=seed)
        dist.recv(got.tensor, before, tag=seed)
        work.wait()
        assert_same_bits(got.tensor.reshape(-1), make_input(dtype, count, seed, before), what)
        got.check(what)


@pytest.mark.by_day("3-shm")
@pytest.mark.parametrize(
    "world, carrier",
    [
        (2, "shm"),
        (3, "shm"),
        (2, "gloo"),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in ((4, "shm"), (3, "gloo"))),
    ],
)
def test_send_recv(world: int, carrier: str) -> None:
    run(_send_recv, world, carrier)
