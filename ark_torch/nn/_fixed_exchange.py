"""Sends bags to the ranks that own their tables in fixed-size buffers, so that no host needs the number of indices.

It serves steps captured in CUDA graphs. Each table has room for a fixed number of indices per rank, so every rank knows
all message sizes, and the device computes each index's position. The received parts are joined without gaps: pooling
sees the same bags as from `ark::exchange_bags`, with unused room after the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.nn._shards import block_of


class Bags(NamedTuple):
    """The bags of this rank's tables (row-wise: of all tables), rank 0's samples first, then rank 1's and so on."""

    indices: list[Tensor]  # [ranks * room]
    offsets: list[Tensor]  # [ranks * batch + 1]; the last one is the last bag's end
    weights: list[Tensor]


def _begins(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


class FixedExchange:
    """The exchange for tables with `rooms` indices per rank; `owners`: the rank of each table, empty if row-wise."""

    def __init__(
        self,
        rows: Sequence[int],
        owners: Sequence[int],
        rooms: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group, self._ranks, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._tables, self._by_row = len(rows), not owners
        everybody = range(self._ranks)
        here = [[t for t in range(len(rows)) if self._by_row or owners[t] == r] for r in everybody]
        self._mine = here[rank]
        self._rooms = [rooms[t] for t in self._mine]
        self._empty = [self._by_row and block_of(rows[t], self._ranks) * rank >= rows[t] for t in self._mine]
        sent = [sum(rooms[t] for t in tables) for tables in here]
        self._sent, self._received = sent, [sum(self._rooms)] * self._ranks
        self._sent_tables = [len(tables) for tables in here]

        def numbers(values: Sequence[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64, device=device)

        order = [t for tables in here for t in tables]
        first = dict(zip(order[: len(rows)], _begins([rooms[t] for t in order])[: len(rows)], strict=True))
        self._order = numbers(order)  # tables in send order
        # each table's position in the send buffer, for rank 0
        self._first = numbers([first[t] for t in range(len(rows))])
        self._each = sum(rooms) if self._by_row else 0  # distance to its position for the next rank
        self._room = numbers(rooms)
        self._block = numbers([block_of(count, self._ranks) or 1 for count in rows])
        # For each slot received from one rank: its local table, its number within that table, and the table's start.
        self._table_of = numbers([i for i, room in enumerate(self._rooms) for _ in range(room)])
        self._number = numbers([n for room in self._rooms for n in range(room)])
        begins = _begins([room * self._ranks for room in self._rooms])
        self._begin = numbers([begins[i] for i, room in enumerate(self._rooms) for _ in range(room)])
        self._pieces = [room * self._ranks for room in self._rooms]

    def __call__(self, values: Tensor, lengths: Tensor, weights: Tensor | None) -> Bags:
        """`values` of all tables, concatenated, possibly with room after the last; `lengths` [tables, batch]."""
        lengths = lengths.long()
        counts = lengths.sum(1)
        ends = counts.cumsum(0)
        torch._assert_async((counts <= self._room).all() & (ends[-1] <= values.numel()) & (lengths >= 0).all())
        number = torch.arange(values.numel(), device=values.device)
        table = torch.searchsorted(ends, number, right=True).clamp_(max=self._tables - 1)
        unused = number >= ends[-1]
        if self._by_row:
            values, place, lengths = self._to_rows(values, lengths, table, unused)
        else:
            place = self._first[table] + number - (ends - counts)[table]
            lengths = lengths.index_select(0, self._order)
        place = place.masked_fill(unused, sum(self._sent))  # torch.where might copy its scalar from the host
        got = self._all_to_all(lengths, self._sent_tables, [len(self._mine)] * self._ranks)
        arrived = [self._moved(one, place) for one in (values, *([] if weights is None else [weights]))]
        if not self._mine:
            return Bags([], [], [])
        got = got.view(self._ranks, len(self._mine), lengths.shape[-1])
        each = got.sum(2)  # [ranks, local tables]
        before = each.cumsum(0) - each
        target = self._begin + before[:, self._table_of] + self._number
        target = target.masked_fill(self._number >= each[:, self._table_of], sum(self._pieces)).reshape(-1)
        put = [one.new_zeros(sum(self._pieces) + 1).scatter_(0, target, one) for one in arrived]
        pieces = [
            [piece[:0] if none and not piece.is_cuda else piece for none, piece in zip(self._empty, parts, strict=True)]
            for parts in (list(one[:-1].split_with_sizes(self._pieces)) for one in put)
        ]
        long = got.transpose(0, 1).flatten(1).cumsum(1, dtype=values.dtype)
        offsets = torch.cat([long.new_zeros(len(self._mine), 1), long], 1)
        return Bags(pieces[0], list(offsets.unbind(0)), pieces[1] if weights is not None else [])

    def _to_rows(self, values: Tensor, lengths: Tensor, table: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes each index to the rank of its row, and makes it relative to that rank's first row."""
        block = self._block[table]
        owner = values.long().div(block, rounding_mode="floor").clamp_(0, self._ranks - 1)
        key = (owner * self._tables + table).masked_fill(unused, self._ranks * self._tables)
        ordered, order = torch.sort(key, stable=True)
        number = torch.arange(values.numel(), device=values.device)
        place = torch.empty_like(number)
        place.scatter_(0, order, number - torch.searchsorted(ordered, ordered))
        place += owner * self._each + self._first[table]
        bags = lengths.numel()
        bag = torch.searchsorted(lengths.reshape(-1).cumsum(0), number, right=True)
        where = (owner * bags + bag).masked_fill(unused, self._ranks * bags)
        spread = lengths.new_zeros(self._ranks * bags + 1).scatter_add_(0, where, torch.ones_like(number))[:-1]
        return values - (owner * block).to(values.dtype), place, spread.view(-1, lengths.shape[1])

    def _moved(self, values: Tensor, place: Tensor) -> Tensor:
        buffer = values.new_zeros(sum(self._sent) + 1).scatter_(0, place, values)[:-1]
        return self._all_to_all(buffer, self._sent, self._received)

    def _all_to_all(self, given: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = given.new_empty((sum(received), *given.shape[1:]))
        dist.all_to_all_single(out, given.contiguous(), received, sent, group=self._group)
        return out


def rooms_of(max_values: int | Sequence[int], tables: int, name: str) -> list[int]:
    """One limit per table. Raises ValueError if `max_values` is invalid."""
    rooms = [max_values] * tables if isinstance(max_values, int) else list(max_values)
    if len(rooms) != tables or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in rooms):
        raise ValueError(
            f"{name}max_values is {max_values!r}. Pass the most indices that a rank has for a table in a call: a whole "
            f"number from 1 on, or one for each of {tables} tables; the same on all ranks."
        )
    return rooms


def trimmed(values: Tensor, lengths: Tensor, weights: Tensor | None, rooms: list[int], names: Any, name: str) -> Any:
    """On CPUs: checks the limits and removes the unused room."""
    counts = lengths.sum(1).tolist()
    for table, (count, room) in enumerate(zip(counts, rooms, strict=True)):
        if count > room:
            raise ValueError(
                f"{name}{names[table]!r} has {count} indices, and max_values says {room}. Pass a larger one."
            )
    total = sum(counts)
    return values[:total], lengths, None if weights is None else weights[:total]
