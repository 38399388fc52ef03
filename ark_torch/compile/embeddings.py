"""Fuses embedding bags and the all-to-all that brings them to their samples into embedding_bag_all_to_all.

Only moves of elements may be between the bags and the exchange, and after it: stack or cat, views, permutations,
splits. To recognize any form of them, the moves are run on numbers that encode an element's rank, table, sample and
column; a symbolic batch gets numbers for this (trials.py). The last node at which these are arranged as `[samples,
tables of all ranks, columns]` is the operator's result.
Of other ranks a rank knows how many elements they send; that they order these in the same way follows from the program
being the same on all ranks. Where it is not, the operator raises an error when called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem, sub
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

import ark_torch.ops  # noqa: F401  (the operator's fake kernel)
from ark_torch.compile.analysis import aten, is_getitem
from ark_torch.compile.graph_edits import VIEWS, NotFused, all_to_alls, call, erase, inherit
from ark_torch.compile.ir import Unsupported
from ark_torch.compile.operators.collectives import resolved
from ark_torch.compile.trials import Trial, is_size, known_equal, trials_of

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
            todo += tensors_read(node)
        else:
            return [], []
    # In the order in which they are joined, which is that of the tables.
    first: list[Node] = []
    for move in sorted(moves, key=order.__getitem__):
        first += [one for one in move.all_input_nodes if one in bags and one not in first]
    return sorted(moves, key=order.__getitem__), first or list(bags)


def tensors_read(node: Node) -> list[Node]:
    return [one for one in node.all_input_nodes if not is_size(one)]


def run(moves: list[Node], known: dict[Node, Any], trial: Trial) -> dict[Node, Any]:
    """Runs the moves on real tensors."""
    values = dict(known)

    def value(one: Node) -> Any:
        return values[one] if one in values else trial(one)

    for node in moves:
        other = moved(node)
        if other is not None:
            values[node] = values[other]
            continue
        if node.target in VIEWS:  # strides are not those of the graph
            values[node] = values[node.all_input_nodes[0]].reshape([trial(n) for n in node.args[1]])  # type: ignore[union-attr]
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)  # type: ignore[misc]
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator, arg-type]
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

    `tables` counts the tables of each rank, `samples` those that a rank gets. `final` is the last node with the result
    of the operator. `tables_first`: whether tables that contain samples are exchanged, or samples that contain tables.
    """

    def __init__(self, wait: Node, started: Node, moves: list[Node], bags: list[Node]) -> None:
        name = started.args[3]
        self.wait, self.started, self.bags, self.moves = wait, started, bags, moves
        group = resolved(name, wait.meta["val"].device)
        self.world, self.rank, self.group = group.size(), group.rank(), group.group_name
        self.calls = [Bag(bag) for bag in bags]
        for one in self.calls:
            one.count_offsets()
        first = self.calls[0]
        for one in self.calls:
            one.check(first)
        self.columns = first.columns
        if isinstance(first.bags, int) and first.bags % self.world != 0:
            raise NotFused(f"there are {first.bags} bags of a table for {self.world} ranks")
        self.samples = first.bags // self.world
        self.trials = trials_of(first.bags, self.world)
        for node in [*bags, *moves]:
            outside = [
                user for user in node.users
                if user not in moves and user is not started and user.target is not aten.empty_like.default
            ]  # fmt: skip
            if outside:
                raise NotFused(f"{node.name} is read by others, too")
        self.tables = self._tables_of(self.trials[0])
        if any(self._tables_of(trial) != self.tables for trial in self.trials):
            raise NotFused("how many tables ranks have depends on the batch")
        with unset_fake_temporarily():
            self.final, self.tables_first = self._placed(self._sent_tables_first())
        if self._shape().count(-1) > 1:
            raise NotFused(f"more than one size of {self.final.name} is symbolic")

    def _tables_of(self, trial: Trial) -> list[int]:
        sent, received, sends, _ = self.started.args
        assert isinstance(sent, Node)
        if math.prod(trial.shape(self.started)) > _MOST:
            raise NotFused("it is too large to be followed")
        each, of_table = math.prod(trial.shape(sent)[1:]), trial(self.samples) * self.columns
        got = [trial(count) * each for count in received]  # type: ignore[union-attr]
        tables, mine = [count // of_table for count in got], len(self.bags)
        if tables[self.rank] != mine or any(count * of_table != n for count, n in zip(tables, got, strict=True)):
            raise NotFused("ranks do not send their own samples of whole tables to each other")
        if any(trial(n) * each != mine * of_table for n in sends):  # type: ignore[union-attr]
            raise NotFused("ranks do not get equal numbers of samples")
        if not all(tables):
            raise NotFused("a rank has no tables")
        return tables

    def _sent_tables_first(self) -> bool | None:
        """Whether the exchange sends tables that contain samples, or samples that contain tables; None: there is one
        table."""
        mine, sent = len(self.bags), self.started.args[0]
        by_sample = by_table = True
        for trial in self.trials:
            samples = trial(self.samples)
            whole = numbers([mine], self.world * samples, self.columns)
            given = run(self.moves, {bag: whole[:, t] for t, bag in enumerate(self.bags)}, trial)[sent].reshape(-1)  # type: ignore[index]
            by_sample &= bool((given == whole.reshape(-1)).all())
            transposed = whole.view(self.world, samples, mine, self.columns).transpose(1, 2).reshape(-1)
            by_table &= bool((given == transposed).all())
        if by_table:
            return None if by_sample else True
        if not by_sample:
            raise NotFused("what is sent is in another order than that of the samples")
        return False

    def _placed(self, tables_first: bool | None) -> tuple[Node, bool]:
        """The last node after the exchange at which rows are in the operator's order and which is all that others
        read; and whether tables come first in what is exchanged."""
        behind, moves = {self.wait}, list[Node]()
        for node in self.wait.graph.nodes:
            copied = moved(node)
            inputs = tensors_read(node) if copied is None else [copied]
            if (copied is not None or node.target in MOVES) and inputs and all(one in behind for one in inputs):
                behind.add(node)
                moves.append(node)
        wanted = [numbers(self.tables, trial(self.samples), self.columns) for trial in self.trials]
        for first in (False, True) if tables_first is None else (tables_first,):
            values = []
            for trial, rows in zip(self.trials, wanted, strict=True):
                got = in_chunks(torch.split(rows, self.tables, 1), first).view(trial.shape(self.wait))
                values.append(run(moves, {self.wait: got}, trial))
            for final in reversed([self.wait, *moves]):
                placed = all(_same_elements(value[final], rows) for value, rows in zip(values, wanted, strict=True))
                if placed and _all_that_is_read(self.wait, final, behind):
                    return final, first
        raise NotFused("what is received is not put in the order of samples, ranks and tables, or is read before")

    def _shape(self) -> list[int]:
        """The result's, -1 for what depends on the batch."""
        first, *_, last = [trial.shape(self.final) for trial in (*self.trials, *self.trials)]
        return [n if n == other else -1 for n, other in zip(first, last, strict=True)]

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
        for trial in self.trials:
            trial.fix()
        graph, final = self.wait.graph, self.final
        value = final.meta["val"]
        with graph.inserting_before(self.started):
            args = (*self.arguments, [], None, 0.0)
            fused = graph.call_function(torch.ops.ark.embedding_bag_all_to_all.default, args)
            fused.meta["val"] = self.wait.meta["val"].new_empty((self.samples, sum(self.tables), self.columns))
            result = graph.call_function(aten.view.default, (fused, self._shape()))
            result.meta["val"] = value.new_empty(value.shape)
        inherit(fused, self.bags[0].args[0])  # type: ignore[arg-type]
        final.replace_all_uses_with(result)
        erase(final)
        return fused, result


class Bag:
    """A call of embedding_bag whose pooled rows alone are read."""

    def __init__(self, rows: Node) -> None:
        made = rows.args[0]
        assert isinstance(made, Node)
        names = ("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
                 "include_last_offset", "padding_idx")  # fmt: skip
        given = dict(zip(names, made.args, strict=False)) | made.kwargs
        self.table, self.indices, self.offsets = given["weight"], given["indices"], given["offsets"]
        self.weights = given.get("per_sample_weights")
        self.include_last_offset = bool(given.get("include_last_offset", False))
        mode = given.get("mode", 0)
        if mode not in (0, 1):
            raise NotFused("its mode is max")
        self.mode = _MODES[mode]  # type: ignore[index]
        if given.get("padding_idx", -1) not in (-1, None):
            raise NotFused("it has a padding_idx")
        self.call, self.rows = made, rows
        self.bags, self.columns = rows.meta["val"].shape
        if not isinstance(self.columns, int):
            raise NotFused("its number of columns is symbolic")
        self.dtype = rows.meta["val"].dtype
        if self.dtype not in _DTYPES:
            raise NotFused(f"it is of {self.dtype}")

    def alone(self) -> None:
        if len(self.call.users) != 1:
            raise NotFused(f"{self.call.name} is read by others, too")

    def count_offsets(self) -> None:
        """Who reads a symbolic number of bags gets it from the offsets, not from what is pooled."""
        for node in list(self.rows.users):
            if node.target is not aten.sym_size.int or node.args[1] != 0:
                continue
            with node.graph.inserting_before(node):
                count = call(node.graph, aten.sym_size.int, self.offsets, 0)
                if self.include_last_offset:
                    count = call(node.graph, sub, count, 1)
            for one in (count, *count.all_input_nodes[: self.include_last_offset]):
                one.meta = node.meta | {"val": one.meta["val"]}
            node.replace_all_uses_with(count)
            node.graph.erase_node(node)

    def check(self, other: Bag) -> None:
        """Checks that one call of the operator can include both."""
        for what in ("bags", "columns", "dtype", "mode", "include_last_offset"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if not known_equal(mine, theirs):
                raise NotFused(f"its tables have {what} {theirs} and {mine}")
        if (self.weights is None) != (other.weights is None):
            raise NotFused("some of its tables have weights of samples, and others none")


def in_chunks(parts: Sequence[Tensor], tables_first: bool) -> Tensor:
    """What is sent or received, in one dimension, of `[samples, tables, columns]` of each rank."""
    return torch.cat([(part.transpose(0, 1) if tables_first else part).reshape(-1) for part in parts])


def _same_elements(value: Any, wanted: Tensor) -> bool:
    """Whether a tensor of any shape has these elements in this order."""
    as_many = isinstance(value, Tensor) and value.numel() == wanted.numel()
    return as_many and bool((value.reshape(-1) == wanted.reshape(-1)).all())


def _all_that_is_read(wait: Node, final: Node, behind: set[Node]) -> bool:
    """Whether only `final` reads what it is computed from."""
    needed, todo = set(), [final]
    while todo:
        node = todo.pop()
        if node in behind and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    return all(user in needed for node in needed - {final} for user in node.users)
