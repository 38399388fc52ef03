"""Lookups and updates by index: gather and scatter along one dimension.

A lookup by several dimensions at once is one along a single dimension of the same memory: positions are counted in
steps of all their strides, and the index is the sum that the indices make. An index out of range is -1 then, which the
kernel reports as it does any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, check_apart, contiguous_strides, lowers
from ark_torch.compile.operators import experts
from ark_torch.compile.operators.pointwise import keyword


def _index(low: Lowering, argument: Any) -> Strided:
    index = low.stored(low.operand(argument))
    if index.dtype not in (torch.int64, torch.int32):
        raise Unsupported("indexing by a mask")
    return index


def _from_the_end(low: Lowering, index: Strided, length: int) -> Strided:
    """x[-1] is the last: indices that may be negative, as gather and scatter want them. Once for each index and length,
    since all layers of a decoder use the same."""
    known = low.notes.setdefault("indices", {})
    key = (low.graph.read(index), length)  # another number after a write
    if key not in known:
        zero, size = Literal(0, torch.int64, ()), Literal(length, torch.int64, ())
        negative = low.pointwise("lt", index, zero, dtype=torch.bool)
        moved = low.pointwise("add", index, size, dtype=torch.int64)
        known[key] = low.pointwise("where", negative, moved, index, dtype=torch.int64)
    result: Strided = known[key]
    return result


def _one_index(indices: Any) -> tuple[int, Any]:
    """Dimension and index of `x[:, :, index]`."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise Unsupported("indexing along several dimensions at once")
    return given[0]


def _gather(low: Lowering, node: Node, table: Operand, index: Strided, dim: int, wrap: bool = False) -> Strided:
    """`wrap`: x[-1] is the last."""
    out = low.result(node)
    table = low.stored(table)
    if out.shape != (*table.shape[:dim], *index.shape, *table.shape[dim + 1 :]):
        raise Unsupported("indexing with a result of another shape")
    experts.remember(low, table, index, out, dim, wrap)
    return low.node("gather", [table, index], out, dim=dim, wrap=wrap, called=_name(node))


def _name(node: Node) -> str:
    """What a user calls the operator, for messages."""
    return str(node.target._schema.name).removeprefix("aten::").removeprefix("_unsafe_")  # type: ignore[union-attr]


def _out_of_range(low: Lowering, index: Strided, length: int) -> list[Strided]:
    """Where an index is wrong, which the sum of several would hide."""
    bounds = (("lt", 0), ("ge", length))
    return [low.pointwise(op, index, Literal(bound, torch.int64, ()), dtype=torch.bool) for op, bound in bounds]


def _flattened(
    low: Lowering, table: Strided, dims: Sequence[int], indices: Sequence[Strided], wrong: Sequence[Strided]
) -> tuple[Strided, Strided]:
    """The table with `dims` (neighbours) as one, and the index into that."""
    strides = [table.strides[dim] for dim in dims]
    unit = math.gcd(*strides) or 1
    extent = 1 + sum((table.shape[dim] - 1) * table.strides[dim] for dim in dims) // unit
    first, last = dims[0], dims[-1] + 1
    flat = table._replace(
        shape=(*table.shape[:first], extent, *table.shape[last:]),
        strides=(*table.strides[:first], unit, *table.strides[last:]),
    )
    total: Operand = Literal(0, torch.int64, ())
    for index, stride in zip(indices, strides, strict=True):
        step = low.pointwise("mul", index, Literal(stride // unit, torch.int64, ()), dtype=torch.int64)
        total = low.pointwise("add", total, step, dtype=torch.int64)
    for where in wrong:
        total = low.pointwise("where", where, Literal(-1, torch.int64, ()), total, dtype=torch.int64)
    return flat, low.stored(total)


@lowers(aten.embedding.default)
def embedding(low: Lowering, node: Node) -> Operand:
    return _gather(low, node, low.operand(node.args[0]), _index(low, node.args[1]), 0)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(low: Lowering, node: Node) -> Operand:
    table = low.stored(low.operand(node.args[0]))
    dims = [dim for dim, by in enumerate(node.args[1]) if by is not None]  # type: ignore[arg-type]
    if len(dims) > 1:
        return _by_several(low, node, table, dims)
    dim, by = _one_index(node.args[1])
    return _gather(low, node, table, _index(low, by), dim, wrap=True)


def _by_several(low: Lowering, node: Node, table: Strided, dims: list[int]) -> Operand:
    """x[i, j]: the masks of Hugging Face's models look up so what is padding."""
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Unsupported("indexing along dimensions that are not neighbours")
    indices = [_from_the_end(low, _index(low, node.args[1][dim]), table.shape[dim]) for dim in dims]  # type: ignore[index]
    wrong = [w for i, dim in zip(indices, dims, strict=True) for w in _out_of_range(low, i, table.shape[dim])]
    return _gather(low, node, *_flattened(low, table, dims, indices, wrong), dims[0])


@lowers(aten.gather.default)
def gather_along(low: Lowering, node: Node) -> Operand:
    """out[i, j] = x[i, index[i, j]]: an index for each element of the result."""
    table, index = low.stored(low.operand(node.args[0])), _index(low, node.args[2])
    if not table.shape or len(index.shape) != len(table.shape):
        raise Unsupported("gather from or by a single number")
    dim = int(node.args[1]) % len(table.shape)  # type: ignore[arg-type]
    attributes = dict(dim=dim, along=True, wrap=False, called=_name(node))
    return low.node("gather", [_within(table, index, dim), index], low.result(node), **attributes)


def _within(whole: Strided, index: Strided, dim: int) -> Strided:
    """The part that an index of fewer rows is about."""
    return whole._replace(shape=tuple(whole.shape[d] if d == dim else n for d, n in enumerate(index.shape)))


@lowers(aten.index_select.default)
def index_select(low: Lowering, node: Node) -> Operand:
    table, by = low.operand(node.args[0]), _index(low, node.args[2])
    if not table.shape:
        raise Unsupported("index_select of a single number")
    dim = int(node.args[1]) % len(table.shape)  # type: ignore[arg-type]
    if not by.shape:
        by = by._replace(shape=(1,), strides=(1,))
    return _gather(low, node, table, by, dim)


@lowers(aten.index_put_.default, aten.index_put.default, aten._unsafe_index_put.default)
def index_put(low: Lowering, node: Node) -> Operand:
    dim, by = _one_index(node.args[1])
    source, in_place = low.operand(node.args[2]), node.target is aten.index_put_.default
    accumulate = bool(keyword(node, "accumulate", False))
    return scatter(low, node, dim, _index(low, by), source, in_place, wrap=True, accumulate=accumulate)


@lowers(aten.index_add_.default, aten.index_add.default)
def index_add(low: Lowering, node: Node) -> Operand:
    """Where it comes whole, as for bfloat16; other types come as an index_put that accumulates."""
    base, source = low.operand(node.args[0]), low.operand(node.args[3])
    if not base.shape:
        raise Unsupported("index_add into a single number")
    alpha = keyword(node, "alpha", 1)
    if alpha != 1:
        wide = torch.float32 if source.dtype.is_floating_point else torch.int64
        number = Literal(float(alpha) if source.dtype.is_floating_point else int(alpha), wide, ())
        source = low.pointwise("mul", source, number, dtype=source.dtype)
    dim, by = int(node.args[1]) % len(base.shape), _index(low, node.args[2])  # type: ignore[arg-type]
    if not by.shape:
        by = by._replace(shape=(1,), strides=(1,))
    return scatter(low, node, dim, by, source, node.target is aten.index_add_.default, accumulate=True)


@lowers(aten.index_copy_.default, aten.index_copy.default)
def index_copy(low: Lowering, node: Node) -> Operand:
    base = low.operand(node.args[0])
    if not base.shape:
        raise Unsupported("index_copy into a single number")
    dim = int(node.args[1]) % len(base.shape)  # type: ignore[arg-type]
    by, source = _index(low, node.args[2]), low.operand(node.args[3])
    if not by.shape:
        by = by._replace(shape=(1,), strides=(1,))
    return scatter(low, node, dim, by, source, node.target is aten.index_copy_.default)


@lowers(
    *(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two),
    *(aten.scatter_.src, aten.scatter_.value, aten.scatter_add_.default),
)
def scatter_along(low: Lowering, node: Node) -> Operand:
    """An index for each element of the source."""
    name = _name(node)
    reduces = node.target is aten.scatter_reduce.two
    if reduces and (node.args[4] != "sum" or not keyword(node, "include_self", True)):
        raise Unsupported("scatter_reduce that does not add")
    accumulate = reduces or "scatter_add" in name
    index = _index(low, node.args[2])
    target, index, source = _target(low, node, index, low.operand(node.args[3]), name.endswith("_"), accumulate)
    if not target.shape or len(index.shape) != len(target.shape):
        raise Unsupported("scatter into or by a single number")
    dim = int(node.args[1]) % len(target.shape)  # type: ignore[arg-type]
    if isinstance(source, Strided) and source.shape:
        source = source._replace(shape=index.shape)
    source, part = low.stored(low.expand(source, index.shape)), _within(target, index, dim)
    attributes = dict(dim=dim, along=True, accumulate=accumulate, wrap=False, called=name)
    low.node("scatter", [part, index, source], part, **attributes)
    return target


def _target(
    low: Lowering, node: Node, index: Strided, source: Operand, in_place: bool, accumulate: bool
) -> tuple[Strided, Strided, Operand]:
    """What an update writes, by which index, and what it writes there."""
    base = low.operand(node.args[0])
    target = base if in_place else low.copy(base, low.result(node))
    if not isinstance(target, Strided):
        raise Unsupported("an update of a constant")
    if accumulate and target.dtype == torch.bool:
        raise Unsupported("sums of booleans")
    if isinstance(source, Literal) and not source.shape:  # a number takes the target's type
        kinds = {torch.bool: bool, torch.int64: int, torch.int32: int}
        source = Literal(kinds.get(target.dtype, float)(source.value), target.dtype, ())
    if source.dtype != target.dtype:
        raise Unsupported("an update of another type")
    check_apart(target)
    # What is read while the target is written: a copy, where both lie in one tensor.
    if isinstance(source, Strided) and source.buffer == target.buffer:
        source = low.copy(source, low.fresh(source.dtype, source.shape))
    if index.buffer == target.buffer:
        index = low.copy(index, low.fresh(index.dtype, index.shape))
    return target, index, source


def scatter(
    low: Lowering,
    node: Node,
    dim: int,
    index: Strided,
    source: Operand,
    in_place: bool,
    wrap: bool = False,
    accumulate: bool = False,
) -> Operand:
    target, index, source = _target(low, node, index, source, in_place, accumulate)
    rest = (target.shape[:dim], target.shape[dim + 1 :])
    source = low.stored(low.expand(low.stored(source), (*rest[0], *index.shape, *rest[1])))
    if not index.shape:  # x[i] = ... with one number
        index = index._replace(shape=(1,), strides=(1,))
        shape, strides = list(source.shape), list(source.strides)
        shape.insert(dim, 1)
        strides.insert(dim, 0)
        source = source._replace(shape=tuple(shape), strides=tuple(strides))
    if len(index.shape) > 1:  # as one dimension
        index, source = (low.copy(o, low.fresh(o.dtype, o.shape)) for o in (index, source))
        positions = math.prod(index.shape)
        flat = (*rest[0], positions, *rest[1])
        index = index._replace(shape=(positions,), strides=(1,))
        source = source._replace(shape=flat, strides=contiguous_strides(flat))
    attributes = dict(dim=dim, accumulate=accumulate, wrap=wrap, called=_name(node))
    return low.node("scatter", [target, index, source], target, **attributes)
