"""Makes results with gaps dense.

`x[:, ::2] = y` leaves copy(x[:, ::2], y) in a functional graph: a separate tensor with the layout of the part of x,
whose memory is mostly unused. A region cannot have such results. This pass removes the gaps, keeping the order of
dimensions, and recomputes everything that depends on the result (whose layout may change, too), before the graph is cut
into regions. Within a region alone that is impossible, since the next piece is compiled for the layout that the graph
declares. What the caller gets keeps its layout, and so does what as_strided reads, which counts places in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from ark_torch.compile.analysis import (
    aten,
    has_order_of_its_own,
    is_getitem,
    origin_of,
    tensor_of,
    written_arguments,
)
from ark_torch.compile.graph_edits import call, erase
from ark_torch.compile.report import log

prims = torch.ops.prims

# Functional updates of their first argument, whose layout they keep.
_UPDATES = frozenset(
    {
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.index_put.default,
        aten.index_copy.default,
        aten.index_add.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
    }
)


class _KeepsGaps(Exception):
    """Why a result stays unchanged."""


def rewrite(graph_module: GraphModule) -> int:
    """Returns the number of results whose gaps were removed."""
    made = 0
    for node in list(graph_module.graph.nodes):
        if (node.target is aten.copy.default or node.target in _UPDATES) and _has_gaps(node):
            made += _rewritten(graph_module.graph, node)
    if made:
        graph_module.graph.lint()
        graph_module.recompile()
    return made


def _order(tensor: torch.Tensor) -> list[int]:
    """Dimensions, outermost in memory first."""
    strides = tuple(tensor.stride())
    return sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))


def _has_gaps(node: Node) -> bool:
    """Whether no element is stored twice, and there is unused memory between elements."""
    tensor = tensor_of(node)
    if tensor is None or not tensor.numel():
        return False
    reach = 0
    for dim in reversed(_order(tensor)):
        if tensor.shape[dim] > 1:
            if tensor.stride(dim) <= reach:
                return False
            reach += tensor.stride(dim) * (tensor.shape[dim] - 1)
    return reach + 1 != tensor.numel()


def _rewritten(graph: Graph, node: Node) -> bool:
    kept: dict[Node, Any] = {}
    with graph.inserting_before(node):
        new = _dense_copy(graph, node) if node.target is aten.copy.default else _dense_update(graph, node)
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    try:
        _work_out(new, kept)
    except _KeepsGaps as why:
        log.debug("%s keeps its gaps: %s", node.name, why)
        for changed, value in kept.items():
            changed.meta["val"] = value
        new.replace_all_uses_with(node)
        erase(new)
        return False
    graph.erase_node(node)
    return True


def _dense_copy(graph: Graph, node: Node) -> Node:
    """Keeps the source only: nothing of the old contents remains."""
    source = node.args[1]
    assert isinstance(source, Node)
    value = node.meta["val"]
    if source.meta["val"].dtype != value.dtype:
        source = call(graph, prims.convert_element_type.default, source, value.dtype)
    if source.meta["val"].shape != value.shape:
        source = call(graph, aten.expand.default, source, list(value.shape))
    return _laid_out(graph, source, _order(value))


def _dense_update(graph: Graph, node: Node) -> Node:
    base = node.args[0]
    assert isinstance(base, Node)
    dense = _laid_out(graph, base, _order(node.meta["val"]))
    new = graph.call_function(node.target, (dense, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
    new.meta["val"] = _value(new)
    return new


def _laid_out(graph: Graph, node: Node, order: list[int]) -> Node:
    """A dense copy with dimensions in this order."""
    turned = order != sorted(order)
    if turned:
        node = call(graph, aten.permute.default, node, order)
    copied = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    copied.meta["val"] = _value(copied)
    if turned:
        copied = call(graph, aten.permute.default, copied, [order.index(d) for d in range(len(order))])
    return copied


def _value(node: Node) -> Any:
    given, named = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*given, **named)  # type: ignore[operator]


def _tensors(value: Any) -> Iterator[tuple[Any, ...]]:
    for one in tree_leaves(value):
        if isinstance(one, torch.Tensor):
            yield tuple(one.shape), one.dtype, one.device, one.stride(), one.storage_offset()


def _work_out(new: Node, kept: dict[Node, Any]) -> None:
    """Recomputes the values of all later nodes now that `new` is dense. Stores their earlier values in `kept`."""
    changed = {new}
    node = new.next
    while node.op != "root":
        reads = [n for n in node.all_input_nodes if n in changed]
        if reads and node.op == "output":
            raise _KeepsGaps(f"the caller gets {reads[0].name}")
        if reads:
            _check(node, changed)
            before = node.meta["val"]
            try:
                after = before if written_arguments(node.target) else _value(node)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise _KeepsGaps(f"{origin_of(node)} does not take it without: {error}") from error
            was, now = list(_tensors(before)), list(_tensors(after))
            if [one[:3] for one in was] != [one[:3] for one in now]:
                raise _KeepsGaps(f"{node.name} is of another shape then")
            if was != now:
                kept[node] = before
                node.meta["val"] = after
                changed.add(node)
        node = node.next


def _check(node: Node, changed: set[Node]) -> None:
    if is_getitem(node):
        return
    if not isinstance(node.target, torch._ops.OpOverload) or has_order_of_its_own(node):
        raise _KeepsGaps(f"{node.name} is no function of tensors alone")
    if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
        raise _KeepsGaps(f"{node.name} counts places in memory")
    if any(node.args[i] in changed for i in written_arguments(node.target)):
        raise _KeepsGaps(f"{node.name} writes it")
