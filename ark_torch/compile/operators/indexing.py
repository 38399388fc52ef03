"""Lookups and updates by index: gather and scatter along one dimension.

Sums of half types stay in float32 until all have been added, and are rounded once.
"""

from __future__ import annotations

import math
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


def _one_index(indices: Any) -> tuple[int, Any]:
    """Dimension and index of `x[:, :, index]`."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise Unsupported("indexing along several dimensions at once")
    return given[0]


def _gather(low: Lowering, node: Node, table: Operand, index: Strided, dim: int, wrap: bool = False) -> Strided:
    """`wrap`: x[-1] is the last element."""
    out = low.result(node)
    table = low.stored(table)
    if out.shape != (*table.shape[:dim], *index.shape, *table.shape[dim + 1 :]):
        raise Unsupported("indexing with a result of another shape")
    experts.remember(low, table, index, out, dim, wrap)
    return low.node("gather", [table, index], out, dim=dim, wrap=wrap, called=_name(node))


def _name(node: Node) -> str:
    """The user's name of the operator, for messages."""
    return str(node.target._schema.name).removeprefix("aten::").removeprefix("_unsafe_")  # type: ignore[union-attr]


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
    """Lowers x[i, j], as used by the masks of Hugging Face's models to look up padding."""
    first, behind = dims[0], dims[-1] + 1
    if dims != list(range(first, behind)):
        raise Unsupported("indexing along dimensions that are not neighbours")
    indices = [_index(low, node.args[1][dim]) for dim in dims]  # type: ignore[index]
    shape = torch.broadcast_shapes(*(index.shape for index in indices))  # type: ignore[no-untyped-call]
    out = low.result(node)
    if out.shape != (*table.shape[:first], *shape, *table.shape[behind:]):
        raise Unsupported("indexing with a result of another shape")
    inputs = [table, *(low.expand(index, shape) for index in indices)]
    return low.node("gather", inputs, out, dim=first, wrap=True, called=_name(node))


@lowers(aten.gather.default)
def gather_along(low: Lowering, node: Node) -> Operand:
    """out[i, j] = x[i, index[i, j]]: an index per element of the result."""
    table, index = low.stored(low.operand(node.args[0])), _index(low, node.args[2])
    if not table.shape or len(index.shape) != len(table.shape):
        raise Unsupported("gather from or by a single number")
    dim = int(node.args[1]) % len(table.shape)  # type: ignore[arg-type]
    attributes = dict(dim=dim, along=True, wrap=False, called=_name(node))
    return low.node("gather", [_within(table, index, dim), index], low.result(node), **attributes)


def _within(whole: Strided, index: Strided, dim: int) -> Strided:
    """The part that an index of fewer rows refers to."""
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
    """There is an index per element of the source."""
    name = _name(node)
    reduces = node.target is aten.scatter_reduce.two
    if reduces and (node.args[4] != "sum" or not keyword(node, "include_self", True)):
        raise Unsupported("scatter_reduce that does not add")
    accumulate = reduces or "scatter_add" in name
    index, in_place = _index(low, node.args[2]), name.endswith("_")
    target, index, source = _target(low, node, index, low.operand(node.args[3]), in_place, accumulate)
    if not target.shape or len(index.shape) != len(target.shape):
        raise Unsupported("scatter into or by a single number")
    dim = int(node.args[1]) % len(target.shape)  # type: ignore[arg-type]
    if isinstance(source, Strided) and source.shape:
        source = source._replace(shape=index.shape)
    source, part = low.stored(low.expand(source, index.shape)), _within(target, index, dim)
    attributes = dict(dim=dim, along=True, accumulate=accumulate, wrap=False, called=name)
    low.node("scatter", [part, index, source], part, **attributes)
    return _rounded(low, node, target, in_place)


def _target(
    low: Lowering, node: Node, index: Strided, source: Operand, in_place: bool, accumulate: bool
) -> tuple[Strided, Strided, Operand]:
    """The target of an update, its index, and its source."""
    base = low.operand(node.args[0])
    dtype = base.dtype
    if accumulate and dtype == torch.bool:
        raise Unsupported("sums of booleans")
    if isinstance(source, Literal) and not source.shape:  # a number takes the target's type
        kinds = {torch.bool: bool, torch.int64: int, torch.int32: int}
        source = Literal(kinds.get(dtype, float)(source.value), dtype, ())
    if source.dtype != dtype:
        raise Unsupported("an update of another type")
    if in_place:
        if not isinstance(base, Strided):
            raise Unsupported("an update of a constant")
        check_apart(base)
    if accumulate and dtype in (torch.bfloat16, torch.float16):
        target, source = low.copy(base, low.fresh(torch.float32, base.shape)), low.cast(source, torch.float32)
    else:
        target = base if in_place and isinstance(base, Strided) else low.copy(base, low.result(node))
    # Copy operands that are in the target's tensor: they are read while it is written.
    if isinstance(source, Strided) and source.buffer == target.buffer:
        source = low.copy(source, low.fresh(source.dtype, source.shape))
    if index.buffer == target.buffer:
        index = low.copy(index, low.fresh(index.dtype, index.shape))
    return target, index, source


def _rounded(low: Lowering, node: Node, target: Strided, in_place: bool) -> Strided:
    """Converts what was added up in float32 back to its original type."""
    if target.dtype == node.meta["val"].dtype:
        return target
    out = low.operand(node.args[0]) if in_place else low.result(node)
    assert isinstance(out, Strided)
    return low.copy(target, out)


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
    if len(index.shape) > 1:  # flattened to one dimension
        index, source = (low.copy(o, low.fresh(o.dtype, o.shape)) for o in (index, source))
        positions = math.prod(index.shape)
        flat = (*rest[0], positions, *rest[1])
        index = index._replace(shape=(positions,), strides=(1,))
        source = source._replace(shape=flat, strides=contiguous_strides(flat))
    attributes = dict(dim=dim, accumulate=accumulate, wrap=wrap, called=_name(node))
    low.node("scatter", [target, index, source], target, **attributes)
    return _rounded(low, node, target, in_place)
