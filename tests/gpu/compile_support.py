"""Shared by tests of compiled regions on a GPU: compiles with ark alone, and checks that the result is one kernel."""

from __future__ import annotations

from typing import Any

import torch

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

DEVICE = torch.device("cuda", 0)


def compiled(model: Any, **chosen: Any) -> tuple[Any, Report]:
    """Returns the call and its report. `chosen` are options of the backend."""
    report = Report()
    parsed = options.parse(None, {"choose": "ark", "wait": True, **chosen})

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, parsed, report)

    return torch.compile(model, backend=run, dynamic=False), report


def on_one_kernel(report: Report) -> None:
    (graph,) = report.graphs
    assert [piece.runs_on for piece in graph.pieces] == ["ark"], report
    resources = graph.pieces[0].region.resources
    assert resources["local_bytes"] < 2048 and resources["registers"] > 0
