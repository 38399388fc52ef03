"""Pooled embeddings with an all-to-all become one operator: which forms are found or not, and unchanged bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from test_embeddings_training import fused as fused_in_training
from torch import Tensor

pytestmark = [ark_only]
SAMPLES, COLUMNS = 6, 4
BATCHES = (SAMPLES, 9, 2)  # of one graph
Pooled = list[Tensor]
Form = Callable[[Pooled, list[int], int], Any]  # pooled rows of this rank's tables, tables of each rank, this rank


def _samples(pooled: Pooled, tables: list[int]) -> int:
    return pooled[0].shape[0] // len(tables)


def _stacked(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    """DLRM's form: [bags, tables, columns] to all, then samples to the front."""
    y = funcol.all_to_all_single(torch.stack(pooled, 1), None, None, "0")
    world, count, samples = len(tables), tables[0], _samples(pooled, tables)
    return y.view(world, samples, count, COLUMNS).permute(1, 0, 2, 3).reshape(samples, world * count, COLUMNS)


def _side_by_side(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    x = torch.cat(pooled, 1)
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    world, count = len(tables), tables[0]
    return y.view(world, -1, count * COLUMNS).transpose(0, 1).reshape(len(y) // world, -1).relu()


def _table_first(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    world, count, samples = len(tables), tables[0], _samples(pooled, tables)
    x = torch.stack(pooled).view(count, world, samples, COLUMNS).transpose(0, 1).contiguous()
    y = funcol.all_to_all_single(x, None, None, "0")
    return y.view(world, count, samples, COLUMNS).permute(2, 0, 1, 3).reshape(samples, -1)


def _uneven(pooled: Pooled, tables: list[int], rank: int) -> Tensor:
    """TorchRec's form: a rank's tables side by side and flat, and what arrives is split by ranks."""
    samples = _samples(pooled, tables)
    each = samples * COLUMNS
    got = [count * each for count in tables]
    y = funcol.all_to_all_single(torch.cat(pooled, 1).view(-1), got, [tables[rank] * each] * len(tables), "0")
    return torch.cat([part.view(samples, -1) for part in y.split(got)], 1)


def _uneven_tables_first(pooled: Pooled, tables: list[int], rank: int) -> Tensor:
    count, world, samples = tables[rank], len(tables), _samples(pooled, tables)
    each = samples * COLUMNS
    x = torch.stack(pooled).view(count, world, each).transpose(0, 1).reshape(-1)
    y = funcol.all_to_all_single(x, [of * each for of in tables], [count * each] * world, "0")
    parts = y.split([of * each for of in tables])
    return torch.cat([part.view(-1, samples, COLUMNS).transpose(0, 1) for part in parts], 1) * 2


FOUND: dict[str, tuple[Form, list[int]]] = {
    "stacked": (_stacked, [2, 2]),
    "side by side, in place": (_side_by_side, [2, 2]),
    "one table": (_side_by_side, [1, 1]),
    "table first": (_table_first, [3, 3]),
    "uneven": (_uneven, [3, 1]),
    "uneven, tables first": (_uneven_tables_first, [1, 2]),
}


def _read_too(pooled: Pooled, tables: list[int], rank: int) -> Any:
    return _stacked(pooled, tables, rank), pooled[0] + 1


def _raw_read(pooled: Pooled, tables: list[int], _: int) -> Any:
    y = funcol.all_to_all_single(torch.stack(pooled, 1), None, None, "0")
    samples = _samples(pooled, tables)
    return y.view(2, samples, 2, COLUMNS).permute(1, 0, 2, 3).reshape(samples, -1), y * 2


def _by_table(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    y = funcol.all_to_all_single(torch.stack(pooled, 1), None, None, "0")
    samples = _samples(pooled, tables)
    return y.view(2, samples, 2, COLUMNS).permute(1, 2, 0, 3).reshape(samples, -1)


def _whole_tables(pooled: Pooled, _: list[int], __: int) -> Tensor:
    """Each rank gets a table's bags of all samples: no rank has its own samples."""
    return funcol.all_to_all_single(torch.cat(pooled), None, None, "0").view(-1, COLUMNS)


LEFT: dict[str, tuple[Form, str]] = {
    "rows read too": (_read_too, "is read by others, too"),
    "raw rows read": (_raw_read, "not put in the order"),
    "tables in another order": (_by_table, "not put in the order"),
    "whole tables": (_whole_tables, "in another order than that of the samples"),
}


def fused(told: list[str]) -> Any:
    """Returns a backend of torch.compile that only runs the pass on the CPU."""
    from torch._dynamo.backends.common import aot_autograd

    from ark_torch.compile import decompositions, embeddings

    def compile(graph_module: Any, _: Any) -> Any:
        told.extend(embeddings.fuse(graph_module.graph, "cpu"))
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module.forward

    return aot_autograd(fw_compiler=compile, decompositions=decompositions.table())


class _Model(torch.nn.Module):
    """A rank's tables. `tables`: how many each rank has."""

    def __init__(self, rank: Rank, form: Form, tables: list[int], dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(3 + rank.rank)
        self.form, self.tables, self.rank, self.kwargs = form, tables, rank.rank, kwargs
        self.weights = torch.nn.ParameterList(torch.randn(9, COLUMNS).to(dtype) for _ in range(tables[rank.rank]))

    def forward(self, indices: list[Tensor], offsets: list[Tensor], of_samples: list[Any]) -> Any:
        pooled = [
            F.embedding_bag(i, table, o, per_sample_weights=w, **self.kwargs)
            for table, i, o, w in zip(self.weights, indices, offsets, of_samples, strict=True)
        ]
        return self.form(pooled, self.tables, self.rank)


def _bags(model: _Model, samples: int, weighted: bool) -> tuple[list[Any], ...]:
    bags, count = samples * len(model.tables), len(model.weights)
    # PyTorch makes graphs of their own for equal sizes, and for no and one index.
    lengths = [torch.bincount(torch.randint(0, bags, (2 * bags + 5 + t,)), minlength=bags) for t in range(count)]
    indices = [torch.randint(0, 9, (int(one.sum()),)) for one in lengths]
    offsets = [one.cumsum(0) - one for one in lengths]
    if model.kwargs.get("include_last_offset"):
        offsets = [torch.cat([one, one.new_tensor([len(i)])]) for one, i in zip(offsets, indices, strict=True)]
    weights = [torch.rand(len(one)).to(model.weights[0].dtype) if weighted else None for one in indices]
    return indices, offsets, weights


def _compare(
    rank: Rank,
    form: Form,
    tables: list[int],
    dtype: torch.dtype,
    weighted: bool,
    *,
    batches: tuple[int, ...] = (SAMPLES,),
    **kwargs: Any,
) -> list[str]:
    """Several batches share a graph in which they are symbolic."""
    told: list[str] = []
    torch._dynamo.reset()
    model = _Model(rank, form, tables, dtype, **kwargs)
    call = torch.compile(model, backend=fused(told), dynamic=len(batches) > 1)
    for samples in batches:
        given = _bags(model, samples, weighted)
        with torch.no_grad():
            got, wanted = call(*given), model(*given)
        for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
            assert one.shape == other.shape
            if dtype == torch.float32 and kwargs["mode"] == "sum" and not weighted:
                assert torch.equal(one, other)
            else:  # eager rounds half types and quotients differently, and weighs with fused multiply-adds
                torch.testing.assert_close(one, other, rtol=2e-2 if dtype != torch.float32 else 1e-6, atol=2e-2)
    return told


def _run(rank: Rank, forms: str, batches: tuple[int, ...] = (SAMPLES,)) -> dict[str, list[str]]:
    rank.init()
    torch.set_num_threads(1)
    if forms == "left":
        return {name: _compare(rank, form, [2, 2], torch.float32, False, batches=batches, mode="sum")
                for name, (form, _) in LEFT.items()}  # fmt: skip
    return {name: _compare(rank, form, tables, torch.float32, False, batches=batches, mode="sum")
            for name, (form, tables) in FOUND.items()}  # fmt: skip


@pytest.mark.parametrize("batches", [(SAMPLES,), BATCHES])
def test_what_is_found(batches: tuple[int, ...]) -> None:
    for said in run_ranks(_run, 2, "found", batches):
        for name in FOUND:
            assert len(said[name]) == 1 and said[name][0].endswith("ark.embedding_bag_all_to_all.default"), (name, said)


@pytest.mark.parametrize("batches", [(SAMPLES,), pytest.param(BATCHES, marks=pytest.mark.nightly)])
def test_what_is_left(batches: tuple[int, ...]) -> None:
    for said in run_ranks(_run, 2, "left", batches):
        for name, (_, reason) in LEFT.items():
            assert len(said[name]) == 1 and reason in said[name][0], (name, said[name])


def _kinds(rank: Rank, batches: tuple[int, ...]) -> list[str]:
    rank.init()
    torch.set_num_threads(1)
    told = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        told += _compare(rank, _stacked, [2, 2], dtype, False, batches=batches, mode="mean")
    told += _compare(rank, _stacked, [2, 2], torch.float32, True, batches=batches, mode="sum")
    told += _compare(
        rank, _stacked, [2, 2], torch.float32, False, batches=batches, mode="sum", include_last_offset=True
    )
    return told


@pytest.mark.nightly
@pytest.mark.parametrize("batches", [(SAMPLES,), BATCHES])
def test_kinds_of_bags(batches: tuple[int, ...]) -> None:
    for told in run_ranks(_kinds, 2, batches):
        assert len(told) == 5 and all(one.endswith("ark.embedding_bag_all_to_all.default") for one in told), told


def _others(rank: Rank) -> list[str]:
    rank.init()
    torch.set_num_threads(1)
    told = _compare(rank, _stacked, [2, 2], torch.float64, False, mode="sum")
    told += _compare(rank, _stacked, [2, 2], torch.float32, False, mode="max")
    told += _compare(rank, _stacked, [2, 2], torch.float32, False, mode="sum", padding_idx=2)
    return told


@pytest.mark.nightly
def test_bags_that_are_left() -> None:
    for told in run_ranks(_others, 2):
        reasons = ("torch.float64", "mode is max", "padding_idx")
        assert len(told) == 3 and all(reason in one for reason, one in zip(reasons, told, strict=True)), told


def _by_closure(weights: list[Any], mine: int, exchanged: Callable[..., Tensor]) -> Any:
    """2 tables on one rank, 1 on the other, whose own number comes by a closure: torch._dynamo makes it a symbol on the
    first alone, since the second asks for it."""

    def forward(indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        pooled = [F.embedding_bag(i, t, o, mode="sum") for t, i, o in zip(weights, indices, offsets, strict=True)]
        samples = pooled[0].shape[0] // 2
        each = samples * pooled[0].shape[1]
        x = (pooled[0] if mine == 1 else torch.cat(pooled, 1)).view(-1)
        got = [2 * each, each]
        y = exchanged(x, got, [mine * each, mine * each])
        return torch.cat([part.view(samples, -1) for part in y.split(got)], 1)

    return forward


def _symbols_on_one_rank(rank: Rank) -> list[list[str]]:
    rank.init(timeout=30)
    torch.set_num_threads(1)
    mine = 2 - rank.rank
    weights = [torch.nn.Parameter(torch.randn(9, COLUMNS)) for _ in range(mine)]
    every: list[list[str]] = []
    for train in (False, True):
        told: list[str] = []
        exchange = funcol.all_to_all_single_autograd if train else funcol.all_to_all_single
        forward = _by_closure(weights, mine, lambda *args, to=exchange: to(*args, dist.group.WORLD))
        call = torch.compile(forward, backend=fused_in_training(told, []) if train else fused(told), dynamic=True)
        for samples in BATCHES:
            indices = [torch.randint(0, 9, (4 * samples + 5 + t,)) for t in range(mine)]
            offsets = [torch.arange(2 * samples)] * mine
            with torch.set_grad_enabled(train):
                results = [one(indices, offsets) for one in (forward, call)]
                assert torch.equal(*results)
                if train:
                    one, other = (torch.autograd.grad((y * y).sum(), weights) for y in results)
                    torch.testing.assert_close(one, other)
        every.append(told)
    return every


def test_a_number_of_tables_that_is_a_symbol_on_one_rank() -> None:
    for every in run_ranks(_symbols_on_one_rank, 2):
        for told in every:
            assert len(told) == 1 and told[0].endswith("ark.embedding_bag_all_to_all.default"), every
