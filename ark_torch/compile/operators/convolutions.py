"""Convolutions of one, two and three dimensions on a CPU, made of operators that regions have.

Windows are a strided view of the padded input, so no index is computed. If a group has several channels, windows are
copied to the columns of a matrix and multiplied by the weight (im2col); adjacent windows of one element need no copy.
If each channel is separate (depthwise), the convolution is a sum over the window's positions of views times per-channel
numbers, in one loop.

`slower` tells which convolutions run faster in oneDNN, as used by Inductor and eager PyTorch. They are left to Inductor
unless a region must be whole (fallback=False, resident mode).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.ir import Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, contiguous_strides, lowers
from ark_torch.compile.operators.pointwise import keyword

# Longer sums take too long to compile: they become products.
MOST_TERMS = 81
# A task takes at most as many parameters as its ring has pages (csrc/compiler/schedule/prefetch.cpp). Computed values
# do not count.
PARAMETERS = 6
LANES = 16

# oneDNN is faster from this number of multiplications (benchmarks/convolutions.py, AVX-512, one thread). Below, its
# call and the transition between two regions cost more than the work.
MOST_WORK = 8_000_000
MOST_APART, MOST_APART_LAST = 4_000_000, 500_000  # depthwise; channels last
LARGE = 1 << 14
FASTER = "left to Inductor, whose convolution (oneDNN) is faster"


@dataclass(frozen=True)
class Form:
    """A convolution's parameters, one entry per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def moves_nothing(self) -> bool:
        """Whether windows have one element and every element is used."""
        return all(n == 1 for n in (*self.kernel, *self.stride)) and not any(self.padding)


def form_of(node: Node) -> Form:
    weight = tensor_of(node.args[1])  # type: ignore[arg-type]
    assert weight is not None
    if keyword(node, "transposed", False):
        raise Unsupported("a transposed convolution")
    kernel = tuple(weight.shape[2:])
    if not kernel:
        raise Unsupported("a convolution without spatial dimensions")

    def each(name: str) -> tuple[int, ...]:
        given: Sequence[int] = keyword(node, name, [])
        return tuple(int(n) for n in given) * (len(kernel) if len(given) == 1 else 1)

    return Form(kernel, each("stride"), each("padding"), each("dilation"), int(keyword(node, "groups", 1)))


@lowers(aten.convolution.default)
def convolution(low: Lowering, node: Node) -> Operand:
    if low.device.type != "cpu":
        raise Unsupported("no lowering for this operator")
    form = form_of(node)
    x, weight = (low.stored(low.operand(a)) for a in node.args[:2])
    bias = None if node.args[2] is None else low.stored(low.operand(node.args[2]))
    out = low.result(node)
    if not x.dtype.is_floating_point or any(o is not None and o.dtype != x.dtype for o in (weight, bias)):
        raise Unsupported("a convolution of integers or of mixed types")
    if len(x.shape) != len(form.kernel) + 2:
        raise Unsupported("a convolution without a dimension of samples")
    windows = _windows(_padded(low, x, form), form, out.shape[2:])
    alone = form.groups == x.shape[1] and (form.groups > 1 or weight.shape[0] == 1)
    if alone and math.prod(form.kernel) <= MOST_TERMS:
        return _depthwise(low, windows, weight, bias, out, form)
    return _product(low, windows, weight, bias, out, form)


def _split(x: Strided, dim: int, first: int) -> Strided:
    """Splits a dimension in two: `first` times the rest."""
    rest = x.shape[dim] // first
    shape = (*x.shape[:dim], first, rest, *x.shape[dim + 1 :])
    strides = (*x.strides[:dim], rest * x.strides[dim], x.strides[dim], *x.strides[dim + 1 :])
    return x._replace(shape=shape, strides=strides)


def _permuted(x: Strided, order: Sequence[int]) -> Strided:
    return x._replace(shape=tuple(x.shape[i] for i in order), strides=tuple(x.strides[i] for i in order))


def _merged(x: Strided, dim: int, count: int) -> Strided | None:
    """Merges `count` dimensions from `dim` on, or returns None if their strides do not allow it."""
    step, length = 0, 1
    for n, s in reversed(list(zip(x.shape[dim : dim + count], x.strides[dim : dim + count], strict=True))):
        if n == 1:
            continue
        if length > 1 and s != step * length:
            return None
        step = s if length == 1 else step
        length *= n
    shape = (*x.shape[:dim], length, *x.shape[dim + count :])
    return x._replace(shape=shape, strides=(*x.strides[:dim], step or 1, *x.strides[dim + count :]))


def _padded(low: Lowering, x: Strided, form: Form) -> Strided:
    """Pads with zeros and keeps the order of dimensions in memory."""
    if not any(form.padding):
        return x
    shape = (*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], form.padding, strict=True)))
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (x.strides[d], x.shape[d], -d)):
        strides[dim] = step
        step *= shape[dim]
    padded = low.fresh(x.dtype, shape, strides)
    low.copy(low.constant(0, x.dtype), padded)
    offset = sum(p * s for p, s in zip(form.padding, strides[2:], strict=True))
    low.copy(x, padded._replace(shape=x.shape, offset=offset))
    return padded


def _windows(x: Strided, form: Form, places: Sequence[int]) -> Strided:
    """[N, groups, C / groups, *kernel, *places], as a view."""
    grouped = _split(x, 1, form.groups)
    steps = grouped.strides[3:]
    return grouped._replace(
        shape=(*grouped.shape[:3], *form.kernel, *places),
        strides=(
            *grouped.strides[:3],
            *(s * d for s, d in zip(steps, form.dilation, strict=True)),
            *(s * n for s, n in zip(steps, form.stride, strict=True)),
        ),
    )


def _product(
    low: Lowering, windows: Strided, weight: Strided, bias: Strided | None, out: Strided, form: Form
) -> Strided:
    """Computes weight @ columns, or its transpose if channels are contiguous in the result."""
    spatial, groups = len(form.kernel), form.groups
    last = _channels_last(out)
    w = _split(weight, 0, groups)  # [G, O / G, C / G, *kernel]
    order = sorted(range(2, 3 + spatial), key=lambda d: (-w.strides[d], d))  # the depth, in the weight's memory order
    matrix = _weights(low, _permuted(w, [0, 1, *order]), last and math.prod(out.shape[2:]) >= LANES)
    first = len(windows.shape) - spatial
    columns = None
    if form.moves_nothing and (flat := _merged(windows, first, spatial)) is not None:
        columns = _merged(flat, 2, 1 + spatial)
    if columns is None:
        ordered = _permuted(windows, [0, 1, *order, *range(first, first + spatial)])
        columns = _columns(low, ordered, spatial, last)
    whole = _split(out, 1, groups)  # [N, G, O / G, *places]
    target = _merged(whole, 3, spatial)
    result = low.fresh(out.dtype, (*whole.shape[:3], math.prod(whole.shape[3:]))) if target is None else target
    operands = [matrix._replace(shape=(1, *matrix.shape), strides=(0, *matrix.strides)), columns]
    if bias is not None:
        each = _split(bias, 0, groups)
        operands.append(each._replace(shape=(1, *each.shape, 1), strides=(0, *each.strides, 0)))
    if last:
        operands[:2] = operands[1::-1]
        low.node("matmul", [_transposed(x) for x in operands], _transposed(result))
    else:
        low.node("matmul", operands, result)
    if target is None:
        back = result._replace(shape=whole.shape, strides=(*result.strides[:3], *contiguous_strides(whole.shape[3:])))
        low.copy(back, whole)
    return out


def _channels_last(out: Strided) -> bool:
    return out.strides[1] == 1 and out.shape[1] > 1


def _transposed(x: Strided) -> Strided:
    return _permuted(x, [*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2])


def _weights(low: Lowering, w: Strided, turned: bool) -> Strided:
    """[G, O / G, depth]; `turned`: output channels are contiguous, for products whose lanes are along them."""
    matrix = _merged(w, 2, len(w.shape) - 2)
    depth = math.prod(w.shape[2:])
    if turned and w.shape[1] > 1:
        strides = (w.shape[1] * depth, 1, *(w.shape[1] * s for s in contiguous_strides(w.shape[2:])))
    elif matrix is not None:
        return matrix
    else:
        strides = contiguous_strides(w.shape)
    made = low.copy(w, low.fresh(w.dtype, w.shape, strides))
    return made._replace(shape=(*w.shape[:2], depth), strides=(*strides[:2], strides[-1]))


def _columns(low: Lowering, windows: Strided, spatial: int, last: bool) -> Strided:
    """[N, G, depth, places], copied; the depth is contiguous with `last`, else places are."""
    samples, groups = windows.shape[:2]
    depth, places = math.prod(windows.shape[2 : 3 + spatial]), math.prod(windows.shape[3 + spatial :])
    steps = (1, depth) if last else (places, 1)
    of_depth = tuple(steps[0] * s for s in contiguous_strides(windows.shape[2 : 3 + spatial]))
    of_places = tuple(steps[1] * s for s in contiguous_strides(windows.shape[3 + spatial :]))
    size = depth * places
    made = low.fresh(windows.dtype, (samples, groups, depth, places), (groups * size, size, *steps))
    low.copy(windows, made._replace(shape=windows.shape, strides=(groups * size, size, *of_depth, *of_places)))
    return made


def _depthwise(
    low: Lowering, windows: Strided, weight: Strided, bias: Strided | None, out: Strided, form: Form
) -> Strided:
    """A sum over the window, from its first position to the last."""
    spatial = len(form.kernel)
    places = list(_places(form.kernel))
    last = _channels_last(out)
    if len(places) > PARAMETERS or (last and len(places) > 1):
        strides = contiguous_strides(weight.shape)
        if last:  # channels are contiguous here, too
            strides = (1, 1, *(weight.shape[0] * s for s in contiguous_strides(form.kernel)))
        weight = low.copy(weight, low.fresh(weight.dtype, weight.shape, strides))
    w = _split(weight, 0, form.groups)  # [C, O / C, 1, *kernel]
    # [N, C, O / C, *places], or channels last, like the result.
    order = [0, *range(3, 3 + spatial), 1, 2] if last else range(3 + spatial)
    whole = _permuted(_split(out, 1, form.groups), order)

    def of_channels(x: Strided, offset: int) -> Strided:
        """[C, O / C, ...] as a number per channel."""
        one = x._replace(
            shape=(1, *x.shape[:2], *(1,) * spatial), strides=(0, *x.strides[:2], *(0,) * spatial), offset=offset
        )
        return _permuted(one, order)

    total: Operand | None = None
    if bias is not None:
        total = of_channels(_split(bias, 0, form.groups), bias.offset)
    for place in places:
        x = windows._replace(
            shape=(*windows.shape[:3], *windows.shape[3 + spatial :]),
            strides=(*windows.strides[:3], *windows.strides[3 + spatial :]),
            offset=windows.offset + sum(i * s for i, s in zip(place, windows.strides[3 : 3 + spatial], strict=True)),
        )
        number = of_channels(w, w.offset + sum(i * s for i, s in zip(place, w.strides[3:], strict=True)))
        only = place is places[-1]
        term = low.pointwise("mul", _permuted(x, order), number, out=whole if only and total is None else None)
        total = low.pointwise("add", term, total, out=whole if only else None) if total is not None else term
    return out


def _places(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for n in kernel:
        found = [(*place, i) for place in found for i in range(n)]
    return found


def slower(node: Node) -> str | None:
    """Why a convolution is left to oneDNN, or None. If `convolution` cannot lower it, it gives another reason."""
    if node.target is not aten.convolution.default:
        return None
    x, weight, out = (tensor_of(n) for n in (*node.args[:2], node))  # type: ignore[arg-type]
    if x is None or weight is None or out is None or out.dim() != weight.dim() or keyword(node, "transposed", False):
        return None
    depth, groups = math.prod(weight.shape[1:]), int(keyword(node, "groups", 1))
    work = out.numel() * depth
    if groups == x.shape[1] and (groups > 1 or weight.shape[0] == 1):
        last = out.dim() > 3 and out.stride(1) == 1 and out.shape[1] > 1
        most = MOST_APART_LAST if last else MOST_APART
        return None if work <= most else _left(work, most, " where channels stay apart")
    if depth < LANES and out.numel() > LARGE:
        return f"{FASTER} for windows of {depth} numbers, fewer than {LANES}, and {out.numel()} results"
    return None if work <= MOST_WORK else _left(work, MOST_WORK)


def _left(work: int, most: int, where: str = "") -> str:
    return f"{FASTER} from {most / 1e6:g} million multiplications on{where} (here {work / 1e6:.3g} million)"
