"""Collectives of processes in one node as in csrc/collectives/cpu: rounds over shared memory, chunk by chunk.

Each function returns a rank's process. Up to MOST_CHUNKS chunks are the code's own; larger tensors have that many
larger chunks.
"""

from __future__ import annotations

from ark_torch.simulation.processes import Call, Work
from ark_torch.simulation.world import Process

MOST_CHUNKS = 16


def chunks_of(size: float, chunk: float) -> int:
    return max(1, min(MOST_CHUNKS, -(-int(size) // max(1, int(chunk)))))


def others_of(ranks: list[int], rank: int) -> list[int]:
    return [peer for peer in ranks if peer != rank]


def rounds(
    call: Call, ranks: list[int], size: float, chunk: float, publishes: float, reads: float, root: int = -1
) -> Work:
    """Rounds of one hand-over (rounds.hpp): a rank copies a chunk into its slot, and its peers read it.

    size: bytes of a rank's tensor, cut into chunks. For each of its bytes a rank copies `publishes` bytes, and
    processes `reads` bytes when the peers' data has arrived. With a root only the root publishes, and only the others
    read.
    """
    chunks = chunks_of(size, chunk)
    each = size / chunks

    def work(rank: int) -> Process:
        yield call.begin(rank)
        speaks, listens = root in (-1, rank), root != rank
        if speaks:
            yield from call.publish(rank, 0, each * publishes)
        for k in range(chunks):
            if speaks and k + 1 < chunks:
                yield from call.publish(rank, k + 1, each * publishes)
            if listens:
                yield call.read(others_of(ranks, rank) if root < 0 else [root], k)
                yield call.copy(rank, each * reads)

    return work


def two_shot(call: Call, ranks: list[int], size: float, chunk: float) -> Work:
    """two_shot_reduce.cpp: publishes inputs one chunk ahead, adds own parts, collects sums one chunk behind."""
    chunks = chunks_of(size, chunk)
    each, n = size / chunks, len(ranks)

    def work(rank: int) -> Process:
        yield call.begin(rank)
        others = others_of(ranks, rank)
        yield from call.publish(rank, ("part", 0), each * (n - 1) / n)
        for k in range(chunks + 1):
            if k + 1 < chunks:
                yield from call.publish(rank, ("part", k + 1), each * (n - 1) / n)
            if k < chunks:
                yield call.read(others, ("part", k))
                yield from call.publish(rank, ("sum", k), each)  # adds n parts
            if k > 0:
                yield call.read(others, ("sum", k - 1))
                yield call.copy(rank, each * (n - 1) / n)

    return work


def collective(call: Call, ranks: list[int], operation: str, each: float, algorithm: str, chunk: float) -> Work:
    """A whole collective. each: bytes of one rank, as the dispatch table counts: all_gather's input, reduce_scatter's
    and all_to_all's output of one rank."""
    n = len(ranks)
    if algorithm == "two_shot":
        return two_shot(call, ranks, each, chunk)
    publishes, reads = {
        "all_reduce": (1, n), "all_gather": (1, n), "broadcast": (1, 1),
        "reduce_scatter": (n - 1, n), "all_to_all": (n - 1, n - 1),
    }[operation]  # fmt: skip
    if operation in ("reduce_scatter", "all_to_all"):
        chunk = chunk / n  # a slot has a piece for every rank
    return rounds(call, ranks, each, chunk, publishes, reads, ranks[0] if operation == "broadcast" else -1)
