"""Decompositions that match eager PyTorch in edge cases in which Inductor's decompositions differ.

They apply before any code generator sees the operators, so they hold on CPUs and GPUs, in ark's kernels and in
Inductor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Graph, Node

from ark_torch.compile.analysis import aten

# Parts of names, in a graph of torch._dynamo, of what may become one of table()'s operators.
_NAMES = ("shift", "threshold", "Threshold", "frac", "gamma", "type_as", "short", "char", "byte")
# Floating point is converted to these types through the others (_to_copy).
_BY_WAY_OF = {torch.int8: torch.int32, torch.int16: torch.int32, torch.uint8: torch.int64}
_SHIFTS = (
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
)
# True while a decomposition emits the same operator with arguments that need no decomposition.
_settled = ContextVar("_settled", default=False)


class Eager(Exception):
    """The graph runs unchanged, operator by operator; the message says why."""


def concerns(graph: Graph) -> bool:
    """Whether a graph of torch._dynamo may contain one of table()'s operators. Without a table of ours, Inductor's own
    caches stay valid."""

    def one(node: Node) -> bool:
        name, given = str(getattr(node.target, "__name__", node.target)), [*node.args, *node.kwargs.values()]
        return (
            any(part in name for part in _NAMES)
            or any(isinstance(x, torch.dtype) and x in _BY_WAY_OF for x in given)
            or (name == "to" and any(isinstance(x, Node) for x in given[1:]))
            or ("pow" in name and any(isinstance(x, int) and x < 0 for x in given))
            or (name.startswith("cl") and any(isinstance(x, float) and math.isnan(x) for x in given))
        )

    return any(map(one, graph.nodes))


def table() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, preceded by these."""
    from torch._inductor.decomposition import select_decomp_table

    inductors = select_decomp_table()
    return {
        **inductors,
        **{operator: _shift(operator) for operator in _SHIFTS},
        aten.threshold.default: _threshold,
        aten.clamp.default: _clamp(inductors[aten.clamp.default]),
        aten.frac.default: lambda x: aten.sub.Tensor(x, aten.trunc.default(x)),
        aten.lgamma.default: _lgamma,
        aten.pow.Tensor_Scalar: _pow,
        aten._to_copy.default: _to_copy(inductors[aten._to_copy.default]),
    }


def _settle(operator: Any, *arguments: Any) -> Any:
    token = _settled.set(True)
    try:
        return operator(*arguments)
    finally:
        _settled.reset(token)


def _shift(operator: Any) -> Callable[..., Any]:
    """A shift with counts limited to the width, and a selection for other counts.

    A machine's shift, to which generated code compiles, takes the count modulo the width or is undefined. PyTorch
    defines counts below 0 or from the width on: the result is 0 to the left, and what remains of the value (its sign)
    to the right.
    """
    left = "lshift" in operator._schema.name or "left" in operator._schema.name
    inner = aten.bitwise_left_shift.Tensor if left else aten.bitwise_right_shift.Tensor

    def shift(value: Any, count: Any) -> Any:
        if _settled.get():
            return NotImplemented
        dtype = torch.result_type(value, count)
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return NotImplemented
        width = torch.iinfo(dtype).bits
        if not isinstance(count, torch.Tensor) and 0 <= count < width:
            return NotImplemented
        like = value if isinstance(value, torch.Tensor) else count
        if not isinstance(value, torch.Tensor):
            value = aten.scalar_tensor.default(value, dtype=dtype, device=like.device)
        if not isinstance(count, torch.Tensor):
            # Check the value first: a count that the type cannot hold is out of range, not what it wraps around to.
            count = aten.scalar_tensor.default(-1, dtype=torch.int64, device=like.device)
        value, wide = value.to(dtype), count.to(dtype).to(torch.int64)
        outside = aten.logical_or.default(aten.lt.Scalar(wide, 0), aten.ge.Scalar(wide, width))
        bounded = aten.clamp.default(wide, 0, width - 1).to(dtype)
        shifted = _settle(inner, value, bounded)
        if left or not dtype.is_signed:
            rest = aten.scalar_tensor.default(0, dtype=dtype, device=value.device)
        else:
            rest = aten.bitwise_right_shift.Tensor_Scalar(value, width - 1)
        return aten.where.self(outside, rest, shifted)

    return shift


def _threshold(x: Any, threshold: Any, value: Any) -> Any:
    """Uses a value of the tensor's type: large integers must not pass through floating point."""
    if not x.dtype.is_floating_point:
        threshold, value = int(threshold), int(value)
    other = aten.scalar_tensor.default(value, dtype=x.dtype, device=x.device)
    return aten.where.self(aten.le.Scalar(x, threshold), other, x)


def _clamp(inductors: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU a NaN as the only bound is ignored; elsewhere it makes everything NaN."""

    def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
        (bound,) = given if len(given := [b for b in (min, max) if b is not None]) == 1 else (None,)
        if x.device.type == "cuda" and isinstance(bound, float) and math.isnan(bound):
            return aten.mul.Scalar(x, 1.0)  # of the result's type; NaN stays
        return inductors(x, min, max)

    return clamp


def _to_copy(inductors: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU converts floating point to int8 and int16 through int32, and to uint8 through int64.

    nvcc compiles eager PyTorch's casts like this, and out-of-range numbers wrap around. Triton's saturate.
    """

    def to_copy(x: Any, *, dtype: Any = None, **rest: Any) -> Any:
        if x.device.type == "cuda" and x.dtype.is_floating_point and dtype in _BY_WAY_OF:
            x = torch.ops.prims.convert_element_type.default(x, _BY_WAY_OF[dtype])
        return inductors(x, dtype=dtype, **rest)

    return to_copy


def _lgamma(x: Any) -> Any:
    """On GPUs Inductor's function flushes denormals to zero. So lgamma(x) is computed as -log|x| near zero, here of a
    multiple."""
    if _settled.get() or x.device.type != "cuda" or x.dtype not in (torch.float32, torch.bfloat16):
        return NotImplemented
    wide = x.to(torch.float32)
    size = aten.abs.default(wide)
    near = aten.rsub.Scalar(aten.log.default(aten.mul.Scalar(size, 2.0**64)), 64 * math.log(2))
    far = _settle(aten.lgamma.default, wide)
    return aten.where.self(aten.lt.Scalar(size, 2.0**-64), near, far).to(x.dtype)


def _pow(x: Any, exponent: Any) -> Any:
    """Raises eager PyTorch's error for integers to a negative integer power; generated code would compute something."""
    whole = not (x.dtype.is_floating_point or x.dtype.is_complex)
    if whole and isinstance(exponent, int) and not isinstance(exponent, bool) and exponent < 0:
        raise Eager(f"a tensor of {x.dtype} to the power {exponent}, which eager PyTorch refuses")
    return NotImplemented
