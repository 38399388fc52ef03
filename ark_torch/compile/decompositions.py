"""Which operators AOTAutograd takes apart: those that Inductor takes apart, but for a few.

index_add, index_copy and index_select refuse negative indices, and their decompositions (index_put, index) take them
from the end. What ark runs is as strict as eager PyTorch, so they stay whole; a piece that goes to Inductor has them
taken apart again, since Inductor knows them no other way. index_fill, which PyTorch makes of index_copy, takes
negative ones from the end. Shifts are taken apart where Inductor leaves them whole: see _shift.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Graph, Node

from ark_torch.compile.analysis import aten

# Where the index stands among the arguments; the dimension stands before it.
_KEPT: dict[Any, Any] = {
    aten.index_add.default: aten.index_put.default,
    aten.index_add_.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_put.default,
    aten.index_copy_.default: aten.index_put_.default,
    aten.index_select.default: aten.index.Tensor,
}
# Guarded, so that counts beyond the width do what they do in eager PyTorch.
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
_ADDING = frozenset({aten.index_add.default, aten.index_add_.default})


# True while _shift makes the shift whose count it has bounded, which is not to be taken apart again.
_within_width = ContextVar("_within_width", default=False)


def table() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    made = dict(select_decomp_table())
    for operator in _KEPT:
        if (decomposition := made.get(operator)) is not None:
            made[operator] = _unless_simple(decomposition)
    made.update(shifts())
    for operator in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor):
        if (decomposition := made.get(operator)) is not None:
            made[operator] = _fill_by_index(decomposition)
    return made


def _fill_by_index(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def fill(base: Any, dim: int, index: Any, value: Any) -> Any:
        if base.ndim == 0 or index.ndim != 1:
            return decomposition(base, dim, index, value)
        if not isinstance(value, torch.Tensor):
            value = aten.scalar_tensor.default(value, dtype=base.dtype, device=base.device)
        return aten.index_put.default(base, [*[None] * (dim % base.ndim), index], value.to(base.dtype))

    return fill


def shifts() -> dict[Any, Callable[..., Any]]:
    return {operator: _shift(operator) for operator in _SHIFTS}


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


def _unless_simple(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Single numbers in place of a dimension are for the decomposition."""

    def maybe(base: Any, dim: int, index: Any, *rest: Any, **numbers: Any) -> Any:
        if base.ndim and index.ndim == 1 and all(r.ndim == base.ndim for r in rest):
            return NotImplemented
        return decomposition(base, dim, index, *rest, **numbers)

    return maybe


def for_inductor(graph: Graph) -> None:
    """Takes the operators that were kept apart after all."""
    for node in graph.nodes:
        if node.target in _KEPT:
            base, dim, index, *source = node.args
            assert isinstance(base, Node) and isinstance(dim, int)
            dim %= base.meta["val"].ndim
            alpha, node.kwargs = node.kwargs.get("alpha", 1), {}
            if alpha != 1:
                with graph.inserting_before(node):
                    scaled = graph.call_function(aten.mul.Tensor, (source[0], alpha))
                scaled.meta = dict(source[0].meta)
                source = [scaled]
            adds = [True] if node.target in _ADDING else []
            node.args = (base, [*[None] * dim, index], *source, *adds)
            node.target = _KEPT[node.target]
