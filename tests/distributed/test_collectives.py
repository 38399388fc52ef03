"""Every collective with every dtype, operation, odd size and layout, against a local reference, to the bit.

The same bodies run over shared memory and over Gloo (ARK_SHARED_MEMORY=off): whoever carries the bytes,
the bits are those of support/reference.py. Outputs are poisoned before each call.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import BACKEND, run_ranks
from support.layouts import LAYOUTS, Placed, poison
from support.rank import Rank
from support.reference import (
    ALL_DTYPES,
    COMPLEX,
    assert_same_bits,
    join,
    make_input,
    reduce,
    supported,
)

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SMALL = (0, 1, 3, 1023)
LARGE = (65537, (1 << 20) + 3)
WORLDS = [1, 2, 3, 4]
CARRIERS = {"shm": {}, "gloo": {"ARK_SHARED_MEMORY": "off"}}
if BACKEND == "gloo":  # for working on the tests themselves: what plain Gloo has
    ALL_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)
    OPS, LAYOUTS = ("SUM", "PRODUCT", "MIN", "MAX"), ("plain",)
SPREAD = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.bool)
SPREAD = SPREAD if BACKEND != "gloo" else ALL_DTYPES


def _factor(rank: int) -> float:
    return 0.25 + 0.375 * rank


def _op(name: str, rank: int) -> Any:
    return dist._make_nccl_premul_sum(_factor(rank)) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def _expected(dtype: torch.dtype, count: int, seed: int, world: int, op: str) -> torch.Tensor:
    inputs = [make_input(dtype, count, seed, r) for r in range(world)]
    return reduce(inputs, op, [_factor(r) for r in range(world)])


def _cases() -> list[tuple[torch.dtype, str]]:
    return [(dtype, op) for dtype, op in itertools.product(ALL_DTYPES, OPS) if supported(dtype, op)]


def _each_world(test: Any) -> Any:
    """W = 1..4 over shared memory, 2 over Gloo (3 at night); W = 2 is quick."""
    parameters = []
    for world in WORLDS:
        marks = [pytest.mark.quick] if world == 2 else []
        parameters.append(pytest.param(world, "shm", marks=marks, id=f"{world}"))
    parameters.append(pytest.param(2, "gloo", id="2-carried"))
    parameters.append(pytest.param(3, "gloo", marks=[pytest.mark.nightly], id="3-carried"))
    return pytest.mark.parametrize("world, carrier", parameters)(test)


def _run(body: Any, world: int, carrier: str, *args: Any) -> list[Any]:
    return run_ranks(body, world, *args, env=CARRIERS[carrier], timeout=200)


# -- reductions


def _all_reduce(rank: Rank) -> int:
    rank.init()
    world, me = rank.world_size, rank.rank
    done = 0
    for seed, ((dtype, op), count) in enumerate(itertools.product(_cases(), SMALL)):
        what = f"all_reduce {dtype} {op} {count}"
        tensor = make_input(dtype, count, seed, me)
        dist.all_reduce(tensor, _op(op, me))
        assert_same_bits(tensor, _expected(dtype, count, seed, world, op), what)
        done += 1
    return done


@_each_world
def test_all_reduce_every_dtype_and_op(world: int, carrier: str) -> None:
    assert all(done > 300 for done in _run(_all_reduce, world, carrier))


def _all_reduce_large(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype, count in itertools.product((*SPREAD, torch.float16, torch.float64), LARGE):
        for op in ("SUM", "MAX", "AVG"):
            if not supported(dtype, op) or (count > 1 << 20 and op != "SUM"):
                continue
            expected = _expected(dtype, count, 7, world, op)
            for repeat in range(3):
                tensor = make_input(dtype, count, 7, me)
                dist.all_reduce(tensor, _op(op, me))
                assert_same_bits(tensor, expected, f"all_reduce {dtype} {op} {count} repeat {repeat}")


@_each_world
def test_all_reduce_large(world: int, carrier: str) -> None:
    _run(_all_reduce_large, world, carrier)


def _all_reduce_layouts(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype, layout, count in itertools.product(SPREAD, LAYOUTS, (1, 6, 1023, 65537)):
        what = f"all_reduce {dtype} {layout} {count}"
        placed = Placed(make_input(dtype, count, 3, me), layout)
        dist.all_reduce(placed.tensor)
        assert_same_bits(placed.tensor.reshape(-1), _expected(dtype, count, 3, world, "SUM"), what)
        placed.check(what)


@_each_world
def test_all_reduce_layouts(world: int, carrier: str) -> None:
    _run(_all_reduce_layouts, world, carrier)


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
        dist.reduce(placed.tensor, root, _op(op, me))
        if me == root:
            assert_same_bits(placed.tensor.reshape(-1), _expected(dtype, count, seed, world, op), what)
        else:  # like NCCL's: only the root's tensor changes
            assert_same_bits(placed.tensor.reshape(-1), make_input(dtype, count, seed, me), what + " (not root)")
        placed.check(what)


@_each_world
def test_reduce(world: int, carrier: str) -> None:
    _run(_reduce, world, carrier)


def _reduce_scatter(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    grid = itertools.product(SPREAD, ("SUM", "AVG", "MIN", "PREMUL_SUM"), SMALL + LARGE[:1], ("plain", "strided"))
    for seed, (dtype, op, count, layout) in enumerate(grid):
        if not supported(dtype, op):
            continue
        what = f"reduce_scatter {dtype} {op} {count} {layout}"
        mine = make_input(dtype, count * world, seed, me)
        expected = _expected(dtype, count * world, seed, world, op)[count * me : count * (me + 1)]
        output = Placed(poison(torch.empty(count, dtype=dtype)), layout)
        inputs = [Placed(part.clone(), layout) for part in mine.split(count)] if count else []
        inputs = inputs or [Placed(mine, "plain") for _ in range(world)]
        dist.reduce_scatter(output.tensor, [placed.tensor for placed in inputs], _op(op, me))
        assert_same_bits(output.tensor.reshape(-1), expected, what)
        output.check(what)
        whole = Placed(mine, layout)
        single = Placed(poison(torch.empty(count, dtype=dtype)), layout)
        dist.reduce_scatter_tensor(single.tensor, whole.tensor, _op(op, me))
        assert_same_bits(single.tensor.reshape(-1), expected, what + " single")
        assert_same_bits(whole.tensor.reshape(-1), mine, what + " input changed")
        single.check(what)


@_each_world
def test_reduce_scatter(world: int, carrier: str) -> None:
    _run(_reduce_scatter, world, carrier)


def _unsupported(rank: Rank) -> int:
    rank.init()
    refused = 0
    for dtype, op in itertools.product(ALL_DTYPES, OPS):
        if supported(dtype, op):
            continue
        tensor = make_input(dtype, 5, 1, rank.rank)
        before = tensor.clone()
        try:
            dist.all_reduce(tensor, _op(op, rank.rank))
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


@_each_world
def test_nan_infinities_and_zero_signs(world: int, carrier: str) -> None:
    _run(_special_values, world, carrier)


# -- moving


def _broadcast(rank: Rank) -> None:
    rank.init()
    for seed, (dtype, count, layout) in enumerate(itertools.product(ALL_DTYPES, SMALL + LARGE[:1], LAYOUTS)):
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


@_each_world
def test_broadcast(world: int, carrier: str) -> None:
    _run(_broadcast, world, carrier)


def _all_gather(rank: Rank) -> None:
    rank.init()
    world = rank.world_size
    for seed, (dtype, count, layout) in enumerate(
        itertools.product(ALL_DTYPES, SMALL + LARGE[:1], ("plain", "strided"))
    ):
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


@_each_world
def test_all_gather(world: int, carrier: str) -> None:
    _run(_all_gather, world, carrier)


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
    # Every entry is the same tensor: all that PyTorch promises is one of the inputs, unmixed.
    same = torch.full((1000,), float("nan"))
    dist.all_gather([same] * world, torch.full((1000,), float(rank.rank)))
    assert same[0].item() in range(world) and bool((same == same[0]).all()), "all_gather into one tensor"
    # The input is one of the outputs.
    outputs = [torch.full((7,), float("nan")) for _ in range(world)]
    outputs[rank.rank].copy_(make_input(torch.float32, 7, 8, rank.rank))
    dist.all_gather(outputs, outputs[rank.rank])
    for r in range(world):
        assert_same_bits(outputs[r], make_input(torch.float32, 7, 8, r), f"all_gather of an output [{r}]")
    # A matrix gathered along dimension 0, and stacked.
    matrix = make_input(torch.float32, 12, 9, rank.rank).view(3, 4)
    for shape in ((3 * world, 4), (world, 3, 4)):
        out = torch.full(shape, float("nan"))
        dist.all_gather_into_tensor(out, matrix)
        expected = torch.cat([make_input(torch.float32, 12, 9, r) for r in range(world)])
        assert_same_bits(out.reshape(-1), expected, f"all_gather_into_tensor {shape}")


@_each_world
def test_all_gather_aliasing(world: int, carrier: str) -> None:
    _run(_all_gather_aliasing, world, carrier)


def _gather_scatter(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for seed, (dtype, count, layout) in enumerate(
        itertools.product(ALL_DTYPES, SMALL + LARGE[:1], ("plain", "strided"))
    ):
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


@_each_world
def test_gather_and_scatter(world: int, carrier: str) -> None:
    _run(_gather_scatter, world, carrier)


def _gather_lists_of_others(rank: Rank) -> None:
    """What non-roots hand over at the group object: [] and [[]] both occur."""
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


@pytest.mark.quick
@pytest.mark.parametrize("world", [1, 2, 3])
def test_empty_lists_of_non_roots(world: int) -> None:
    run_ranks(_gather_lists_of_others, world)


def _splits(world: int, seed: int) -> list[list[int]]:
    """splits[s][d]: elements that s sends to d; some rows and columns are empty."""
    return [[((s + 2 * d + seed) * 37) % 50 if (s + d + seed) % 3 else 0 for d in range(world)] for s in range(world)]


def _all_to_all(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for seed, (dtype, layout) in enumerate(itertools.product(ALL_DTYPES, LAYOUTS[:3])):
        what = f"all_to_all {dtype} {layout}"
        splits = _splits(world, seed)
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
    # Splits count rows of a matrix.
    rows = _splits(world, 1)
    matrix = make_input(torch.float32, sum(rows[me]) * 5, 2, me).view(-1, 5)
    out = torch.full((sum(row[me] for row in rows), 5), float("nan"))
    dist.all_to_all_single(out, matrix, [row[me] for row in rows], rows[me])
    parts = [make_input(torch.float32, sum(rows[s]) * 5, 2, s).view(-1, 5).split(rows[s])[me] for s in range(world)]
    assert_same_bits(out, torch.cat(parts), "all_to_all_single of rows")


@_each_world
def test_all_to_all(world: int, carrier: str) -> None:
    _run(_all_to_all, world, carrier)


def _send_recv(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    after, before = (me + 1) % world, (me - 1) % world
    for seed, (dtype, count, layout) in enumerate(
        itertools.product(ALL_DTYPES, SMALL + LARGE[:1], ("plain", "strided"))
    ):
        what = f"send/recv {dtype} {count} {layout}"
        sent = Placed(make_input(dtype, count, seed, me), layout)
        got = Placed(poison(torch.empty(count, dtype=dtype)), layout if me % 2 else "plain")
        work = dist.isend(sent.tensor, after, tag=seed)
        dist.recv(got.tensor, before, tag=seed)
        work.wait()
        assert_same_bits(got.tensor.reshape(-1), make_input(dtype, count, seed, before), what)
        got.check(what)


@pytest.mark.parametrize("world, carrier", [(2, "shm"), (3, "shm"), (4, "shm"), (2, "gloo"), (3, "gloo")])
def test_send_recv(world: int, carrier: str) -> None:
    _run(_send_recv, world, carrier)


# -- other forms


def _sparse(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for dtype, dense_dims in itertools.product((torch.float32, torch.float64, torch.int64), ((), (3,))):
        inputs = []
        for r in range(world):
            entries = 0 if r == 1 else 3 + 2 * r  # one rank has none; indices repeat (not coalesced)
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


@_each_world
def test_sparse_all_reduce(world: int, carrier: str) -> None:
    _run(_sparse, world, carrier)


def _coalesced(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD
    counts = (1, 0, 1000, 33)

    def inputs(r: int) -> list[torch.Tensor]:
        return [make_input(torch.float32, count, i, r) for i, count in enumerate(counts)]

    sums = [_expected(torch.float32, count, i, world, "SUM") for i, count in enumerate(counts)]
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
        want = _expected(torch.float32, count * world, i, world, "SUM")[count * me : count * (me + 1)]
        assert_same_bits(got, want, "reduce_scatter_tensor_coalesced")
    # Tensors of several dtypes in one coalesced call: each keeps its own arithmetic.
    mixed = [make_input(dtype, 77, 5, me) for dtype in (torch.float32, torch.bfloat16, torch.int32)]
    options = dist.AllreduceCoalescedOptions()
    try:
        group.allreduce_coalesced(mixed, options).wait()
    except (ValueError, TypeError) as error:
        assert "dtype" in str(error) or "type" in str(error), f"mixed dtypes: {error}"
    else:
        for got in mixed:
            assert_same_bits(got, _expected(got.dtype, 77, 5, world, "SUM"), "allreduce_coalesced mixed")


@_each_world
def test_coalesced_forms(world: int, carrier: str) -> None:
    _run(_coalesced, world, carrier)


def _functional(rank: Rank) -> None:
    import torch.distributed._functional_collectives as funcol

    rank.init()
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD

    def mine(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return make_input(dtype, count, seed, me)

    for dtype, op in itertools.product((torch.float32, torch.bfloat16, torch.int64), ("sum", "avg", "max", "min")):
        if not supported(dtype, op.upper()):
            continue
        got = funcol.all_reduce(mine(101, 1, dtype), op, group)
        assert_same_bits(got + 0, _expected(dtype, 101, 1, world, op.upper()), f"functional all_reduce {dtype} {op}")
        got = funcol.reduce_scatter_tensor(mine(world * 10, 2, dtype), op, 0, group)
        want = _expected(dtype, world * 10, 2, world, op.upper())[me * 10 : me * 10 + 10]
        assert_same_bits(got + 0, want, f"functional reduce_scatter {dtype} {op}")
    for dimension in (0, 1):
        got = funcol.all_gather_tensor(mine(12, 3).view(3, 4), dimension, group)
        want = torch.cat([make_input(torch.float32, 12, 3, r).view(3, 4) for r in range(world)], dimension)
        assert_same_bits(got + 0, want, f"functional all_gather dimension {dimension}")
    assert_same_bits(funcol.broadcast(mine(9, 4), 0, group) + 0, make_input(torch.float32, 9, 4, 0), "broadcast")
    splits = _splits(world, 2)
    received = [row[me] for row in splits]
    got = funcol.all_to_all_single(mine(sum(splits[me]), 5), received, splits[me], group)
    parts = [make_input(torch.float32, sum(splits[s]), 5, s).split(splits[s])[me] for s in range(world)]
    assert_same_bits(got + 0, torch.cat(parts), "functional all_to_all_single")
    counts = (5, 64, 1)
    many = funcol.all_reduce_coalesced([mine(count, 6) for count in counts], "sum", group)
    for got, count in zip(many, counts, strict=True):
        assert_same_bits(got + 0, _expected(torch.float32, count, 6, world, "SUM"), "functional coalesced all_reduce")
    many = funcol.all_gather_into_tensor_coalesced([mine(count, 7) for count in counts], group)
    for got, count in zip(many, counts, strict=True):
        want = torch.cat([make_input(torch.float32, count, 7, r) for r in range(world)])
        assert_same_bits(got + 0, want, "functional coalesced all_gather")
    inputs = [mine(count * world, 8) for count in counts]
    many = funcol.reduce_scatter_tensor_coalesced(inputs, "sum", [0] * len(counts), group)
    for got, count in zip(many, counts, strict=True):
        want = _expected(torch.float32, count * world, 8, world, "SUM")[me * count : (me + 1) * count]
        assert_same_bits(got + 0, want, "functional coalesced reduce_scatter")
    moved = funcol.permute_tensor(mine(6, 9), [(r + 1) % world for r in range(world)], group)
    assert_same_bits(moved + 0, make_input(torch.float32, 6, 9, (me - 1) % world), "functional permute")
    # Through autograd: the gradient of a sum over ranks is the sum of everybody's gradients.
    x = torch.ones(world * 2, requires_grad=True)
    y = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    (y * (me + 1)).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [float(r + 1) for r in range(world) for _ in range(2)]


@_each_world
def test_functional_collectives(world: int, carrier: str) -> None:
    _run(_functional, world, carrier)


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


@_each_world
def test_object_collectives(world: int, carrier: str) -> None:
    _run(_objects, world, carrier)


def _scalars(rank: Rank) -> None:
    """Tensors without dimensions, and one element at a stride: contiguous by name, odd to view as bytes."""
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


@_each_world
def test_tensors_without_dimensions(world: int, carrier: str) -> None:
    _run(_scalars, world, carrier)


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


@pytest.mark.skipif(BACKEND != "ark", reason="compares ark's two carriers")
@pytest.mark.parametrize("world", [2, 3])
def test_shared_memory_and_gloo_carry_the_same_bits(world: int) -> None:
    over_shm = run_ranks(_both_carriers_agree, world)
    over_gloo = run_ranks(_both_carriers_agree, world, env=CARRIERS["gloo"])
    assert over_shm == over_gloo


def _huge(rank: Rank) -> None:
    """More than 2^31 elements of one byte: indices must not be 32 bits wide."""
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
@pytest.mark.limit(600)
def test_more_than_two_to_the_31_elements() -> None:
    run_ranks(_huge, 2, timeout=500)
