"""Collectives of GPUs on several nodes.

They use NCCL, or ark's own stages over RDMA; the model is the plan of NCCL's
hierarchical algorithms, not its code: a reduce-scatter in the node, an exchange over each rank's own rail with the
ranks of the same local index, and an all-gather in the node, pipelined in chunks, with one chunk in each phase at a
time.
"""

from __future__ import annotations

from collections.abc import Callable

from ark_torch.simulation import algorithms
from ark_torch.simulation.world import Mail, Process, World

CHUNKS, LEAST_CHUNK = 4, 4 << 20  # maximum number and minimum size of pipelined chunks


def in_phases(world: World, chunks: int, phases: list[Callable[[int], list[Process]]]) -> float:
    """Pipelines chunks through phases: each phase has one chunk at a time. Returns microseconds."""
    env = world.env
    ends = {(k, p): env.event() for k in range(chunks) for p in range(-1, len(phases))}

    def phase(k: int, p: int) -> Process:
        before = [ends[k, p - 1], *([ends[k - 1, p]] if k else [])]
        yield env.all_of(before)
        yield env.all_of([env.process(one) for one in phases[p](k)])
        ends[k, p].succeed()

    began = env.now
    every = [env.process(phase(k, p)) for k in range(chunks) for p in range(len(phases))]
    for k in range(chunks):
        ends[k, -1].succeed()
    env.run(until=env.all_of(every))
    return float(env.now - began)


def ring(mail: Mail, world: World, rank: int, steps: int, size: float, tag: object) -> Process:
    """`steps` sends to the same local index in the next node."""
    for step in range(steps):
        mail.post(rank, rank + world.local, size, (tag, step), rail=True)
        yield mail.arrival(rank - world.local, rank, (tag, step))


def doubling(mail: Mail, world: World, rank: int, sizes: list[float], tag: object) -> Process:
    """Exchanges with nodes at distance 1, 2, 4, ...: one exchange per size."""
    distance = 1
    for step, size in enumerate(sizes):
        partner = rank ^ (distance * world.local) if not world.folded else rank + world.local
        mail.post(rank, partner, size, (tag, step), rail=True)
        yield mail.arrival(partner if not world.folded else rank - world.local, rank, (tag, step))
        distance = distance * 2 if distance * 2 < world.nodes else 1


def exchange(mail: Mail, world: World, rank: int, size: float, both: bool, tag: object) -> Process:
    """Exchanges `size` bytes per rank: reduce-scatter among nodes and, with `both`, the all-gather.

    Uses halving and doubling for a power-of-2 number of nodes, else a ring.
    """
    nodes = world.nodes
    rounds = 2 if both else 1
    if nodes & (nodes - 1) == 0:
        halves = [size / 2 ** (k + 1) for k in range(nodes.bit_length() - 1)]
        yield from doubling(mail, world, rank, halves + (halves[::-1] if both else []), tag)
    else:
        yield from ring(mail, world, rank, rounds * (nodes - 1), size / nodes, tag)


def hierarchical(world: World, operation: str, size: int, mail_of: Callable[[str, float], Mail]) -> float:
    """A collective's microseconds. mail_of: the engine for its part within a node; size: as in algorithms.py."""
    nodes, local = world.nodes, world.local
    chunks = max(1, min(CHUNKS, size // LEAST_CHUNK))
    here = world.members()
    groups = [here] if world.folded else [world.members(node) for node in range(nodes)]
    each = size / chunks
    rails = mail_of(operation, each)

    def local_phase(what: str, size: float) -> Callable[[int], list[Process]]:
        def phase(k: int) -> list[Process]:
            if local == 1:
                return []
            mail = mail_of(what, size)
            every = []
            for group in groups:
                if what == "reduce_scatter":
                    work = algorithms.two_shot(mail, group, size, gather=False)
                else:
                    work = algorithms.move(mail, group, size)
                every += [work(rank) for rank in group]
            return every

        return phase

    def rail_phase(size: float, both: bool) -> Callable[[int], list[Process]]:
        return lambda k: [exchange(rails, world, rank, size, both, k) for rank in world.every()]

    if operation == "all_reduce":
        phases = [local_phase("reduce_scatter", each), rail_phase(each / local, True), local_phase("all_gather", each)]
        return in_phases(world, chunks, phases)
    if operation == "reduce_scatter":
        return in_phases(world, chunks, [local_phase("reduce_scatter", each), rail_phase(each / local, False)])
    if operation == "all_gather":
        return in_phases(world, chunks, [rail_phase(each / local, False), local_phase("all_gather", each)])
    if operation == "all_to_all":
        return in_phases(world, 1, [lambda k: [everywhere(mail_of, world, rank, size) for rank in world.every()]])
    return broadcast(world, size, local_phase, rails)


def everywhere(mail_of: Callable[[str, float], Mail], world: World, rank: int, size: float) -> Process:
    """All messages of a rank: to its own node, and over the rail node by node."""
    mail = _shared(mail_of, world, size)
    message = size / world.ranks
    yield mail.wait(mail.engine.setup_us)
    here, node = world.at(rank) // world.local, rank // world.local
    near = [peer for peer in world.members(here) if peer != world.at(rank)]
    for peer in near:
        mail.post(rank, peer, message)
    for distance in range(1, world.nodes):
        far = (node + distance) % world.nodes
        # All messages to one node leave together, and arrive on the rails of its ranks.
        away = far if not world.folded else distance
        sent = [mail.post(rank, away * world.local + place, message, ("far", distance), rail=True)
                for place in range(world.local)]  # fmt: skip
        yield mail.all_of(sent)
    yield mail.all_of([mail.arrival(peer, rank) for peer in near])


def _shared(mail_of: Callable[[str, float], Mail], world: World, size: float) -> Mail:
    """One mail for all ranks of a world's all_to_all, so that their messages can meet."""
    kept: Mail | None = getattr(world, "_all_to_all", None)
    if kept is None:
        kept = mail_of("all_to_all", size)
        world._all_to_all = kept  # type: ignore[attr-defined]
    return kept


def broadcast(
    world: World, size: int, local_phase: Callable[[str, float], Callable[[int], list[Process]]], rails: Mail
) -> float:
    """Sends parts over all rails of the root's node, doubling the number of nodes each time; then nodes gather."""
    took = 0.0
    reached = 1
    while reached < world.nodes:
        took += world.machine.rail_latency_us + size / world.local / (world.machine.rail_gbit / 8 * 1e3)
        reached *= 2
    scatter = in_phases(world, 1, [local_phase("all_gather", float(size))])
    gather = in_phases(world, 1, [local_phase("all_gather", float(size))])
    return scatter + took + gather
