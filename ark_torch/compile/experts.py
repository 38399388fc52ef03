"""Fuses mixtures of experts in expert parallelism: all-to-all, experts, all-to-all become one operator.

Two forms are recognized. Either rows sorted by expert are sent with split sizes that are the counts of each rank's
choices, exchanged before; or rows are put into equally many slots per expert, so that none is dropped, and the slots
are sent. choices.py and expert_rows.py follow counts, orders and slots in many forms; the experts must compute what
`ark_torch.ops.moe_layer` does, with the same roundings (networks.py).

If rows are taken from tokens by `order // k`, and weighted, summed and rounded once as in moe_layer, the operator
includes that; otherwise it starts with the rows sent and ends with the rows received. With split sizes read from
tensors, a graph does not show whether all ranks have equally many tokens, so ranks exchange this in every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from operator import add, floordiv, ge, getitem, le, mod, mul
from operator import eq as equals
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import ark_torch.ops  # noqa: F401  (the operators' fake kernels)
from ark_torch.compile import combining
from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.choices import SENT, Choices, copied, is_called, plain, same, sorts_up, taken
from ark_torch.compile.expert_rows import Blocks, Follower, Rows, slots
from ark_torch.compile.graph_edits import VIEWS, NotFused, all_to_alls, call, erase, inherit, size_node, value_of
from ark_torch.compile.ir import Unsupported
from ark_torch.compile.networks import Network, network_of
from ark_torch.compile.operators.collectives import resolved

_functional = torch.ops._c10d_functional
_MOST_EXPERTS = 1024  # that a GPU counts (kMostCounts of tiles.cuh)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOVED = (*VIEWS, aten.permute.default, aten.transpose.int, aten.clone.default, aten.unsqueeze.default,
          aten.squeeze.dim, aten.squeeze.dims)  # fmt: skip
_ARITHMETIC = (add, floordiv, ge, le, mod, mul, equals)
_COUNTING = (aten.histc.default, aten.scatter_add.default, aten.index_add.default, aten.sum.dim_IntList)


class Sent(NamedTuple):
    """What is sent, and to whom."""

    rows: Any  # [choices, columns]
    expert: Any | None  # per row, if a node has it; None: the choices, sorted
    sorted: bool
    choices: Choices
    follower: Follower
    slots: Any  # per expert, from each rank, a number or symbol; 0: there are none
    reads: Callable[[Node], bool]  # whether a node takes rows out of slots

    @property
    def in_slots(self) -> bool:
        return not isinstance(self.slots, int) or self.slots > 0


def fuse(graph: Graph, device: str = "cuda") -> list[str]:
    """Replaces matches on tensors of that device. Returns, for each all-to-all of routed rows, what became of
    it."""
    told = []
    for wait, started in all_to_alls(graph, device):
        if wait._erased or _brings_back(graph, started):
            continue
        try:
            sent = sent_by(wait, started)
            if sent is not None:
                told.append(f"{started.name}: {_fuse(wait, started, sent)}")
        except (NotFused, Unsupported) as reason:
            told.append(f"{started.name}: not fused with experts: {reason}")
    return told


def _reads_none(node: Node) -> bool:
    return False


def _brings_back(graph: Graph, started: Any) -> bool:
    """Whether its split sizes are those of an earlier exchange, swapped: it was handled with that one."""
    _, received, sends, _ = started.args
    if not any(isinstance(n, Node) for n in (*received, *sends)):
        return False
    for node in graph.nodes:
        if node is started:
            return False
        if is_called(node, _functional.all_to_all_single.default) and same(node.args[1:3], (sends, received)):
            return True
    return False


def sent_by(wait: Any, started: Any) -> Sent | None:
    sent, received, sends, name = started.args
    device = wait.meta["val"].device
    if any(isinstance(n, Node) for n in (*received, *sends)) and not are_even(started):
        choices = _counted(sends, received, resolved(name, device))
        if choices is None or not choices.are_splits(received, "got"):
            raise NotFused("its split sizes are not known as the counts of each rank's choices, exchanged by the group")
        rows = {wait: Rows(Blocks(tuple((r, e) for r in range(choices.world) for e in range(choices.local))))}
        assert isinstance(sent, Node)
        return Sent(sent, None, True, choices, Follower(choices, rows, _reads_none), 0, _reads_none)
    return _in_slots(wait, started)


def are_even(started: Any) -> bool:
    """Whether ranks exchange equal parts, of a size that may be symbolic."""
    sent, received, sends, _ = started.args
    whole = sent.meta["val"].shape[0]
    return all(statically_known_true(value_of(n) * len(sends) == whole) for n in (*received, *sends))


def _counted(sends: Any, received: Any, group: Any) -> Choices | None:
    """The choices whose counts these are."""
    seen, todo = set[Any](), [one for one in (*sends, *received) if isinstance(one, Node)]
    while todo:
        node = todo.pop(0)  # nearest first, since the whole model precedes the counts
        if node in seen or len(seen) > 1000:
            continue
        seen.add(node)
        todo += node.all_input_nodes
        value = tensor_of(node)
        if node.target not in _COUNTING or value is None or value.dim() != 1:
            continue
        experts = value.shape[0]
        if not isinstance(experts, int) or experts % group.size() != 0 or experts == 0:
            continue
        index = node.args[2] if node.target in (aten.scatter_add.default, aten.index_add.default) else node.args[0]
        if node.target is aten.sum.dim_IntList:
            compared = plain(index)
            index = compared.args[0] if is_called(compared, aten.eq.Tensor) else None
        flat = plain(index)
        if is_called(flat, getitem) and flat.args[1] == 0 and sorts_up(flat.args[0]):
            flat = plain(flat.args[0].args[0])
        if isinstance(flat, Node):
            choices = Choices(group.size(), group.rank(), group.group_name, experts, flat)
            if choices.are_splits(sends, SENT):
                return choices
    return None


def _in_slots(wait: Any, started: Any) -> Sent | None:
    """Rows that were put into slots; None if something else is sent."""
    put: Any = started.args[0]
    while is_called(put, *_MOVED) or copied(put) is not None:
        put = copied(put) or put.args[0]
    if is_called(put, aten.index_put.default) and len(put.args) == 3:
        index, rows = put.args[1:]
    elif is_called(put, aten.index_copy.default) and put.args[1] == 0:
        index, rows = [put.args[2]], put.args[3]
    else:
        return None
    buffer, group = put.meta["val"], resolved(started.args[3], wait.meta["val"].device)
    world = group.size()
    if not isinstance(buffer.shape[-1], int) or buffer.dim() != len(index) + 1 or len(index) > 2:
        raise NotFused("its rows are put where no expert's slots are known to be")
    expert, place, upto = (*index, None) if len(index) == 2 else _taken_apart(index[0])
    experts = buffer.shape[0]
    each = buffer.shape[1] if len(index) == 2 else 0
    if len(index) == 1:
        expert, each = expert.args[0], value_of(expert.args[1])
        experts = _quotient(buffer.shape[0], each)
    experts = experts if isinstance(experts, int) else 0
    source = plain(expert)
    found = taken(source)
    if is_called(source, getitem) and source.args[1] == 0 and sorts_up(source.args[0]):
        flat, in_order = plain(source.args[0].args[0]), True
    elif found is not None:
        flat, in_order = plain(found[0]), True
    else:
        flat, in_order = source, False
    if not experts or experts % world != 0:
        raise NotFused(f"there are slots for {experts} experts and {world} ranks")
    choices = Choices(world, group.rank(), group.group_name, experts, flat)
    if not choices.fills_slots(expert, place, upto):
        raise NotFused("two of its rows could be put into the same slot")
    count = rows.meta["val"].shape[0]
    most = flat.meta["val"].shape[0] if choices.distinct() else count
    if not any(statically_known_true(each >= upper) for upper in (most, count)):
        raise NotFused(f"an expert has {each} slots for each rank, and {most} rows may go there: some could be dropped")
    columns = buffer.shape[-1]

    def reads(node: Any) -> bool:
        if len(index) == 2:
            return is_called(node, aten.index.Tensor) and same(node.args[1], index)
        again = taken(node)
        return again is not None and same(again[1], index[0])

    start = {put: Rows(slots(world, choices.local, each, columns, len(index) == 1))}
    return Sent(rows, expert, in_order, choices, Follower(choices, start, reads), each, reads)


def _quotient(whole: Any, part: Any) -> Any:
    """How many parts, of a size that may be symbolic, make the whole; 0 if none are known to."""
    for count in range(1, _MOST_EXPERTS + 1) if not isinstance(whole, int) else ():
        if statically_known_true(part * count == whole):
            return count
    known = isinstance(whole, int) and isinstance(part, int) and part > 0 and whole % part == 0
    return whole // part if known else 0


def _taken_apart(index: Any) -> tuple[Any, Any, Any]:
    """Splits `expert * each + place` into the product, and the place or the place plus one."""
    index = plain(index)
    less = is_called(index, aten.sub.Tensor) and index.args[1] == 1
    index = plain(index.args[0]) if less else index
    if is_called(index, aten.add.Tensor) and not index.kwargs:
        product, place = index.args
        if is_called(product, aten.mul.Tensor) and isinstance(value_of(product.args[1]), int | torch.SymInt):
            return (product, None, place) if less else (product, place, None)
    raise NotFused("its rows are put where no expert's slots are known to be")


def _fuse(wait: Any, started: Any, sent: Sent) -> str:
    graph, follower, choices = wait.graph, sent.follower, sent.choices
    network = network_of(follower.run(list(graph.nodes)))
    result = follower.results[0]
    value, given = sent.rows.meta["val"], result.meta["val"]
    every = frozenset((SENT, e) for e in range(choices.experts))
    follower.check_readers(lambda condition: _is_true(condition, choices, every, value.shape[0]))
    check_kind(sent.rows, result, choices.experts)
    tokens = combining.tokens_of(sent.rows, choices, sent.sorted)
    weighted = combining.combined(result, choices, sent.sorted, tokens) if tokens is not None else None
    if len(follower.results) > 1:
        weighted = None
    last = result if weighted is None else weighted.node
    with graph.inserting_before(last):
        weights = weights_of(graph, network, choices.local)
        if tokens is not None:
            x, k = tokens.x, tokens.k
            ids = call(graph, aten.view.default, choices.flat, [-1, k])
        else:
            x, k = sent.rows, 1
            expert = sent.expert
            if expert is None:
                ordered = graph.call_function(aten.sort.stable, (call(graph, aten.view.default, choices.flat, [-1]),),
                                              {"stable": True})  # fmt: skip
                ordered.meta["val"] = ordered.target(ordered.args[0].meta["val"], stable=True)
                expert = call(graph, getitem, ordered, 0)
            ids = call(graph, aten.view.default, expert, [-1, 1])
        if ids.meta["val"].dtype not in (torch.int32, torch.int64):
            ids = call(graph, torch.ops.prims.convert_element_type.default, ids, torch.int64)
        factors = None
        if weighted is not None:
            factors = call(graph, aten.view.default, weighted.weights, [-1, k])
            if weighted.by_expert and k > 2:  # sums are in expert order
                in_order = graph.call_function(aten.sort.stable, (ids,), {"stable": True, "dim": 1})
                in_order.meta["val"] = aten.sort.stable(ids.meta["val"], stable=True, dim=1)
                ids = call(graph, getitem, in_order, 0)
                factors = call(graph, aten.gather.default, factors, 1, call(graph, getitem, in_order, 1))
        fused, target = _operator(
            graph, x, ids, factors, weights, network.activation, choices, most_of(graph, sent, tokens, k, last)
        )
        if weighted is None:
            fused = call(graph, aten.view.default, fused, [-1, value.shape[1]])
            if tokens is not None and sent.sorted:
                fused = call(graph, aten.index_select.default, fused, 0, tokens.order)
        elif fused.meta["val"].dtype != given.dtype:
            raise AssertionError("a mixture's dtype is that of its rows")
    inherit(fused, started)
    for one in follower.results if weighted is None else [last]:
        one.replace_all_uses_with(fused)
    if not sent.in_slots:
        _forget_sizes(graph, follower, choices, sent.rows)
    _renew(graph)
    _drop(graph, [last, *follower.results])
    return str(target)


def check_kind(rows: Any, result: Any, experts: int) -> None:
    """Checks the kinds of tensors that are sent and received."""
    value, given = rows.meta["val"], result.meta["val"]
    if value.is_cuda and experts > _MOST_EXPERTS:
        raise NotFused(f"there are {experts} experts, and a GPU counts at most {_MOST_EXPERTS}")
    if value.dim() != 2 or given.dim() != 2 or value.dtype != given.dtype:
        raise NotFused("its rows and what comes back are not of one dtype")
    if value.dtype not in _DTYPES and not (value.dtype == torch.float64 and value.device.type == "cpu"):
        raise NotFused(f"it is of {value.dtype}")
    if value.shape[1] != given.shape[-1]:
        raise NotFused(f"its rows have {value.shape[1]} columns, and what comes back has {given.shape[-1]}")


def most_of(graph: Graph, sent: Sent, tokens: Any, k: int, before: Any) -> tuple[Any, Any]:
    """The most tokens of any rank, and rows of any rank's experts, if ranks send equally many slots; else -1. Of
    symbolic slots, nodes."""
    if not sent.in_slots:
        return -1, -1
    choices = sent.choices
    each = 1 if tokens is not None or not choices.distinct() else choices.flat.meta["val"].shape[1]
    factors = each, choices.world * min(choices.local, each * k)
    if isinstance(sent.slots, int):
        return factors[0] * sent.slots, factors[1] * sent.slots
    number = size_node(graph, sent.slots, before)
    one, other = (number if factor == 1 else call(graph, mul, number, factor) for factor in factors)
    return one, other


def _operator(
    graph: Graph,
    x: Any,
    ids: Any,
    factors: Any,
    weights: tuple[Any, Any, Any],
    activation: str,
    choices: Choices,
    most: tuple[Any, Any],
) -> tuple[Any, Any]:
    w1, w3, w2 = weights
    name, experts = choices.group_name, choices.experts
    plain = w3 is None and all(one.meta["val"].is_contiguous() for one in (w1, w2))  # otherwise they would be copied
    if most != (-1, -1) and factors is not None and plain:
        target = torch.ops.ark.moe_layer.default
        made = call(graph, target, x, ids, factors, w1, w2, name, experts, activation, *most, False, 0)
        return call(graph, getitem, made, 0), target
    target = torch.ops.ark.moe_feed_forward.default
    return call(graph, target, x, ids, factors, w1, w3, w2, name, experts, activation, *most), target


def weights_of(graph: Graph, network: Network, local: int) -> tuple[Node, Node | None, Node]:
    """w1, w3 (None if there is none or it is the second half of w1) and w2, each [experts, out, in]."""
    gate, down = _stacked(graph, network.gate, local), _stacked(graph, network.down, local)
    if network.factor is not None:
        return gate, _stacked(graph, network.factor, local), down
    if network.halves is None or network.whole:
        return gate, None, down
    width = gate.meta["val"].shape[1] // 2
    first, second = (
        call(graph, aten.slice.Tensor, gate, 1, half * width, (half + 1) * width) for half in network.halves
    )
    return first, second, down


def _stacked(graph: Graph, weight: Any, local: int) -> Any:
    kind, given = weight
    if kind == "all":
        given = untwisted(given)
        transposed = turned(given)
        return transposed if transposed is not None else call(graph, aten.permute.default, given, [0, 2, 1])
    if [expert for expert, _ in given] != list(range(local)):
        raise NotFused("not every expert of this rank multiplies rows")
    nodes = [untwisted(node) for _, node in given]
    turned_nodes = [turned(node) for node in nodes]
    is_turned = all(one is not None for one in turned_nodes)
    nodes = turned_nodes if is_turned else nodes
    bases = [one.args[0] if is_called(one, aten.select.int) and one.args[1:] == (0, e) else None
             for e, one in enumerate(nodes)]  # fmt: skip
    whole = bases[0]
    if whole is None or any(one is not whole for one in bases) or whole.meta["val"].shape[0] != local:
        whole = call(graph, aten.stack.default, nodes)
    return whole if is_turned else call(graph, aten.permute.default, whole, [0, 2, 1])


def untwisted(node: Any) -> Any:
    """Removes pairs of transposes that cancel."""
    while (once := turned(node)) is not None and (twice := turned(once)) is not None:
        node = twice
    return node


def turned(node: Any) -> Any:
    """What the node transposes in its last two dimensions; else None."""
    last = node.meta["val"].dim() - 1
    if is_called(node, aten.t.default):
        return node.args[0]
    if is_called(node, aten.permute.default) and [d % (last + 1) for d in node.args[1]] == [
        *range(last - 1),
        last,
        last - 1,
    ]:
        return node.args[0]
    if is_called(node, aten.transpose.int) and {d % (last + 1) for d in node.args[1:]} == {last, last - 1}:
        return node.args[0]
    return None


def _forget_sizes(graph: Graph, follower: Follower, choices: Choices, sent: Any) -> None:
    """Sizes of received rows are known now, and assertions about counts hold for the operator's, too."""
    every = frozenset((SENT, e) for e in range(choices.experts))
    count: Any = sent.meta["val"].shape[0]
    for node in list(graph.nodes):
        if node.target is aten._assert_scalar.default and _is_true(node.args[0], choices, every, count):
            condition = node.args[0]
            graph.erase_node(node)
            erase(condition)
    if not isinstance(count, int):
        with graph.inserting_after(sent):
            count = call(graph, aten.sym_size.int, sent, 0)
    back = {*follower.results, *(n for one in follower.results for n in one.all_input_nodes)}
    for node in list(graph.nodes):
        size = node.target is aten.sym_size.int and node.args[0] in back and node.args[1] == 0
        if (size or choices.size(node) == every) and node is not count:
            node.replace_all_uses_with(count)


def _is_true(condition: Any, choices: Choices, every: Any, count: Any) -> bool:
    """Whether a condition on counts holds: they are nonnegative, none exceeds their total, and what depends on the sum
    is known."""
    if not is_called(condition, ge, le, equals) or len(condition.args) != 2:
        return False
    if _number(condition, choices, every, count) is True:
        return True
    one, other = condition.args
    cells, others = choices.size(one), choices.size(other)
    if condition.target is ge and not isinstance(other, Node) and other <= 0:
        return cells is not None or is_called(one, aten.sym_size.int, aten.sym_storage_offset.default)
    if cells is None or condition.target is ge:
        return False
    if others is not None:
        return bool(cells == others if condition.target is equals else cells <= others)
    most = not isinstance(other, Node) and other == count and all(cell[0] == SENT for cell in cells)
    return most and condition.target is le


def _number(value: Any, choices: Choices, every: Any, count: Any) -> Any:
    """A number's certain value, or None. All choices together are `count`."""
    if not isinstance(value, Node):
        return value if isinstance(value, int) else None
    if choices.size(value) == every:
        return count if isinstance(count, int) else None
    target: Any = value.target
    if target is torch.sym_sum:
        return _total(list(value.args[0]), choices, every, count)  # type: ignore[arg-type]
    if target is add:
        return _total(list(value.args), choices, every, count)
    if target not in _ARITHMETIC:
        return None
    known = [_number(one, choices, every, count) for one in value.args]
    return None if None in known else target(*known)


def _total(parts: list[Any], choices: Choices, every: Any, count: Any) -> Any:
    """The total of numbers, or of one number times each of some that together are all choices."""
    known = [_number(one, choices, every, count) for one in parts]
    if None not in known:
        return sum(known)
    factors = {one.args[0] for one in parts if is_called(one, mul) and isinstance(one.args[0], int)}
    cells = [choices.size(one.args[1]) for one in parts if is_called(one, mul)]
    if len(factors) != 1 or len(cells) != len(parts) or not isinstance(count, int) or None in cells:
        return None
    whole = frozenset().union(*cells) == every and sum(map(len, cells)) == len(every)  # type: ignore[arg-type]
    return factors.pop() * count if whole else None


def _drop(graph: Graph, nodes: list[Node]) -> None:
    for node in nodes:
        if not node._erased:
            erase(node)
    for node in reversed(list(graph.nodes)):  # unused parts, and views of what was replaced
        if not node._erased and node.op == "call_function" and not node.users and not node.is_impure():
            erase(node)


def _renew(graph: Graph) -> None:
    """Recomputes nodes whose sizes may be known now, and removes assertions about them that are true."""
    for node in list(graph.nodes):
        before: Any = node.meta.get("val")
        numbers = isinstance(before, torch.SymInt | torch.SymBool) and node.target in (torch.sym_sum, *_ARITHMETIC)
        tensors = isinstance(before, FakeTensor) and any(isinstance(n, torch.SymInt) for n in before.shape)
        if node.target is aten._assert_scalar.default:
            condition = node.args[0]
            if condition is True or (isinstance(condition, Node) and statically_known_true(condition.meta["val"])):
                graph.erase_node(node)
        if node.op != "call_function" or not (numbers or tensors):
            continue
        given = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
        named = torch.fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
        with before.fake_mode if tensors else contextlib.nullcontext():
            after = node.target(*given, **named)
        node.meta["val"] = after
        if numbers and isinstance(after, int):
            node.replace_all_uses_with(after)
