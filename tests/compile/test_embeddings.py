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
from torch import Tensor

pytestmark = [ark_only]
SAMPLES, COLUMNS = 6, 4
Pooled = list[Tensor]
Form = Callable[[Pooled, list[int], int], Any]  # pooled rows of this rank's tables, tables of each rank, this rank


def _stacked(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    """DLRM's form: [bags, tables, columns] to all, then samples to the front."""
    y = funcol.all_to_all_single(torch.stack(pooled, 1), None, None, "0")
    world, count = len(tables), tables[0]
    return y.view(world, SAMPLES, count, COLUMNS).permute(1, 0, 2, 3).reshape(SAMPLES, world * count, COLUMNS)


def _side_by_side(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    x = torch.cat(pooled, 1)
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    world, count = len(tables), tables[0]
    return y.view(world, SAMPLES, count * COLUMNS).transpose(0, 1).reshape(SAMPLES, -1).relu()


def _table_first(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    world, count = len(tables), tables[0]
    x = torch.stack(pooled).view(count, world, SAMPLES, COLUMNS).transpose(0, 1).contiguous()
    y = funcol.all_to_all_single(x, None, None, "0")
    return y.view(world, count, SAMPLES, COLUMNS).permute(2, 0, 1, 3).reshape(SAMPLES, -1)


def _uneven(pooled: Pooled, tables: list[int], rank: int) -> Tensor:
    """TorchRec's form: a rank's tables side by side and flat, and what arrives is split by ranks."""
    each = SAMPLES * COLUMNS
    got = [count * each for count in tables]
    y = funcol.all_to_all_single(torch.cat(pooled, 1).view(-1), got, [tables[rank] * each] * len(tables), "0")
    return torch.cat([part.view(SAMPLES, -1) for part in y.split(got)], 1)


def _uneven_tables_first(pooled: Pooled, tables: list[int], rank: int) -> Tensor:
    count, world, each = tables[rank], len(tables), SAMPLES * COLUMNS
    x = torch.stack(pooled).view(count, world, each).transpose(0, 1).reshape(-1)
    y = funcol.all_to_all_single(x, [of * each for of in tables], [count * each] * world, "0")
    parts = y.split([of * each for of in tables])
    return torch.cat([part.view(-1, SAMPLES, COLUMNS).transpose(0, 1) for part in parts], 1) * 2


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
    return y.view(2, SAMPLES, 2, COLUMNS).permute(1, 0, 2, 3).reshape(SAMPLES, -1), y * 2


def _by_table(pooled: Pooled, tables: list[int], _: int) -> Tensor:
    y = funcol.all_to_all_single(torch.stack(pooled, 1), None, None, "0")
    return y.view(2, SAMPLES, 2, COLUMNS).permute(1, 2, 0, 3).reshape(SAMPLES, -1)


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


def _bags(rank: Rank, tables: int, dtype: torch.dtype, **kwargs: Any) -> tuple[list[Tensor], ...]:
    torch.manual_seed(3 + rank.rank)
    bags = SAMPLES * rank.world_size
    lengths = [torch.randint(0, 4, (bags,)) for _ in range(tables)]
    indices = [torch.randint(0, 9, (int(one.sum()),)) for one in lengths]
    offsets = [one.cumsum(0) - one for one in lengths]
    if kwargs.get("include_last_offset"):
        offsets = [torch.cat([one, one.new_tensor([len(i)])]) for one, i in zip(offsets, indices, strict=True)]
    return [torch.randn(9, COLUMNS).to(dtype) for _ in range(tables)], indices, offsets


def _compare(rank: Rank, form: Form, tables: list[int], dtype: torch.dtype, weighted: bool, **kwargs: Any) -> list[str]:
    given = _bags(rank, tables[rank.rank], dtype, **kwargs)
    weights = [torch.rand(len(one)).to(dtype) for one in given[1]] if weighted else [None] * len(given[1])

    def model(tensors: list[Tensor], indices: list[Tensor], offsets: list[Tensor], weights: list[Any]) -> Any:
        pooled = [
            F.embedding_bag(i, table, o, per_sample_weights=w, **kwargs)
            for table, i, o, w in zip(tensors, indices, offsets, weights, strict=True)
        ]
        return form(pooled, tables, rank.rank)

    told: list[str] = []
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend=fused(told), dynamic=False)(*given, weights)
        wanted = model(*given, weights)
    for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
        assert one.shape == other.shape
        if dtype == torch.float32 and kwargs["mode"] == "sum" and not weighted:
            assert torch.equal(one, other)
        else:  # eager rounds half types and quotients differently, and weighs with fused multiply-adds
            torch.testing.assert_close(one, other, rtol=2e-2 if dtype != torch.float32 else 1e-6, atol=2e-2)
    return told


def _run(rank: Rank, forms: str) -> dict[str, list[str]]:
    rank.init()
    torch.set_num_threads(1)
    if forms == "left":
        return {
            name: _compare(rank, form, [2, 2], torch.float32, False, mode="sum") for name, (form, _) in LEFT.items()
        }
    return {name: _compare(rank, form, tables, torch.float32, False, mode="sum")
            for name, (form, tables) in FOUND.items()}  # fmt: skip


def test_what_is_found() -> None:
    for said in run_ranks(_run, 2, "found"):
        for name in FOUND:
            assert len(said[name]) == 1 and said[name][0].endswith("ark.embedding_bag_all_to_all.default"), (name, said)


def test_what_is_left() -> None:
    for said in run_ranks(_run, 2, "left"):
        for name, (_, reason) in LEFT.items():
            assert len(said[name]) == 1 and reason in said[name][0], (name, said[name])


def _kinds(rank: Rank) -> list[str]:
    rank.init()
    torch.set_num_threads(1)
    told = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        told += _compare(rank, _stacked, [2, 2], dtype, False, mode="mean")
    told += _compare(rank, _stacked, [2, 2], torch.float32, True, mode="sum")
    told += _compare(rank, _stacked, [2, 2], torch.float32, False, mode="sum", include_last_offset=True)
    return told


@pytest.mark.nightly
def test_kinds_of_bags() -> None:
    for told in run_ranks(_kinds, 2):
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
