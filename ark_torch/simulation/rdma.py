"""Collectives of GPUs on several nodes over RDMA: kernels in each node, writes of the NIC between nodes.

Each collective divides as its namesake in csrc/collectives/cuda/between does: stages in the node, by the tables of
CudaCommunicator, and stages between nodes, one behind the other on a rank's stream. A stage between nodes is the
protocol of kernels/cuda/between.cuh: lanes fill slots and ask the host's thread for writes, a NIC sends one after the
other, and the receiver gives a slot back when it has read it. Lanes, chunks and slots are asked of the extension.
All rails do the same, so one is simulated. Elements are float32, of whose sums each node brings one.

What it costs to ask, post, hear and copy was never measured on a NIC: ASSUMED. A machine's engine "between/rdma" has
other figures: setup_us of a launch; message_us of the host for a write, at either end; latency_us until a kernel sees
what the host has heard; gbps at which a lane's block copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ark_torch.simulation.machine import Engine, Machine
from ark_torch.simulation.network import new_environment
from ark_torch.simulation.world import Process

ASSUMED = Engine(setup_us=4.0, latency_us=1.5, gbps=40.0, message_us=0.5)
MOST_PIECES = 16  # simulated of a lane's message; more chunks go as that many longer pieces
NodeStage = Callable[[str, int], tuple[float, int]]  # (operation, bytes) -> (microseconds, bytes sent in a node)


class BadNodes(ValueError):
    """RDMA does not carry a group of that shape."""


@cache
def sizes() -> dict[str, int]:
    from ark_torch.simulation.carried import extension

    return extension()._between_sizes()  # type: ignore[no-any-return]


@cache
def message(nodes: int, size: int) -> tuple[list[int], int, int]:
    """How a message is cut: (bytes of each lane, bytes of a chunk, slots)."""
    from ark_torch.simulation.carried import extension

    told = extension()._between_message(nodes, size)
    return told["lanes"], told["chunk"], told["slots"]


def engine_of(machine: Machine) -> Engine:
    by_ranks = machine.engines.get("between/rdma")
    return next(iter(by_ranks.values())) if by_ranks else ASSUMED


class _Line:
    """Serves one after the other: a NIC's port, or a thread of the host."""

    def __init__(self, env: Any) -> None:
        self._env, self._due = env, 0.0

    def wait(self, us: float) -> float:
        """How long until what comes now is served."""
        self._due = max(self._env.now, self._due) + us
        return float(self._due - self._env.now)


@dataclass(frozen=True)
class _Cut:
    """A lane's message, as it is simulated: `pieces`, of which each is that many `chunks`."""

    pieces: int
    bytes: float  # of a piece
    chunks: float

    @staticmethod
    def of(lane: int, chunk: int) -> _Cut:
        count = -(-lane // chunk)
        pieces = min(count, MOST_PIECES)
        return _Cut(pieces, lane / max(1, pieces), count / max(1, pieces))


class Rail:
    """One rail's kernels, NICs and threads, in one stage. `folded`: one node stands for all, which do the same."""

    def __init__(self, machine: Machine, nodes: int, folded: bool = False) -> None:
        self.env = new_environment()
        self.nodes, self.costs = nodes, engine_of(machine)
        self.latency, self.rate = machine.rail_latency_us, machine.rail_gbit / 8 * 1e3
        self.here = [0] if folded else list(range(nodes))
        self.posting, self.hearing, self.out, self.into = ([_Line(self.env) for _ in self.here] for _ in range(4))
        self.writes = self.sent = 0.0
        self._events: dict[Any, Any] = {}

    def other(self, node: int, distance: int) -> int:
        return (node + distance) % self.nodes if len(self.here) > 1 else 0

    def event(self, *key: Any) -> Any:
        """What a node hears from the one at a distance."""
        if key not in self._events:
            self._events[key] = self.env.event()
        return self._events[key]

    def write(self, node: int, distance: int, what: tuple[Any, ...], size: float, chunks: float) -> Process:
        """A request of a kernel, until the other node's kernel sees the count."""
        peer, asked = self.other(node, distance), self.costs.message_us * chunks
        self.writes, self.sent = self.writes + chunks, self.sent + size
        yield self.env.timeout(self.posting[node].wait(asked))
        wire = size / self.rate
        begun = self.out[node].wait(wire) - wire
        yield self.env.timeout(begun + self.latency)
        yield self.env.timeout(self.into[peer].wait(wire))
        yield self.env.timeout(self.hearing[peer].wait(asked))
        yield self.env.timeout(self.costs.latency_us)
        self.event(peer, self.nodes - distance, *what).succeed()

    def lane(self, node: int, lane: int, sends: list[_Cut], receives: list[_Cut], slots: int, adds: bool) -> Process:
        """Between::run() of a block. sends, receives: by distance, from 1 on, to the node that is so far ahead."""

        def copy(size: float) -> Any:
            return self.env.timeout(size / (self.costs.gbps * 1e3))

        lag, order = slots // 2, range(1, self.nodes)
        most = max(cut.pieces for cut in receives)
        for k in range(max(*(cut.pieces for cut in sends), most + lag if most else 0)):
            for distance in order:
                cut = sends[distance - 1]
                if k >= cut.pieces:
                    continue
                if k >= slots:
                    yield self.event(node, distance, "credit", lane, k - slots)
                yield copy(cut.bytes)
                self.env.process(self.write(node, distance, ("chunk", lane, k), cut.bytes, cut.chunks))
            if not 0 <= k - lag < most:
                continue
            came = [d for d in reversed(order) if k - lag < receives[d - 1].pieces]
            if adds:
                yield self.env.all_of([self.event(node, d, "chunk", lane, k - lag) for d in came])
                yield copy(receives[came[0] - 1].bytes * (len(came) + 1))
            for distance in came:
                if not adds:
                    yield self.event(node, distance, "chunk", lane, k - lag)
                    yield copy(receives[distance - 1].bytes)
                cut = receives[distance - 1]
                self.env.process(self.write(node, distance, ("credit", lane, k - lag), 0, cut.chunks))

    def stage(self, size: int, adds: bool = False, root: int | None = None) -> float:
        """Microseconds of a launch in which every node, or `root` alone, sends `size` bytes to each other node."""
        if size <= 0:
            return 0.0
        lanes, chunk, slots = message(self.nodes, size)
        works = []
        for node in self.here:
            for lane, part in enumerate(lanes):
                cut, none = _Cut.of(part, chunk), _Cut(0, 0, 0)
                distances = range(1, self.nodes)
                sends = [cut if root in (None, node) else none for _ in distances]
                receives = [cut if root in (None, (node + d) % self.nodes) else none for d in distances]
                works.append(self.env.process(self.lane(node, lane, sends, receives, slots, adds)))
        self.env.run(until=self.env.all_of(works))
        return float(self.env.now) + self.costs.setup_us


class Nodes:
    """A collective of NodesCommunicator. `of_node`: a stage in a node."""

    def __init__(self, machine: Machine, ranks: int, of_node: NodeStage, folded: bool = True) -> None:
        self.machine, self.local, self.nodes = machine, min(ranks, machine.node_ranks), ranks // machine.node_ranks
        if self.nodes > sizes()["most_nodes"] or self.local > sizes()["most_places"]:
            raise BadNodes(
                f"{self.nodes} nodes of {self.local} ranks: RDMA carries CUDA tensors of up to {sizes()['most_nodes']} "
                f"nodes of up to {sizes()['most_places']} ranks, and NCCL those of larger groups"
            )
        self._of_node, self.folded = of_node, folded
        self.us, self.sent, self.writes = 0.0, 0, 0.0

    def here(self, operation: str, size: int, times: int = 1) -> None:
        """Adds stages of a node, whose tensor has `size` bytes as the simulator counts."""
        if self.local == 1 or size == 0:
            return
        us, sent = self._of_node(operation, size)
        self.us += times * us
        self.sent += times * sent * self.nodes

    def between(self, size: int, adds: bool = False, root: bool = False, times: int = 1, rails: int = 0) -> None:
        rail = Rail(self.machine, self.nodes, self.folded and not root)
        self.us += times * rail.stage(size, adds, 0 if root else None)
        every = times * (rails or self.local) * (self.nodes // len(rail.here))
        self.sent += int(every * rail.sent)
        self.writes += every * rail.writes

    def run(self, operation: str, size: int) -> None:
        """`size` as the simulator counts: bytes of the larger side."""
        getattr(self, operation)(size)

    def slices(self, size: int, blocks: int) -> list[tuple[int, int]]:
        """(times, bytes): a block of `size` bytes, as much at a time as so many fit into the scratch memory."""
        unit = sizes()["unit"]
        most = size if self.local == 1 else max(unit, sizes()["scratch"] // blocks // unit * unit)
        return [(size // most, most), (1, size % most)] if size else []

    def all_reduce(self, size: int) -> None:
        if size * self.nodes <= sizes()["whole"]:
            self.here("all_reduce", size)
            return self.between(size, adds=True)
        part = -(-size // self.local)
        own = -(-part // self.nodes)
        self.here("reduce_scatter", size)
        self.between(own, adds=True)
        self.between(own)
        self.here("all_to_all", size)

    def reduce_scatter(self, size: int) -> None:
        for times, block in self.slices(-(-size // (self.nodes * self.local)), self.nodes):
            if block and times:
                self.here("reduce_scatter", block * self.local, times * self.nodes)
                self.between(block, adds=True, times=times)

    def all_gather(self, size: int) -> None:
        block = -(-size // (self.nodes * self.local))
        self.here("all_gather", block * self.local, self.nodes)
        self.between(block)

    def all_to_all(self, size: int) -> None:
        blocks = self.nodes * (self.local + 1)
        for times, block in self.slices(-(-size // (self.nodes * self.local)), blocks):
            if block and times:
                self.here("all_to_all", block * self.local, times * self.nodes)
                self.between(block, times=times * self.local)

    def broadcast(self, size: int) -> None:
        """Of a large one root gives every rail of its node a part, which takes as long as an all_to_all there."""
        if self.local == 1 or size <= sizes()["whole"]:
            self.between(size, root=True, rails=1)
            return self.here("broadcast", size)
        self.here("all_to_all", size)
        self.between(-(-size // self.local), root=True)
        self.here("all_to_all", size)
