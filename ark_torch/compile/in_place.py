"""Turns functional updates of inputs into in-place writes again.

AOTAutograd's graphs are functional: a KV cache becomes `new = index_copy(cache, ...)`, with `copy_(cache, new)` at the
end. Run like that, each step would copy the whole cache twice. If nothing reads the old contents after the update, the
update may write the cache itself, and the copy is dropped.

index_put, index_copy, index_add, scatter and scatter_add become their in-place forms, slice_scatter and select_scatter
become copy_ into a slice of the input. Inductor does the same, so a piece that falls back may contain them.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ark_torch.compile.analysis import aten, is_view, root_of

_SCATTER_VIEWS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
_BY_INDEX: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}
_SCATTERS = frozenset({*_BY_INDEX, *_SCATTER_VIEWS})


def restore(graph_module: GraphModule) -> int:
    """Rewrites the graph. Returns the number of copies dropped at its end."""
    graph = graph_module.graph
    simplified, gone = _simplify(graph_module), 0
    for copy in [n for n in graph.nodes if n.target is aten.copy_.default]:
        target, source = copy.args[:2]
        if not isinstance(target, Node) or target.op != "placeholder" or not isinstance(source, Node) or copy.users:
            continue
        updates = _chain(target, source)
        if updates and _unobserved(graph_module, target, updates, copy):
            graph.erase_node(copy)
            for update in updates:
                _write(graph_module, target, update)
            gone += 1
    if gone or simplified:
        graph.lint()
        graph_module.recompile()
    return gone


def _simplify(graph_module: GraphModule) -> int:
    """`x[1:3] += y` leaves a copy of the part over itself, and a part written back to where it was read: removes
    both."""
    gone = 0
    for node in list(graph_module.graph.nodes):
        same: object = None
        if node.target is aten.copy.default and isinstance(node.args[1], Node):
            old, new = node.meta["val"], node.args[1].meta["val"]
            alike = (old.shape, old.stride(), old.dtype) == (new.shape, new.stride(), new.dtype)
            same = node.args[1] if alike else None
        elif (view := _SCATTER_VIEWS.get(node.target)) is not None and isinstance(node.args[1], Node):
            part = node.args[1]
            where = (node.args[2:], node.kwargs)
            if part.target is view and part.args[0] is node.args[0] and (part.args[1:], part.kwargs) == where:
                same = node.args[0]
        if isinstance(same, Node) and not _returned(node):
            node.replace_all_uses_with(same)
            graph_module.graph.erase_node(node)
            gone += 1
    return gone


def _returned(node: Node) -> bool:
    """Whether the caller gets the node or a view of it, so that it may not become part of another tensor."""
    return any(user.op == "output" or (is_view(user) and _returned(user)) for user in node.users)


def _chain(target: Node, last: Node) -> list[Node]:
    """The updates that lead from the input to its new contents, in order; empty if anything else is in between."""
    updates: list[Node] = []
    node = last
    while node is not target:
        base = node.args[0] if node.target in _SCATTERS else None
        if not isinstance(base, Node):
            return []
        updates.insert(0, node)
        node = base
    return updates


def _unobserved(graph_module: GraphModule, target: Node, updates: list[Node], copy: Node) -> bool:
    """Whether no node reads a state of the input that a later update has overwritten by then."""
    position = {node: i for i, node in enumerate(graph_module.graph.nodes)}
    states = [target, *updates]
    for state, update in zip(states, updates, strict=False):
        if any(position[reader] >= position[update] and reader not in (update, copy) for reader in _readers(state)):
            return False
        # The new elements may be read from the input itself: x[1:] = x[:-1] needs a copy in between.
        for argument in update.all_input_nodes:
            if argument is not state and root_of(argument) is target:
                return False
    # A write through one expanded element would change many.
    value = target.meta["val"]
    return not any(stride == 0 and length > 1 for length, stride in zip(value.shape, value.stride(), strict=True))


def _readers(node: Node) -> set[Node]:
    """The nodes that read a node's elements, also through views."""
    readers: set[Node] = set()
    for user in node.users:
        if is_view(user):
            readers |= _readers(user)
        else:
            readers.add(user)
    return readers


def _write(graph_module: GraphModule, target: Node, update: Node) -> None:
    graph = graph_module.graph
    if update.target in _BY_INDEX:
        update.target = _BY_INDEX[update.target]
        update.args = (target, *update.args[1:])
        return
    source, dim, rest = update.args[1], update.args[2] if len(update.args) > 2 else 0, update.args[3:]
    view = _SCATTER_VIEWS[update.target]
    with graph.inserting_before(update):
        part = graph.call_function(view, (target, dim, *rest), dict(update.kwargs))
        part.meta = {**update.meta, "val": view(target.meta["val"], dim, *rest, **update.kwargs)}
        written = graph.call_function(aten.copy_.default, (part, source))
        written.meta = {**update.meta, "val": part.meta["val"]}
    update.replace_all_uses_with(target)
    graph.erase_node(update)
