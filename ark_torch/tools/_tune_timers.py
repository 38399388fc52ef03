"""Timers of `ark tune --cuda`: CUDA graphs of one operation, alone or in parallel with matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def _call(operation: str, group: Any, whole: torch.Tensor, other: torch.Tensor, ranks: int) -> Callable[[], Any]:
    """The operation; `whole` is the tensor whose bytes the dispatch looks at."""
    part = other[: whole.numel() // ranks]
    mean = dist.ReduceOp.AVG  # repeated on the same tensor, sums would become infinite
    if operation == "all_reduce":
        return lambda: dist.all_reduce(whole, mean, group=group)
    if operation == "reduce":
        return lambda: dist.reduce(whole, op=mean, group_dst=0, group=group)
    if operation == "broadcast":
        return lambda: dist.broadcast(whole, group_src=0, group=group)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, mean, group=group)
    return lambda: dist.all_to_all_single(other[: whole.numel()], whole, group=group)


class Products:
    """Matrix products on their own stream."""

    def __init__(self) -> None:
        self._matrices = [torch.rand(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.prepare(10)
        self._each = self._microseconds() / 10

    def prepare(self, count: int) -> None:
        one, two, out = self._matrices
        torch.mm(one, two, out=out)  # warms up outside the graph
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(count):
                torch.mm(one, two, out=out)

    def last(self, microseconds: float) -> None:
        """From now on runs as many products as take this long alone."""
        self.prepare(max(1, round(microseconds / self._each)))

    def replay(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def _microseconds(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._graph.replay()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000


class Timer:
    """One candidate: graphs of several operations of one size, made once."""

    def __init__(self, group: Any, operation: str, tensors: Sequence[torch.Tensor], ranks: int) -> None:
        self._group, self._operation, self._tensors, self._ranks = group, operation, tensors, ranks
        self._call(1 << 12)()
        torch.cuda.synchronize()

    def _call(self, size: int) -> Callable[[], Any]:
        whole, other = self._tensors
        count = size // whole.element_size() // self._ranks * self._ranks
        return _call(self._operation, self._group, whole[:count], other, self._ranks)

    def prepare(self, size: int) -> None:
        self._calls = max(2, min(20, (64 << 20) // size))
        call = self._call(size)
        call()  # loads kernels and creates NCCL outside the graph
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self._calls):
                call()

    def microseconds(self, products: Products | None = None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        self._graph.replay()
        start.record()
        if products is not None:
            products.replay()
        self._graph.replay()
        if products is not None:
            torch.cuda.current_stream().wait_stream(products.stream)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / self._calls

    def whole(self) -> float:
        """Microseconds of all calls of a graph, alone."""
        return self.microseconds() * self._calls
