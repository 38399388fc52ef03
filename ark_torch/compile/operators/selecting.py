"""Top-k, sorting, running sums, histograms: operators that order or count rows."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, contiguous_strides, lowers
from ark_torch.compile.operators.pointwise import keyword, operand_as
from ark_torch.compile.operators.reductions import reduce

LONGEST = 1 << 18  # a row's pairs of value and position are in a worker's scratch memory


def _row(low: Lowering, node: Node, dim: int) -> tuple[Strided, int]:
    operand = low.stored(low.operand(node.args[0]))
    if not operand.shape:
        raise Unsupported("sorting a single number")
    if operand.dtype == torch.bool:
        raise Unsupported("sorting booleans")
    dim %= len(operand.shape)
    if operand.shape[dim] > LONGEST:
        raise Unsupported(f"sorting rows of {operand.shape[dim]} elements")
    return operand, dim


def _select(low: Lowering, node: Node, dim: int, largest: bool, stable: bool) -> tuple[Strided, Strided]:
    operand, dim = _row(low, node, dim)
    values, places = low.result(node, 0), low.result(node, 1)
    low.node("topk", [operand], places, dim=dim, largest=largest, stable=stable)
    low.node("gather", [operand, places], values, dim=dim, along=True, wrap=False)
    return values, places


@lowers(aten.topk.default)
def topk(low: Lowering, node: Node) -> tuple[Operand, ...]:
    """Always sorted."""
    return _select(low, node, int(keyword(node, "dim", -1)), bool(keyword(node, "largest", True)), False)


@lowers(aten.sort.default, aten.sort.stable)
def sort(low: Lowering, node: Node) -> tuple[Operand, ...]:
    """Always stable."""
    return _select(low, node, int(keyword(node, "dim", -1)), bool(keyword(node, "descending", False)), True)


@lowers(aten.cumsum.default, aten.cumprod.default)
def scan(low: Lowering, node: Node) -> Operand:
    out = low.result(node)
    operand = low.stored(operand_as(low, node.args[0], out.dtype))
    op = "cumsum" if node.target is aten.cumsum.default else "cumprod"
    if not out.shape:
        return low.copy(operand, out)
    return low.node(op, [operand], out, dim=int(node.args[1]) % len(out.shape))  # type: ignore[arg-type]


@lowers(aten.histc.default)
def histc(low: Lowering, node: Node) -> Operand:
    """Counts per bin between adjacent edges; values equal to the last edge belong to the last bin."""
    operand = low.stored(low.operand(node.args[0]))
    bins, least, most = (keyword(node, name, 0) for name in ("bins", "min", "max"))
    if not least < most or operand.dtype != torch.float32:
        raise Unsupported("a histogram over what its data span, or of a type that is not float32")
    if operand.strides != contiguous_strides(operand.shape):
        operand = low.copy(operand, low.fresh(operand.dtype, operand.shape))
    elements = math.prod(operand.shape)
    if bins * elements > 1 << 24:
        raise Unsupported(f"a histogram of {elements} elements in {bins} bins")
    flat = operand._replace(shape=(1, elements), strides=(0, 1))
    lower, upper = (_edges(low, float(least), float(most), int(bins), begin) for begin in (0, 1))
    last = low.pointwise("ge", upper, _number(most), dtype=torch.bool)
    inside = low.pointwise(
        "logical_or",
        low.pointwise("lt", flat, upper, dtype=torch.bool),
        low.pointwise("logical_and", last, low.pointwise("le", flat, upper, dtype=torch.bool), dtype=torch.bool),
        dtype=torch.bool,
    )
    inside = low.pointwise("logical_and", inside, low.pointwise("ge", flat, lower, dtype=torch.bool), dtype=torch.bool)
    out = low.result(node)
    return low.copy(reduce(low, "sum", inside, [1], False, low.fresh(torch.int64, out.shape)), out)


def _number(value: float) -> Literal:
    return Literal(float(value), torch.float32, ())


def _edges(low: Lowering, least: float, most: float, bins: int, begin: int) -> Strided:
    """Edges [begin, begin + bins) of torch.linspace(least, most, bins + 1), as a column."""
    step = _number(float((torch.tensor(most) - torch.tensor(least)) / bins))
    place = low.node("iota", [], low.fresh(torch.int64, (bins,)), start=begin, step=1)
    ahead = low.pointwise("mul", low.cast(place, torch.float32), step)
    rest = low.pointwise("sub", Literal(bins, torch.int64, ()), place, dtype=torch.int64)
    behind = low.pointwise("mul", low.cast(rest, torch.float32), step)
    first = low.pointwise("lt", place, Literal((bins + 1) // 2, torch.int64, ()), dtype=torch.bool)
    edges = low.pointwise(
        "where", first, low.pointwise("add", ahead, _number(least)), low.pointwise("sub", _number(most), behind)
    )
    return edges._replace(shape=(bins, 1), strides=(1, 0))
