"""Sparse gradients of embedding_bag_all_to_all, and its in-place updates: bits on CPU ranks, misuse, compilers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from support.embedding import (
    Case,
    check_sparse,
    check_updates,
    crowded_case,
    draw,
    gradient_of,
    random_case,
    reference_gradients,
    same,
)
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import SGD, RowwiseAdagrad, embedding_bag_all_to_all

pytestmark = [ark_only]


def _random(rank: Rank, seed: int, count: int) -> None:
    rank.init()
    torch.set_num_threads(1)
    random = Random(seed)
    for number in range(count):
        case = random_case(random, rank.world_size, 300 * seed + number)
        check_sparse(case, rank.rank, rank.world_size)
        check_updates(case, rank.rank, rank.world_size, adapts=number % 2 == 0)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_shapes(world: int) -> None:
    run_ranks(_random, world, 40 + world, 10)


def _crowded(rank: Rank) -> None:
    """Rows with more indices than one partial sum has, by several threads."""
    rank.init()
    torch.set_num_threads(2)
    for number, more in enumerate(({}, {"mode": "mean"}, {"weighted": True, "dtype": torch.bfloat16})):
        case = crowded_case(rank.world_size, 70 + number, **more)
        check_sparse(case, rank.rank, rank.world_size)
        for adapts in (False, True):
            check_updates(case, rank.rank, rank.world_size, adapts)


@pytest.mark.nightly
def test_rows_in_very_many_bags() -> None:
    run_ranks(_crowded, 2)


def _optimizers(rank: Rank) -> None:
    """PyTorch's own optimizers accept the sparse gradient. SGD in place has the bits of torch.optim.SGD."""
    rank.init()
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 8, 24, seed=81)
    for kind in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        part, dense = draw(case, me, world), draw(case, me, world)
        tables = [table.requires_grad_() for table in part.tables]
        mine = kind(tables, lr=0.125)
        for step in range(3):
            mine.zero_grad()
            part.call(case, sparse=True).backward(gradient_of(case, me))
            assert all(table.grad is not None and table.grad.is_sparse for table in tables)
            mine.step()
            if kind is torch.optim.SGD:
                sgd = SGD(dense.tables, lr=0.125)
                dense.call(case, optimizer=sgd).backward(gradient_of(case, me))
                for one, other in zip(tables, dense.tables, strict=True):
                    same(one.detach(), other, f"step {step} of SGD")
        begun = draw(case, me, world)
        for table, before in zip(tables, begun.tables, strict=True):
            named = table.grad.coalesce().indices()[0]  # autograd forgets that it is coalesced
            rest = torch.ones(len(table), dtype=torch.bool).index_fill_(0, named, False)
            assert torch.equal(table.detach()[rest], before[rest]), "rows that no bag names stay"
            assert not len(named) or not torch.equal(table.detach()[named], before[named])


def test_pytorchs_optimizers() -> None:
    run_ranks(_optimizers, 2)


def _kept(rank: Rank) -> None:
    """State is saved and loaded in place; a scheduler sets the learning rate; step() and zero_grad() do nothing."""
    rank.init()
    part = draw(Case([2], 6, 8, seed=82), 0, 1)
    case = Case([2], 6, 8, seed=82)
    optimizer = RowwiseAdagrad([table.bfloat16() for table in part.tables], lr=0.1)
    part.tables = optimizer.tables
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rate = optimizer.lr
    case.dtype = torch.bfloat16
    for _ in range(2):
        optimizer.zero_grad()
        part.call(case, optimizer=optimizer).backward(gradient_of(case, 0))
        optimizer.step()
        scheduler.step()
    assert optimizer.lr is rate and abs(float(rate) - 0.025) < 1e-8
    saved = optimizer.state_dict()
    other = RowwiseAdagrad([table.clone() for table in part.tables], lr=1.0, eps=0.5)
    tensors = [other.state[table]["sum"] for table in other.tables]
    other.load_state_dict(saved)
    for table, mine, tensor in zip(part.tables, other.tables, tensors, strict=True):
        assert other.state[mine]["sum"] is tensor and tensor.dtype == torch.float32
        same(tensor, optimizer.state[table]["sum"], "state")
    assert abs(float(other.lr) - 0.025) < 1e-8 and other.param_groups[0]["eps"] == 1e-8
    with pytest.raises(ValueError, match="state_dict is of 2 tables, and this optimizer of 1"):
        RowwiseAdagrad(part.tables[:1]).load_state_dict(saved)


def test_what_optimizers_are_asked_for() -> None:
    run_ranks(_kept, 1)


def _weights(rank: Rank) -> None:
    """Gradients of weights use the rows before the update."""
    rank.init()
    me, world = rank.rank, rank.world_size
    case = Case([1] * world, 5, 8, weighted=True, seed=83)
    gradients = []
    for in_place in (False, True):
        part = draw(case, me, world)
        assert part.weights is not None
        for weight in part.weights:
            weight.requires_grad_()
        optimizer = SGD(part.tables, lr=0.5) if in_place else None
        part.call(case, optimizer=optimizer).backward(gradient_of(case, me))
        gradients.append([weight.grad for weight in part.weights])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None and one.abs().sum() > 0
        same(one, other, "gradients of weights")


def test_gradients_of_weights_beside_an_update() -> None:
    run_ranks(_weights, 2)


def _misuse(rank: Rank) -> None:
    rank.init(timeout=20)
    me = rank.rank
    bags = [torch.zeros(4, dtype=torch.int64)] * 2, [torch.arange(4)] * 2
    tables = [torch.ones(5, 4), torch.ones(5, 4)]
    for lr in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="lr is"):
            SGD(tables, lr=lr)
    with pytest.raises(ValueError, match="eps is -1"):
        RowwiseAdagrad(tables, eps=-1)
    with pytest.raises(ValueError, match=r"sparse=True and optimizer= are given"):
        embedding_bag_all_to_all(tables, *bags, sparse=True, optimizer=SGD(tables))
    with pytest.raises(ValueError, match="SGD of other tables"):
        embedding_bag_all_to_all([table.clone() for table in tables], *bags, optimizer=SGD(tables))

    def refused(kind: type[Exception], text: str, optimizer: Any, given: list[Tensor]) -> None:
        """Only rank 1 is refused. Nothing is written, and the group still works."""
        before = [table.clone() for table in given]
        mine = optimizer if me == 1 else SGD(tables)
        with pytest.raises(kind if me == 1 else dist.DistBackendError, match=text if me == 1 else "rank 1 refused"):
            embedding_bag_all_to_all(given if me == 1 else tables, *bags, optimizer=mine)
        assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))
        assert embedding_bag_all_to_all(tables, *bags).shape == (2, 4, 4)

    twice = [tables[0], tables[0]]
    refused(ValueError, r"tables\[1\] shares memory with tables\[0\]", SGD(twice[:1]), twice)
    spoilt = RowwiseAdagrad(tables)
    spoilt.state[tables[1]]["sum"] = torch.zeros(4)
    refused(ValueError, r"the optimizer's state\[1\] is not \[5\]", spoilt, tables)
    spoilt.state[tables[1]]["sum"] = torch.zeros(5, dtype=torch.float16)
    refused(TypeError, r"the optimizer's state\[1\] is torch.float16", spoilt, tables)
    other = [torch.tensor([0, 1, 9, 1]), bags[0][1]]
    before = [table.clone() for table in tables]
    with pytest.raises(
        IndexError if me == 1 else dist.DistBackendError, match=r"index 9 .* tables\[0\]|rank 1 refused"
    ):
        embedding_bag_all_to_all(tables, other if me == 1 else bags[0], bags[1], optimizer=SGD(tables))
    assert all(torch.equal(one, then) for one, then in zip(tables, before, strict=True))
    # Parts of one tensor are separate tables.
    whole = torch.ones(10, 4)
    halves = list(whole.split(5))
    embedding_bag_all_to_all(halves, *bags, optimizer=SGD(halves, lr=1.0)).sum().backward()
    assert whole[0].unique().tolist() == [-3.0] and whole[1:5].unique().tolist() == [1.0]


def test_misuse() -> None:
    run_ranks(_misuse, 2)


def _changed(rank: Rank) -> None:
    """A row written between a call and its backward pass is detected. Without gradients nothing is written."""
    rank.init()
    tables = [torch.ones(5, 4)]
    bags = [torch.arange(4)], [torch.arange(4)]
    optimizer = SGD(tables, lr=1.0)
    one, two = (embedding_bag_all_to_all(tables, *bags, optimizer=optimizer) for _ in range(2))
    two.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        one.sum().backward()
    before = tables[0].clone()
    with torch.no_grad():
        assert not embedding_bag_all_to_all(tables, *bags, optimizer=optimizer).requires_grad
    assert torch.equal(tables[0], before)


def test_tables_that_changed() -> None:
    run_ranks(_changed, 1)


def _compiled(rank: Rank, backend: str) -> None:
    """In-place updates in a compiled step, with a learning rate that changes without recompiling."""
    rank.init()
    torch.set_num_threads(1)
    me, world = rank.rank, rank.world_size
    case = Case([2, 1], 4, 6, seed=84)
    part = draw(case, me, world)

    def model(scale: Tensor, tables: list[Tensor], optimizer: Any) -> Tensor:
        out = embedding_bag_all_to_all(
            tables, part.indices, part.offsets, tables_per_rank=case.tables, optimizer=optimizer
        )
        return out * 2 + scale

    compiles = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for adapts in (False, True):
        torch._dynamo.reset()
        compiles.clear()
        compiled = torch.compile(model, backend=compiles, fullgraph=True)
        results = []
        for run in (model, compiled):
            tables = [table.clone() for table in part.tables]
            optimizer = RowwiseAdagrad(tables, lr=0.5) if adapts else SGD(tables, lr=0.5)
            for lr in (None, 0.25, 0.125):
                if lr is not None:
                    optimizer.lr.fill_(lr)
                run(torch.ones(1, requires_grad=True), tables, optimizer).backward(gradient_of(case, me))
            results.append([*tables, *(one["sum"] for one in optimizer.state.values())])
        assert compiles.frame_count == 1
        for one, other in zip(*results, strict=True):
            same(one, other, f"{backend}, adapts: {adapts}")
    if backend != "aot_eager":
        return

    def sparsely(tables: list[Tensor]) -> Tensor:
        return embedding_bag_all_to_all(tables, part.indices, part.offsets, sparse=True) * 2

    torch._dynamo.reset()
    tables = [table.clone().requires_grad_() for table in part.tables]
    torch.compile(sparsely, backend=backend)(tables).backward(gradient_of(case, me))
    wanted = reference_gradients(case, me, world, [gradient_of(case, r) * 2 for r in range(world)])
    for table, gradient in zip(tables, wanted, strict=True):
        assert table.grad is not None and table.grad.is_sparse
        same(table.grad.to_dense(), gradient, "sparse, beside a compiled graph")


def _views(rank: Rank) -> None:
    """Inductor would read beyond a view. Without fullgraph=True the operator runs between two graphs."""
    rank.init()
    case = Case([2, 1], 4, 6, seed=85)
    part = draw(case, rank.rank, rank.world_size)
    whole = torch.cat([part.tables[0].new_zeros(1, 6), *part.tables])
    tables = list(whole[1:].split([len(table) for table in part.tables]))
    optimizer = SGD(tables, lr=0.5)

    def model(scale: Tensor) -> Tensor:
        out = embedding_bag_all_to_all(
            tables, part.indices, part.offsets, tables_per_rank=case.tables, optimizer=optimizer
        )
        return out * 2 + scale

    scale = torch.ones(1, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a view into other memory"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(scale)
    wanted = [table.clone() for table in tables]
    other = SGD(wanted, lr=0.5)
    embedding_bag_all_to_all(wanted, part.indices, part.offsets, tables_per_rank=case.tables, optimizer=other).backward(
        gradient_of(case, rank.rank) * 2
    )
    torch.compile(model, backend="aot_eager")(scale).backward(gradient_of(case, rank.rank))
    for table, one in zip(tables, wanted, strict=True):
        same(table, one, "views")


@pytest.mark.nightly
def test_compiled_views() -> None:
    run_ranks(_views, 2, timeout=300)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled(backend: str) -> None:
    run_ranks(_compiled, 2, backend, timeout=300)


def _opcheck(rank: Rank) -> None:
    """PyTorch's checks of operators: they write what their schema says and nothing else."""
    rank.init()
    part = draw(Case([2], 3, 4, seed=6), 0, 1)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    where = (part.tables, part.indices, part.offsets, [], None, name, "sum", False, [2], -1, -1, False)
    state = [torch.zeros(len(table)) for table in part.tables]
    gradient = torch.randn(3, 2, 4)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.ark.embedding_bag_all_to_all_update.default,
        (gradient, *where, "rowwise_adagrad", state, torch.tensor(0.5), 1e-8, False), test_utils=checks,
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.ark.embedding_bag_all_to_all_backward.default, (gradient, *where, "dense", False), test_utils=checks
    )


def test_what_pytorch_asks_of_an_operator() -> None:
    run_ranks(_opcheck, 1)
