"""Joins the pieces of a graph into one function of a list, with minimal overhead per call.

A call's tensors are in one list of slots: the graph's arguments, then tensors that the graph holds, then the pieces'
results. Each piece reads its slots and fills its own. The graph returns slots, views of slots, or constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ark_torch.compile import analysis
from ark_torch.compile.ir import Strided

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass
class Step:
    run: Boxed
    takes: list[Node]
    gives: list[Node]


def _taker(slots: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    if not slots:
        return lambda env: []
    if len(slots) == 1:
        only = slots[0]
        return lambda env: [env[only]]
    take = operator.itemgetter(*slots)
    return lambda env: list(take(env))


def _viewer(slot: int, view: Strided) -> Callable[[list[Any]], Any]:
    shape, strides, offset = view.shape, view.strides, view.offset
    return lambda env: torch.as_strided(env[slot], shape, strides, env[slot].storage_offset() + offset)


def _replayer(slot: int, chain: list[Node]) -> Callable[[list[Any]], Any]:
    """Replays a chain of views from its base."""
    calls = [(node.target, node.args[1:], node.kwargs) for node in chain]

    def replay(env: list[Any]) -> Any:
        value = env[slot]
        for target, arguments, keywords in calls:
            value = target(value, *arguments, **keywords)  # type: ignore[operator]
        return value

    return replay


def _maker(node: Node) -> Callable[[list[Any]], Any]:
    target, arguments, keywords = node.target, node.args, node.kwargs
    held = analysis.held_number(node)
    if held is not None:
        return lambda env: held.clone()
    if any(isinstance(argument, Node) for argument in node.args):  # as full_like: its argument's contents do not matter
        value = node.meta["val"]
        name = str(target)
        fill: Any = node.args[-1] if "full" in name else 1 if "ones" in name else 0
        shape, strides, like = tuple(value.shape), value.stride(), {"dtype": value.dtype, "device": value.device}
        return lambda env: torch.empty_strided(shape, strides, **like).fill_(fill)
    return lambda env: target(*arguments, **keywords)  # type: ignore[operator]


def _chain(node: Node) -> list[Node]:
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
    return chain[::-1]


def assemble(
    graph_module: GraphModule, steps: Sequence[Step], views: dict[Node, Strided], outputs: Sequence[Any]
) -> Boxed:
    """`views`: results of ark's regions that are views of another result; `outputs`: what the graph returns."""
    slots: dict[Node, int] = {}
    constants: list[Any] = []
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
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
            constants.append(value)
    results = 0
    program = []
    for step in steps:
        first = len(slots)
        for node in step.gives:
            slots[node] = len(slots)
        program.append((step.run, _taker([slots[node] for node in step.takes]), first, len(slots)))
        results += len(step.gives)

    def returns(node: Any) -> Callable[[list[Any]], Any] | int | None:
        if not isinstance(node, Node):
            return lambda env: node
        if node in slots:
            return slots[node]
        root = analysis.root_of(node)
        if node in views:
            return _viewer(slots[root], views[node])
        if analysis.is_constant(root):
            make, chain = _maker(root), _chain(node)
            replay = _replayer(0, chain)
            return lambda env: replay([make(env)])
        return _replayer(slots[root], _chain(node))

    returned = [returns(node) for node in outputs]
    if len(steps) == 1 and not constants and returned == [slots[node] for node in steps[0].gives]:
        return _single(steps[0], [slots[node] for node in steps[0].takes], len(placeholders))
    finish = [operator.itemgetter(r) if isinstance(r, int) else r for r in returned]
    blank = [None] * results

    def call(args: list[Any]) -> Sequence[Any]:
        env = [*args, *constants, *blank]
        args.clear()
        for run, take, first, last in program:
            env[first:last] = run(take(env))
        return [f(env) for f in finish]  # type: ignore[misc]

    return call


def _single(step: Step, taken: list[int], arguments: int) -> Boxed:
    run = step.run
    if taken == list(range(arguments)):

        def straight(args: list[Any]) -> Sequence[Any]:  # `run` may be an object that takes no attributes
            return run(args)

        straight.runs = run  # type: ignore[attr-defined]  # nothing else happens: see ark_torch.compile.fast_call
        return straight
    take = _taker(taken)
    return lambda args: run(take(args))
