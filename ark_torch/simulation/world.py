"""Ranks, their links and the messages between GPUs: the primitives of algorithms.py and between_nodes.py.

If all nodes do the same, one stands for all: a *folded* world has one node, whose messages to the next node arrive at
itself. Step s of a node waits for step s - 1 of the previous node, which is as late as its own; so times equal those of
all nodes (a test compares both), and 4,096 ranks cost as much as one node's. Processes begin their messages with the
next node, whichever node they are on, so this holds for them too.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import Any

from ark_torch.simulation.machine import MOST_RANKS, BadMachine, Engine, Machine
from ark_torch.simulation.network import Link, Network, new_environment

Process = Generator[Any, Any, None]


class World:
    """`ranks` ranks, node by node. Raises BadMachine if they do not fill nodes."""

    def __init__(self, machine: Machine, ranks: int, folded: bool = False) -> None:
        if not 2 <= ranks <= MOST_RANKS:
            raise BadMachine(f"{ranks} ranks: the simulator takes 2 to {MOST_RANKS}")
        self.local = min(ranks, machine.node_ranks)
        if ranks % self.local:
            raise BadMachine(f"{ranks} ranks do not fill nodes of {machine.node_ranks}")
        self.machine, self.ranks, self.nodes = machine, ranks, ranks // self.local
        self.folded = folded and self.nodes > 1
        self.node_of = [rank // self.local for rank in range(ranks)]
        self.env = new_environment()
        self.network = Network(self.env)
        here = range(self.local if self.folded else ranks)
        if machine.kind == "cpu":  # processes.py has their cores and links
            return
        port = machine.link_gbps
        self.out = {r: Link(f"out of {r}", port) for r in here}
        self.into = {r: Link(f"into {r}", port) for r in here}
        self.rail_out = {r: Link(f"rail out of {r}", machine.rail_gbit / 8) for r in here}
        self.rail_into = {r: Link(f"rail into {r}", machine.rail_gbit / 8) for r in here}

    def members(self, node: int = 0) -> list[int]:
        return [node * self.local + r for r in range(self.local)]

    def every(self) -> list[int]:
        """The simulated ranks."""
        return list(range(self.local if self.folded else self.ranks))

    def at(self, rank: int) -> int:
        """The simulated rank that stands for `rank`."""
        return rank % self.ranks % self.local if self.folded else rank % self.ranks

    def path(self, source: int, target: int) -> tuple[Link, ...]:
        """The links through a node's switch or over rails; in a folded world `target` may be in another node."""
        apart = source // self.local != target % self.ranks // self.local
        source, target = self.at(source), self.at(target)
        if apart:
            return self.rail_out[source], self.rail_into[target]
        return self.out[source], self.into[target]

    def run(self, work: Callable[[int], Process], ranks: list[int]) -> float:
        """Runs until the last rank's process ends; returns microseconds."""
        began = self.env.now
        every = [self.env.process(work(rank)) for rank in ranks]
        self.env.run(until=self.env.all_of(every))
        return float(self.env.now - began)


class Mail:
    """Messages of one operation on one engine; a receiver names the sender and a tag."""

    def __init__(self, world: World, engine: Engine, size: int) -> None:
        """size: bytes of the operation, which determine the engine's rate."""
        self.world, self.engine = world, engine
        self.engines = {r: Link(f"engine of {r}", engine.rate(size)) for r in world.every()}
        self._arrivals: dict[Hashable, Any] = {}

    def arrival(self, source: int, target: int, tag: Hashable = 0) -> Any:
        key = (self.world.at(source), self.world.at(target), tag)
        if key not in self._arrivals:
            self._arrivals[key] = self.world.env.event()
        return self._arrivals[key]

    def post(self, source: int, target: int, size: float, tag: Hashable = 0, rail: bool = False) -> Any:
        """Sends; returns the arrival event. rail: between nodes, with the rail's latency, without the engine."""
        world = self.world
        path = world.path(source, target)
        source, target = world.at(source), world.at(target)
        path = path if rail else (self.engines[source], *path)
        latency = world.machine.rail_latency_us if rail else self.engine.latency_us
        came = self.arrival(source, target, tag)
        done = world.network.message(source, target, path, size, latency)
        done.callbacks.append(lambda _: came.succeed())
        return done

    def wait(self, us: float) -> Any:
        return self.world.env.timeout(us)

    def all_of(self, events: list[Any]) -> Any:
        return self.world.env.all_of(events)
