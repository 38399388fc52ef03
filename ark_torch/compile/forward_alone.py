"""What a graph that trains would win: its forward pass without gradients, measured with ark, Inductor and eager.

Graphs that train are Inductor's whole, since ark has no kernels for backward passes. explain(training=True) says what
kernels for the forward pass alone would save. That is a bound: a forward pass that trains also keeps values for its
backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ark_torch.compile import inductor_fallback
from ark_torch.compile.options import Options
from ark_torch.compile.report import NAMES, Report, log


def trains(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def measuring(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[[Sequence[Any]], str]:
    """Compiles a copy of the graph for inference. The result takes a call's arguments, whose contents the graph may
    change, and returns a line for the report."""
    from ark_torch.compile.backend import compile_graph

    own = Report()
    chosen = dataclasses.replace(options, choose="measure", wait=True, fallback=True)
    try:
        with torch.no_grad():
            function = compile_graph(inductor_fallback.copy_of(graph_module), example_inputs, chosen, own)
    except Exception as error:  # the report is of the graph that trains
        problem = inductor_fallback.first_line(error)
        log.debug("the forward pass alone was not compiled", exc_info=True)
        return lambda inputs: f"its forward pass was not compiled without gradients ({problem})"

    def measured(inputs: Sequence[Any]) -> str:
        with torch.no_grad():
            function(*(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))
        [graph] = own.graphs
        if graph.choice is None:
            why = f": {graph.whole}" if graph.whole else ""
            return f"without gradients, too, its forward pass would run on {graph.whole_on}{why}"
        us = graph.choice.us
        if "ark" not in us or "inductor" not in us:
            return f"without gradients its forward pass runs on {NAMES[graph.choice.runs_on]}"
        saved = us["inductor"] - us["ark"]
        told = f"would save at most {saved:.1f} us a step" if saved > 0 else "would save nothing"
        return f"without gradients its forward pass takes {graph.choice}: kernels of ark for it {told}"

    return measured
