"""The operators that AOTAutograd decomposes: those that Inductor decomposes, with a few exceptions.

index_add, index_copy and index_select refuse negative indices, but their decompositions (index_put, index) count them
from the end. What ark runs is as strict as eager PyTorch, so these operators stay whole; for Inductor's pieces they are
decomposed again, since Inductor knows no other form. index_fill, which PyTorch makes of index_copy, accepts negative
indices. The decompositions of eager_values.py take precedence over Inductor's.

Where torch._inductor.config.coordinate_descent_tuning is set (torchao's quantize_ and GPT-fast set it), Inductor
multiplies one row on a GPU by multiplying and adding up elements. ark has kernels for products of one row, so these
stay products as well, except in Inductor's pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ark_torch.compile import eager_values
from ark_torch.compile.analysis import aten

prims = torch.ops.prims

# The position of the index among the arguments; the dimension precedes it.
_KEPT: dict[Any, Any] = {
    aten.index_add.default: aten.index_put.default,
    aten.index_add_.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_put.default,
    aten.index_copy_.default: aten.index_put_.default,
    aten.index_select.default: aten.index.Tensor,
}
_ADDING = frozenset({aten.index_add.default, aten.index_add_.default})
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default})


def table() -> dict[Any, Callable[..., Any]]:
    made = eager_values.table()
    for operator in _KEPT:
        if (decomposition := made.get(operator)) is not None:
            made[operator] = _unless_simple(decomposition)
    for operator in (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor):
        if (decomposition := made.get(operator)) is not None:
            made[operator] = _fill_by_index(decomposition)
    for name in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
        operator = getattr(aten, name).default
        if (decomposition := made.get(operator)) is not None:
            made[operator] = _with_lowerings(decomposition)
    for operator in _PRODUCTS:
        if (decomposition := made.get(operator)) is not None:
            made[operator] = _unless_one_line(decomposition)
    return made


def _unless_one_line(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def maybe(a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        if _adds_up(a, b) and a.shape[-1] != 1:
            return NotImplemented
        return decomposition(a, b, *rest, **named)

    return maybe


def _adds_up(a: Any, b: Any) -> bool:
    """Whether Inductor makes a sum of the product of these."""
    from torch._inductor import config

    one = any(type(n) is int and n == 1 for n in (a.shape[-2], b.shape[-1]))
    return one and config.coordinate_descent_tuning and a.device.type not in ("cpu", "mps")


def _with_lowerings(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition uses an Inductor module that exists only once Inductor has compiled something."""

    def run(*arguments: Any, **named: Any) -> Any:
        import torch._inductor.lowering  # noqa: F401

        return decomposition(*arguments, **named)

    return run


def _fill_by_index(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def fill(base: Any, dim: int, index: Any, value: Any) -> Any:
        if base.ndim == 0 or index.ndim != 1:
            return decomposition(base, dim, index, value)
        if not isinstance(value, torch.Tensor):
            value = aten.scalar_tensor.default(value, dtype=base.dtype, device=base.device)
        return aten.index_put.default(base, [*[None] * (dim % base.ndim), index], value.to(base.dtype))

    return fill


def _unless_simple(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition handles numbers in place of dimensions."""

    def maybe(base: Any, dim: int, index: Any, *rest: Any, **numbers: Any) -> Any:
        if base.ndim and index.ndim == 1 and all(r.ndim == base.ndim for r in rest):
            return NotImplemented
        return decomposition(base, dim, index, *rest, **numbers)

    return maybe


def for_inductor(graph: Graph) -> None:
    """Decomposes the operators that were kept."""
    for node in list(graph.nodes):
        if node.target in _PRODUCTS:
            _add_up(graph, node)
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


def _add_up(graph: Graph, product: Node) -> None:
    """Does what Inductor does to a product of one row or one column on a GPU: half types are added up in float32."""
    a, b = product.args
    assert isinstance(a, Node) and isinstance(b, Node)
    if "val" not in a.meta or "val" not in b.meta or not _adds_up(a.meta["val"], b.meta["val"]):
        return

    def add(operator: Any, *arguments: Any) -> Node:
        node = graph.call_function(operator, arguments)
        node.meta["val"] = operator(*[one.meta["val"] if isinstance(one, Node) else one for one in arguments])
        return node

    dtype, depth = a.meta["val"].dtype, a.meta["val"].dim() - 1
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    with graph.inserting_before(product):
        if computed != dtype:
            a, b = (add(prims.convert_element_type.default, one, computed) for one in (a, b))
        a, b = add(aten.unsqueeze.default, a, depth + 1), add(aten.unsqueeze.default, b, depth - 1)
        total = add(aten.sum.dim_IntList, add(aten.mul.Tensor, a, b), [depth])
        if computed != dtype:
            total = add(prims.convert_element_type.default, total, dtype)
    product.replace_all_uses_with(total)
    graph.erase_node(product)
