"""embedding_bag_all_to_all on GPUs: the reference's bits, graphs, registered memory, groups, bad input."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support.embedding import (
    Case,
    check,
    check_sparse,
    check_updates,
    crowded_case,
    draw,
    gradient_of,
    random_case,
    reference,
    reference_gradients,
    same,
)
from support.rank import Rank

import ark_torch
from ark_torch.nn import ShardedEmbeddingBags
from ark_torch.ops import SGD, RowwiseAdagrad, embedding_bag_all_to_all

GPU_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def _random(rank: Rank, seed: int, count: int) -> None:
    device = start(rank)
    random = Random(seed)
    for number in range(count):
        check(random_case(random, rank.world_size, 100 * seed + number, GPU_TYPES), rank.rank, rank.world_size,
              device=device)  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2])
def test_random_shapes(seed: int) -> None:
    run(_random, seed, 25)


def cases(world: int) -> list[Case]:
    bf16 = torch.bfloat16
    return [
        Case([70] * (world - 1) + [1], 4, 64, bf16, seed=1),  # more tables than one launch handles
        Case([2] * world, 64, 128, bf16, torch.int32, seed=2),
        Case([1] * world, 33, 1000, torch.float32, seed=3),  # rows shared by several groups of threads
        Case([3] + [0] * (world - 1), 200, 256, torch.float16, mode="mean", seed=4),
        Case([2] * world, 1500, 16, bf16, weighted=True, seed=5),
        Case([1] * world, 5, 8, torch.float16, weighted=True, last=True, seed=6),
    ]


def _cases(rank: Rank) -> None:
    device = start(rank)
    for case in cases(rank.world_size):
        check(case, rank.rank, rank.world_size, device=device)


def test_shapes_of_every_kind() -> None:
    run(_cases)


def _captured(rank: Rank) -> None:
    """Forward and backward in one graph. Replays see new rows, and results of several calls do not overlap."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 16, 64, torch.bfloat16, seed=3)
    part = draw(case, me, world, device)
    for table in part.tables:
        table.requires_grad_()
    gradient = gradient_of(case, me).to(device)
    known = {"tables_per_rank": case.tables}
    part.call(case, **known).backward(gradient)
    first_gradients = [table.grad.clone() for table in part.tables]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        outs = [part.call(case, **known) for _ in range(12)]  # more than there are separate places
        grads = torch.autograd.grad(outs[0], part.tables, gradient)
    wanted = reference(case, me, world)
    for _ in range(3):
        graph.replay()
        for out in outs:
            same(out.detach().cpu(), wanted, "replayed")
        for got, first in zip(grads, first_gradients, strict=True):
            same(got, first, "replayed gradient")
    with torch.no_grad():
        for table in part.tables:
            table.mul_(2)
    graph.replay()
    same(outs[5].detach().cpu(), wanted * 2, "replayed with other rows")
    same(part.call(case, **known).detach().cpu(), wanted * 2, "eager beside a graph")


def test_graphs() -> None:
    run(_captured)


def _eager(rank: Rank, steps: int) -> None:
    """Many calls without host communication: kept results do not change, and ranks may be late."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = Case([3] * world, 40, 96, torch.float16, torch.int32, seed=8)
    part = draw(case, me, world, device)
    wanted = reference(case, me, world)
    kept = []
    for step in range(steps):
        if step % world == me:
            torch.cuda._sleep(2_000_000)
        kept.append(part.call(case, tables_per_rank=case.tables))
    for out in kept:
        same(out.cpu(), wanted, "kept")


def test_many_calls() -> None:
    run(_eager, 100)


def _registered(rank: Rank) -> None:
    """In registered memory the result is stored at its final place."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 256, 1024, torch.bfloat16, seed=9)  # large blocks, as from PyTorch's allocator
    part = draw(case, me, world, device)
    part.call(case)
    with torch.cuda.use_mem_pool(ark_torch.memory.pool()):
        held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    assert ark_torch.distributed.register(held)
    dist.group.WORLD._get_backend(device).register_mem_pool(ark_torch.memory.pool())
    begin, end = held.data_ptr(), held.data_ptr() + held.nbytes
    del held
    wanted = reference(case, me, world)
    for _ in range(20):
        out = part.call(case, tables_per_rank=case.tables)
        same(out.cpu(), wanted, "registered")
        assert begin <= out.data_ptr() < end


def test_registered_memory() -> None:
    run(_registered)


def _groups(rank: Rank) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    other = dist.new_group(list(range(world)))
    cases = [Case([1] * world, 9, 32, torch.float32, seed=s) for s in (11, 12)]
    for _ in range(10):
        for case, group in zip(cases, (None, other), strict=True):
            same(draw(case, me, world, device).call(case, group).cpu(), reference(case, me, world), "two groups")


def test_two_groups() -> None:
    run(_groups)


def _compiled(rank: Rank, backend: str) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 16, 32, torch.float32, seed=21)
    part = draw(case, me, world, device)
    layer = torch.nn.Linear(2 * world * 32, 7, device=device)

    def model(tables: Any, known: Any) -> torch.Tensor:
        part.tables = tables
        out = embedding_bag_all_to_all(tables, part.indices, part.offsets, tables_per_rank=known)
        return layer(out.flatten(1) * 2)

    for known in (case.tables, None):
        gradients = []
        for run_ in (model, torch.compile(model, backend=backend)):
            tables = [table.detach().clone().requires_grad_() for table in draw(case, me, world, device).tables]
            run_(tables, known).square().sum().backward()
            gradients.append([table.grad for table in tables])
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", ["inductor"])
def test_compiled(backend: str) -> None:
    run(_compiled, backend)


def _alone(rank: Rank) -> None:
    """A group of one rank, without a peer or an earlier collective."""
    device = start(rank)
    alone = [dist.new_group([r]) for r in range(rank.world_size)][rank.rank]
    check(Case([3], 10, 48, torch.float16, seed=15), 0, 1, alone, device)


def test_a_group_of_one() -> None:
    run(_alone, own=True)


def _bad_index(rank: Rank) -> str:
    """The launch ends the context, like a failed assertion. The next call names table and index."""
    device = start(rank, timeout=20)
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 8, 32, torch.float32, seed=31)
    part = draw(case, me, world, device)
    part.call(case)
    part.tables[1] = torch.zeros(5, 32, device=device)
    part.indices[1] = torch.full((16,), 4, device=device)
    part.indices[1][3] = 5 if me == 0 else 4
    part.offsets[1] = torch.arange(8 * world, device=device).clamp(max=16)
    with pytest.raises(RuntimeError):
        part.call(case, tables_per_rank=case.tables)
        torch.cuda.synchronize()
        if me != 0:
            part.call(case, tables_per_rank=case.tables)  # the group has failed
            torch.cuda.synchronize()
            part.call(case, tables_per_rank=case.tables)
    if me != 0:
        return ""
    with pytest.raises(IndexError) as caught:
        part.call(case, tables_per_rank=case.tables)
    return str(caught.value)


def test_index_out_of_range() -> None:
    told = run(_bad_index, own=True, destroy=False)[0]
    assert "embedding_bag_all_to_all" in told and "index 5" in told and "size 5 of tables[1]" in told, told


def _other_layout(rank: Rank) -> None:
    device = start(rank, timeout=20)
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 8, 32, torch.float32, seed=41)
    part = draw(case, me, world, device)
    part.call(case)
    mine = [2] * world
    if me == world - 1:
        part.tables, part.indices, part.offsets = part.tables[:1], part.indices[:1], part.offsets[:1]
        mine = [2] * (world - 1) + [1]
    with pytest.raises(RuntimeError, match=r"other tables, another batch or dtype|embedding_bag_all_to_all"):
        for _ in range(3):
            part.call(case, tables_per_rank=mine)
            torch.cuda.synchronize()


@pytest.mark.skipif(WORLD < 2, reason="needs ranks that can disagree")
def test_layouts_that_differ() -> None:
    run(_other_layout, own=True, destroy=False)


# --- sparse gradients, updates in place, the module ---------------------------------------------------------------


def _updates(rank: Rank, seed: int, count: int) -> None:
    device = start(rank)
    random = Random(seed)
    for number in range(count):
        case = random_case(random, rank.world_size, 500 * seed + number, GPU_TYPES)
        check_sparse(case, rank.rank, rank.world_size, device)
        check_updates(case, rank.rank, rank.world_size, number % 2 == 0, device)


@pytest.mark.parametrize("seed", [1, 2])
def test_sparse_gradients_and_updates(seed: int) -> None:
    run(_updates, seed, 15)


def update_cases(world: int) -> list[Case]:
    """Rows shared by a block, each width of a thread group, rows of several strips, more tables than one launch
    handles.
    """
    bf16 = torch.bfloat16
    return [
        crowded_case(world, 90, dtype=torch.float32),
        crowded_case(world, 91, dtype=bf16, mode="mean", dim=96),
        crowded_case(world, 92, dtype=torch.float16, weighted=True, dim=1000),
        crowded_case(world, 93, dtype=bf16, dim=33),
        *(Case([2] * world, 20, dim, bf16, seed=94 + i) for i, dim in enumerate((8, 32, 64, 128, 256, 264))),
        *(Case([2] * world, 20, dim, torch.float32, seed=101 + i) for i, dim in enumerate((4, 16, 32, 64, 128, 160))),
        Case([70] + [1] * (world - 1), 3, 16, bf16, seed=108),
    ]


def _update_cases(rank: Rank) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    for case in update_cases(world):
        check(case, me, world, device=device)
        check_sparse(case, me, world, device)
        for adapts in (False, True):
            check_updates(case, me, world, adapts, device)


def test_updates_of_every_kind() -> None:
    run(_update_cases)


def _captured_update(rank: Rank) -> None:
    """A whole step in a graph. Replays continue from the last rows, with the current learning rate."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = crowded_case(world, 110, dtype=torch.bfloat16, dim=64)
    gradient = gradient_of(case, me).to(device)
    results = []
    for captured in (False, True):
        part = draw(case, me, world, device)
        optimizer = RowwiseAdagrad(part.tables, lr=0.5, eps=1e-3)

        def step(part: Any = part, optimizer: Any = optimizer) -> None:
            part.call(case, tables_per_rank=case.tables, optimizer=optimizer).backward(gradient)

        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step()
        for lr in (0.5, 0.25, 0.125):
            optimizer.lr.fill_(lr)
            graph.replay() if captured else step()
        results.append([*part.tables, *(one["sum"] for one in optimizer.state.values())])
    for one, other in zip(*results, strict=True):
        same(one, other, "replayed update")
    with pytest.raises(ValueError, match="a sparse gradient cannot be captured"):
        tables = [table.requires_grad_() for table in draw(case, me, world, device).tables]
        part.tables = tables
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            out = part.call(case, tables_per_rank=case.tables, sparse=True)
            torch.autograd.grad(out, tables, gradient)


def test_updates_in_graphs() -> None:
    run(_captured_update, own=True)


def _large(rank: Rank) -> None:
    """A table of more than 2^31 elements, of which the last row is written."""
    device = start(rank)
    rows, dim = (1 << 31) // 64 + 1000, 64
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        return
    table = torch.zeros(rows, dim, dtype=torch.float16, device=device)
    bags = torch.tensor([rows - 1, 5, rows - 1] * rank.world_size, device=device)
    offsets = torch.arange(0, len(bags), 3, device=device)
    optimizer = RowwiseAdagrad([table], lr=1.0, eps=0.0)
    out = embedding_bag_all_to_all([table], [bags], [offsets], optimizer=optimizer)
    out.sum().backward()  # each rank's result has all ranks' tables, with gradient one
    assert table[rows - 1].unique().tolist() == [-1.0] and table[5].unique().tolist() == [-1.0]
    assert int((table != 0).any(1).sum()) == 2
    assert optimizer.state[table]["sum"][rows - 1].item() == (2.0 * rank.world_size) ** 2


def test_a_table_beyond_32_bits() -> None:
    run(_large)


def _compiled_update(rank: Rank) -> bool:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 16, 32, torch.float32, seed=111)
    part = draw(case, me, world, device)

    def model(scale: torch.Tensor, tables: Any, optimizer: Any) -> torch.Tensor:
        out = embedding_bag_all_to_all(
            tables, part.indices, part.offsets, tables_per_rank=case.tables, optimizer=optimizer
        )
        return out * 2 + scale

    results = []
    for run_ in (model, torch.compile(model, fullgraph=True)):
        tables = [table.clone() for table in part.tables]
        optimizer = SGD(tables, lr=0.5)
        for _ in range(3):
            run_(torch.ones(1, device=device, requires_grad=True), tables, optimizer).backward(
                gradient_of(case, me).to(device)
            )
        results.append(tables)
    for one, other in zip(*results, strict=True):
        same(one, other, "compiled update")
    wanted = reference_gradients(case, me, world, [gradient_of(case, r) for r in range(world)])
    return any(bool(gradient.any()) for gradient in wanted)


def test_compiled_updates() -> None:
    assert any(run(_compiled_update)), "no rank's rows had a gradient"


TABLES = [(500, 64), (3, 64), (170, 64), (70, 64), (1, 64)]


def _module(rank: Rank, sharding: str, mode: str) -> None:
    """Compares the module with CPU tensors of the same group: result, gradients, update, jagged input with weights."""
    device = start(rank)
    generator = torch.Generator().manual_seed(7 + rank.rank)
    lengths = torch.randint(0, 5, (len(TABLES), 40), generator=generator)
    indices = [
        torch.randint(0, rows, (int(count),), generator=generator)
        for (rows, _), count in zip(TABLES, lengths.sum(1), strict=True)
    ]
    offsets = [one.cumsum(0) - one for one in lengths]
    weights = [torch.rand(len(one), generator=generator) for one in indices] if mode == "sum" else None
    gradient = torch.randn(40, len(TABLES), 64, generator=generator)
    torch.manual_seed(4)
    host = ShardedEmbeddingBags(TABLES, sharding=sharding, mode=mode)
    state = {name: value.clone() for name, value in host.state_dict().items()}

    def moved(list_: Any) -> Any:
        return None if list_ is None else [one.to(device) for one in list_]

    for kwargs in ({}, {"sparse": True}, {"optimizer_class": RowwiseAdagrad}, {"optimizer_class": SGD}):
        results = []
        for place in ("cpu", device):
            module = ShardedEmbeddingBags(TABLES, sharding=sharding, mode=mode, **kwargs)
            module.load_state_dict(state, strict=False)
            module.to(place)
            given = (indices, offsets, weights) if place == "cpu" else (moved(indices), moved(offsets), moved(weights))
            out = module(*given)
            assert out.device == torch.device(place)
            out.backward(gradient.to(place))
            values = [out.detach()]
            for shard in module.tables.values():
                got = shard.weight.grad
                values.append(shard.weight.detach() if got is None else got.to_dense() if got.is_sparse else got)
                values += [] if shard.sum is None else [shard.sum]
            results.append([value.cpu() for value in values])
        for one, other in zip(*results, strict=True):
            same(other, one, f"{sharding}, {mode}, {kwargs}")


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_module(sharding: str, mode: str) -> None:
    run(_module, sharding, mode)
