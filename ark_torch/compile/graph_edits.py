"""Helpers of the passes that replace several operators by one (products.py, embeddings.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from ark_torch.compile.analysis import aten, tensor_of

_functional = torch.ops._c10d_functional
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class NotFused(Exception):
    """The operators stay unchanged; the message says why."""


def call(graph: Graph, target: Any, *args: Any, **named: Any) -> Node:
    """Adds a node and computes its value."""
    node: Node = graph.call_function(target, args, named)
    given = map_arg(args, lambda one: one.meta["val"])
    node.meta["val"] = target(*given, **named)
    return node


def erase(node: Node) -> None:
    """Erases a node without users, and its inputs that become unused."""
    if node.op != "call_function" or node.users or node._erased:
        return
    given = node.all_input_nodes
    node.graph.erase_node(node)
    for one in given:
        erase(one)


def copied_from(node: Node) -> Node | None:
    """The source of a copy into another tensor of the same kind, as torch.distributed's in-place functions look when
    made functional."""
    if node.target is not aten.copy.default:
        return None
    into, other = node.all_input_nodes[0], node.all_input_nodes[-1]
    one, two = into.meta["val"], other.meta["val"]
    if one.dtype != two.dtype or one.device != two.device or one.dim() != two.dim():
        return None
    pairs = zip((*one.shape, *one.stride()), (*two.shape, *two.stride()), strict=True)
    return other if all(statically_known_true(mine == theirs) for mine, theirs in pairs) else None


def value_of(size: Any) -> Any:
    """The number or symbol that a size in a graph is."""
    return size.meta["val"] if isinstance(size, Node) else size


def size_node(graph: Graph, size: torch.SymInt, before: Node) -> Node:
    """A node in front of another whose value is this symbol."""
    for node in graph.nodes:
        if node is before:
            break
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and statically_known_true(value == size):
            return node  # type: ignore[no-any-return]
        for dim, n in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(n, torch.SymInt) and statically_known_true(n == size):
                return call(graph, aten.sym_size.int, node, dim)
    raise NotFused("its sizes are symbolic")


def all_to_alls(graph: Graph, device: str) -> list[tuple[Any, Any]]:
    """All-to-alls of numbers on tensors of that device, as (wait, start) nodes."""
    found = []
    for wait in graph.nodes:
        if wait.target is not _functional.wait_tensor.default:
            continue
        started, value = wait.args[0], tensor_of(wait)
        if value is None or value.device.type != device or not value.dtype.is_floating_point:
            continue
        if getattr(started, "target", None) is _functional.all_to_all_single.default:
            found.append((wait, started))
    return found


def alone(node: Node) -> None:
    if len(node.users) != 1:
        raise NotFused(f"{node.name} is read by others, too")


def shape_of(node: Node) -> tuple[int, ...]:
    value = tensor_of(node)
    if value is None or not all(isinstance(n, int) for n in value.shape):
        raise NotFused("its sizes are symbolic")
    return tuple(value.shape)


def inherit(node: Node, other: Node) -> None:
    """Copies another node's origin, for messages."""
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten"):
        if key in other.meta:
            node.meta[key] = other.meta[key]


def is_backward(node: Node) -> bool:
    """Whether a node of a joint graph is in the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def tag(before: Node, count: int, which: str) -> None:
    """Sets the partitioner's own tag ("is_forward", "is_backward") on the nodes inserted before that one."""
    node = before
    for _ in range(count):
        node = node.prev
        node.meta["partitioner_tag"] = which
