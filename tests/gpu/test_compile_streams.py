"""Compiled regions on a GPU beside other work: overlapping streams, CUDA graphs, and the lifetime of their memory."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from compile_support import DEVICE, compiled
from torch import Tensor

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("fresh_compiler")]


def mlp() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    a, b = torch.randn(256, 512, device=DEVICE) / 16, torch.randn(512, 256, device=DEVICE) / 16

    def call(x: Tensor) -> Tensor:
        return torch.softmax(torch.nn.functional.silu(x @ a) @ b + x, -1)

    return call, torch.randn(24, 256, device=DEVICE)


def test_a_captured_region_is_replayed() -> None:
    """In two graphs, alternately, with calls in between: each counts its own steps."""
    eager, x = mlp()
    call, _ = compiled(eager)
    call(x)
    graphs = []
    for _ in range(2):
        given = x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(call(given))
        graphs.append((graph, given, result))
    for turn in range(20):
        for graph, given, result in graphs:
            given.normal_()
            graph.replay()
            torch.testing.assert_close(result, eager(eager(given)), rtol=1e-4, atol=1e-6)
        other = torch.randn_like(x)
        torch.testing.assert_close(call(other), eager(other), rtol=1e-4, atol=1e-6), turn


def test_a_graph_outlives_what_it_captured() -> None:
    """The region is destroyed and its memory reused, but the graph keeps what it needs."""
    eager, x = mlp()
    call, report = compiled(eager)
    call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(x)
    region = weakref.ref(report.graphs[0].pieces[0].region)
    del call, report
    torch._dynamo.reset()
    gc.collect()
    assert region() is None
    torch.cuda.empty_cache()
    others = [(compiled(lambda x, number=number: eager(x) * number)[0], number) for number in range(2, 5)]
    for _ in range(20):
        x.normal_()
        graph.replay()
        for other, number in others:
            torch.testing.assert_close(other(x), eager(x) * number, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(result, eager(x), rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.alone
def test_graphs_that_are_gone_hold_no_memory() -> None:
    """Repeated captures: each graph's memory, some megabytes, is freed with the graph."""
    eager, x = mlp()
    call, _ = compiled(eager)
    call(x)
    free = []
    for _ in range(60):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call(x)
        graph.replay()
        torch.testing.assert_close(result, eager(x), rtol=1e-4, atol=1e-6)
        del graph, result
        torch.cuda.synchronize()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[10] - free[-1] < 25 * 2**20, [one >> 20 for one in free]


def test_streams_at_once() -> None:
    """Overlapping launches have separate memory, and other GPU work continues beside them."""
    eager, x = mlp()
    other = torch.randn(2048, 2048, device=DEVICE)
    call, _ = compiled(eager)
    streams = [torch.cuda.Stream() for _ in range(4)]
    given = [torch.randn_like(x) for _ in streams]
    call(x)
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in streams]
    for _ in range(50):
        for stream, one, found in zip(streams, given, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(call(one))
        other @ other
    torch.cuda.synchronize()
    for one, found in zip(given, results, strict=True):
        for result in found:
            assert torch.equal(result, found[0])
        torch.testing.assert_close(found[0], eager(one), rtol=1e-4, atol=1e-6)


def test_streams_of_two_priorities() -> None:
    """Two loop kernels must not interleave their blocks, or both would wait for a minute.

    Tests calls and replays, while other work leaves some multiprocessors free or none.
    """
    eager, x = mlp()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    calls, graphs, results = [], [], []
    for stream in streams:
        torch._dynamo.reset()
        calls.append(compiled(eager)[0])
        with torch.cuda.stream(stream):
            calls[-1](x)
        graphs.append(torch.cuda.CUDAGraph())
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[-1], stream=stream):
            results.append(calls[-1](x))
    beside, side = torch.randn(1280, 1280, device=DEVICE), torch.cuda.Stream()
    began = time.monotonic()
    for step in range(3000):
        for number, stream in enumerate(streams if step % 2 else streams[::-1]):
            with torch.cuda.stream(stream):
                calls[number](x) if step % 3 else graphs[number].replay()
        if step % 4 == 0:
            with torch.cuda.stream(side):
                torch.mm(beside[: 64 + step % 1200], beside)
        if step % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert time.monotonic() - began < 30
    for result in results:
        torch.testing.assert_close(result, eager(x), rtol=1e-4, atol=1e-6)
