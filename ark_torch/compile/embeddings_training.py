"""Fuses embedding bags and their all-to-all in training graphs: both passes become embedding_bag_all_to_all's own.

It works on joint graphs, before these are split into forward and backward. The forward part is found as
in embeddings.py. The backward part, made by autograd, moves the gradient of the result, exchanges it the other way, and
gives each table's part to that table's backward operator. That only elements are moved is shown as there, by numbers.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.embeddings import MOVES, Exchange, in_chunks, moved, numbers, run, sources, tensors_read
from ark_torch.compile.graph_edits import NotFused, all_to_alls, call, inherit, is_backward, tag
from ark_torch.compile.ir import Unsupported
from ark_torch.compile.operators.collectives import resolved
from ark_torch.compile.trials import Trial

_functional = torch.ops._c10d_functional
_OF_TABLE = (aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
_OF_WEIGHTS = aten._embedding_bag_per_sample_weights_backward.default


def fuse(graph: Graph, device: str = "cuda") -> list[str]:
    """Like embeddings.fuse, for a joint graph."""
    told: list[str] = []
    for wait, started in all_to_alls(graph, device):
        if wait._erased or is_backward(wait):
            continue
        try:
            moves, bags = sources(started.args[0])
            if bags:
                told.append(f"{started.name}: {_fuse(graph, Exchange(wait, started, moves, bags))}")
        except (NotFused, Unsupported) as reason:
            told.append(f"{started.name}: not fused with embedding_bag: {reason}")
    return told


def _fuse(graph: Graph, forward: Exchange) -> str:
    backward = _Backward(graph, forward)
    fused, result = forward.replace()
    tag(result.next, 2, "is_forward")
    ark: Any = torch.ops.ark
    place = backward.of_bags[0]
    with graph.inserting_before(place):
        first = len(graph.nodes)
        gradient, value = backward.gradient, backward.gradient.meta["val"]
        if not value.is_contiguous():
            gradient = call(graph, aten.clone.default, gradient, memory_format=torch.contiguous_format)
        gradient = call(graph, aten.view.default, gradient, [-1, sum(forward.tables), forward.columns])
        of_weights = any(node.target is _OF_WEIGHTS for node in backward.of_bags)
        made = call(graph, ark.embedding_bag_all_to_all_backward.default, gradient, *forward.arguments, of_weights)
        parts = {which: call(graph, getitem, made, which) for which in range(1 + of_weights)}
        given = {
            node: call(graph, getitem, parts[int(node.target is _OF_WEIGHTS)], backward.table_of(node))
            for node in backward.of_bags
        }
    inherit(made, place)
    tag(place, len(graph.nodes) - first, "is_backward")
    for node, other in given.items():
        node.replace_all_uses_with(other)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and (node in backward.inside or not node.is_impure()):
            graph.erase_node(node)
    return str(fused.target)


class _Backward:
    """`gradient` is that of the operator's result, in its order; `of_bags` compute those of tables and weights."""

    def __init__(self, graph: Graph, forward: Exchange) -> None:
        self._forward = forward
        self._calls = [one.call for one in forward.calls]
        others = {user for one in self._calls for user in one.users if user not in forward.bags}
        readers = {user for one in others for user in one.users}
        self.of_bags = [node for node in graph.nodes if node in readers]
        if not self.of_bags:
            raise NotFused("it does not train")
        for node in self.of_bags:
            if node.target not in (*_OF_TABLE, _OF_WEIGHTS):
                raise NotFused(f"{node.name} reads what its bags return beside rows")
            if _given(node, "scale_grad_by_freq"):
                raise NotFused("its gradients are scaled by frequency (scale_grad_by_freq)")
            if _given(node, "sparse"):
                raise NotFused("its gradients are sparse")
        starts = [node.all_input_nodes[0] for node in self.of_bags]
        after, waits = _moves_before(starts)
        if len(waits) != 1 or waits[0].target is not _functional.wait_tensor.default:
            raise NotFused("its gradients do not come from one exchange")
        (wait,) = waits
        started: Any = wait.args[0]
        if getattr(started, "target", None) is not _functional.all_to_all_single.default:
            raise NotFused("its gradients do not come from an all_to_all")
        if resolved(started.args[3], wait.meta["val"].device).group_name != forward.group:
            raise NotFused("its gradients are exchanged in another group")
        self.inside = {started, wait, *after}
        for node in (wait, *after):
            if any(user not in self.inside and user not in self.of_bags for user in node.users):
                raise NotFused(f"{node.name}, a gradient, is read by others, too")
        with unset_fake_temporarily():
            for trial in forward.trials:
                self._check_received(wait, after, trial)
            self.gradient = self._sent_from(started)

    def table_of(self, node: Any) -> int:
        """The index of the table whose bags' gradient it reads."""
        given = set(node.all_input_nodes)
        return next(i for i, one in enumerate(self._calls) if any(user in given for user in one.users))

    def _check_received(self, wait: Node, after: list[Node], trial: Trial) -> None:
        forward, samples = self._forward, trial(self._forward.samples)
        whole = numbers([len(self._calls)], forward.world * samples, forward.columns)
        got = in_chunks(torch.split(whole, samples), forward.tables_first)
        if got.numel() != math.prod(trial.shape(wait)):
            raise NotFused("its gradients are of another size")
        values = run(after, {wait: got.view(trial.shape(wait))}, trial)
        for node in self.of_bags:
            value = values[node.all_input_nodes[0]]
            wanted = whole[:, self.table_of(node)]
            if value.shape != wanted.shape or not bool((value == wanted).all()):
                raise NotFused("the gradients that are received are not put in the order of its bags")

    def _sent_from(self, started: Node) -> Node:
        """The first node from which moves alone lead to what is sent, and which has the operator's order."""
        forward = self._forward
        sent, received, sends, _ = started.args
        assert isinstance(sent, Node)
        for trial in forward.trials:
            element, unit = trial(forward.samples) * forward.columns, math.prod(trial.shape(sent)[1:])
            if [trial(n) * unit for n in sends] != [count * element for count in forward.tables]:  # type: ignore[union-attr]
                raise NotFused("ranks do not send each other the gradients of whole tables")
            if any(trial(n) * unit != len(self._calls) * element for n in received):  # type: ignore[union-attr]
                raise NotFused("ranks do not get the gradients of equal numbers of samples")
        moves, roots = _moves_before([sent])
        for node in (*roots, *moves):
            if tensor_of(node) is not None and all(self._leads_to(sent, node, moves, one) for one in forward.trials):
                return node
        raise NotFused("the gradients that are sent are not in the order of samples, ranks and tables")

    def _leads_to(self, sent: Node, node: Node, moves: list[Node], trial: Trial) -> bool:
        """Whether these moves put a tensor in the operator's order into the order in which it is sent."""
        forward = self._forward
        wanted = numbers(forward.tables, trial(forward.samples), forward.columns)
        shape = trial.shape(node)
        if math.prod(shape) != wanted.numel():
            return False
        known = {node}
        for one in moves:
            if all(n in known for n in _read_by(one)):
                known.add(one)
        values = run([one for one in moves if one in known and one is not node], {node: wanted.view(shape)}, trial)
        chunks = in_chunks(torch.split(wanted, forward.tables, 1), forward.tables_first)
        return sent in values and bool((values[sent].reshape(-1) == chunks).all())


def _given(node: Node, name: str) -> Any:
    """An argument of an operator of ATen."""
    names = [one.name for one in node.target._schema.arguments]  # type: ignore[union-attr]
    return (dict(zip(names, node.args, strict=False)) | node.kwargs).get(name)


def _moves_before(ends: list[Node]) -> tuple[list[Node], list[Node]]:
    """The moves that lead to these nodes, in order, and where they start."""
    order = {one: i for i, one in enumerate(ends[0].graph.nodes)}
    moves, roots, todo = set(), set(), list(ends)
    while todo:
        node = todo.pop()
        if node in moves or node in roots:
            continue
        given = _read_by(node)
        if given:
            moves.add(node)
            todo += given
        else:
            roots.add(node)
    return sorted(moves, key=order.__getitem__), sorted(roots, key=order.__getitem__)


def _read_by(node: Node) -> list[Node]:
    """What a move reads; nothing if the node is none."""
    copied = moved(node)
    if copied is not None:
        return [copied]
    return tensors_read(node) if node.target in MOVES else []
