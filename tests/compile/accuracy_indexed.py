"""Cases of operators that follow indices or move numbers (accuracy_cases.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accuracy_inputs import Call, Case, at, bound, case, each, first, negated, normal
from torch import Tensor

aten, prims = torch.ops.aten, torch.ops.prims


def _along(operator: Any, dim: int) -> Call:
    """Calls with a tensor, the dimension, an index and the rest."""
    return lambda x, *rest: operator(x, dim, *rest)


def _put(operator: Any) -> Call:
    return lambda x, i, v, *rest: operator(x, [i], v, *rest)


def indexed() -> Iterator[Case]:
    table, rows = normal(37, 19), at(37, 50)
    yield case(aten.embedding.default, "rows", table, rows)
    for operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        yield case(operator, "rows", table, rows, call=lambda x, i, operator=operator: operator(x, [i]))
    yield case(aten.gather.default, "rows", table, at(19, 37, 5), call=_along(aten.gather.default, 1))
    yield case(aten.index_select.default, "rows", table, rows, call=_along(aten.index_select.default, 0))
    once, many = (table, each(37, most=11), normal(11, 19)), (table, at(37, 1000), normal(1000, 19))
    for operator in (aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default):
        yield case(operator, "rows", *once, call=negated(_put(operator)))
    yield case(aten.index_put.default, "sums", *many, call=bound(_put(aten.index_put.default), True))
    for operator in (aten.index_copy.default, aten.index_copy_.default):
        yield case(operator, "rows", *once, call=negated(_along(operator, 0)))
    for operator in (aten.index_add.default, aten.index_add_.default):
        yield case(operator, "rows", *many, call=negated(_along(operator, 0)))
    places = (table, each(37, 19), normal(37, 19))
    for operator in (aten.scatter, aten.scatter_):
        yield case(operator.src, "rows", *places, call=negated(_along(operator.src, 1)))
        yield case(operator.value, "rows", *places[:2], call=negated(bound(_along(operator.value, 1), 0.375)))
    sums = (normal(5, 19), at(19, 5, 3000), normal(5, 3000))
    for operator in (aten.scatter_add.default, aten.scatter_add_.default):
        yield case(operator, "rows", *sums, call=negated(_along(operator, 1)))
    reduced = bound(_along(aten.scatter_reduce.two, 1), "sum")
    yield case(aten.scatter_reduce.two, "rows", *sums, call=reduced)
    yield case(aten.topk.default, "rows", table, call=first(bound(aten.topk.default, 5)))
    yield case(aten.sort.default, "rows", table, call=first(bound(aten.sort.default, 1)))
    yield case(aten.sort.stable, "rows", table, call=first(bound(aten.sort.stable, stable=True, dim=1)))


def _copied(a: Tensor) -> Tensor:
    return aten.clone.default(a.t(), memory_format=torch.contiguous_format)


def _by_constants(a: Tensor) -> Tensor:
    return a * torch.tensor([0.375, 3.0, -2.5], dtype=a.dtype)


def _by_iota(a: Tensor) -> Tensor:
    where = dict(dtype=torch.int64, device=torch.device("cpu"), requires_grad=False)
    return a * prims.iota.default(19, start=2, step=3, **where)


def moving() -> Iterator[Case]:
    table = normal(37, 19)
    yield case(aten.clone.default, "transposed", table, call=_copied)
    yield case(aten.lift_fresh_copy.default, "odd", normal(37, 3), call=_by_constants)
    yield case(aten.repeat.default, "odd", table, call=bound(aten.repeat.default, [2, 3]))
    yield case(aten.cat.default, "odd", table, normal(37, 3), call=lambda a, b: aten.cat.default([a, b], 1))
    yield case(
        aten.constant_pad_nd.default, "odd", table, call=bound(aten.constant_pad_nd.default, [1, 2, 3, 0], 0.375)
    )
    yield case(aten.slice_scatter.default, "odd", table, normal(37, 5), call=bound(aten.slice_scatter.default, 1, 3, 8))
    yield case(aten.select_scatter.default, "odd", table, normal(37), call=bound(aten.select_scatter.default, 1, 3))
    yield case(aten.copy_.default, "broadcast", table, normal(19))
    yield case(aten.copy.default, "broadcast", table, normal(19))
    yield case(prims.rev.default, "odd", table, call=bound(prims.rev.default, [0]))
    yield case(aten.flip.default, "odd", table, call=bound(aten.flip.default, [0, 1]))
    yield case(aten.fill.Scalar, "odd", table, call=lambda a: aten.fill.Scalar(a, 0.375) * a)
    for operator, ends in (
        (aten.arange.default, (19,)),
        (aten.arange.start, (3, 22)),
        (aten.arange.start_step, (3, 60, 3)),
    ):
        yield case(operator, "scaled", table, call=lambda a, operator=operator, ends=ends: a * operator(*ends))
    yield case(prims.iota.default, "scaled", table, call=_by_iota)
