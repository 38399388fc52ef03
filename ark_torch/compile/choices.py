"""What is known of the routed choices in a graph: how many go where, which are sorted, and which slots they fill.

A router's expert numbers, flattened, are *choices*. `Choices` answers questions about nodes derived from them, with
None if nothing is certain. Counts are tracked as sets of cells: `(SENT, e)` is the number of this rank's choices that
name expert e, `(GOT, r, l)` the number that rank r sends to this rank's expert l. A count is the sum of a set of cells,
and a tensor of counts is represented by a tensor of such sets' numbers: views and selections run on it unchanged; sums,
running sums and exchanges unite sets. So any way of writing them is recognized.
"""

from __future__ import annotations

import math
from operator import add, getitem
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.graph_edits import VIEWS

SENT, GOT = "sent", "got"
Cells = frozenset[Any]
_functional = torch.ops._c10d_functional
_prims = torch.ops.prims
CASTS = (_prims.convert_element_type.default, aten._to_copy.default, _prims.device_put.default)
_SAME = (*VIEWS, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
         aten.squeeze.dims)  # fmt: skip
_WHOLE = (torch.int32, torch.int64, torch.float32, torch.float64)  # types that hold any expert's number


def argument(node: Any, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def is_called(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def plain(node: Any) -> Any:
    """The node before operators that keep all elements in order: views, copies, casts that lose no integer."""
    while True:
        if is_called(node, *_SAME) or (is_called(node, *CASTS) and node.meta["val"].dtype in _WHOLE):
            node = node.args[0]
        elif (other := copied(node)) is not None:
            node = other
        else:
            return node


def copied(node: Any) -> Any:
    """The source of a copy into an empty tensor, as torch.distributed's in-place functions look when made
    functional."""
    if not is_called(node, aten.copy.default):
        return None
    into, other = node.args[:2]
    if not is_called(into, aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default):
        return None
    return other if into.meta["val"].dtype == other.meta["val"].dtype else None


def same(one: Any, other: Any) -> bool:
    """Whether two values of a graph are computed by the same operators from the same values."""
    if one is other or (not isinstance(one, Node) and not isinstance(other, Node) and one == other):
        return True
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return all(map(same, one, other))
    if not (isinstance(one, Node) and isinstance(other, Node)) or one.op != "call_function":
        return False
    pure = isinstance(one.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in one.target.tags
    if one.target is not other.target or not (pure or one.target is getitem) or set(one.kwargs) != set(other.kwargs):
        return False
    if getattr(one.target, "namespace", "") not in ("aten", "prims", ""):
        return False
    return same(one.args, other.args) and all(same(one.kwargs[key], other.kwargs[key]) for key in one.kwargs)


class Choices:
    """The choices of rank `rank` in a group of `world` ranks."""

    def __init__(self, world: int, rank: int, group_name: str, experts: int = 0, flat: Any = None) -> None:
        self.world, self.rank, self.group_name = world, rank, group_name
        self.experts, self.flat = experts, flat  # flat: the choices, before views and casts
        self.sizes: dict[Node, Cells] = {}  # of rows
        self._counts: dict[Node, Tensor | None] = {}
        self._sets: list[Cells] = []
        self._numbers: dict[Cells, int] = {}

    @property
    def local(self) -> int:
        return self.experts // self.world

    def is_choices(self, node: Any) -> bool:
        return self.flat is not None and plain(node) is self.flat

    def names(self, node: Any) -> bool:
        """Whether the node is the choices, in any order."""
        return self.is_choices(node) or self.sorted_choices(node)

    # ---- Counts

    def counts(self, node: Any) -> Tensor | None:
        """The numbers of sets of cells, or None."""
        if not isinstance(node, Node):
            return None
        if node not in self._counts:
            self._counts[node] = None
            with unset_fake_temporarily():
                self._counts[node] = self._counted(node)
        return self._counts[node]

    def cells(self, known: Tensor | None) -> Any:
        """The sets as a list."""
        with unset_fake_temporarily():
            return None if known is None else [self._sets[i] for i in known.reshape(-1).tolist()]

    def _numbered(self, sets: list[Any], shape: Any) -> Tensor | None:
        if any(one is None for one in sets):
            return None
        numbers = []
        for one in sets:
            if one not in self._numbers:
                self._numbers[one] = len(self._sets)
                self._sets.append(one)
            numbers.append(self._numbers[one])
        return torch.tensor(numbers, dtype=torch.int64).reshape(shape)

    def _counted(self, node: Any) -> Tensor | None:
        if node.op != "call_function":
            return None
        if self._is_base(node):
            return self._numbered([frozenset({(SENT, e)}) for e in range(self.experts)], [self.experts])
        if is_full(node, 0) and _is_small(node):
            return self._numbered([frozenset()] * node.meta["val"].numel(), node.meta["val"].shape)
        if is_called(node, _functional.wait_tensor.default):
            started = node.args[0]
            if is_called(started, _functional.all_to_all_single.default):
                return self._exchanged(started)
            return self.counts(started)
        if (other := copied(node)) is not None:
            return self.counts(other)
        if node.target not in _MOVES and node.target not in _SUMS:
            return None
        given = node.args[0]
        known: Any = [self.counts(one) for one in given] if isinstance(given, list | tuple) else self.counts(given)
        if known is None or (isinstance(known, list) and any(one is None for one in known)):
            return None
        if node.target in CASTS:
            return known if node.meta["val"].dtype in _WHOLE else None
        if node.target in _MOVES:
            if not all(isinstance(n, int) for n in node.meta["val"].shape):
                return None
            moved = node.target(known, *node.args[1:], **node.kwargs)
            return moved if tuple(moved.shape) == tuple(node.meta["val"].shape) else None
        if node.target is aten.constant_pad_nd.default:
            none: Any = self._numbered([frozenset()], [])
            return aten.constant_pad_nd.default(known, node.args[1], none.item()) if _pads_zeros(node) else None
        if node.target is aten.sub.Tensor:
            less = self.counts(node.args[1])
            if less is None or less.shape != known.shape or node.kwargs:
                return None
            both = zip(self.cells(known), self.cells(less), strict=True)
            return self._numbered([a - b if b <= a else None for a, b in both], known.shape)
        if node.target is aten.cumsum.default:
            if known.dim() != 1:
                return None
            upto: list[Cells | None] = []
            for one in self.cells(known):
                upto.append(_union([upto[-1] if upto else frozenset(), one]))
            return self._numbered(upto, known.shape)
        return self._summed(known, node)

    def _summed(self, known: Tensor, node: Any) -> Tensor | None:
        dims = node.args[1] if node.target is aten.sum.dim_IntList else list(range(known.dim()))
        axes = sorted(d % known.dim() for d in dims)
        rest = [d for d in range(known.dim()) if d not in axes]
        moved = known.permute(*rest, *axes).reshape(math.prod(known.shape[d] for d in rest), -1)
        return self._numbered([_union(self.cells(row)) for row in moved], node.meta["val"].shape)

    def _is_base(self, node: Any) -> bool:
        """Whether the node counts the choices of each expert."""
        value = tensor_of(node)
        if self.flat is None or value is None or value.dim() != 1:
            return False
        if node.target is aten.histc.default:
            bins, low, high = argument(node, 1, "bins"), argument(node, 2, "min", 0), argument(node, 3, "max", 0)
            fits = bins == self.experts and low == 0 and high in (self.experts, self.experts - 1) and high > 0
            return fits and self.names(node.args[0])
        if node.target in (aten.scatter_add.default, aten.index_add.default) and not node.kwargs:
            base, dim, index, ones = node.args
            counted = index.meta["val"].numel() == ones.meta["val"].numel()
            return (
                value.shape[0] == self.experts and dim == 0 and counted and is_full(base, 0) and is_full(ones, 1)
                and self.names(index)
            )  # fmt: skip
        if node.target is aten.sum.dim_IntList:
            hot, dims = node.args[:2]
            every = sorted(d % hot.meta["val"].dim() for d in dims) == list(range(hot.meta["val"].dim() - 1))
            return every and self.is_hot(hot, self.names) and not argument(node, 2, "keepdim", False)
        return False

    def is_hot(self, node: Any, names: Any = None) -> bool:
        """Whether the node is [..., experts], integers, 1 where a choice names that expert."""
        if not is_called(node, *CASTS) or node.meta["val"].dtype not in _WHOLE:
            return False
        compared = node.args[0]
        if not is_called(compared, aten.eq.Tensor):
            return False
        one, numbers = compared.args
        value = tensor_of(one)
        counts_up = numbers_up(numbers, self.experts)
        return counts_up and value is not None and value.shape[-1] == 1 and (names or self.is_choices)(one)

    def _exchanged(self, started: Any) -> Tensor | None:
        """Counts that all ranks send each other. Every rank names its experts in the same order."""
        sent, received, sends, name = started.args
        known = self.counts(sent)
        if known is None or name != self.group_name or known.dim() == 0 or known.shape[0] % self.world != 0:
            return None
        each = known.shape[0] // self.world
        if any(n != each for n in (*received, *sends)):
            return None
        places = [self.cells(row) for row in known.reshape(self.world, -1)]
        got: list[Cells | None] = []
        for r in range(self.world):
            for place, cells in enumerate(places[r]):
                if len(cells) != 1:
                    return None
                ((kind, *expert),) = cells
                ((_, *mine),) = places[self.rank][place] if len(places[self.rank][place]) == 1 else ((None, -1),)
                if kind != SENT or expert[0] // self.local != r or expert[0] % self.local != mine[0] % self.local:
                    return None
                got.append(frozenset({(GOT, r, expert[0] % self.local)}))
        return self._numbered(got, known.shape)

    def size(self, value: Any) -> Cells | None:
        """The cells whose sum a number is."""
        if not isinstance(value, Node):
            return None
        if value in self.sizes:
            return self.sizes[value]
        first: Any = value.args[0] if value.args else None
        if is_called(value, aten._local_scalar_dense.default):
            known = self.cells(self.counts(first))
            return known[0] if known is not None and len(known) == 1 else None
        if is_called(value, torch.sym_sum):
            return _union([self.size(one) for one in first])
        if is_called(value, add):
            return _union([self.size(one) for one in value.args])
        sizes = is_called(value, aten.sym_numel.default, aten.sym_size.int)
        if sizes and is_called(first, aten.repeat_interleave.Tensor):
            known = self.cells(self.counts(first.args[0]))
            return None if known is None else _union(known)
        return None

    def all_of(self, kind: str, at: int) -> Cells:
        """The cells of rank `at` (sent to it, received from it)."""
        if kind == SENT:
            return frozenset((SENT, at * self.local + one) for one in range(self.local))
        return frozenset((GOT, at, one) for one in range(self.local))

    def are_splits(self, sizes: Any, kind: str) -> bool:
        """Whether the sizes are the counts of each rank's rows."""
        if len(sizes) != self.world:
            return False
        nothing = kind == SENT and self.flat.meta["val"].numel() == 0  # sizes are known then, so they are not nodes
        return all(
            self.size(one) == self.all_of(kind, r) or (nothing and one == 0 and not isinstance(one, Node))
            for r, one in enumerate(sizes)
        )

    # ---- Orders

    def order(self, node: Any) -> bool:
        """Whether the node is the permutation that sorts the choices."""
        node = plain(node)
        return is_called(node, getitem) and node.args[1] == 1 and self._sorts(node.args[0])

    def sorted_choices(self, node: Any) -> bool:
        """Whether the node is the choices, sorted."""
        node = plain(node)
        if is_called(node, getitem) and node.args[1] == 0:
            return self._sorts(node.args[0])
        found = taken(node)
        return found is not None and self.is_choices(found[0]) and self.order(found[1])

    def _sorts(self, node: Any) -> bool:
        return sorts_up(node) and self.is_choices(node.args[0])

    # ---- Slots

    def fills_slots(self, expert: Any, place: Any, upto: Any = None) -> bool:
        """Whether no two choices have the same expert and place; `expert` is each choice's expert, in either order.
        `upto` is the place plus one, if no node is the place."""
        place = plain(place)
        if self.distinct() and self.is_token(place, self.sorted_choices(expert)):
            return True  # a token names an expert once
        if self.sorted_choices(expert):  # its number, minus those of earlier experts
            if not is_called(place, aten.sub.Tensor) or place.kwargs:
                return False
            number, begins = place.args
            found = taken(plain(begins))
            starts = None if found is None else self.cells(self.counts(found[0]))
            wanted = [frozenset((SENT, e) for e in range(one)) for one in range(self.experts)]
            if found is None or starts != wanted:
                return False
            return self.sorted_choices(found[1]) and numbers_up(number)
        if upto is None and is_called(place, aten.sub.Tensor) and place.args[1] == 1:
            upto = place.args[0]
        return self.is_choices(expert) and self._running(plain(upto))

    def distinct(self) -> bool:
        """Whether a token's choices are different experts, as topk guarantees."""
        flat = self.flat
        if not is_called(flat, getitem) or flat.args[1] != 1 or not is_called(flat.args[0], aten.topk.default):
            return False
        return flat.meta["val"].dim() == 2 and argument(flat.args[0], 2, "dim", -1) in (-1, 1)

    def is_token(self, node: Any, in_order: bool) -> bool:
        """Whether the node is each choice's token; `in_order`: for the sorted choices."""
        value = tensor_of(self.flat)
        k = value.shape[1] if value is not None and value.dim() == 2 else None
        if in_order or divisor(node):
            return divisor(node) == k and (self.order if in_order else numbers_up)(node.args[0])
        if not is_called(node, aten.expand.default):
            return False
        wide, column = node.meta["val"], node.args[0].meta["val"]
        return wide.dim() == 2 and wide.shape[1] == k and column.shape[1] == 1 and numbers_up(node.args[0])

    def _running(self, upto: Any) -> bool:
        """Whether the node is the running count of choices with the same expert."""
        if is_called(upto, aten.sum.dim_IntList):
            product, dims = upto.args[:2]
            if not is_called(product, aten.mul.Tensor) or product.meta["val"].dim() != 2 or dims not in ([-1], [1]):
                return False
            one, other = product.args
            return (self._runs(one) and self.is_hot(other)) or (self._runs(other) and self.is_hot(one))
        return (
            is_called(upto, aten.gather.default)
            and upto.args[1] in (1, -1)
            and self._runs(upto.args[0])
            and (self.is_choices(upto.args[2]))
        )

    def _runs(self, node: Any) -> bool:
        return is_called(node, aten.cumsum.default) and node.args[1] == 0 and self.is_hot(node.args[0])


def taken(node: Any) -> tuple[Node, Node] | None:
    """The tensor and the index of a node that takes elements or rows by a 1-d index."""
    if is_called(node, aten.index.Tensor) and len(node.args[1]) == 1 and node.args[1][0] is not None:
        return _one_dimensional(node.args[0], node.args[1][0])
    if is_called(node, aten.index_select.default) and node.args[1] == 0:
        return _one_dimensional(node.args[0], node.args[2])
    if is_called(node, aten.gather.default) and node.args[1] == 0:
        index = node.args[2]
        if is_called(index, aten.expand.default):  # of whole rows
            wide, source = tensor_of(index), tensor_of(node.args[0])
            column = tensor_of(index.args[0])
            if wide is None or column is None or source is None or wide.dim() != 2 or column.shape[1] != 1:
                return None
            return (node.args[0], index.args[0]) if wide.shape[1] == source.shape[1] else None
        return _one_dimensional(node.args[0], index)
    return None


def _one_dimensional(source: Any, index: Any) -> tuple[Node, Node] | None:
    value = tensor_of(index)
    return (source, index) if value is not None and value.dim() == 1 and value.dtype != torch.bool else None


def sorts_up(node: Any) -> bool:
    """Whether the node sorts a 1-d tensor in increasing order."""
    if not is_called(node, aten.sort.stable, aten.sort.default) or node.args[0].meta["val"].dim() != 1:
        return False
    return not node.kwargs.get("descending", False) and not any(one is True for one in node.args[2:])


def divisor(node: Any) -> int | None:
    """The divisor by which a node divides nonnegative integers, rounding down."""
    mode = (
        (node.kwargs.get("rounding_mode") or (*node.args, None)[2]) if is_called(node, aten.div.Tensor_mode) else None
    )
    if mode not in ("floor", "trunc") and not is_called(node, aten.floor_divide.default):
        return None
    return node.args[1] if isinstance(node.args[1], int) and node.args[1] > 0 else None


def numbers_up(node: Any, count: int | None = None) -> bool:
    """Whether the node is 0, 1, 2, ..."""
    node = plain(node)
    if is_called(node, _prims.iota.default):
        start, step = node.kwargs["start"], node.kwargs["step"]
        return bool((count is None or node.args[0] == count) and start == 0 and step == 1)
    return is_called(node, aten.arange.default) and (count is None or node.args[0] == count)


def is_full(node: Any, number: int) -> bool:
    if is_called(node, aten.full.default, aten.full_like.default):
        return bool(node.args[1] == number)
    zeros = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
    ones = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)
    return is_called(node, *(ones if number else zeros))


def _is_small(node: Any) -> bool:
    shape = node.meta["val"].shape
    return all(isinstance(n, int) for n in shape) and 0 < shape.numel() <= 4096


def _union(sets: Any) -> Cells | None:
    """The union of disjoint sets of cells."""
    out: set[Any] = set()
    for one in sets:
        if one is None or out & one:
            return None
        out |= one
    return frozenset(out)


def _pads_zeros(node: Any) -> bool:
    return bool(argument(node, 2, "value", 0) == 0)


# Operators that run on the sets' numbers unchanged.
_MOVES = frozenset(
    {
        *_SAME,
        *CASTS,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.cat.default,
    }
)
_SUMS = frozenset(
    {
        aten.sum.dim_IntList,
        aten.sum.default,
        aten.cumsum.default,
        aten.sub.Tensor,
        aten.constant_pad_nd.default,
    }
)
