"""Fuses embedding bags and the all-to-all that brings them to their samples into embedding_bag_all_to_all.

Only moves of elements may be between the bags and the exchange, and after it: stack or cat, views, permutations,
splits. To recognize any form of them, the moves are run on numbers that encode an element's rank, table, sample and
column. The last node at which these are arranged as `[samples, tables of all ranks, columns]` is the operator's result.
Of other ranks a rank knows how many elements they send; that they order these in the same way follows from the program
being the same on all ranks. Where it is not, the operator raises an error when called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

import ark_torch.ops  # noqa: F401  (the operator's fake kernel)
from ark_torch.compile.analysis import aten, is_getitem
from ark_torch.compile.graph_edits import VIEWS, NotFused, all_to_alls, erase, inherit, shape_of
from ark_torch.compile.ir import Unsupported
from ark_torch.compile.operators.collectives import resolved

_BAGS = (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
MOVES = frozenset(
    {
        *VIEWS,
        aten.stack.default,
        aten.cat.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.clone.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        getitem,
    }
)
_MODES = ("sum", "mean")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 1 << 28  # limit of the elements of a rank's exchange whose moves are followed


def fuse(graph: Graph, device: str = "cuda") -> list[str]:
    """Replaces matches on tensors of that device. Returns, for each all-to-all of pooled rows, what became of
    it."""
    told = []
    for wait, started in all_to_alls(graph, device):
        try:
            moves, bags = sources(started.args[0])
            if bags:
                told.append(f"{started.name}: {_fuse(wait, started, moves, bags)}")
        except (NotFused, Unsupported) as reason:
            told.append(f"{started.name}: not fused with embedding_bag: {reason}")
    return told


def moved(node: Node) -> Node | None:
    """The source of a copy into an empty tensor, as torch.distributed's in-place functions look when made
    functional."""
    if node.target is not aten.copy.default:
        return None
    into, other = node.all_input_nodes[0], node.all_input_nodes[-1]
    alike = node.meta["val"].dtype == other.meta["val"].dtype
    return other if alike and into.target in (aten.empty_like.default, aten.empty.memory_format) else None


def sources(sent: Node) -> tuple[list[Node], list[Node]]:
    """The moves before an exchange, in order, and the bags at their start; empty if they start with anything else."""
    order = {one: i for i, one in enumerate(sent.graph.nodes)}
    moves, bags, todo = set(), set(), [sent]
    while todo:
        node = todo.pop()
        if node in moves or node in bags:
            continue
        if is_getitem(node) and node.args[1] == 0 and getattr(node.args[0], "target", None) in _BAGS:
            bags.add(node)
        elif node.target in MOVES:
            moves.add(node)
            todo += [one for one in node.all_input_nodes if not isinstance(one.meta.get("val"), torch.SymInt)]
        else:
            return [], []
    # In the order in which they are joined, which is that of the tables.
    first: list[Node] = []
    for move in sorted(moves, key=order.__getitem__):
        first += [one for one in move.all_input_nodes if one in bags and one not in first]
    return sorted(moves, key=order.__getitem__), first or list(bags)


def run(moves: list[Node], known: dict[Node, Any]) -> dict[Node, Any]:
    """Runs the moves on real tensors."""
    values = dict(known)
    for node in moves:
        other = moved(node)
        if other is not None:
            values[node] = values[other]
            continue
        if node.target in VIEWS:  # strides are not those of the graph
            values[node] = values[node.all_input_nodes[0]].reshape(node.args[1])
            continue
        args = torch.fx.node.map_arg(node.args, values.__getitem__)
        values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
    return values


def numbers(tables: list[int], samples: int, columns: int) -> Tensor:
    """[samples, tables of all ranks, columns] with a different number for each element."""
    return torch.arange(samples * sum(tables) * columns, dtype=torch.int32).view(samples, sum(tables), columns)


def _fuse(wait: Node, started: Node, moves: list[Node], bags: list[Node]) -> str:
    found = Exchange(wait, started, moves, bags)
    for one in found.calls:
        one.alone()
    fused, _ = found.replace()
    return str(fused.target)


class Exchange:
    """An all-to-all of pooled rows that the operator can replace.

    `tables` counts the tables of each rank. `final` is the last node with the result of the operator. `tables_first`:
    whether tables that contain samples are exchanged, or samples that contain tables.
    """

    def __init__(self, wait: Node, started: Node, moves: list[Node], bags: list[Node]) -> None:
        sent, received, sends, name = started.args
        assert isinstance(sent, Node)
        self.wait, self.started, self.bags = wait, started, bags
        group = resolved(name, wait.meta["val"].device)
        self.world, self.rank, self.group = group.size(), group.rank(), group.group_name
        self.calls = [Bag(bag) for bag in bags]
        first = self.calls[0]
        for one in self.calls:
            one.check(first)
        samples, columns = first.bags // self.world, first.columns
        self.samples, self.columns = samples, columns
        if first.bags % self.world != 0:
            raise NotFused(f"there are {first.bags} bags of a table for {self.world} ranks")
        if math.prod(shape_of(started)) > _MOST:
            raise NotFused("it is too large to be followed")
        for node in [*bags, *moves]:
            outside = [
                user for user in node.users
                if user not in moves and user is not started and user.target is not aten.empty_like.default
            ]  # fmt: skip
            if outside:
                raise NotFused(f"{node.name} is read by others, too")
        each = math.prod(shape_of(sent)[1:])
        tables = [int(count) * each // (samples * columns) for count in received]  # type: ignore[union-attr, arg-type]
        mine = len(bags)
        if tables[self.rank] != mine or any(count * samples * columns != int(got) * each
                                            for count, got in zip(tables, received, strict=True)):  # type: ignore[arg-type]  # fmt: skip
            raise NotFused("ranks do not send their own samples of whole tables to each other")
        if any(int(n) * each != mine * samples * columns for n in sends):  # type: ignore[union-attr, arg-type]
            raise NotFused("ranks do not get equal numbers of samples")
        if not all(tables):
            raise NotFused("a rank has no tables")
        self.tables = tables
        with unset_fake_temporarily():
            tables_first = _sent_tables_first(sent, moves, bags, self.world, columns)
            self.final, self.tables_first = _placed(wait, tables_first, tables, samples, columns)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those that the operator and its backward pass share."""
        calls, first = self.calls, self.calls[0]
        weights = [one.weights for one in calls if one.weights is not None]
        return (
            [one.table for one in calls], [one.indices for one in calls], [one.offsets for one in calls], weights,
            None, self.group, first.mode, first.include_last_offset, self.tables, -1, -1, False, "dense",
        )  # fmt: skip

    def replace(self) -> tuple[Node, Node]:
        """Returns the operator's node, and that of its result in the shape that is read."""
        graph, final = self.wait.graph, self.final
        with graph.inserting_before(self.started):
            args = (*self.arguments, [], None, 0.0)
            fused = graph.call_function(torch.ops.ark.embedding_bag_all_to_all.default, args)
            fused.meta["val"] = self.wait.meta["val"].new_empty((self.samples, sum(self.tables), self.columns))
            result = graph.call_function(aten.view.default, (fused, list(shape_of(final))))
            result.meta["val"] = fused.meta["val"].view(shape_of(final))
        inherit(fused, self.bags[0].args[0])  # type: ignore[arg-type]
        final.replace_all_uses_with(result)
        erase(final)
        return fused, result


class Bag:
    """A call of embedding_bag whose pooled rows alone are read."""

    def __init__(self, rows: Node) -> None:
        call = rows.args[0]
        assert isinstance(call, Node)
        names = ("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
                 "include_last_offset", "padding_idx")  # fmt: skip
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        self.table, self.indices, self.offsets = given["weight"], given["indices"], given["offsets"]
        self.weights = given.get("per_sample_weights")
        self.include_last_offset = bool(given.get("include_last_offset", False))
        mode = given.get("mode", 0)
        if mode not in (0, 1):
            raise NotFused("its mode is max")
        self.mode = _MODES[mode]  # type: ignore[index]
        if given.get("padding_idx", -1) not in (-1, None):
            raise NotFused("it has a padding_idx")
        self.call = call
        self.bags, self.columns = shape_of(rows)
        self.dtype = rows.meta["val"].dtype
        if self.dtype not in _DTYPES:
            raise NotFused(f"it is of {self.dtype}")

    def alone(self) -> None:
        if len(self.call.users) != 1:
            raise NotFused(f"{self.call.name} is read by others, too")

    def check(self, other: Bag) -> None:
        """Checks that one call of the operator can include both."""
        for what in ("bags", "columns", "dtype", "mode", "include_last_offset"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise NotFused(f"its tables have {what} {theirs} and {mine}")
        if (self.weights is None) != (other.weights is None):
            raise NotFused("some of its tables have weights of samples, and others none")


def _sent_tables_first(sent: Node, moves: list[Node], bags: list[Node], world: int, columns: int) -> bool | None:
    """Whether the exchange sends tables that contain samples, or samples that contain tables; None: there is one
    table."""
    bag_count = shape_of(bags[0])[0]
    whole = numbers([len(bags)], bag_count, columns)
    given = run(moves, {bag: whole[:, t] for t, bag in enumerate(bags)})[sent].reshape(-1)
    by_sample = bool((given == whole.reshape(-1)).all())
    by_table = whole.view(world, bag_count // world, len(bags), columns).transpose(1, 2).reshape(-1)
    if bool((given == by_table).all()):
        return None if by_sample else True
    if not by_sample:
        raise NotFused("what is sent is in another order than that of the samples")
    return False


def in_chunks(parts: Sequence[Tensor], tables_first: bool) -> Tensor:
    """What is sent or received, in one dimension, of `[samples, tables, columns]` of each rank."""
    return torch.cat([(part.transpose(0, 1) if tables_first else part).reshape(-1) for part in parts])


def _placed(wait: Node, tables_first: bool | None, tables: list[int], samples: int, columns: int) -> tuple[Node, bool]:
    """The last node after the exchange at which rows are in the operator's order and which is all that others read;
    and whether tables come first in what is exchanged."""
    wanted = numbers(tables, samples, columns)
    of_ranks = torch.split(wanted, tables, 1)
    behind, moves = {wait}, list[Node]()
    for node in wait.graph.nodes:
        copied = moved(node)
        inputs = node.all_input_nodes if copied is None else [copied]
        if (copied is not None or node.target in MOVES) and inputs and all(one in behind for one in inputs):
            behind.add(node)
            moves.append(node)
    for first in (False, True) if tables_first is None else (tables_first,):
        values = run(moves, {wait: in_chunks(of_ranks, first).view(shape_of(wait))})
        for final in reversed([wait, *moves]):
            value = values[final]
            if not isinstance(value, Tensor) or value.numel() != wanted.numel():
                continue
            if bool((value.reshape(-1) == wanted.reshape(-1)).all()) and _all_that_is_read(wait, final, behind):
                return final, first
    raise NotFused("what is received is not put in the order of samples, ranks and tables, or is read before")


def _all_that_is_read(wait: Node, final: Node, behind: set[Node]) -> bool:
    """Whether only `final` reads what it is computed from."""
    needed, todo = set(), [final]
    while todo:
        node = todo.pop()
        if node in behind and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    return all(user in needed for node in needed - {final} for user in node.users)
