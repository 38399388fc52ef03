"""The streams of benchmarks/interference.py: products on one, collectives on another, and when each call ended.

A gate holds both streams while they are filled. They start at the end of a first collective, which synchronizes the
ranks. Calls are issued in the order in which they should end, so that neither stream waits for the host. On the CPU
there are no streams: the same code runs with stand-ins, in call order.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_ranks import Rank
from interference_contenders import Contender

GATE_MS = 5.0  # while the streams are filled


class HostEvent:
    def record(self, stream: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return (later.at - self.at) * 1e3


class HostStream:
    def wait_event(self, event: HostEvent) -> None:
        pass


class Machine:
    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self.products = torch.cuda.Stream() if self.gpu else HostStream()
        self.collectives = torch.cuda.Stream(priority=-1) if self.gpu else HostStream()

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.gpu else HostEvent()

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self.gpu else contextlib.nullcontext()

    def close_gate(self) -> None:
        if self.gpu:
            torch.cuda._sleep(int(GATE_MS * 1.8e6))  # cycles, at about 1.8 GHz

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()


class Run:
    """When the products and collectives of one run ended, in microseconds after the start."""

    def __init__(self, products: list[float], collectives: list[float]) -> None:
        self.products, self.collectives = products, collectives
        self.total = max(products + collectives)

    def each(self, ends: list[float]) -> float:
        """Returns the time per call while both streams were busy, or of the only stream used."""
        until = min(lane[-1] for lane in (self.products, self.collectives) if lane)
        done = bisect.bisect_right(ends, until)
        before = ends[done - 1] if done else 0.0
        part = (until - before) / (ends[done] - before) if done < len(ends) else 0.0
        return until / max(done + part, 1e-9)


class Bench:
    def __init__(self, rank: Rank, size: int) -> None:
        self.rank, self.machine = rank, Machine(rank.device)
        self.left, self.right = rank.random(size, size), rank.random(size, size, source=99)
        self.result = torch.empty_like(self.left)

    def product(self) -> None:
        torch.mm(self.left, self.right, out=self.result)

    def run(self, products: int, contender: Contender | None, collectives: int) -> Run:
        """Issues one collective, then `collectives` more. Both streams start at the end of the first one."""
        machine = self.machine
        start = machine.event()
        product_events = [machine.event() for _ in range(products)]
        collective_events = [machine.event() for _ in range(collectives)]
        lanes: list[tuple[Any, Callable[[], Any], list[Any]]] = [(machine.products, self.product, product_events)]
        if contender is not None:
            contender.renew()
            lanes.append((machine.collectives, contender.call, collective_events))
        order = sorted(
            ((i + 0.5) / len(events), lane, i) for lane, (_, _, events) in enumerate(lanes) for i in range(len(events))
        )
        machine.synchronize()
        self.rank.barrier()
        with machine.on(machine.collectives):
            machine.close_gate()
            if contender is not None:
                contender.call()
            start.record(machine.collectives)
        machine.products.wait_event(start)
        for _, lane, i in order:
            stream, call, events = lanes[lane]
            with machine.on(stream):
                call()
                events[i].record(stream)
        machine.synchronize()
        times = [[start.elapsed_time(event) * 1e3 for event in events] for _, _, events in lanes]
        return Run(times[0], times[1] if contender is not None else [])
