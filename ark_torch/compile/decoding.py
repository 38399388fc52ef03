"""Follows a decoded weight from its operator back to the codes.

The operators of int8, float8 and 4 bits are conversions, masks and shifts of bytes' halves and their combination,
subtraction of numbers and zeros, one scale, and views between all of these. The dimensions of the decoded tensor are
tracked as lists of factors, each with a stride in the codes, in the scale and in the zero. So a view that no strides of
the scale could express, such as groups merged back into one depth, is just a different cut of the lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Node

from ark_torch.compile import analysis
from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.ir import CODE_TYPES, SCALAR_TYPES, Strided
from ark_torch.compile.views import view_of

prims = torch.ops.prims


class NotTaken(Exception):
    """The message says why Inductor decodes a product's weight."""


class Factor(NamedTuple):
    length: int
    code: int  # strides; of codes in half bytes if they have 4 bits
    scale: int = 0
    zero: int = 0


@dataclass(frozen=True)
class Leaf:
    """A tensor that is given to the graph, and the view of it that is read."""

    source: Node
    view: Strided
    made: Strided | None = None  # what a region gets in place of the source, and the view is of (tinygemm.py)


@dataclass(frozen=True)
class Decoded:
    dims: tuple[tuple[Factor, ...], ...]
    codes: Leaf
    bits: int = 8
    half: str = ""  # for bytes whose low or high halves are numbers: which; "raised": low halves, shifted up
    signed: bool = False
    high_first: bool = False
    offset: int = 0
    least: int = -128  # range of the integers, as long as they are integers
    most: int = 127
    scale: Leaf | None = None
    zero: Leaf | None = None
    zero_after: bool = False
    block: int = 0  # columns side by side (Codes in csrc/compiler/graph/stage.hpp); 0: columns of bytes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(f.length for f in dim) for dim in self.dims)


def may_decode(node: Any, known: dict[Any, bool] | None = None, depth: int = 12) -> bool:
    """Whether codes are among what a weight is computed from. `known`: results for other nodes."""
    known = {} if known is None else known
    if node not in known:
        known[node] = _may_decode(node, known, depth)
    return known[node]


def _may_decode(node: Any, known: dict[Any, bool], depth: int) -> bool:
    value = tensor_of(node) if isinstance(node, Node) else None
    if value is None or depth == 0:
        return False
    if value.dtype in CODE_TYPES:
        return True
    if analysis.is_source(node) or analysis.is_constant(node):
        return False
    followed = analysis.is_view(node) or node.target in (*CONVERSIONS, *_ARITHMETIC, aten.clone.default)
    return followed and any(may_decode(one, known, depth - 1) for one in node.all_input_nodes)


def joined(factors: Sequence[Factor]) -> list[Factor]:
    """Merges neighbors that are contiguous in every stride."""
    made: list[Factor] = []
    for one in factors:
        if one.length == 1:
            continue
        length = one.length
        if made and all(a == b * length for a, b in zip(made[-1][1:], one[1:], strict=True)):
            length *= made.pop().length
        made.append(one._replace(length=length))
    return made


# ---- Operators, starting at the codes. None: a node is not computed from codes.

CONVERSIONS = (prims.convert_element_type.default, aten._to_copy.default)
_SHIFTS = {
    getattr(getattr(aten, name), overload): kind
    for name, overload, kind in (
        ("__rshift__", "Scalar", "right"),
        ("bitwise_right_shift", "Tensor_Scalar", "right"),
        ("__lshift__", "Scalar", "left"),
        ("bitwise_left_shift", "Tensor_Scalar", "left"),
    )
}
_ARITHMETIC: dict[Any, str] = {
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.mul.Tensor: "mul",
    aten.bitwise_and.Scalar: "and",
    aten.bitwise_and.Tensor: "and",
    aten.cat.default: "cat",
    **_SHIFTS,
}


def follow(node: Node) -> Decoded | None:
    value = tensor_of(node)
    if value is None:
        return None
    if analysis.is_source(node):
        return _codes(node, value)
    if analysis.is_view(node):
        base = follow(node.args[0])  # type: ignore[arg-type]
        return None if base is None else replace(base, dims=_viewed(base, node, tuple(value.shape)))
    if node.target is aten.clone.default:
        return follow(node.args[0])  # type: ignore[arg-type]
    if node.target in CONVERSIONS:
        return _converted(node, value.dtype)
    kind = _ARITHMETIC.get(node.target)
    if kind == "cat":
        return _interleaved(node)
    if kind in ("and", "left", "right"):
        return _bits(kind, node)
    if kind is not None:
        return _arithmetic(kind, node, value.dtype)
    return None


def _codes(node: Node, value: torch.Tensor) -> Decoded | None:
    if value.dtype not in CODE_TYPES:
        return None
    if value.layout != torch.strided or value.numel() == 0:
        raise NotTaken("its codes are no plain tensor")
    view = Strided(0, value.dtype, tuple(value.shape), tuple(value.stride()), 0)
    dims = tuple((Factor(n, s),) for n, s in zip(view.shape, view.strides, strict=True))
    least, most = (0, 255) if value.dtype == torch.uint8 else (-128, 127)
    return Decoded(dims, Leaf(node, view), least=least, most=most)


def _converted(node: Node, dtype: torch.dtype) -> Decoded | None:
    base = follow(node.args[0])  # type: ignore[arg-type]
    if base is None or dtype.is_floating_point:
        return base
    given = tensor_of(node.args[0])  # type: ignore[arg-type]
    if given is None or given.dtype.is_floating_point or dtype == torch.bool:
        raise NotTaken("its decoded numbers become integers again")
    _check_range(base, dtype)
    return base


def _check_range(of: Decoded, dtype: torch.dtype) -> None:
    """Raises NotTaken if integers of that type would wrap around."""
    limits = torch.iinfo(dtype)
    if of.least < limits.min or of.most > limits.max:
        raise NotTaken(f"its codes may not fit {str(dtype).removeprefix('torch.')}")


def _bits(kind: str, node: Node) -> Decoded | None:
    base, number = (follow(node.args[0]) if isinstance(node.args[0], Node) else None), node.args[1]  # type: ignore[arg-type]
    if base is None:
        return None
    whole = base.bits == 8 and not base.half and base.offset == 0 and base.codes.view.dtype != torch.float8_e4m3fn
    value = tensor_of(node)
    assert value is not None
    byte = value.dtype in (torch.int8, torch.uint8)
    if kind == "and" and number == 15 and whole:
        return replace(base, half="low", least=0, most=15)
    if kind == "and" and number == 15 and base.half == "high":
        return replace(base, signed=False, least=0, most=15)
    if kind == "right" and number == 4 and (whole or base.half == "raised"):
        signed = base.codes.view.dtype == torch.int8
        half = "low" if base.half == "raised" else "high"
        return replace(base, half=half, signed=signed, least=-8 if signed else 0, most=7 if signed else 15)
    if kind == "left" and number == 4 and whole and byte:
        return replace(base, half="raised")
    raise NotTaken("bits of its codes are taken apart otherwise than into halves of bytes")


def _interleaved(node: Node) -> Decoded | None:
    given = cast("list[Node]", node.args[0])
    pieces = [one for one in map(follow, given) if one is not None]
    if not pieces:
        return None
    if len(given) != 2 or len(pieces) != 2:
        raise NotTaken("its codes are put together from several tensors")
    first, second = pieces
    at = cast(int, node.args[1] if len(node.args) > 1 else 0) % len(first.dims)
    if {first.half, second.half} != {"low", "high"} or first != replace(second, half=first.half):
        raise NotTaken("what is put together is not the low and the high halves of the same bytes")
    if math.prod(f.length for f in first.dims[at]) != 1:
        raise NotTaken("numbers of low and of high halves of bytes are not neighbours")
    dims = [tuple(f._replace(code=2 * f.code) for f in dim) for dim in first.dims]
    dims[at] = (Factor(2, 1),)
    return replace(first, dims=tuple(dims), bits=4, half="", high_first=first.half == "high")


def _arithmetic(kind: str, node: Node, dtype: torch.dtype) -> Decoded | None:
    left, right = node.args[:2]
    if node.kwargs.get("alpha", 1) != 1:
        raise NotTaken("what is added to its codes is scaled")
    base, leaf_side = _follow_if_coded(left), right
    if kind != "sub":
        other = _follow_if_coded(right)  # codes, or integer zeros
        if other is not None and (base is None or math.prod(other.shape) > math.prod(base.shape)):
            base, leaf_side = other, left
    if base is None:
        return None
    if base.half:
        raise NotTaken("halves of bytes are computed with before they are put together")
    number = _number(leaf_side)
    if number is not None:
        return _with_number(base, kind, number, dtype)
    leaf = leaf_of(leaf_side)
    if leaf is None:
        raise NotTaken("its scales or zeros are computed in the graph")
    if kind == "mul":
        if base.scale is not None or base.zero_after or not leaf.view.dtype.is_floating_point:
            raise NotTaken("it is scaled twice")
        return scaled_by(base, leaf)
    after = kind == "add"
    if base.zero is not None or after != (base.scale is not None):
        raise NotTaken("its zeros are neither subtracted from codes nor added to what is scaled")
    if not dtype.is_floating_point and dtype not in (torch.int16, torch.int32, torch.int64):
        raise NotTaken(f"its zeros are subtracted in {str(dtype).removeprefix('torch.')}, which may wrap around")
    dims = _with_strides(base.dims, _strides_over(base, leaf.view), "zero")
    return replace(base, zero=leaf, zero_after=after, dims=dims)


def _number(argument: Any) -> float | None:
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return float(argument)
    held = analysis.held_number(argument) if isinstance(argument, Node) and argument.op == "call_function" else None
    return None if held is None else float(held)


def _with_number(base: Decoded, kind: str, number: float, dtype: torch.dtype) -> Decoded:
    whole = number.is_integer() and abs(number) <= 128 and base.codes.view.dtype != torch.float8_e4m3fn
    if kind == "mul" or base.scale is not None or not whole:
        raise NotTaken(f"its numbers are computed with {number:g}")
    step = int(number) if kind == "sub" else -int(number)
    moved = replace(base, offset=base.offset + step, least=base.least - step, most=base.most - step)
    if not dtype.is_floating_point:
        _check_range(moved, dtype)
    return moved


def _follow_if_coded(node: Any) -> Decoded | None:
    return follow(node) if may_decode(node) else None


def leaf_of(node: Any) -> Leaf | None:
    """A view of a graph input, possibly with a conversion of floating types; None for anything else."""
    views: list[Node] = []
    while isinstance(node, Node) and not analysis.is_source(node):
        value, before = tensor_of(node), node.args[0] if node.args else None
        given = tensor_of(before) if isinstance(before, Node) else None
        if value is None or given is None:
            return None
        if analysis.is_view(node) and not analysis.is_getitem(node):
            views.append(node)
        elif node.target not in CONVERSIONS or not _widens(given.dtype, value.dtype):
            return None
        node = before
    value = tensor_of(node) if isinstance(node, Node) else None
    if value is None or not (value.dtype in SCALAR_TYPES or value.dtype in CODE_TYPES) or value.numel() == 0:
        return None
    if value.layout != torch.strided or value.dtype in (torch.bool, torch.float8_e4m3fn):
        return None
    view = Strided(0, value.dtype, tuple(value.shape), tuple(value.stride()), 0)
    for one in reversed(views):
        if any(isinstance(a, Node) for a in one.args[1:]):
            return None
        seen = view_of(one.target, view, one.args[1:], one.kwargs)
        if not isinstance(seen, Strided):
            return None
        view = seen
    return Leaf(node, view)  # type: ignore[arg-type]


def _widens(given: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a conversion widens, or rounds to another floating type, which float32 arithmetic does not need."""
    return dtype.is_floating_point or (not given.is_floating_point and dtype.itemsize >= given.itemsize > 0)


def _strides_over(base: Decoded, view: Strided) -> tuple[int, ...]:
    """For each of the base's dimensions, the view's stride, 0 where it is broadcast."""
    shape = base.shape
    if len(view.shape) > len(shape):
        raise NotTaken("its scales have more dimensions than its codes")
    missing = len(shape) - len(view.shape)
    strides = [0] * missing
    for n, have, stride in zip(shape[missing:], view.shape, view.strides, strict=True):
        if have not in (1, n):
            raise NotTaken("its codes are broadcast to its scales")
        strides.append(0 if have == 1 else stride)
    return tuple(strides)


def scaled_by(base: Decoded, leaf: Leaf) -> Decoded:
    """The same weights times a scale that is broadcast to them."""
    return replace(base, scale=leaf, dims=_with_strides(base.dims, _strides_over(base, leaf.view), "scale"))


def _with_strides(
    dims: tuple[tuple[Factor, ...], ...], strides: tuple[int, ...], name: str
) -> tuple[tuple[Factor, ...], ...]:
    made = []
    for dim, stride in zip(dims, strides, strict=True):
        factors: list[Factor] = []
        inner = 1
        for one in reversed(dim):
            factors.insert(0, one._replace(**{name: stride * inner}))
            inner *= one.length
        made.append(tuple(factors))
    return tuple(made)


def _viewed(base: Decoded, node: Node, shape: tuple[int, ...]) -> tuple[tuple[Factor, ...], ...]:
    dims, rank = base.dims, len(base.dims)
    target, arguments = node.target, node.args[1:]
    if target is aten.permute.default:
        return tuple(dims[d % rank] for d in cast("list[int]", arguments[0]))
    if target is aten.t.default:
        return tuple(reversed(dims))
    if target is aten.transpose.int:
        one, other = (cast(int, a) % rank for a in arguments)
        swapped = list(dims)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        return tuple(swapped)
    if math.prod(shape) == math.prod(base.shape) and target in _RESHAPES:
        return _regrouped([f for dim in dims for f in dim], shape)
    if target in (aten.alias.default, aten.detach.default):
        return dims
    raise NotTaken(f"{target} stands between its codes and the product")


_RESHAPES = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
)


def _regrouped(factors: list[Factor], shape: tuple[int, ...]) -> tuple[tuple[Factor, ...], ...]:
    """Distributes the same factors, in order, over dimensions of these lengths."""
    rest = [f for f in reversed(joined(factors))]  # in reverse order
    dims = []
    for wanted in shape:
        dim: list[Factor] = []
        length = wanted
        while length > 1:
            one = rest.pop()
            taken = min(one.length, length)
            if one.length % taken or length % taken:
                raise NotTaken("a view of its codes is not followed")
            inner = one.length // taken
            if inner > 1:
                rest.append(one._replace(length=inner))
            dim.append(Factor(taken, *(stride * inner for stride in one[1:])))
            length //= taken
        dims.append(tuple(dim))
    return tuple(dims)
