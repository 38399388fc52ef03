"""Recording a step in a CUDA graph, and getting back to where one was when that fails.

A recorder is what a step is recorded by: tests put another in its place, so that all that is decided around graphs runs
without a GPU. Capturing executes nothing on the device; whatever Python did meanwhile is undone by the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Enqueues it on the current stream."""

    def reset(self) -> None:
        """Gives its memory back; it cannot be replayed any more."""


class Recorder(Protocol):
    """What records steps on a device."""

    stream: Any  # where steps run eagerly and are recorded; None: the current one

    def warm(self, body: Callable[[], T]) -> T:
        """Runs a step eagerly, as it will be recorded."""

    def record(self, body: Callable[[], Any]) -> Recording:
        """Records what the body enqueues. Where it raises, the device and its random numbers are as before."""


def recorder_for(device: torch.device) -> Recorder | None:
    """None where there are no graphs: on CPUs."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """CUDA graphs of one pool of memory: they are replayed one after the other, and share what lives within a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def warm(self, body: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return body()
        finally:
            current.wait_stream(self.stream)

    def record(self, body: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index]
        random = generator.get_state()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # Threads of a process group may call CUDA meanwhile; those of autograd belong to the capture all the same.
            with torch.cuda.graph(graph, self._pool, self.stream, capture_error_mode="thread_local"):
                try:
                    torch.cuda.set_sync_debug_mode("error")  # operators that would break the capture raise before
                    body()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        except BaseException as error:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own where the end of the capture raises
            self._recover(graph, generator, random)
            raise _first(error) from None
        return graph

    def _recover(self, graph: torch.cuda.CUDAGraph, generator: torch.Generator, random: torch.Tensor) -> None:
        """A capture that CUDA itself broke off leaves PyTorch in the midst of it.

        The generator would refuse every draw, and the allocator keep all memory that several streams used: the first
        gets a state of its own that was never captured, the second is told that the capture is over.
        """
        ended = True
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            ended = False  # nobody had told it before
        except RuntimeError:
            pass
        graph.reset()
        if not ended:
            torch._C._cuda_releasePool(self._device.index, self._pool)
            fresh = torch.Generator(self._device)
            fresh.set_state(random)
            generator.graphsafe_set_state(fresh)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def _first(error: BaseException) -> BaseException:
    """The error that broke the capture: the end of a broken capture raises another one on top of it."""
    while error.__context__ is not None and "captur" in str(error).lower():
        error = error.__context__
    return error
