"""Captures a step in a CUDA graph, and restores the device's state if that fails.

Steps are captured by a recorder; tests replace it, so that all decisions about graphs run without a GPU. A capture
executes nothing on the device; the caller undoes changes of Python state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Recording(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Enqueues it on the current stream."""

    def reset(self) -> None:
        """Frees its memory; it cannot be replayed afterwards."""


class Recorder(Protocol):
    """Captures steps on a device."""

    stream: Any  # stream for eager steps and captures; None: the current one

    def warm(self, body: Callable[[], T]) -> T:
        """Runs a step eagerly, under the same conditions as a capture."""

    def record(self, body: Callable[[], Any]) -> Recording:
        """Captures the work that `body` enqueues. If it raises, the device and its random state are restored."""


def recorder_for(device: torch.device) -> Recorder | None:
    """None for devices without graphs: CPUs."""
    return CudaRecorder(device) if device.type == "cuda" else None


class CudaRecorder:
    """CUDA graphs that share one memory pool: they replay one at a time, so temporaries can share memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._kept = 0  # graphs that use the pool

    def warm(self, body: Callable[[], T]) -> T:
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return body()
        finally:
            current.wait_stream(self.stream)

    def record(self, body: Callable[[], Any]) -> CudaRecording:
        if self._kept == 0:  # PyTorch's allocators refuse the handle of a pool that all graphs have left
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._device.index]
        random = generator.get_state()
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # Process-group threads may call CUDA during the capture; autograd's threads are captured in any case.
            with torch.cuda.graph(graph, self._pool, self.stream, capture_error_mode="thread_local"):
                try:
                    torch.cuda.set_sync_debug_mode("error")  # raises before an operator breaks the capture
                    body()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        except BaseException as error:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own stream if ending the capture fails
            self._recover(graph, generator, random)
            raise _first(error) from None
        self._kept += 1
        return CudaRecording(graph, self)

    def released(self) -> None:
        """Called when a graph has been freed."""
        self._kept -= 1

    def _recover(self, graph: torch.cuda.CUDAGraph, generator: torch.Generator, random: torch.Tensor) -> None:
        """Cleans up after a capture that CUDA itself ended.

        PyTorch would still believe in the capture: the generator would refuse every draw, and the allocator would keep
        all memory used on several streams. The generator gets a new, uncaptured state, and the allocator is told that
        the capture is over.
        """
        ended = True
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            ended = False  # the allocator had not been told
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


class CudaRecording:
    """A step in a CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, recorder: CudaRecorder) -> None:
        self._graph = graph
        self._recorder: CudaRecorder | None = recorder
        self.replay = graph.replay

    def reset(self) -> None:
        """Frees its memory; it cannot be replayed afterwards."""
        self._graph.reset()
        if self._recorder is not None:
            self._recorder.released()
        self._recorder = None


def _first(error: BaseException) -> BaseException:
    """The error that broke the capture; ending a broken capture raises another one on top of it."""
    while error.__context__ is not None and "captur" in str(error).lower():
        error = error.__context__
    return error
