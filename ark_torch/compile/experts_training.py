"""Fuses mixtures of experts in training graphs: the forward and backward passes of slots' exchanges become ark's
operators.

It works on joint graphs, before these are split into forward and backward. The forward part is found as
in experts.py. The backward part, made by autograd, starts where the gradient of the received rows is put into slots,
and ends where that of the sent rows is taken out of them. Everything in between depends only on those gradients, the
forward part and its weights, and leads only to that end and to the gradients of the weights. So it is replaced by the
gradients of ark's operators.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from ark_torch.compile import experts
from ark_torch.compile.analysis import aten
from ark_torch.compile.choices import is_called, is_full, same
from ark_torch.compile.graph_edits import VIEWS, NotFused, all_to_alls, call, inherit, is_backward, tag
from ark_torch.compile.ir import Unsupported
from ark_torch.compile.networks import Network, network_of

_OF_WEIGHTS = (
    *VIEWS,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.select.int,
    aten.unsqueeze.default,
)


def fuse(graph: Graph, device: str = "cuda") -> list[str]:
    """Like experts.fuse, for a joint graph."""
    told: list[str] = []
    for wait, started in all_to_alls(graph, device):
        if is_backward(wait) or wait._erased:
            continue
        try:
            sent = experts.sent_by(wait, started)
            if sent is not None:
                told.append(f"{started.name}: {_fuse(graph, started, sent)}")
        except (NotFused, Unsupported) as reason:
            told.append(f"{started.name}: not fused with experts: {reason}")
    return told


def _fuse(graph: Graph, started: Any, sent: Any) -> str:
    if not sent.in_slots:
        raise NotFused("it trains, and its split sizes are read from tensors")
    if not isinstance(sent.slots, int):
        raise NotFused("it trains, and its sizes are symbolic")
    forward = [node for node in graph.nodes if not is_backward(node)]
    network = network_of(sent.follower.run(forward))
    if len(sent.follower.results) != 1:
        raise NotFused("rows that come back are read in several ways")
    result = sent.follower.results[0]
    experts.check_kind(sent.rows, result, sent.choices.experts)
    region = _Region(graph, sent, result, network)
    gradients = region.gradients()
    with graph.inserting_before(result):
        first = len(graph.nodes)
        w1, w3, w2 = experts.weights_of(graph, network, sent.choices.local)
        both = w1 if w3 is None else call(graph, aten.cat.default, [w1, w3], 1)
        name, activation = sent.choices.group_name, network.activation
        ids = call(graph, aten.view.default, sent.expert, [-1, 1])
        if ids.meta["val"].dtype not in (torch.int32, torch.int64):
            ids = call(graph, torch.ops.prims.convert_element_type.default, ids, torch.int64)
        most, most_rows = experts.most_of(graph, sent, None, 1, result)
        ark: Any = torch.ops.ark
        made = call(
            graph, ark.moe_dispatch.default, sent.rows, ids, name, sent.choices.experts, most, most_rows, False, 1
        )
        rows, counts, places, rank_counts = (call(graph, getitem, made, i) for i in range(4))
        y = call(graph, ark.moe_experts.default, rows, counts, both, w2, activation)
        more = (places, rank_counts, None, name, most)
        brought = call(graph, ark.moe_gather.default, y, *more, False, 1)
        out = call(graph, aten.view.default, brought, list(result.meta["val"].shape))
    inherit(brought, started)
    tag(result, len(graph.nodes) - first, "is_forward")
    result.replace_all_uses_with(out)
    place = next(iter(region.inside))
    with graph.inserting_before(place):
        first = len(graph.nodes)
        each = call(graph, aten.unsqueeze.default, region.gradient, 1)
        of_y = call(graph, ark.moe_scatter.default, each, *more, most_rows, 0)
        of_all = call(graph, ark.moe_experts_backward.default, of_y, rows, counts, both, w2, activation)
        of_rows, of_both, of_w2 = (call(graph, getitem, of_all, i) for i in range(3))
        of_sent = call(graph, ark.moe_gather.default, of_rows, *more, False, 0)
        of_sent = call(graph, aten.view.default, of_sent, list(sent.rows.meta["val"].shape))
        width = w1.meta["val"].shape[1]
        of_w1 = of_both if w3 is None else call(graph, aten.slice.Tensor, of_both, 1, 0, width)
        of_w3 = None if w3 is None else call(graph, aten.slice.Tensor, of_both, 1, width, 2 * width)
        put = []
        for gradient, made_of in zip(gradients, (of_w1, of_w3, of_w2), strict=True):
            if gradient is not None:
                number, is_turned = gradient
                put.append((number, made_of if is_turned else call(graph, aten.permute.default, made_of, [0, 2, 1])))
    tag(place, len(graph.nodes) - first, "is_backward")
    region.end.replace_all_uses_with(of_sent)
    region.put(put)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and (node in region.all or not node.is_impure()):
            graph.erase_node(node)
    return str(ark.moe_experts.default)


class _Region:
    """The backward part. `gradient` is that of the received rows; `end` computes that of the sent rows."""

    def __init__(self, graph: Graph, sent: Any, result: Any, network: Network) -> None:
        self._graph, self._network, self._local = graph, network, sent.choices.local
        self._forward = sent.follower.rows
        backward = [node for node in graph.nodes if is_backward(node)]
        begins = [node for node in backward if self._puts(node, sent, result)]
        if len(begins) != 1:
            raise NotFused("no one place is known where the gradients of its rows come from")
        self.gradient: Any = begins[0].args[2]
        self.inside: dict[Node, None] = {begins[0]: None}
        self._weights = {
            self._parameter(weight)[0] for weight in (network.gate, network.factor, network.down) if weight
        }
        ends = [node for node in backward if sent.reads(node)]
        self._grow(backward, ends)
        ends = [node for node in ends if node.all_input_nodes[0] in self.inside]
        if len(ends) != 1:
            raise NotFused("no one place is known where the gradients of its rows go to")
        self.end: Any = ends[0]
        self.all = {*self.inside, *self._forward}
        for node in self._forward:
            if any(is_backward(user) and user not in self.inside for user in node.users):
                raise NotFused(f"{node.name} is read by others in the backward pass, too")
            outside = [user for user in node.users if not is_backward(user) and user not in self._forward]
            if any(user is not result for user in outside):
                raise NotFused(f"{node.name} is read by others, too")

    @staticmethod
    def _puts(node: Any, sent: Any, result: Any) -> bool:
        """Whether the node puts gradients into the slots that rows are read from."""
        if not is_called(node, aten.index_put.default) or len(node.args) != 4 or node.args[3] is not True:
            return False
        read = result.args[1] if is_called(result, aten.index.Tensor) else [result.args[2]]
        base = node.args[0]
        shape = result.all_input_nodes[0].meta["val"].shape
        return same(node.args[1], read) and is_full(base, 0) and base.meta["val"].shape == shape

    def _grow(self, backward: list[Any], ends: list[Any]) -> None:
        """Adds all nodes that depend only on gradients in slots, the forward part and its weights."""
        for node in backward:
            given = node.all_input_nodes
            if node in self.inside or node in ends or node.op == "output" or not given:
                continue
            fits = [n in self.inside or n in self._forward or self._of_weights(n) for n in given]
            touches = any(n in self.inside for n in given)
            if all(fits) and (touches or any(n in self._forward for n in given)):
                self.inside[node] = None
            elif touches:
                raise NotFused(f"{node.name}, in the backward pass, reads more than its experts' gradients")

    def _of_weights(self, node: Any) -> bool:
        while is_called(node, *_OF_WEIGHTS):
            node = node.args[0]
        constant = node.op == "call_function" and not node.all_input_nodes and not node.is_impure()
        return node in self._weights or constant

    def _parameter(self, weight: Any) -> tuple[Any, bool]:
        """The parameter that a weight is, and whether it is [experts, out, in]."""
        kind, given = weight
        node = experts.untwisted(given if kind == "all" else given[0][1])
        turned = experts.turned(node)
        base = node if turned is None else turned
        if kind == "each":
            if self._local == 1 and base.op == "placeholder":
                raise NotFused("its weights are matrices, and no parameter holds those of all experts of this rank")
            if not is_called(base, aten.select.int):
                raise NotFused("no parameter holds the weights of all experts of this rank")
            base = base.args[0]
        if base.op != "placeholder" or base.meta["val"].dim() != 3:
            raise NotFused("its weights are no parameters, but made of them")
        return base, turned is not None

    def gradients(self) -> list[Any]:
        """For gate, factor and down: the index among the graph's results, and whether it is [experts, out, in]."""
        if self._network.halves is not None and not self._network.whole:
            raise NotFused("the second half of its first product goes through the activation")
        (results,) = (node for node in self._graph.nodes if node.op == "output")
        self._results: Any = results
        inputs = [n for n in self._graph.nodes if n.op == "placeholder" and "primals" in str(n.target)]
        given = list(results.args[0])
        first = len(given) - len(inputs)
        found: list[Any] = []
        for weight in (self._network.gate, self._network.factor, self._network.down):
            if weight is None:
                found.append(None)
                continue
            base, is_turned = self._parameter(weight)
            number = first + inputs.index(base)
            if given[number] is not None and given[number] not in self.inside:
                raise NotFused(f"the gradient of {base.name} is made of more than its experts' gradients")
            found.append(None if given[number] is None else (number, is_turned))
        known = {given[one[0]] for one in found if one is not None}
        for node in self.inside:
            if any(user not in self.inside and user is not self.end for user in node.users) and node not in known:
                raise NotFused(f"{node.name}, in the backward pass, is read by others, too")
        return found

    def put(self, gradients: list[tuple[int, Any]]) -> None:
        given = list(self._results.args[0])
        for number, node in gradients:
            given[number] = node
        self._results.args = (type(self._results.args[0])(given),)
