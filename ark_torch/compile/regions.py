"""Cuts a graph into pieces: the largest sets of operators that one side can run, in an order that preserves all
results.

Each computing node gets a level: one more than the level of anything before it that the other side runs, and no less
than that of anything its own side runs. Nodes of the same level and side form a piece. Levels grow along dependencies
(data, the order of reads and writes of mutated tensors, random numbers and collectives), so pieces in order of level
are a valid order, however the program mixes the two kinds. Even levels are Inductor's, odd ones ark's. An ark piece
that is not worth its call is given to the other side, and levels are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

from torch.fx import Node


@dataclass
class Piece:
    ark: bool
    nodes: list[Node]  # those that compute, in program order


def cut(
    needed: Mapping[Node, Set[Node]],
    supported: Callable[[Node], bool],
    minimum: int,
    waits: Mapping[Node, Node] = MappingProxyType({}),
) -> tuple[list[Piece], list[Node]]:
    """The pieces in execution order, and the nodes given away because their piece was too small.

    `waits`: nodes that wait for what another node has started; they stay on its side.
    """
    ours = {node: supported(node) for node in needed}
    given: list[Node] = []
    while True:
        pieces = _pieces(needed, ours)
        small = [piece for piece in pieces if piece.ark and len(piece.nodes) < minimum]
        if not small:
            return pieces, given
        for node in (node for piece in small for node in piece.nodes):
            ours[node] = False
            given.append(node)
        for wait, started in waits.items():
            if ours[wait] and not ours[started]:
                ours[wait] = False
                given.append(wait)


def _pieces(needed: Mapping[Node, Set[Node]], ours: Mapping[Node, bool]) -> list[Piece]:
    level: dict[Node, int] = {}
    for node, before in needed.items():
        level[node] = max(
            (level[b] if ours[b] == ours[node] else level[b] + 1 for b in before), default=int(ours[node])
        )
    _delay(needed, ours, level)
    found: dict[int, Piece] = {}
    for node in needed:
        found.setdefault(level[node], Piece(ours[node], [])).nodes.append(node)
    return [found[number] for number in sorted(found)]


def _delay(needed: Mapping[Node, Set[Node]], ours: Mapping[Node, bool], level: dict[Node, int]) -> None:
    """Merges a piece into a later one of its side if only later pieces of that side wait for it; last pieces first."""
    after: dict[Node, list[Node]] = {node: [] for node in needed}
    for node, before in needed.items():
        for b in before:
            after[b].append(node)
    members: dict[int, list[Node]] = {}
    for node in needed:
        members.setdefault(level[node], []).append(node)
    for number in sorted(members, reverse=True):
        piece = members[number]
        inside = set(piece)
        users = [(node, user) for node in piece for user in after[node] if user not in inside]
        limit = min((level[u] if ours[u] == ours[n] else level[u] - 1 for n, u in users), default=max(members))
        for target in sorted(members, reverse=True):
            if number < target <= limit and (target - number) % 2 == 0:
                members[target] += members.pop(number)
                level.update(dict.fromkeys(piece, target))
                break
