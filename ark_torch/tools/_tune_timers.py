"""Timers of CUDA tuning: CUDA graphs of one operation, alone or in parallel with matrix products.

They call a group's backend directly, because groups of the measurement at first use are unknown to torch.distributed,
and work on the current stream alone: the program's other streams may wait for peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Together(Protocol):
    """The ranks that measure, and how they make groups and exchange figures."""

    ranks: int

    def group(self, numbers: dict[str, int], fast: bool) -> Any:
        """A new group's backend with this dispatch; `fast`: sums in any order."""

    def close(self, backend: Any) -> None:
        """Ends a group."""

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The maximum over the ranks of each value. No rank returns before all have come."""


def _synchronous(options: Any, **values: Any) -> Any:
    options.asyncOp = False
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _wait_for(work: Any) -> None:
    """A group that NCCL carries may return no work for a synchronous call."""
    if work is not None:
        work.wait()


def call_of(operation: str, backend: Any, whole: torch.Tensor, other: torch.Tensor, ranks: int) -> Callable[[], Any]:
    """The operation; `whole` is the tensor whose bytes the dispatch looks at."""
    mean = dist.ReduceOp.AVG  # repeated on the same tensor, sums would become infinite
    if operation == "all_reduce":
        options = _synchronous(c10d.AllreduceOptions(), reduceOp=mean)
        return lambda: _wait_for(backend.allreduce([whole], options))
    if operation == "reduce":
        options = _synchronous(c10d.ReduceOptions(), reduceOp=mean, rootRank=0)
        return lambda: _wait_for(backend.reduce([whole], options))
    if operation == "broadcast":
        options = _synchronous(c10d.BroadcastOptions(), rootRank=0, rootTensor=0)
        return lambda: _wait_for(backend.broadcast([whole], options))
    if operation == "all_to_all":
        options = _synchronous(c10d.AllToAllOptions())
        return lambda: _wait_for(backend.alltoall_base(other[: whole.numel()], whole, [], [], options))
    part = other[: whole.numel() // ranks]
    if operation == "all_gather":
        options = _synchronous(c10d.AllgatherOptions())
        return lambda: _wait_for(backend._allgather_base(whole, part, options))
    options = _synchronous(c10d.ReduceScatterOptions(), reduceOp=mean)
    return lambda: _wait_for(backend._reduce_scatter_base(part, whole, options))


def _graph_of(body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Captures on the current stream, which must not be the default one. Unlike torch.cuda.graph it waits for no other
    stream, and frees no cached memory."""
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        body()
    finally:
        graph.capture_end()
    return graph


class Products:
    """Matrix products on their own stream."""

    def __init__(self) -> None:
        source = torch.Generator("cuda").manual_seed(2)
        whole = torch.rand(3, 4096, 4096, device="cuda", dtype=torch.bfloat16, generator=source)
        self._matrices = list(whole)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.prepare(10)
        self._each = self._microseconds() / 10

    def prepare(self, count: int) -> None:
        one, two, out = self._matrices
        torch.mm(one, two, out=out)  # warms up outside the graph

        def body() -> None:
            for _ in range(count):
                torch.mm(one, two, out=out)

        self._graph = _graph_of(body)

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

    def __init__(self, together: Together, backend: Any, operation: str, tensors: Sequence[torch.Tensor]) -> None:
        self._together, self._backend, self._operation, self._tensors = together, backend, operation, tensors
        self._call(1 << 12)()
        torch.cuda.current_stream().synchronize()

    def _call(self, size: int) -> Callable[[], Any]:
        whole, other = self._tensors
        count = size // whole.element_size() // self._together.ranks * self._together.ranks
        return call_of(self._operation, self._backend, whole[:count], other, self._together.ranks)

    def prepare(self, size: int) -> None:
        self._calls = max(2, min(20, (64 << 20) // size))
        call = self._call(size)
        call()  # loads kernels and creates NCCL outside the graph

        def body() -> None:
            for _ in range(self._calls):
                call()

        self._graph = _graph_of(body)

    def microseconds(self, products: Products | None = None) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._together.slowest([0.0])
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

    def close(self) -> None:
        """Frees the graph, which holds the group's captured work."""
        torch.cuda.current_stream().synchronize()
        self._graph.reset()

    def whole(self) -> float:
        """Microseconds of all calls of a graph, alone."""
        return self.microseconds() * self._calls
