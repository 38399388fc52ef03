"""Reductions. The graph sums in float32 (floating types) or int64, and rounds once to the result's type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, contiguous_strides, lowers
from ark_torch.compile.operators.pointwise import keyword, operand_as


def dimensions(operand: Operand, dims: Any) -> list[int]:
    """Interprets `dim` as PyTorch does: None and [] mean all dimensions."""
    rank = len(operand.shape)
    if dims is None or dims == []:
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return sorted({int(d) % max(rank, 1) for d in listed})


def reduced_shape(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return [1 if i in dims else n for i, n in enumerate(shape)]


def reduce_float(low: Lowering, op: str, operand: Operand, dims: Sequence[int]) -> Strided:
    """Reduces over `dims`, kept with length 1, into a new float32 result."""
    listed = dimensions(operand, list(dims))
    out = low.fresh(torch.float32, reduced_shape(operand.shape, listed))
    return reduce(low, op, operand, listed, True, out)


def reduce(low: Lowering, op: str, operand: Operand, dims: list[int], keepdim: bool, out: Strided) -> Strided:
    operand = low.stored(operand)
    if not operand.shape:  # a single number: nothing to reduce
        operand, out_flat = low.expand(operand, (1,)), out._replace(shape=(1,), strides=(1,))
        low.node(op, [operand], out_flat, dims=[0], keepdim=True)
        return out
    return low.node(op, [operand], out, dims=dims, keepdim=keepdim)


@lowers(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def sum_or_mean(low: Lowering, node: Node) -> Operand:
    op = "sum" if "sum" in node.target._schema.name else "mean"  # type: ignore[union-attr]
    out = low.result(node)
    operand = operand_as(low, node.args[0], out.dtype)
    dims = dimensions(operand, keyword(node, "dim", None))
    return reduce(low, op, operand, dims, bool(keyword(node, "keepdim", False)), out)


@lowers(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def extreme(low: Lowering, node: Node) -> Operand:
    op = "amax" if node.target in (aten.amax.default, aten.max.default) else "amin"
    operand = low.operand(node.args[0])
    if operand.dtype == torch.bool:
        raise Unsupported(f"{op} of booleans")
    dims = dimensions(operand, keyword(node, "dim", None))
    return reduce(low, op, operand, dims, bool(keyword(node, "keepdim", False)), low.result(node))


def _turned(low: Lowering, operand: Operand) -> Operand:
    """Reverses the order, so that the least becomes the greatest; NaN stays NaN, and no integer overflows."""
    if operand.dtype.is_floating_point:
        return low.pointwise("neg", operand)
    return low.pointwise("bitwise_not", operand, dtype=torch.int64)


@lowers(aten.max.dim, aten.min.dim)
def extreme_with_index(low: Lowering, node: Node) -> tuple[Operand, ...]:
    operand = low.operand(node.args[0])
    if operand.dtype == torch.bool:
        raise Unsupported("max and min of booleans")
    dims, keepdim = dimensions(operand, node.args[1]), bool(keyword(node, "keepdim", False))
    op, turned = ("amax", operand) if node.target is aten.max.dim else ("amin", _turned(low, operand))
    return (
        reduce(low, op, operand, dims, keepdim, low.result(node, 0)),
        reduce(low, "argmax", turned, dims, keepdim, low.result(node, 1)),
    )


@lowers(aten.argmax.default, aten.argmin.default)
def argmax(low: Lowering, node: Node) -> Operand:
    operand = low.stored(low.operand(node.args[0]))
    dim = keyword(node, "dim", None)
    if operand.dtype == torch.bool:
        raise Unsupported("argmax of booleans")
    if node.target is aten.argmin.default:
        operand = low.stored(_turned(low, operand))
    if dim is not None:
        keepdim = bool(keyword(node, "keepdim", False))
        return reduce(low, "argmax", operand, dimensions(operand, dim), keepdim, low.result(node))
    if operand.strides != contiguous_strides(operand.shape):
        operand = low.copy(operand, low.fresh(operand.dtype, operand.shape))
    elements = torch.Size(operand.shape).numel()
    out = low.result(node)
    reduce(
        low, "argmax", operand._replace(shape=(elements,), strides=(1,)), [0], False, out._replace(shape=(), strides=())
    )
    return out


@lowers(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def any_or_all(low: Lowering, node: Node) -> Operand:
    out = low.result(node)
    operand = low.operand(node.args[0])
    everywhere = "all" in node.target._schema.name  # type: ignore[union-attr]
    if operand.dtype != torch.bool or everywhere:
        # The condition that `any` tests: for `all`, whether an element is false.
        zero = Literal(0.0, torch.float32, ()) if operand.dtype.is_floating_point else Literal(0, torch.int64, ())
        if operand.dtype == torch.bool:
            operand = low.pointwise("logical_not", operand, dtype=torch.bool)
        else:
            operand = low.pointwise("eq" if everywhere else "ne", operand, zero, dtype=torch.bool)
    dims, keepdim = dimensions(operand, keyword(node, "dim", None)), bool(keyword(node, "keepdim", False))
    if not everywhere:
        return reduce(low, "any", operand, dims, keepdim, out)
    found = reduce(low, "any", operand, dims, keepdim, low.fresh(torch.bool, out.shape))
    return low.pointwise("logical_not", found, out=out)


def variance(low: Lowering, node: Node) -> tuple[Strided, Strided]:
    """Variance and mean in float32, dimensions kept."""
    operand = low.operand(node.args[0])
    if not operand.dtype.is_floating_point:
        raise Unsupported("variance of integers")
    dims = dimensions(operand, keyword(node, "dim", None))
    count = torch.Size(operand.shape[d] for d in dims).numel()
    correction = keyword(node, "correction", 1)
    correction = 1.0 if correction is None else float(correction)
    mean = reduce_float(low, "mean", operand, dims)
    centred = low.pointwise("sub", operand, mean)
    total = reduce_float(low, "sum", low.pointwise("mul", centred, centred), dims)
    divisor = max(count - correction, 0.0)
    return low.pointwise("div", total, Literal(divisor, torch.float32, ())), mean


def _without(low: Lowering, kept: Strided, out: Strided) -> Strided:
    """`kept` has the reduced dimensions with length 1; `out` may lack them."""
    shape = [n for n in kept.shape if n != 1]
    squeezed = [(n, s) for n, s in zip(out.shape, out.strides, strict=True) if n != 1]
    assert shape == [n for n, _ in squeezed], (kept, out)
    strides = iter(s for _, s in squeezed)
    low.copy(kept, out._replace(shape=kept.shape, strides=tuple(1 if n == 1 else next(strides) for n in kept.shape)))
    return out


@lowers(aten.var_mean.correction)
def var_mean(low: Lowering, node: Node) -> tuple[Operand, ...]:
    return tuple(_without(low, kept, low.result(node, i)) for i, kept in enumerate(variance(low, node)))


@lowers(aten.var.correction)
def var(low: Lowering, node: Node) -> Operand:
    return _without(low, variance(low, node)[0], low.result(node))
