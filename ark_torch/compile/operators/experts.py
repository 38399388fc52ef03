"""Grouped products: each row times the matrix that it selected (a mixture of experts).

Most models write them as a lookup of whole matrices and a batched product (`torch.bmm(weight[experts], x)`, or the same
as einsum), in which each row would first copy its matrices. Here the lookup is remembered, and a product that reads it
becomes the operator "experts", which reads the selected matrices in place; the copy is then unread and is dropped. A
product's operand is a view of the lookup, so its strides tell which dimensions select matrices, and which are a
matrix's rows and columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Strided, Unsupported
from ark_torch.compile.lowering import NAMED_RULES, Lowering, contiguous_strides, lowers
from ark_torch.compile.operators.pointwise import keyword


@dataclass
class _Lookup:
    table: Strided  # [matrices, d1, d2]
    index: Strided
    out: Strided  # [*index, d1, d2], contiguous
    wrap: bool  # negative indices count from the end
    versions: tuple[int, int, int]

    def current(self, low: Lowering) -> bool:
        return self.versions == _versions(low, self.table, self.index, self.out)


def _versions(low: Lowering, *operands: Strided) -> tuple[int, int, int]:
    first, second, third = (low.graph.version(operand.buffer) for operand in operands)
    return first, second, third


def remember(low: Lowering, table: Strided, index: Strided, out: Strided, dim: int, wrap: bool) -> None:
    """Remembers a lookup of matrices; called before its result is written."""
    if dim != 0 or len(table.shape) != 3 or out.strides != contiguous_strides(out.shape) or not index.shape:
        return
    if not table.dtype.is_floating_point:
        return
    table_version, index_version, out_version = _versions(low, table, index, out)
    low.notes.setdefault("lookups", {})[out.buffer] = _Lookup(
        table, index, out, wrap, (table_version, index_version, out_version + 1)
    )


def grouped(low: Lowering, out: Strided, left: Strided, right: Strided) -> bool:
    """Writes out = left @ right as a grouped product if either was looked up. Returns False if neither was."""
    if _try(low, out, left, right):
        return True
    return _try(low, _transposed(out), _transposed(right), _transposed(left))


def _transposed(x: Strided) -> Strided:
    return x._replace(
        shape=(*x.shape[:-2], x.shape[-1], x.shape[-2]), strides=(*x.strides[:-2], x.strides[-1], x.strides[-2])
    )


def _inner(lookup: _Lookup, length: int, stride: int) -> tuple[int, int] | None:
    """The table dimension that `stride` walks within a matrix, and by how many of its elements."""
    rows, columns = lookup.table.shape[1:]
    if length == 1:
        return 0, 0
    if (stride % columns == 0 and stride < rows * columns and columns > 1) or columns == 1:
        return 1, stride // columns
    return (2, stride) if (length - 1) * stride < columns else None


def _try(low: Lowering, out: Strided, a: Strided, b: Strided) -> bool:
    lookup = low.notes.get("lookups", {}).get(b.buffer)
    if lookup is None or not lookup.current(low) or len(b.shape) != len(out.shape) or b.shape[:-2] != out.shape[:-2]:
        return False
    size = math.prod(lookup.table.shape[1:])
    columns = lookup.table.shape[2]
    depth, width = b.shape[-2:]
    # Leading dimensions: (length, stride in the index, stride of a, stride of out).
    lead = []
    for n, step, of_a, of_out in zip(b.shape[:-2], b.strides[:-2], a.strides[:-2], out.strides[:-2], strict=True):
        if n > 1 and step % size != 0:
            return False
        lead.append((n, step // size if n > 1 else 0, of_a, of_out))
    lead.append((a.shape[-2], 0, a.strides[-2], out.strides[-2]))
    column, of_out = b.strides[-1], out.strides[-1]
    if width > 1 and (width - 1) * column >= size:  # columns of several matrices side by side
        if column >= size or size % column != 0 or width % (size // column) != 0:
            return False
        lead.append((width * column // size, 1, 0, of_out * (size // column)))
        width = size // column
    places = [_inner(lookup, depth, b.strides[-2]), _inner(lookup, width, column)]
    if any(place is None for place in places) or places[0][0] == places[1][0] != 0:  # type: ignore[index]
        return False
    first, rest = divmod(b.offset, size)
    strides, reach = [], list(divmod(rest, columns))
    begin = tuple(reach)
    for n, (dim, step) in zip((depth, width), places, strict=True):  # type: ignore[misc]
        strides.append(lookup.table.strides[dim] * step if dim else 1)
        if dim:
            reach[dim - 1] += (n - 1) * step
    if reach[0] >= lookup.table.shape[1] or reach[1] >= columns:
        return False
    table = lookup.table._replace(
        shape=(lookup.table.shape[0], depth, width),
        strides=(lookup.table.strides[0], *strides),
        offset=lookup.table.offset + begin[0] * lookup.table.strides[1] + begin[1] * lookup.table.strides[2],
    )
    index = lookup.index
    if lookup.wrap:
        size_of_table = Literal(lookup.table.shape[0], torch.int64, ())
        negative = low.pointwise("lt", index, Literal(0, torch.int64, ()), dtype=torch.bool)
        moved = low.pointwise("add", index, size_of_table, dtype=torch.int64)
        index = low.pointwise("where", negative, moved, index, dtype=torch.int64)
    if index.strides != contiguous_strides(index.shape):
        index = low.copy(index, low.fresh(index.dtype, index.shape))
    lengths = tuple(n for n, *_ in lead)
    rows = a._replace(shape=(*lengths, depth), strides=(*(s for _, _, s, _ in lead), a.strides[-1]))
    chosen = index._replace(shape=lengths, strides=tuple(s for _, s, _, _ in lead), offset=index.offset + first)
    result = out._replace(shape=(*lengths, width), strides=(*(s for *_, s in lead), of_out))
    low.node("experts", [rows, table, chosen], result)
    return True


def grouped_mm_fallback(low: Lowering, node: Node) -> Strided:
    """Hugging Face's operator for the same, for any floating type; GPUs use their own."""
    if low.device.type != "cpu":
        raise Unsupported("no lowering for this operator")
    return grouped_mm(low, node)


NAMED_RULES["transformers::grouped_mm_fallback.default"] = grouped_mm_fallback


@lowers(aten._grouped_mm.default)
def grouped_mm(low: Lowering, node: Node) -> Strided:
    """Rows in runs, one per matrix, whose ends are known at run time."""
    a, b = (low.stored(low.operand(x)) for x in node.args[:2])
    offsets, bias = keyword(node, "offs", None), keyword(node, "bias", None)
    if len(a.shape) != 2 or len(b.shape) != 3 or offsets is None or bias is not None:
        raise Unsupported("a grouped product that is not of rows [P, K] and matrices [E, K, N] with offsets")
    if not a.dtype.is_floating_point or a.dtype != b.dtype:
        raise Unsupported("a grouped product of mixed types")
    ends = low.stored(low.operand(offsets))
    if ends.dtype not in (torch.int32, torch.int64):
        raise Unsupported("offsets that are no integers")
    return low.node("experts", [a, b, ends], low.result(node), runs=True)
