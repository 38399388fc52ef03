"""Collectives of GPUs within a node as in csrc/collectives/cuda: who sends what when.

Each function returns a rank's process. `size` is the whole tensor's bytes, counted like nccl-tests (all_gather: the
output, reduce_scatter: the input).
"""

from __future__ import annotations

from collections.abc import Callable

from ark_torch.simulation.world import Mail, Process

GPU_PIECES = 4
Work = Callable[[int], Process]


def _others(ranks: list[int], rank: int) -> list[int]:
    """The other ranks, starting with the next one: the order in which a rank sends."""
    at = ranks.index(rank)
    return ranks[at + 1 :] + ranks[:at]


def one_shot(mail: Mail, ranks: list[int], size: float) -> Work:
    """Every rank sends its whole input to every rank, which adds them (cuda/one_shot.cuh)."""

    def work(rank: int) -> Process:
        yield mail.wait(mail.engine.setup_us)
        others = _others(ranks, rank)
        for peer in others:
            mail.post(rank, peer, size)
        yield mail.all_of([mail.arrival(peer, rank) for peer in others])

    return work


def two_shot(mail: Mail, ranks: list[int], size: float, in_turn: bool = False, gather: bool = True) -> Work:
    """Sends parts to their owners, and sums to all (cuda/two_shot.cuh; in_turn:
    collectives/cuda/copy_engine/copy_engine.cpp, one peer at a time).

    gather: False for a reduce_scatter, which ends with the sums.
    """
    pieces = GPU_PIECES
    part = size / len(ranks) / pieces

    def put(rank: int, what: str, k: int) -> Process:
        sent = []
        for peer in _others(ranks, rank):
            sent.append(mail.post(rank, peer, part, (what, k)))
            if in_turn:
                yield sent[-1]
        yield mail.all_of(sent)

    def contribute(rank: int) -> Process:
        for k in range(pieces):
            yield from put(rank, "part", k)

    def add(rank: int) -> Process:
        for k in range(pieces):
            yield mail.all_of([mail.arrival(peer, rank, ("part", k)) for peer in _others(ranks, rank)])
            if gather:
                yield from put(rank, "sum", k)

    # One stream of copies: the parts of the next piece go before the sums of this one.
    def in_line(rank: int) -> Process:
        for k in range(pieces + 1):
            if k < pieces:
                yield from put(rank, "part", k)
            if k > 0:
                yield mail.all_of([mail.arrival(peer, rank, ("part", k - 1)) for peer in _others(ranks, rank)])
                if gather:
                    yield from put(rank, "sum", k - 1)

    def work(rank: int) -> Process:
        env = mail.world.env
        yield mail.wait(mail.engine.setup_us)
        running = [env.process(one(rank)) for one in ([in_line] if in_turn else [contribute, add])]
        if gather:
            for k in range(pieces):
                yield mail.all_of([mail.arrival(peer, rank, ("sum", k)) for peer in _others(ranks, rank)])
        yield mail.all_of(running)

    return work


def move(mail: Mail, ranks: list[int], size: float, in_turn: bool = False) -> Work:
    """A message of size / ranks to every rank: all_gather and all_to_all (cuda/move.cuh)."""

    def work(rank: int) -> Process:
        yield mail.wait(mail.engine.setup_us)
        others = _others(ranks, rank)
        for peer in others:
            sent = mail.post(rank, peer, size / len(ranks))
            if in_turn:
                yield sent
        yield mail.all_of([mail.arrival(peer, rank) for peer in others])

    return work


def from_root(mail: Mail, ranks: list[int], size: float) -> Work:
    """A broadcast directly from the first rank."""

    def work(rank: int) -> Process:
        yield mail.wait(mail.engine.setup_us)
        if rank == ranks[0]:
            yield mail.all_of([mail.post(rank, peer, size) for peer in ranks[1:]])
        else:
            yield mail.arrival(ranks[0], rank)

    return work


def relay(mail: Mail, ranks: list[int], size: float) -> Work:
    """A broadcast whose receivers forward parts to each other (cuda/relay.cuh)."""
    root, peers = ranks[0], ranks[1:]
    part = size / len(peers) / GPU_PIECES

    def work(rank: int) -> Process:
        yield mail.wait(mail.engine.setup_us)
        sent = []
        for k in range(GPU_PIECES):
            if rank == root:
                yield mail.all_of([mail.post(root, peer, part, k) for peer in peers])
                continue
            yield mail.arrival(root, rank, k)
            sent += [mail.post(rank, peer, part, k) for peer in peers if peer != rank]
        if rank != root:
            every = [mail.arrival(peer, rank, k) for peer in peers if peer != rank for k in range(GPU_PIECES)]
            yield mail.all_of([*every, *sent])

    return work
