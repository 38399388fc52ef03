"""Ranks that are processes: threads that share cores, rounds over a node's memory, messages of TCP between nodes.

A rank has two threads: its own, and the one that moves messages (Gloo's). What they do takes core time, which all
threads of a host share; a thread has one core at most. A copied or added byte costs 1 / gbps of the operation's engine
over shared memory, a sent or received one 1 / gbps of its engine over TCP. A node's link is a token bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

from ark_torch.simulation.machine import Engine
from ark_torch.simulation.network import Link
from ark_torch.simulation.world import Process, World

CORE = 1e-3  # a Link that passes one microsecond of work in a microsecond
PAYLOAD = 1448 / 1514  # of TCP's segments in Ethernet's frames


class Bucket:
    """A link that sends at a rate, and at once what fits into the tokens that gathered while it was idle."""

    def __init__(self, bytes_per_us: float, burst: float) -> None:
        self.rate, self.burst, self.due = bytes_per_us, burst, 0.0

    def wait(self, now: float, size: float) -> float:
        """How long until the last of `size` bytes has left, behind all others that were given before."""
        self.due = max(now, self.due) + size / self.rate
        return max(0.0, self.due - self.burst / self.rate - now)


class Host:
    """Cores and links of a world of processes."""

    def __init__(self, world: World) -> None:
        machine, here = world.machine, world.every()
        self.world = world
        share = world.nodes if machine.one_host and world.folded else 1  # of the cores, for the node that is simulated
        hosts = 1 if machine.one_host or world.folded else world.nodes
        cores = [Link(f"cores {host}", CORE * machine.cores / share) for host in range(hosts)]
        self.cores = [cores[world.node_of[rank] % hosts] for rank in here]
        self.threads = [Link(f"rank {rank}", CORE) for rank in here]
        self.movers = [Link(f"messages of rank {rank}", CORE) for rank in here]
        rate = machine.rail_gbit / 8 * 1e3 * PAYLOAD
        self.links = [Bucket(rate, machine.rail_burst) for _ in range(1 if world.folded else world.nodes)]


class Call:
    """One collective on a host: who has published what, and which messages are under way."""

    def __init__(self, host: Host, memory: Engine, size: float, tcp: Engine | None = None) -> None:
        """memory, tcp: engines of the operation; size: its bytes, which determine their rates."""
        self.host, self.world, self.memory, self.tcp = host, host.world, memory, tcp
        self.env = host.world.env
        self.byte_us = 1e-3 / memory.rate(size)
        self.sent_byte_us = 1e-3 / tcp.rate(size) if tcp else 0.0
        self._events: dict[Hashable, Any] = {}

    def event(self, *key: Hashable) -> Any:
        if key not in self._events:
            self._events[key] = self.env.event()
        return self._events[key]

    def work(self, rank: int, us: float, mover: bool = False) -> Any:
        """Core time of a rank's own thread, or of the one that moves its messages."""
        thread = self.host.movers[rank] if mover else self.host.threads[rank]
        return self.world.network.transfer((thread, self.host.cores[rank]), us)

    def begin(self, rank: int) -> Any:
        return self.work(rank, (self.tcp or self.memory).setup_us)

    def copy(self, rank: int, size: float) -> Any:
        """Copies `size` bytes; a sum of n inputs counts as n copies."""
        return self.work(rank, size * self.byte_us)

    # Rounds over a node's memory.

    def publish(self, rank: int, tag: Hashable, size: float) -> Process:
        yield self.copy(rank, size)
        self.show(rank, tag)

    def show(self, rank: int, tag: Hashable) -> None:
        """Publishes what needs no copy."""
        done = self.env.timeout(self.memory.latency_us)
        shown = self.event("round", rank, tag)
        done.callbacks.append(lambda _: shown.succeed())

    def read(self, ranks: list[int], tag: Hashable) -> Any:
        return self.env.all_of([self.event("round", rank, tag) for rank in ranks])

    # Messages between nodes.

    def send(self, rank: int, peer: int, tag: Hashable, size: float) -> Process:
        """Begins a message; the caller waits for the system call alone. It has come at arrival(), left at leaving().

        In a folded world it comes to the one node that stands for all, from as many nodes before as it goes ahead.
        """
        assert self.tcp is not None
        network = self.world.network
        network.sent[rank] += int(size)
        yield self.work(rank, self.tcp.message_us)
        self.env.process(self._move(rank, peer, tag, size))

    def _move(self, rank: int, peer: int, tag: Hashable, size: float) -> Generator[Any, Any, None]:
        assert self.tcp is not None
        link = self.host.links[self.world.node_of[rank]]
        came, left = self.arrival(rank, peer, tag), self.event("left", rank, peer, tag)
        peer = self.world.at(peer)
        wire = self.env.timeout(link.wait(self.env.now, size))
        sending = self.env.all_of([self.work(rank, size * self.sent_byte_us, mover=True), wire])
        yield self.env.timeout(self.world.machine.rail_latency_us)
        yield self.env.all_of([self.work(peer, size * self.sent_byte_us, mover=True), wire])
        if not sending.triggered:
            yield sending
        left.succeed()
        yield self.work(peer, self.tcp.message_us, mover=True)
        yield self.env.timeout(self.tcp.latency_us)
        self.world.network.received.update({peer: int(size)})
        came.succeed()

    def arrival(self, rank: int, peer: int, tag: Hashable) -> Any:
        world = self.world
        ahead = (world.node_of[peer] - world.node_of[rank]) % world.nodes if world.folded else 0
        return self.event("message", world.at(rank), world.at(peer), ahead, tag)

    def leaving(self, rank: int, peer: int, tag: Hashable) -> Any:
        return self.event("left", rank, peer, tag)

    def all_of(self, events: list[Any]) -> Any:
        return self.env.all_of(events)

    def beside(self, process: Process) -> Any:
        return self.env.process(process)


Work = Callable[[int], Process]


def back_to_back(world: World, works: list[Work]) -> float:
    """Microseconds of a call, on the slowest rank, of calls one behind the other; of several the first is not counted.

    So they are measured: the first one finds idle ranks and links.
    """
    took: list[float] = []
    counted = works[1:] or works

    def work(rank: int) -> Process:
        if len(works) > 1:
            yield from works[0](rank)
        began = world.env.now
        for one in counted:
            yield from one(rank)
        took.append(world.env.now - began)

    world.run(work, world.every())
    return max(took) / len(counted)
