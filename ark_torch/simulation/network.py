"""Flows over links in simpy's time: every flow gets its max-min fair share of each link on its path.

A flow starts latency_us after its request, and keeps its rate until any flow starts or ends. Progressive filling
computes the rates: the most loaded link fixes the rate of its flows, and the remaining bandwidth is shared again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import simpy

DONE_BYTES = 1e-3  # a flow with less than this left has arrived (rounding of times)


class SimpyMissing(ModuleNotFoundError):
    """simpy is not installed; it comes with the extra "simulate"."""


def new_environment() -> simpy.Environment:
    try:
        import simpy
    except ModuleNotFoundError as error:
        if error.name != "simpy":
            raise
        raise SimpyMissing(
            "the simulator needs simpy, which is not installed: pip install 'ark_torch[simulate]' or pip install simpy",
            name="simpy",
        ) from None
    return simpy.Environment()


@dataclass(eq=False)
class Link:
    name: str
    gbps: float  # 10^9 bytes per second: 10^3 bytes per microsecond
    carried: float = 0.0  # bytes


@dataclass(eq=False)
class Flow:
    path: tuple[Link, ...]
    left: float
    done: Any
    rate: float = 0.0  # bytes per microsecond


@dataclass(eq=False)
class Network:
    env: Any
    flows: list[Flow] = field(default_factory=list)
    sent: Counter[int] = field(default_factory=Counter)  # bytes, by rank
    received: Counter[int] = field(default_factory=Counter)
    _moved_at: float = 0.0
    _plan: int = 0
    _changing: bool = False

    def transfer(self, path: tuple[Link, ...], size: float, latency_us: float = 0.0) -> Any:
        """An event for the arrival of `size` bytes."""
        done = self.env.event()
        flow = Flow(path, float(size), done)
        if latency_us > 0:
            self.env.timeout(latency_us).callbacks.append(lambda _: self._start(flow))
        else:
            self._start(flow)
        return done

    def message(self, source: int, target: int, path: tuple[Link, ...], size: float, latency_us: float = 0.0) -> Any:
        """The same between two ranks, with counting: sent at the request, received at the arrival."""
        self.sent[source] += int(size)
        done = self.transfer(path, size, latency_us)
        done.callbacks.append(lambda _: self.received.update({target: int(size)}))
        return done

    def _start(self, flow: Flow) -> None:
        if flow.left <= 0 or not flow.path:
            flow.done.succeed()
            return
        self._advance()
        self.flows.append(flow)
        self._change()

    def _advance(self) -> None:
        passed = self.env.now - self._moved_at
        self._moved_at = self.env.now
        if passed <= 0:
            return
        for flow in self.flows:
            moved = min(flow.left, flow.rate * passed)
            flow.left -= moved
            for link in flow.path:
                link.carried += moved

    # Flows that start or end at the same time trigger only one new sharing.
    def _change(self) -> None:
        if not self._changing:
            self._changing = True
            self.env.timeout(0).callbacks.append(lambda _: self._settle())

    def _settle(self) -> None:
        self._changing = False
        self._share()
        self._plan += 1
        if self.flows:
            plan = self._plan
            wait = min(flow.left / flow.rate for flow in self.flows)
            self.env.timeout(wait).callbacks.append(lambda _: self._arrive(plan))

    def _arrive(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended: list[Flow] = []
        going: list[Flow] = []
        for flow in self.flows:
            (ended if flow.left <= max(DONE_BYTES, flow.rate * 1e-9) else going).append(flow)
        self.flows = going
        for flow in ended:
            for link in flow.path:
                link.carried += flow.left
            flow.done.succeed()
        self._change()

    def _share(self) -> None:
        left: dict[Link, float] = {}
        users: dict[Link, int] = {}
        for flow in self.flows:
            for link in flow.path:
                left[link] = link.gbps * 1e3
                users[link] = users.get(link, 0) + 1
        waiting = self.flows
        while waiting:
            least = min(left[link] / users[link] for link in users if users[link])
            limit = least * (1 + 1e-12)
            tight = {link for link in users if users[link] and left[link] / users[link] <= limit}
            later = []
            for flow in waiting:
                if tight.isdisjoint(flow.path):
                    later.append(flow)
                    continue
                flow.rate = least
                for link in flow.path:
                    left[link] -= least
                    users[link] -= 1
            waiting = later
