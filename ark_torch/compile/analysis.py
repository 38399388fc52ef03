"""Classifies the nodes of a functional ATen graph: views, constants, roots, and the order that mutation requires.

The *root* of a tensor is the node whose storage it uses: a placeholder, a lifted constant, or the operator that made
the storage. Views share their base's root, and an in-place operator returns its argument's. Views and constants are
*free*: they cost nothing, belong to no region, and are recreated wherever they are needed. So are operators that decode
weights of products that read the codes themselves (low_bits.py).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
DECODES = "ark_decodes"  # key in a node's meta: the node decodes such weights

# ATen declares the result of _unsafe_view as new memory, but it never is.
_UNSAFE_VIEWS = frozenset({aten._unsafe_view.default})
_CONSTANTS = frozenset(
    {
        aten.full.default,
        aten.scalar_tensor.default,
        aten.zeros.default,
        aten.ones.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        # Uninitialized memory may hold anything, so zeros are valid.
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_permuted.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


@functools.cache
def is_view_operator(target: Any) -> bool:
    """Whether the operator returns its first argument with other sizes and strides and writes nothing."""
    if target in _UNSAFE_VIEWS:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    if not schema.arguments or schema.arguments[0].alias_info is None:
        return False
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    returned = [r.alias_info for r in schema.returns if r.alias_info is not None]
    return bool(returned) and not any(alias.is_write for alias in aliases)


@functools.cache
def written_arguments(target: Any) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    arguments = target._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def is_getitem(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def is_view(node: Node) -> bool:
    if is_getitem(node):
        return is_view(_node(node.args[0]))
    return node.op == "call_function" and is_view_operator(node.target)


def is_constant(node: Node) -> bool:
    return node.op == "call_function" and (node.target in _CONSTANTS or held_number(node) is not None)


def held_number(node: Node) -> torch.Tensor | None:
    """A copy of a number that the graph holds, as Dynamo makes of Python's own in x[0] = 1.5. It is on the CPU even if
    everything else is on a GPU."""
    if node.target is not aten.lift_fresh_copy.default or _node(node.args[0]).op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for part in str(_node(node.args[0]).target).split("."):
        value = getattr(value, part)
    held = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.device.type == "cpu"
    return value if held and value.dim() == 0 else None


def is_source(node: Node) -> bool:
    """Whether the node is given to the graph: an argument, or a tensor that it holds."""
    return node.op in ("placeholder", "get_attr")


def is_free(node: Node) -> bool:
    free = is_source(node) or is_view(node) or is_constant(node) or is_getitem(node) or node.op == "output"
    return free or DECODES in node.meta


def _node(argument: Any) -> Node:
    assert isinstance(argument, Node), argument
    return argument


def base_of(node: Node) -> Node | None:
    """The base of a view, or what an operator wrote in place and returns; None for a node with its own storage."""
    if is_getitem(node):
        source = _node(node.args[0])
        return base_of(source) if is_view(source) else None
    if is_view(node):
        return _node(node.args[0])
    written = written_arguments(node.target) if node.op == "call_function" else ()
    if written and node.target._schema.returns:  # type: ignore[union-attr]
        return _node(node.args[written[0]])
    return None


def root_of(node: Node) -> Node:
    while (base := base_of(node)) is not None:
        node = base
    return node


def producer_of(root: Node) -> Node:
    """The node that computes a root; for one of several results, the operator that returns them."""
    while is_getitem(root):
        root = _node(root.args[0])
    return root


def written_roots(node: Node) -> list[Node]:
    return [root_of(_node(node.args[i])) for i in written_arguments(node.target)] if node.op == "call_function" else []


def roots_read(node: Node) -> list[Node]:
    """The roots of a node's arguments, and of what decodes an argument, each once."""
    roots: dict[Node, None] = {}

    def read(argument: Node) -> None:
        root = root_of(argument)
        if DECODES not in root.meta:
            roots.setdefault(root)
            return
        for one in root.all_input_nodes:
            read(one)

    for argument in node.all_input_nodes:
        read(argument)
    return list(roots)


def tensor_of(node: Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def has_order_of_its_own(node: Node) -> bool:
    """Whether the node must stay in program order with others of its kind: random numbers, collectives and other
    effects."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.op == "call_function" and node.target is not operator.getitem
    if node.target.namespace in ("_c10d_functional", "c10d_functional", "_dtensor", "ark"):
        return True
    return torch.Tag.nondeterministic_seeded in node.target.tags or (
        bool(node.target._schema.is_mutable) and not written_arguments(node.target)
    )


def waits(needed: Iterable[Node]) -> dict[Node, Node]:
    """Maps each node that waits for a collective to that collective."""
    return {
        node: started
        for node in needed
        if node.target is torch.ops._c10d_functional.wait_tensor.default
        and not is_free(started := producer_of(root_of(_node(node.args[0]))))
    }


def dependencies(graph_module: GraphModule) -> dict[Node, set[Node]]:
    """Maps each computing node to the computing nodes that must precede it."""
    needed: dict[Node, set[Node]] = {}
    last_write: dict[Node, Node] = {}
    reads: dict[Node, set[Node]] = {}  # since the last write
    last_effect: Node | None = None
    mutated = {root for node in graph_module.graph.nodes for root in written_roots(node)}
    for node in graph_module.graph.nodes:
        if is_free(node):
            continue
        before: set[Node] = set()
        for root in roots_read(node):
            producer = producer_of(root)
            if not is_free(producer):
                before.add(producer)
            if root in mutated:
                if root in last_write:
                    before.add(last_write[root])
                reads.setdefault(root, set()).add(node)
        for root in written_roots(node):
            before |= reads.pop(root, set())
            last_write[root] = node
        if has_order_of_its_own(node):
            if last_effect is not None:
                before.add(last_effect)
            last_effect = node
        before.discard(node)
        needed[node] = before
    return needed


def origin_of(node: Node) -> str:
    """A node's origin for messages: "layers.0.attn (model.py:31)"."""
    module = module_of(node)
    file, line = source_of(node)
    place = f"{file.rsplit('/', 1)[-1]}:{line}" if file else ""
    return f"{module} ({place})" if module and place else module or place or node.name


def module_of(node: Node) -> str:
    """The innermost module as the model's owner names it: "layers.0.attn", or with the model's variable if a function
    calls it: "model.layers.0.attn". Returns "" if there is none, and in the model's own forward."""
    module = ""
    for name, _ in (node.meta.get("nn_module_stack") or {}).values():
        module = name
    module = re.sub(r"^[LG]\['(\w+)'\]", r"\1", module)
    module = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", module)
    return re.sub(r"^(self|fn|s)(\.|$)", "", module)


def source_of(node: Node) -> tuple[str, int]:
    """File and line of the innermost frame that PyTorch recorded; ("", 0) without one."""
    for text in map(str.strip, reversed((node.meta.get("stack_trace") or "").splitlines())):
        if text.startswith('File "'):
            file, _, rest = text[6:].partition('"')
            number = rest.partition("line ")[2].partition(",")[0]
            return file, int(number) if number.isdigit() else 0
    return "", 0
