"""Follows rows through the experts: from the exchange that brings them to the one that takes them back.

It tracks the order of rows, and what has been computed of each (networks.py). Two kinds of layout are known: blocks
with as many rows as there are choices (`Blocks`), and slots for more rows than can arrive (`Slots`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.choices import GOT, SENT, Choices, argument, copied, is_called, plain, sorts_up, taken
from ark_torch.compile.graph_edits import VIEWS, NotFused, value_of
from ark_torch.compile.networks import ROWS, Tree, merged, operation

_functional = torch.ops._c10d_functional
_SIZES = (aten.sym_size.int, aten.sym_storage_offset.default, aten.sym_stride.int, aten.empty_like.default)
_prims = torch.ops.prims


class Blocks(NamedTuple):
    """Rows grouped by cell; with `order`, in the order in which that permutation takes them."""

    cells: tuple[tuple[int, int], ...]  # (the rank that sent them, local expert)
    order: Node | None = None


class Slots(NamedTuple):
    """Dimensions made of atoms (name, size): rank, local (expert), slot (perhaps a symbol), column; `expert`: the
    only expert of these rows."""

    dims: tuple[tuple[tuple[str, Any], ...], ...]
    stage: int  # the number of exchanges so far
    expert: int | None = None


class Rows(NamedTuple):
    layout: Blocks | Slots
    tree: Tree = ROWS


def slots(world: int, local: int, each: Any, columns: int, flat: bool) -> Slots:
    """The layout of a buffer with slots for all experts."""
    expert, slot = (("rank", world), ("local", local)), (("slot", each),)
    dims = (expert + slot,) if flat else (expert, slot)
    return Slots(tuple(tuple(a for a in dim if not _is(a[1], 1)) for dim in (*dims, (("column", columns),))), 0)


class Follower:
    """What nodes compute from those in `rows`; `results`: nodes that hold rows in the order in which they were sent.
    `reads`: whether a node takes rows out of the slots that they were put into."""

    def __init__(self, choices: Choices, rows: dict[Node, Any], reads: Callable[[Node], bool]) -> None:
        self.choices, self.rows, self.results = choices, dict(rows), list[Node]()
        self._reads, self._back = reads, set[Node]()
        self._start = next(iter(rows.values())).layout
        self.by_cells = tuple((r, e) for r in range(choices.world) for e in range(choices.local))
        self.by_expert = tuple((r, e) for e in range(choices.local) for r in range(choices.world))

    def run(self, nodes: list[Node]) -> Tree:
        """Returns what is computed of rows. Raises NotFused if that, or an order, is unknown."""
        for node in nodes:
            if node in self.rows or node.op != "call_function":
                continue
            given = [n for n in node.all_input_nodes if n in self.rows]
            if not given or node.target in _SIZES:
                continue
            if self._is_result(node, given[0]):
                self.results.append(node)
                continue
            self.rows[node] = self._next(node)
        for node in nodes:
            first: Any = node.args[0] if node.args else None
            layout = getattr(self.rows.get(first) if node.target in _SIZES else None, "layout", None)
            if isinstance(layout, Blocks) and node.target is aten.sym_size.int and node.args[1] == 0:
                self.choices.sizes[node] = frozenset((GOT, *cell) for cell in layout.cells)
        if not self.results:
            raise NotFused("no second exchange brings its rows back")
        trees = [self.rows[n].tree for one in self.results for n in one.all_input_nodes if n in self.rows]
        if any(tree != trees[0] for tree in trees):
            raise NotFused("its rows come back more than once")
        tree: Tree = trees[0]
        return tree

    def check_readers(self, is_true: Callable[[Node], bool]) -> None:
        """Checks that nothing else reads the nodes in between. Sizes may also be read for the way back, and by
        assertions that are true in any case."""
        back = {n for one in self.results for n in one.all_input_nodes}
        for node in self.rows:
            for user in node.users:
                size = user.target is aten.sym_size.int and node in back
                if not (size or self._goes(user, is_true, user.target in _SIZES)):
                    raise NotFused(f"{node.name} is read by others, too")

    def _goes(self, node: Any, is_true: Callable[[Node], bool], size: bool) -> bool:
        if node in self.rows or node in self.results:
            return True
        if node.target is aten._assert_scalar.default:
            return is_true(node.args[0])
        if not size:
            return not node.users and not node.is_impure()
        return all(self._goes(user, is_true, True) for user in node.users) and node.op != "output"

    def _is_result(self, node: Any, given: Node) -> bool:
        if node.target is _functional.wait_tensor.default and given in self._back:
            return True
        layout = getattr(self.rows[given], "layout", None)
        if not isinstance(layout, Slots) or layout.stage != 2 or layout.dims[:-1] != self._start.dims[:-1]:
            return False
        return _ends_in_columns(layout, len(layout.dims)) and self._reads(node)

    def _next(self, node: Any) -> Any:
        target = node.target
        if (other := copied(node)) is not None:
            return self.rows[other]
        if target in (aten.clone.default, aten.alias.default, aten.detach.default, _functional.wait_tensor.default):
            return self.rows[node.args[0]]
        if target is getitem and isinstance(self.rows[node.args[0]], list):
            return self.rows[node.args[0]][node.args[1]]
        if target is aten.cat.default or target is aten.stack.default:
            return self._joined(node)
        if target is _functional.all_to_all_single.default:
            return self._exchanged(node)
        given = next(self.rows[n] for n in node.all_input_nodes if n in self.rows)
        if isinstance(given, list):
            raise NotFused(f"{node.name} takes pieces of its rows")
        computes = isinstance(given.layout, Blocks) or given.layout.stage == 1
        found = (self._product(node) or self._half(node, given)) if computes else None
        if found is None:
            found = self._in_blocks(node, given) if isinstance(given.layout, Blocks) else self._in_slots(node, given)
        if found is None and not computes:
            raise NotFused(f"{node.name} reads its rows before they come to their experts, or when they are back")
        return found if found is not None else self._by_elements(node)

    # ---- Networks

    def _by_elements(self, node: Any) -> Rows:
        known = [self.rows[n] for n in node.all_input_nodes if n in self.rows]
        by_elements = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        if not (by_elements or node.target is _prims.convert_element_type.default):
            raise NotFused(f"{node.target} moves its rows, or makes others of them")
        if len(known) != len(node.all_input_nodes) or any(one.layout != known[0].layout for one in known):
            raise NotFused(f"{node.name} reads more than rows of its experts")
        return Rows(known[0].layout, operation(node, {n: self.rows[n].tree for n in node.all_input_nodes}))

    def _product(self, node: Any) -> Rows | None:
        grouped = (
            node.target is aten._grouped_mm.default or str(node.target) == "transformers.grouped_mm_fallback.default"
        )
        if not grouped and node.target not in (aten.mm.default, aten.bmm.default):
            return None
        rows, weight = node.args[0], node.args[1]
        given, dtype = self.rows.get(rows), node.meta["val"].dtype
        if given is None or weight in self.rows or not isinstance(weight, Node):
            raise NotFused(f"{node.name} is no product of rows with weights")
        layout = given.layout
        if grouped:
            ends, bias = argument(node, 2, "offs"), argument(node, 3, "bias")
            wanted = [
                frozenset((GOT, r, e) for r, e in self.by_cells if e <= last) for last in range(self.choices.local)
            ]
            if bias is not None or weight.meta["val"].dim() != 3 or getattr(layout, "cells", None) != self.by_expert:
                raise NotFused(f"{node.name} does not multiply the rows of each expert by its weights")
            if self.choices.cells(self.choices.counts(ends)) != wanted:
                raise NotFused(f"the ends of groups of {node.name} are not those of the experts' rows")
            return Rows(layout, ("mm", ("all", weight), given.tree, dtype))
        if node.target is aten.bmm.default:
            local = (("local", self.choices.local),) if self.choices.local != 1 else ()
            if not isinstance(layout, Slots) or layout.dims[0] != local or not _ends_in_columns(layout, 3):
                raise NotFused(f"{node.name} does not multiply the rows of each expert by its weights")
            return self._with_columns(node, given, ("all", weight))
        if isinstance(layout, Blocks):
            experts = {e for _, e in layout.cells}
            expert = experts.pop() if len(experts) == 1 else None
        else:
            expert = 0 if self.choices.local == 1 else layout.expert
            expert = expert if _ends_in_columns(layout, 2) else None
        if expert is None:
            raise NotFused(f"{node.name} multiplies rows of several experts by the same weight")
        weights = ("each", ((expert, weight),))
        if isinstance(layout, Slots):
            return self._with_columns(node, given, weights)
        return Rows(layout, ("mm", weights, given.tree, dtype))

    def _with_columns(self, node: Any, given: Rows, weights: Any) -> Rows:
        assert isinstance(given.layout, Slots)
        value = node.meta["val"]
        columns = (("column", value.shape[-1]),) if value.shape[-1] != 1 else ()
        layout = given.layout._replace(dims=(*given.layout.dims[:-1], columns))
        return Rows(layout, ("mm", weights, given.tree, value.dtype))

    def _half(self, node: Any, given: Rows) -> Any:
        """One of two halves of the columns, or a list of both."""
        value = tensor_of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if value is None or node.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor):
            return None
        width = value.shape[-1]
        if argument(node, 2 if node.target is not aten.slice.Tensor else 1, "dim", 0) % value.dim() != value.dim() - 1:
            return None
        layout = given.layout
        if isinstance(layout, Slots):
            layout = layout._replace(dims=(*layout.dims[:-1], (("column", width // 2),)))
        halves = [Rows(layout, ("part", given.tree, number)) for number in (0, 1)]
        if node.target is aten.slice.Tensor:
            start, end = argument(node, 2, "start") or 0, argument(node, 3, "end")
            ends = width if end is None or end > width else end
            if argument(node, 4, "step", 1) == 1 and (start, ends) in ((0, width // 2), (width // 2, width)):
                return halves[int(start != 0)]
        elif (node.args[1] == width // 2 and width % 2 == 0) or node.args[1] == [width // 2] * 2:
            return halves
        raise NotFused(f"{node.name} takes columns apart, other than in halves")

    # ---- Orders

    def _joined(self, node: Any) -> Rows:
        parts: list[Any] = [self.rows.get(one) for one in node.args[0]]
        if any(not isinstance(one, Rows) for one in parts):
            raise NotFused(f"{node.name} puts other things than rows of its experts together")
        if len(parts) == 1 and node.target is aten.cat.default:
            return Rows(*parts[0])
        dim = argument(node, 1, "dim", 0)
        tree, first = merged([one.tree for one in parts]), parts[0].layout
        if isinstance(first, Blocks) and all(getattr(one.layout, "order", 0) is first.order for one in parts):
            if dim == 0 and node.target is aten.cat.default:
                return Rows(first._replace(cells=tuple(cell for one in parts for cell in one.layout.cells)), tree)
        elif isinstance(first, Slots) and [one.layout for one in parts] == [
            first._replace(expert=e) for e in range(self.choices.local)
        ]:
            local = ("local", self.choices.local)
            if dim == 0:
                dims = (
                    ((local, *first.dims[0]), *first.dims[1:]) if node.target is aten.cat.default
                    else ((local,), *first.dims)
                )  # fmt: skip
                return Rows(Slots(dims, first.stage), tree)
        raise NotFused(f"{node.name} puts rows together in an order that is not known")

    def _exchanged(self, node: Any) -> Rows:
        sent, received, sends, name = node.args
        rows = self.rows.get(sent)
        if not isinstance(rows, Rows) or name != self.choices.group_name:
            raise NotFused("what its experts give goes over another group")
        if isinstance(rows.layout, Blocks):
            known = self.choices.are_splits(sends, GOT) and self.choices.are_splits(received, SENT)
            if rows.layout != Blocks(self.by_cells) or not known:
                raise NotFused("what its experts give is not sent back in the order in which it came")
            self._back.add(node)
            return rows
        dims, world = rows.layout.dims, self.choices.world
        first = dims[0][0] if dims[0] else None
        even = all(_is(value_of(n) * world, sent.meta["val"].shape[0]) for n in (*received, *sends))
        if (first != ("rank", world) and world > 1) or not even or rows.layout.expert is not None:
            raise NotFused("its slots do not begin with those of each rank")
        return Rows(rows.layout._replace(stage=rows.layout.stage + 1), rows.tree)

    def _in_blocks(self, node: Any, given: Rows) -> Any:
        layout = given.layout
        assert isinstance(layout, Blocks)
        if node.target in VIEWS and node.meta["val"].dim() == 2:
            if node.args[0].meta["val"].shape[1:] != node.meta["val"].shape[1:]:
                raise NotFused(f"{node.name} takes its rows apart")
            return given
        if (found := taken(node)) is not None and found[0] in self.rows:
            order = plain(found[1])
            sorted_cells = self._order_of(order)
            if layout.order is None and sorted_cells is not None and sorted_cells[0] == layout.cells:
                return Rows(Blocks(sorted_cells[1], order), given.tree)
            again = is_called(order, getitem) and order.args[1] == 1 and sorts_up(order.args[0])
            if again and (before := self._before(layout, plain(order.args[0].args[0]))) is not None:
                return Rows(before, given.tree)
            raise NotFused(f"{node.name} takes its rows in an order that is not known")
        index = None
        if node.target is aten.index_put.default and len(node.args) == 3 and len(node.args[1]) == 1:
            index = node.args[1][0]
        if node.target is aten.index_copy.default and node.args[1] == 0:
            index = node.args[2]
        if index is not None and node.args[0] not in self.rows:
            before = self._before(layout, plain(index))
            if before is None:
                raise NotFused(f"{node.name} puts its rows in an order that is not known")
            return Rows(before, given.tree)
        if node.target is aten.slice.Tensor and argument(node, 1, "dim", 0) == 0 and argument(node, 4, "step", 1) == 1:
            return self._cut(node, given)
        if node.target is aten.split_with_sizes.default and argument(node, 2, "dim", 0) == 0:
            pieces = []
            left = list(layout.cells)
            for size in node.args[1]:
                wanted = self.choices.size(size)
                piece = left[: len(wanted)] if wanted is not None else []
                if wanted != frozenset((GOT, *cell) for cell in piece):
                    raise NotFused(f"{node.name} splits its rows at places that are not known")
                left = left[len(piece) :]
                pieces.append(Rows(layout._replace(cells=tuple(piece)), given.tree))
            return pieces
        return None

    def _cut(self, node: Any, given: Rows) -> Rows:
        """Handles rows[start:end]."""
        layout = given.layout
        assert isinstance(layout, Blocks)
        ends = []
        for name, index in (("start", 2), ("end", 3)):
            at = argument(node, index, name)
            cells = frozenset() if at in (0, None) and name == "start" else self.choices.size(at)
            count = len(cells) if cells is not None else 0
            if cells != frozenset((GOT, *cell) for cell in layout.cells[:count]):
                raise NotFused(f"{node.name} cuts its rows at places that are not known")
            ends.append(count)
        return Rows(layout._replace(cells=layout.cells[slice(*ends)]), given.tree)

    def _before(self, layout: Blocks, order: Any) -> Blocks | None:
        """The layout before that permutation took all rows."""
        known = self._order_of(order) if order is layout.order else None
        return Blocks(known[0]) if known is not None and known[1] == layout.cells else None

    def _order_of(self, order: Any) -> Any:
        """The cells before a permutation, and after it, sorted by expert."""
        if not is_called(order, getitem) or order.args[1] != 1 or not sorts_up(order.args[0]):
            return None
        known = self._labels(order.args[0].args[0])
        if known is None:
            return None
        cells, labels = known
        by_label = sorted(range(len(cells)), key=labels.__getitem__)
        experts = [cells[i][1] for i in by_label]
        if experts != sorted(experts) or len(set(labels)) != len(set(experts)):
            return None
        return cells, tuple(cells[i] for i in by_label)

    def _labels(self, node: Any) -> Any:
        """The cells of received rows, and the number that each row of a cell has."""
        if is_called(node, *VIEWS, aten.clone.default):
            return self._labels(node.args[0])
        if is_called(node, _functional.wait_tensor.default):
            started = node.args[0]
            if not is_called(started, _functional.all_to_all_single.default):
                return self._labels(started)
            sent, received, sends, name = started.args
            known = name == self.choices.group_name and self.choices.sorted_choices(sent)
            if not known or not self.choices.are_splits(sends, SENT) or not self.choices.are_splits(received, GOT):
                return None
            first = self.choices.rank * self.choices.local
            return self.by_cells, [first + e for _, e in self.by_cells]
        if is_called(node, aten.remainder.Scalar, aten.sub.Tensor, aten.add.Tensor, aten.div.Tensor_mode):
            known = self._labels(node.args[0])
            if known is None or not isinstance(node.args[1], int):
                return None
            with unset_fake_temporarily():
                labels = node.target(torch.tensor(known[1]), *node.args[1:], **node.kwargs)
            return known[0], labels.tolist()
        found = taken(node)
        if found is None or not is_called(found[1], aten.repeat_interleave.Tensor):
            return None
        counted = self.choices.cells(self.choices.counts(found[1].args[0]))
        numbers = _constant(found[0])
        if counted is None or numbers is None or len(numbers) < len(counted):
            return None
        if any(len(one) != 1 or next(iter(one))[0] != GOT for one in counted):
            return None
        cells = tuple(next(iter(one))[1:] for one in counted)
        return (cells, numbers.tolist()[: len(cells)]) if numbers.dim() == 1 else None

    def _in_slots(self, node: Any, given: Rows) -> Any:
        layout = given.layout
        assert isinstance(layout, Slots)
        dims, value = list(layout.dims), node.meta["val"]
        if node.target is aten.permute.default:
            return Rows(layout._replace(dims=tuple(dims[d] for d in node.args[1])), given.tree)
        if node.target in (aten.transpose.int, aten.t.default):
            one, two = node.args[1:] if node.target is aten.transpose.int else (0, len(dims) - 1)
            dims[one], dims[two] = dims[two], dims[one]
            return Rows(layout._replace(dims=tuple(dims)), given.tree)
        if node.target in (*VIEWS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims):
            grouped = _grouped([atom for dim in dims for atom in dim], tuple(value.shape))
            if grouped is None:
                raise NotFused(f"{node.name} takes its slots apart")
            return Rows(layout._replace(dims=grouped), given.tree)
        local = (("local", self.choices.local),)
        if node.target is aten.select.int and layout.dims[node.args[1]] == local:
            at = node.args[1] % len(dims)
            del dims[at]
            return Rows(Slots(tuple(dims), layout.stage, node.args[2] % self.choices.local), given.tree)
        if node.target is aten.unbind.int and layout.dims[argument(node, 1, "dim", 0)] == local:
            del dims[argument(node, 1, "dim", 0)]
            return [Rows(Slots(tuple(dims), layout.stage, e), given.tree) for e in range(self.choices.local)]
        return None


def _ends_in_columns(layout: Slots, dims: int) -> bool:
    names = [atom[0] for dim in layout.dims[:-1] for atom in dim]
    return len(layout.dims) == dims and "column" not in names and [a[0] for a in layout.dims[-1]] in (["column"], [])


def _is(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)


def _grouped(atoms: list[tuple[str, Any]], shape: tuple[Any, ...]) -> Any:
    """Groups atoms into dimensions of these sizes; None if an atom would be split."""
    left, out = list(atoms), []
    for size in shape:
        dim: list[tuple[str, Any]] = []
        while not _is(math.prod(n for _, n in dim), size):
            if not left or statically_known_true(math.prod(n for _, n in dim) > size):
                return None
            dim.append(left.pop(0))
        out.append(tuple(dim))
    return None if left else tuple(out)


def _constant(node: Any) -> Any:
    """The value of a small tensor that depends on nothing."""
    if not isinstance(node, Node) or node.op != "call_function" or tensor_of(node) is None:
        return None
    shape = node.meta["val"].shape
    if not all(isinstance(n, int) for n in shape) or math.prod(shape) > 4096:
        return None
    known = {}
    for one in node.all_input_nodes:
        known[one] = _constant(one)
        if known[one] is None:
            return None
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in node.kwargs.items()}
    target: Any = node.target
    with unset_fake_temporarily():
        return target(*torch.fx.node.map_arg(node.args, known.__getitem__), **kwargs)
