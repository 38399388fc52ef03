"""Modes `graph` and `eager` of benchmarks/training.py: gradients in our own flat buckets.

Each bucket is all-reduced on a high-priority stream as soon as its last gradient is ready. The whole step can be
captured into one CUDA graph. All contenders share one model and one set of buckets, and only the group changes, so that
their graphs share memory. Events around each bucket's all-reduce give its bandwidth during training and alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import Row
from on_gpus import MB
from torch import nn
from training_subject import Groups, Subject, same_gradients, timed


class Bucketed:
    """A model with gradients in flat buckets, and its step."""

    def __init__(self, subject: Subject, bucket_mb: float) -> None:
        self.subject = subject
        self.model = subject.model()
        self.optimizer = subject.optimizer(self.model, capturable=subject.gpu)
        self.communication = torch.cuda.Stream(priority=-1) if subject.gpu else None
        self.pool = torch.cuda.graph_pool_handle() if subject.gpu else None  # shared: graphs take turns
        self.group: Any = None
        self.timers: list[tuple[Any, Any]] | None = None  # events at the start and end of each bucket's all-reduce
        self.where: dict[nn.Parameter, int] = {}
        self.flat: list[torch.Tensor] = []
        self.members: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed([p for p in self.model.parameters() if p.requires_grad]):
            if size > bucket_mb * MB:
                self.members.append([])
                size = 0
            self.members[-1].append(parameter)
            size += parameter.numel() * 4
        self.left = [0] * len(self.members)
        for number, members in enumerate(self.members):
            flat = torch.zeros(sum(p.numel() for p in members), device=subject.rank.device)
            self.flat.append(flat)
            at = 0
            for parameter in members:
                parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                self.where[parameter] = number
                parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter: nn.Parameter) -> None:
        number = self.where[parameter]
        self.left[number] -= 1
        if self.left[number] == 0 and self.group is not None:
            self.all_reduce(number)

    def all_reduce(self, number: int) -> None:
        if self.communication is None:
            dist.all_reduce(self.flat[number], group=self.group)
            return
        self.communication.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.communication):
            if self.timers is not None:
                self.timers[number][0].record()
            dist.all_reduce(self.flat[number], group=self.group)
            if self.timers is not None:
                self.timers[number][1].record()

    def join(self) -> None:
        if self.communication is not None and self.group is not None:
            torch.cuda.current_stream().wait_stream(self.communication)

    def step(self) -> None:
        self.left = [len(members) for members in self.members]
        for flat in self.flat:
            flat.zero_()
        with self.subject.autocast():
            loss = self.model(self.subject.tokens)
        (loss / self.subject.rank.ranks).backward()
        self.join()
        self.optimizer.step()

    def only_communication(self) -> None:
        for flat in self.flat:
            flat.mul_(1.0)  # written shortly before the all-reduce, as in training
        for number in range(len(self.flat)):
            self.all_reduce(number)
        self.join()

    def captured(self, what: Callable[[], None]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                what()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=side, capture_error_mode="thread_local"):
            what()
        return graph

    @contextlib.contextmanager
    def with_timers(self, in_graph: bool) -> Iterator[list[tuple[Any, Any]]]:
        self.timers = [
            tuple(torch.cuda.Event(enable_timing=True, external=in_graph) for _ in range(2))  # type: ignore[misc]
            for _ in self.flat
        ]
        yield self.timers
        self.timers = None

    def gradients(self) -> torch.Tensor:
        return torch.cat([flat.double().sum().reshape(1) for flat in self.flat]).cpu()


def bandwidth(bucketed: Bucketed, what: Callable[[], None], in_graph: bool, steps: int) -> float:
    """Returns the bus bandwidth (nccl-tests' factor) of all buckets' all-reduces in GB/s: median over steps."""
    subject = bucketed.subject
    rates = []
    with bucketed.with_timers(in_graph) as timers:
        run = bucketed.captured(what).replay if in_graph else what
        for turn in range(steps + 2):
            subject.synchronize()
            subject.rank.barrier()
            run()
            subject.synchronize()
            # The rank that reaches a bucket last gives its time. The other ranks' times include waiting for that one.
            times = subject.rank.share([begin.elapsed_time(end) for begin, end in timers])
            spent = sum(min(of_bucket) for of_bucket in zip(*times, strict=True))
            if turn >= 2:
                ranks = subject.rank.ranks
                bytes_ = sum(flat.numel() * 4 for flat in bucketed.flat)
                rates.append(bytes_ * 2 * (ranks - 1) / ranks / spent / 1e6)
    return statistics.median(rates)


def run_bucketed(subject: Subject, groups: Groups, mode: str, arguments: argparse.Namespace) -> list[Row]:
    rank = subject.rank
    in_graph = mode == "graph" and subject.gpu
    bucketed = Bucketed(subject, arguments.bucket_mb)
    runs: dict[str, Callable[[], Any]] = {}
    sums: dict[str, torch.Tensor] = {}
    for name, group in groups.items():
        bucketed.group = group
        for _ in range(3):  # compiles, connects the peers, shares memory
            bucketed.step()
        sums[name] = bucketed.gradients()
        if in_graph:
            runs[name] = bucketed.captured(bucketed.step).replay
        else:

            def step(group: Any = group) -> None:
                bucketed.group = group
                bucketed.step()

            runs[name] = step
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(arguments.rounds + 1):
        for name, run in runs.items():
            milliseconds = timed(subject, run, arguments.steps)
            if turn:
                taken[name].append(milliseconds)
    rows = []
    for name, rounds in taken.items():
        row: Row = {"contender": name, "step_ms": rank.slowest(rounds)}
        row["gradient_bytes"] = sum(flat.numel() * 4 for flat in bucketed.flat)
        row["buckets"] = len(bucketed.flat)
        rows.append(row | same_gradients(rank, name, sums))
    # The graphs stay alive, because their common pool is freed with the last of them.
    for row in rows if subject.gpu and arguments.bandwidth else ():
        name = str(row["contender"])
        if groups[name] is None or not rank.time_for(6):
            continue
        bucketed.group = groups[name]
        row["during_gbps"] = bandwidth(bucketed, bucketed.step, in_graph, arguments.steps)
        row["alone_gbps"] = bandwidth(bucketed, bucketed.only_communication, in_graph, arguments.steps)
    return rows
