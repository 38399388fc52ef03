"""Collectives of processes on several nodes: memory in each node, messages of a carrier (Gloo) between nodes.

Each function follows its C++ namesake in csrc/process_group/carriers. Who exchanges with whom, which way a size takes,
and its pieces are asked of the extension (csrc/collectives/node_plan.hpp, carried_path.hpp). Elements are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ark_torch.simulation.processes import Call, Work
from ark_torch.simulation.shared_memory import others_of
from ark_torch.simulation.world import Process

ELEMENT = 4
MOST_PIECES = 16  # simulated; a longer tensor has that many longer pieces


def extension() -> Any:
    from ark_torch import _autoload

    _autoload.ready()
    from ark_torch import _C

    return _C


@dataclass(frozen=True)
class Plan:
    """What NodePlan says of one rank."""

    rank: int
    node: int
    local: int
    members: list[list[int]]
    stand_ins: list[int]  # by node: the rank that this one exchanges with there
    others: list[int]  # the other nodes, in the order in which this one sends to them
    foreign: list[int]  # their ranks, in that order
    peers: list[int]
    targets: list[int]  # ranks of other nodes that this one stands for
    rails: int
    parcel_limit: int

    @property
    def own(self) -> list[int]:
        return self.members[self.node]


def plan_of(node_of: tuple[int, ...], rank: int) -> Plan:
    told = extension()._node_plan(list(node_of), rank)
    node = next(i for i, members in enumerate(told["members"]) if rank in members)
    return Plan(rank, node, told["members"][node].index(rank), **told)


@cache
def plans(node_of: tuple[int, ...], ranks: int) -> list[Plan]:
    """Of the first `ranks` ranks, which are those that are simulated."""
    return [plan_of(node_of, rank) for rank in range(ranks)]


@cache
def sizes() -> dict[str, int]:
    made: dict[str, int] = extension()._carried_sizes()
    return made


@cache
def path_of(operation: str, size: int, node_of: tuple[int, ...]) -> tuple[str, int, int]:
    """(way, bytes of a piece, pieces) of a rank's `size` bytes, counted as in carried_path.hpp."""
    size = max(ELEMENT, size // ELEMENT * ELEMENT)
    way, piece, pieces = extension()._carried_path(operation, size, ELEMENT, ELEMENT, list(node_of))
    return way, piece, pieces


def collective(call: Call, operation: str, each: int) -> tuple[Work, str]:
    """A rank's process, and the way that it takes. each: bytes of a rank's tensor, counted as in carried_path.hpp."""
    node_of = tuple(call.world.node_of)
    way, piece, pieces = path_of(operation, each, node_of)
    if pieces > MOST_PIECES:
        piece, pieces = -(-each // MOST_PIECES), MOST_PIECES
    simulated = plans(node_of, len(call.world.every()))
    carried = _Carried(call, simulated, each, way, min(piece, each), pieces)
    body = {
        "all_reduce": carried.sum_in_chunks if way == "pieces" else carried.sum_whole,
        "reduce_scatter": carried.sum_blocks,
        "all_gather": carried.gather_in_pieces if way == "pieces" else carried.gather_whole,
        "broadcast": carried.broadcast,
        "all_to_all": carried.exchange_parcels if way == "parcels" else carried.exchange_blocks,
    }[operation]

    def work(rank: int) -> Process:
        yield call.begin(rank)
        yield from body(carried.plans[rank])

    return work, way


class _Carried:
    def __init__(self, call: Call, plans: list[Plan], size: int, way: str, piece: int, pieces: int) -> None:
        self.call, self.plans, self.size, self.way, self.piece, self.pieces = call, plans, size, way, piece, pieces
        self.ranks = call.world.ranks
        self.first = sizes()["first_message"]

    def length(self, k: int) -> int:
        """Bytes of piece k."""
        return min(self.piece, self.size - k * self.piece)

    def meet(self, plan: Plan, peers: list[int]) -> Process:
        for peer in peers:
            yield from self.call.send(plan.rank, peer, "first", self.first)

    def hear(self, plan: Plan, peers: list[int], tag: Any = "first") -> Any:
        return self.call.all_of([self.call.arrival(peer, plan.rank, tag) for peer in peers])

    # Sums: carried_communicator.cpp, carried_reduce.cpp.

    def sum_whole(self, plan: Plan) -> Process:
        """One hop: the node's partial to every rank that this one stands for."""
        call, rank, own = self.call, plan.rank, plan.own
        first = self.way == "first"
        if not first:
            yield from self.meet(plan, plan.peers)
        yield from call.publish(rank, "in", self.size if len(own) > 1 else 0)
        yield call.read(others_of(own, rank), "in")
        yield call.copy(rank, self.size * len(own))
        sources = [plan.stand_ins[node] for node in plan.others]
        if first:
            yield from self.meet(plan, plan.peers)
            yield self.hear(plan, plan.peers)
        else:
            yield self.hear(plan, plan.peers)
            for peer in plan.targets:
                yield from call.send(rank, peer, "partial", self.size)
            yield self.hear(plan, sources, "partial")
        yield call.copy(rank, self.size * len(plan.members))

    def sum_in_chunks(self, plan: Plan) -> Process:
        """Every rail adds its part of a chunk in the node, then the nodes' partials, and publishes the result."""
        call, rank, own, nodes = self.call, plan.rank, plan.own, len(plan.members)
        lag, chunks = sizes()["sum_lag"], self.pieces
        others, lone = others_of(own, rank), len(own) == 1
        on_rail = plan.local < plan.rails
        peers = [plan.members[node][plan.local] for node in plan.others] if on_rail else []
        share = 1 if nodes == 2 else nodes  # with two nodes each takes the whole part
        yield from self.meet(plan, peers)
        for t in range(chunks + 2 + 2 * lag):
            k = t
            if k < chunks and not lone:
                part = self.length(k) / plan.rails if on_rail else 0
                yield from call.publish(rank, ("in", k), self.length(k) - part)
            k = t - 1
            if 0 <= k < chunks:
                part = self.length(k) / plan.rails
                yield call.read(others, ("in", k))
                if on_rail:
                    if k == 0:
                        yield self.hear(plan, peers)
                    if k > lag:
                        yield call.all_of([call.leaving(rank, peer, ("part", k - lag - 1)) for peer in peers])
                    yield call.copy(rank, part * len(own) if not lone else 0)
                    for peer in peers:
                        yield from call.send(rank, peer, ("part", k), part / share)
            k = t - 1 - lag
            if 0 <= k < chunks and on_rail:
                part = self.length(k) / plan.rails
                yield self.hear(plan, peers, ("part", k))
                yield call.copy(rank, part / share * nodes)
                if share > 1:
                    for peer in peers:
                        yield from call.send(rank, peer, ("sum", k), part / share)
            k = t - 1 - 2 * lag
            if 0 <= k < chunks:
                if on_rail and share > 1:
                    yield self.hear(plan, peers, ("sum", k))
                if on_rail and not lone:
                    yield from call.publish(rank, ("out", k), self.length(k) / plan.rails)
            k = t - 2 - 2 * lag
            if 0 <= k < chunks and not lone:
                rails = [peer for peer in own[: plan.rails] if peer != rank]
                yield call.read(rails, ("out", k))
                yield call.copy(rank, self.length(k) / plan.rails * len(rails))

    def sum_blocks(self, plan: Plan) -> Process:
        """reduce_scatter: who stands for a block's owner adds the node's pieces of it, the owner those of all nodes."""
        call, rank, own, nodes = self.call, plan.rank, plan.own, len(plan.members)
        first, lag = self.way == "first", sizes()["sum_lag"]
        lone, blocks = len(own) == 1, len(plan.targets) + 1
        sources = [plan.stand_ins[node] for node in plan.others]
        if not first:
            yield from self.meet(plan, plan.peers)
        for t in range(self.pieces + 1 + lag):
            k = t
            if k < self.pieces and not lone:
                yield from call.publish(rank, ("in", k), self.length(k) * (self.ranks - blocks))
            k = t - 1
            if 0 <= k < self.pieces:
                if k > lag:
                    yield call.all_of([call.leaving(rank, peer, ("block", k - lag - 1)) for peer in plan.targets])
                yield call.read(others_of(own, rank), ("in", k))
                if k == 0 and not first:
                    yield self.hear(plan, plan.peers)
                for block in range(blocks):
                    yield call.copy(rank, self.length(k) * len(own) if not lone else 0)
                    if block < len(plan.targets) and not first:
                        yield from call.send(rank, plan.targets[block], ("block", k), self.length(k))
                if first:
                    yield from self.meet(plan, plan.peers)
            k = t - 1 - lag
            if 0 <= k < self.pieces:
                yield self.hear(plan, plan.peers if first else sources, "first" if first else ("block", k))
                yield call.copy(rank, self.length(k) * nodes)

    # Moves: carried_moves.cpp.

    def gather_whole(self, plan: Plan) -> Process:
        call, rank, own = self.call, plan.rank, plan.own
        yield from call.publish(rank, "in", self.size)
        yield call.read(others_of(own, rank), "in")
        yield call.copy(rank, self.size * len(own))
        yield from self.meet(plan, plan.peers)
        yield self.hear(plan, plan.peers)
        yield call.copy(rank, self.size * self.ranks)

    def gather_in_pieces(self, plan: Plan) -> Process:
        """A piece of a rank's own block is published `ahead` rounds before that of the blocks which it received."""
        call, rank, own = self.call, plan.rank, plan.own
        ahead = min(sizes()["pieces_ahead"], self.pieces)
        steps = self.pieces + ahead
        yield from self.meet(plan, plan.peers)
        yield call.copy(rank, self.size)
        yield self.hear(plan, plan.peers)
        for k in range(self.pieces):
            for node in plan.others:
                yield from call.send(rank, plan.stand_ins[node], ("piece", k), self.length(k))
        if len(own) == 1:
            yield call.all_of([call.arrival(peer, rank, ("piece", k)) for peer in plan.targets
                               for k in range(self.pieces)])  # fmt: skip
            return

        def bytes_of(t: int, targets: int) -> int:
            mine = self.length(t) if t < self.pieces else 0
            return mine + (self.length(t - ahead) * targets if t >= ahead else 0)

        for t in range(steps + 1):
            if t < steps:
                if t >= ahead:
                    yield self.hear(plan, plan.targets, ("piece", t - ahead))
                yield from call.publish(rank, ("round", t), bytes_of(t, len(plan.targets)))
            if t > 0:
                others = others_of(own, rank)
                yield call.read(others, ("round", t - 1))
                yield call.copy(rank, sum(bytes_of(t - 1, len(self.plans[peer].targets)) for peer in others))

    def broadcast(self, plan: Plan) -> Process:
        """From rank 0 to one rank of each other node; these publish to their nodes."""
        call, rank, own = self.call, plan.rank, plan.own
        first, root = self.way == "first", self.plans[0]
        source = root.stand_ins[plan.node]  # who publishes in this node
        partners = [root.stand_ins[node] for node in root.others] if rank == 0 else []
        if rank == source != 0:
            partners = [0]
        if not first or rank == 0:
            yield from self.meet(plan, partners)
        if rank != 0:
            yield self.hear(plan, partners)
            if first and rank == source:
                yield call.copy(rank, self.size)
        for k in range(self.pieces):
            if rank == source:
                if rank != 0 and not first:
                    yield call.arrival(0, rank, ("piece", k))
                yield from call.publish(rank, k, self.length(k) if len(own) > 1 else 0)
            else:
                yield call.read([source], k)
                yield call.copy(rank, self.length(k))
            if k == 0 and rank == 0 and not first:
                yield self.hear(plan, partners)
                for piece in range(self.pieces):
                    for peer in partners:
                        yield from call.send(rank, peer, ("piece", piece), self.length(piece))
        if rank == 0 and not first:
            yield call.all_of([call.leaving(0, peer, ("piece", k)) for peer in partners for k in range(self.pieces)])

    def exchange_in_node(self, plan: Plan) -> Process:
        call, rank, own = self.call, plan.rank, plan.own
        chunk = max(1, sizes()["most_piece"] // len(own))
        rounds = min(MOST_PIECES, max(1, -(-self.size // chunk)))
        each = self.size / rounds * (len(own) - 1)
        for k in range(rounds + 1):
            if k < rounds:
                yield from call.publish(rank, ("near", k), each)
            if k > 0:
                yield call.read(others_of(own, rank), ("near", k - 1))
                yield call.copy(rank, each)
        yield call.copy(rank, self.size)

    def exchange_blocks(self, plan: Plan) -> Process:
        """all_to_all: first messages to every rank of other nodes, with the block if it fits, else followed by it."""
        call, rank, others = self.call, plan.rank, plan.foreign
        yield from self.meet(plan, others)
        for peer in others:
            yield call.arrival(peer, rank, "first")
            if self.way != "first":
                yield from call.send(rank, peer, "block", self.size)
        yield from self.exchange_in_node(plan)
        if self.way != "first":
            yield self.hear(plan, others, "block")
            yield call.all_of([call.leaving(rank, peer, "block") for peer in others])

    # carried_parcels.cpp

    def exchange_parcels(self, plan: Plan) -> Process:
        """all_to_all of nodes with several ranks: small blocks for a node in one message, which spreads them there."""
        call, rank, own = self.call, plan.rank, plan.own
        small = self.size <= plan.parcel_limit
        heads = {node: 2 * 8 * len(plan.members[node]) for node in plan.others}

        def apart(ranks: int) -> bool:
            return small and self.size * ranks > sizes()["first_room"] - 2 * 8 * ranks

        for node in plan.others:
            peer, parcel = plan.stand_ins[node], self.size * len(plan.members[node]) if small else 0
            yield call.copy(rank, heads[node] + parcel)
            yield from call.send(rank, peer, "first", self.first)
            if apart(len(plan.members[node])):
                yield from call.send(rank, peer, "parcel", parcel)
        yield self.hear(plan, plan.targets)
        yield from call.publish(rank, "heads", self.first * len(plan.targets))
        yield call.read(others_of(own, rank), "heads")
        yield call.copy(rank, self.first * len(plan.foreign))
        if not small:
            for peer in plan.foreign:
                yield from call.send(rank, peer, "block", self.size)
        yield from self.exchange_in_node(plan)
        if apart(len(own)):
            yield self.hear(plan, plan.targets, "parcel")
            yield from call.publish(rank, "parcels", self.size * len(own) * len(plan.targets))
            yield call.read(others_of(own, rank), "parcels")
            yield call.copy(rank, self.size * len(plan.foreign))
        if not small:
            yield self.hear(plan, plan.foreign, "block")
