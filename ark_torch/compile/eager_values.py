"""Decompositions that give what eager PyTorch gives at the edges, where those of Inductor's table give something else.

They are taken apart before any code generator sees them, so they hold on the CPU and on GPUs, in ark's kernels and in
Inductor's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ark_torch.compile.analysis import aten

# Parts of the names, in a graph of torch._dynamo, of all that comes to be one of table()'s operators.
CONCERNED = ("shift", "threshold", "Threshold")
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
# True while _shift makes the shift whose count it has bounded, which is not to be taken apart again.
_within_width = ContextVar("_within_width", default=False)


def table() -> dict[Any, Callable[..., Any]]:
    return {
        **{operator: _shift(operator) for operator in _SHIFTS},
        aten.threshold.default: _threshold,
    }


def _shift(operator: Any) -> Callable[..., Any]:
    """A shift with every count within the width, and a choice for the others.

    A machine's shift, which is what generated code makes of it, takes the count modulo the width or is undefined.
    PyTorch's rule for counts below 0 or of the width and more: 0 to the left, to the right what is left of the value
    (its sign). The decomposition is what each code generator then sees, on the CPU and on GPUs.
    """
    left = "lshift" in operator._schema.name or "left" in operator._schema.name
    inner = aten.bitwise_left_shift.Tensor if left else aten.bitwise_right_shift.Tensor

    def shift(value: Any, count: Any) -> Any:
        if _within_width.get():
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
            # The value first: a count that the type cannot hold is out of range, not what it wraps around to.
            count = aten.scalar_tensor.default(-1, dtype=torch.int64, device=like.device)
        value, wide = value.to(dtype), count.to(dtype).to(torch.int64)
        outside = aten.logical_or.default(aten.lt.Scalar(wide, 0), aten.ge.Scalar(wide, width))
        bounded = aten.clamp.default(wide, 0, width - 1).to(dtype)
        token = _within_width.set(True)
        try:
            shifted = inner(value, bounded)
        finally:
            _within_width.reset(token)
        if left or not dtype.is_signed:
            rest = aten.scalar_tensor.default(0, dtype=dtype, device=value.device)
        else:
            rest = aten.bitwise_right_shift.Tensor_Scalar(value, width - 1)
        return aten.where.self(outside, rest, shifted)

    return shift


def _threshold(x: Any, threshold: Any, value: Any) -> Any:
    """The value as one of the tensor's type: large integers do not pass through floating point."""
    if not x.dtype.is_floating_point:
        threshold, value = int(threshold), int(value)
    other = aten.scalar_tensor.default(value, dtype=x.dtype, device=x.device)
    return aten.where.self(aten.le.Scalar(x, threshold), other, x)
