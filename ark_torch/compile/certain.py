"""Graphs that ark wins for certain, so that nothing else is compiled and nothing measured: steps of decoding.

Such a step is one region whose products have one row each, and what it does is to read the weights once. No compiler
can be faster than memory, to which loop kernels come near; others start every product anew. Each decoding step that was
measured ran on ark (docs/performance.md, docs/measurements.md), at least 1.3 times as fast as Inductor's best mode.
That holds for the machines named there alone. Everything else is measured: several rows of products depend on the
processor, small graphs on the host.
"""

from __future__ import annotations

import math

import torch

from ark_torch import _cost_files
from ark_torch.compile.ir import Literal, LoweredGraph, Strided

LEAST_BYTES = 64 << 20  # of weights that the products read; with fewer, the host's part of a call decides
MOST_THREADS = 2  # of a CPU, with which steps were measured
SHARE = 0.8  # of all bytes of inputs that are read whole
OTHERS = ("experts", "dequant_matmul", "scaled_matmul", "embedding_bag")  # of which less was measured
GATHERS = ("gather",)  # operators that read few rows of what they are given


def was_measured(device: torch.device, workers: int) -> bool:
    if device.type == "cuda":
        return _cost_files.is_built_in(torch.cuda.get_device_name(device))
    return workers <= MOST_THREADS


def why(graph: LoweredGraph, device: torch.device, workers: int) -> str:
    """Why ark runs the graph, if that is certain; else ""."""
    if (
        not was_measured(device, workers)
        or graph.groups
        or any(node.op in OTHERS or "group" in node.attributes for node in graph.nodes)
    ):
        return ""
    weights: dict[int, int] = {}  # bytes, by buffer
    for node in graph.nodes:
        if node.op != "matmul":
            continue
        left, right = (graph.values[value] for value in node.inputs[:2])
        if isinstance(left, Literal) or isinstance(right, Literal):
            return ""
        if not graph.buffers[right.buffer].parameter:
            continue  # of attention that is written out: of the caches' size, and counted with them
        if _rows(left) != 1 or not right.dtype.is_floating_point or right.dtype.itemsize == 1:
            return ""
        weights[right.buffer] = graph.buffers[right.buffer].bytes
    read = sum(weights.values())
    if read < LEAST_BYTES or read < SHARE * (read + _other_bytes(graph, set(weights))):
        return ""
    return f"each product has one row, so that a call reads {read / 1e6:.0f} MB of weights and does little else"


def _rows(value: Strided) -> int:
    return math.prod(value.shape[:-1])


def _other_bytes(graph: LoweredGraph, weights: set[int]) -> int:
    """Of inputs that operators read whole. Rows of tables are few."""
    whole = {
        graph.buffer_of(value) for node in graph.nodes if node.op not in GATHERS for value in node.inputs
    } - weights
    return sum(graph.buffers[one].bytes for one in whole if one >= 0 and graph.buffers[one].kind == "input")
