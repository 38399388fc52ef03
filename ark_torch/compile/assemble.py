"""Describes how the pieces of a graph are joined into one function of a list (program.py).

The graph returns slots, views of slots, or constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from ark_torch.compile import analysis
from ark_torch.compile.ir import Strided
from ark_torch.compile.program import Boxed, Call, Filled, Held, Operator, Part, Program, Returned, Slot, Views, link


@dataclass
class Step:
    run: Boxed
    takes: list[Node]
    gives: list[Node]


def _constant(node: Node) -> Any:
    held = analysis.held_number(node)
    if held is not None:
        return held
    if any(isinstance(argument, Node) for argument in node.args):  # as full_like: its argument's contents do not matter
        value = node.meta["val"]
        name = str(node.target)
        fill: Any = node.args[-1] if "full" in name else 1 if "ones" in name else 0
        return Filled(tuple(value.shape), tuple(value.stride()), value.dtype, value.device, fill)
    return Call(Operator.of(node.target), tuple(node.args), dict(node.kwargs))


def _chain(node: Node) -> list[Call]:
    """The views between a node and its root, first one first."""
    chain: list[Node] = []
    while (base := analysis.base_of(node)) is not None:
        if analysis.is_getitem(node):
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
            chain.append(node)
        elif analysis.is_view(node):
            chain.append(node)
        node = base
    return [Call(Operator.of(one.target), tuple(one.args[1:]), dict(one.kwargs)) for one in chain[::-1]]


def describe(
    graph_module: GraphModule, steps: Sequence[Step], views: dict[Node, Strided], outputs: Sequence[Any]
) -> Program:
    """`views`: results of ark's regions that are views of another result; `outputs`: what the graph returns."""
    slots: dict[Node, int] = {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    program = Program(len(placeholders))
    for node in placeholders:
        slots[node] = len(slots)
    wanted = {node for step in steps for node in step.takes}
    wanted |= {analysis.root_of(node) for node in outputs if isinstance(node, Node)}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node in wanted:
            slots[node] = len(slots)
            value: Any = graph_module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            program.constants.append(value)
    for step in steps:
        first = len(slots)
        for node in step.gives:
            slots[node] = len(slots)
        program.steps.append(([slots[node] for node in step.takes], first, len(slots)))

    def returns(node: Any) -> Returned:
        if not isinstance(node, Node):
            return Held(node)
        if node in slots:
            return Slot(slots[node])
        root = analysis.root_of(node)
        if node in views:
            view = views[node]
            return Part(slots[root], view.shape, view.strides, view.offset)
        return Views(_constant(root) if analysis.is_constant(root) else slots[root], _chain(node))

    program.returned = [returns(node) for node in outputs]
    return program


def assemble(
    graph_module: GraphModule, steps: Sequence[Step], views: dict[Node, Strided], outputs: Sequence[Any]
) -> Boxed:
    return link(describe(graph_module, steps, views, outputs), [step.run for step in steps])
