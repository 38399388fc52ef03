"""Copies into other layouts, concatenation, filling, and the copies back into inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ark_torch.compile import analysis
from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, check_apart, lowers
from ark_torch.compile.operators.pointwise import keyword
from ark_torch.compile.views import view_of

prims = torch.ops.prims


def _part(whole: Strided, dim: int, begin: int, length: int) -> Strided:
    shape = (*whole.shape[:dim], length, *whole.shape[dim + 1 :])
    return whole._replace(shape=shape, offset=whole.offset + begin * whole.strides[dim])


@lowers(aten.clone.default, aten.lift_fresh_copy.default)
def clone(low: Lowering, node: Node) -> Operand:
    """Drops the copy if that is unobservable: equal layouts, and nothing writes the source."""
    source = low.operand(node.args[0])
    out = low.result(node)
    same_layout = isinstance(source, Strided) and source._replace(buffer=0, offset=0).same_place(out._replace(buffer=0))
    if same_layout and isinstance(node.args[0], Node) and analysis.root_of(node.args[0]) not in low.mutated:
        return source
    return low.copy(source, out)


@lowers(aten.repeat.default)
def repeat(low: Lowering, node: Node) -> Operand:
    """One copy: every dimension of the result is (repeats, length), and the source is expanded over the repeats."""
    source, out = low.operand(node.args[0]), low.result(node)
    repeats = [int(n) for n in node.args[1]]  # type: ignore[union-attr, arg-type]
    lengths = [1] * (len(repeats) - len(source.shape)) + list(source.shape)
    if isinstance(source, Literal):
        return low.copy(source, out)
    given = (0,) * (len(repeats) - len(source.shape)) + source.strides
    shape = [n for pair in zip(repeats, lengths, strict=True) for n in pair]
    strides = [s for step in given for s in (0, step)]
    target = [s for n, step in zip(lengths, out.strides, strict=True) for s in (n * step, step)]
    low.copy(
        source._replace(shape=tuple(shape), strides=tuple(strides)),
        out._replace(shape=tuple(shape), strides=tuple(target)),
    )
    return out


@lowers(aten.cat.default)
def cat(low: Lowering, node: Node) -> Operand:
    out = low.result(node)
    dim = int(keyword(node, "dim", 0)) % len(out.shape)
    begin = 0
    for argument in node.args[0]:  # type: ignore[union-attr]
        operand = low.operand(argument)
        if operand.shape == (0,):
            continue
        low.copy(operand, _part(out, dim, begin, operand.shape[dim]))
        begin += operand.shape[dim]
    assert begin == out.shape[dim]
    return out


@lowers(aten.constant_pad_nd.default)
def constant_pad(low: Lowering, node: Node) -> Operand:
    pads: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    if any(not isinstance(n, int) or n < 0 for n in pads):
        raise Unsupported("padding that cuts")
    if not any(pads):  # torchao's products pad their rows, if only by nothing
        return clone(low, node)
    source, out = low.operand(node.args[0]), low.result(node)
    value = keyword(node, "value", 0)
    low.copy(low.constant(value, out.dtype), out)
    inner = out
    for i in range(len(pads) // 2):
        dim = len(out.shape) - 1 - i
        inner = _part(inner, dim, pads[2 * i], source.shape[dim])
    low.copy(source, inner)
    return out


@lowers(aten.slice_scatter.default, aten.select_scatter.default)
def write_part(low: Lowering, node: Node) -> Operand:
    """A copy with one part replaced."""
    base, source, *where = node.args
    out = low.copy(low.operand(base), low.result(node))
    view = aten.slice.Tensor if node.target is aten.slice_scatter.default else aten.select.int
    target = view_of(view, out, where or [0], node.kwargs)
    assert isinstance(target, Strided)  # a single view
    low.copy(low.expand(low.operand(source), target.shape), target)
    return out


@lowers(aten.copy_.default, aten.copy.default)
def copy(low: Lowering, node: Node) -> Operand:
    source = low.operand(node.args[1])
    if node.target is aten.copy.default:
        target = low.result(node)
    else:
        base = low.operand(node.args[0])
        if not isinstance(base, Strided):
            raise Unsupported("a write into a constant")
        target = base
        check_apart(target)
        if isinstance(source, Strided) and source.buffer == target.buffer:
            if source.same_place(target):
                return target
            # Both are in one tensor and may overlap.
            source = low.copy(source, low.fresh(source.dtype, source.shape))
    if target.dtype == torch.bool and source.dtype != torch.bool:
        raise Unsupported("a copy of numbers into booleans")
    return low.copy(low.expand(source, target.shape), target)


@lowers(prims.rev.default, aten.flip.default)
def flip(low: Lowering, node: Node) -> Operand:
    """Reads by decreasing indices, dimension by dimension."""
    source = low.stored(low.operand(node.args[0]))
    dims = [int(d) % max(len(source.shape), 1) for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    out = low.result(node)
    if not dims or not source.shape:
        return low.copy(source, out)
    for i, dim in enumerate(dims):
        length = source.shape[dim]
        index = low.node("iota", [], low.fresh(torch.int64, (length,)), start=length - 1, step=-1)
        target = out if i == len(dims) - 1 else low.fresh(source.dtype, source.shape)
        source = low.node("gather", [source, index], target, dim=dim, wrap=False)
    return source


@lowers(aten.fill.Scalar)
def fill(low: Lowering, node: Node) -> Operand:
    dtype, shape = node.meta["val"].dtype, tuple(node.meta["val"].shape)
    value = node.args[1]
    return low.constant(value, dtype, shape)  # type: ignore[arg-type]


@lowers(aten.arange.start_step, aten.arange.default, aten.arange.start, prims.iota.default)
def iota(low: Lowering, node: Node) -> Operand:
    out = low.result(node)
    if node.target is prims.iota.default:
        start, step = node.kwargs["start"], node.kwargs["step"]
    else:
        start = 0 if node.target is aten.arange.default else node.args[0]
        step = node.args[2] if len(node.args) > 2 else 1
    if not isinstance(start, int) or not isinstance(step, int):
        raise Unsupported("a range with fractional steps")
    if out.dtype == torch.int64:
        return low.node("iota", [], out, start=start, step=step)
    if max(abs(start), abs(start + step * out.shape[0])) > 1 << 24 and out.dtype.is_floating_point:
        raise Unsupported("a range beyond what float32 counts")
    whole = low.node("iota", [], low.fresh(torch.int64, out.shape), start=start, step=step)
    return low.copy(whole, out)
