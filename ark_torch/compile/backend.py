"""From a graph of torch._dynamo to a function: who runs it.

Graphs that train go to Inductor whole: loop kernels for backward passes are not written. So do graphs with symbolic
sizes, and graphs of which ark runs nothing. Of the others (options.choose) the fastest of three is taken: ark's regions
with Inductor for the rest, Inductor alone, which is what torch.compile does without ark, and eager PyTorch. What was
chosen before is taken at once. Otherwise Inductor serves, and serving.py decides while the program runs, or the first
call does (options.wait).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from ark_torch.compile import capture, choice, costs, inductor_fallback, progress, serving, workers
from ark_torch.compile.build import Launcher, NotOneRegion
from ark_torch.compile.capture import TRAINS, Captured, WholeGraph
from ark_torch.compile.eager_values import Eager
from ark_torch.compile.options import Options
from ark_torch.compile.report import NAMES, GraphReport, Report, log, title_of
from ark_torch.errors import UnsupportedGraph

TWICE = 'it was traced with gradients on, and options={"differentiate_twice": True}'

AHEAD = (
    "ark cannot save compiled regions to a file yet, as compiling ahead of time (aot_compile) needs: pass "
    'options={"choose": "inductor"} to torch.compile(backend="ark"), which hands the graph to Inductor whole.'
)
# Generated code reads memory as it is, Inductor's too.
LAZY = "an argument is negated or conjugated lazily, as a view: resolve_neg() and resolve_conj() make it a plain tensor"


def compile_graph(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None = None,
    launcher: Launcher | None = None,
) -> Callable[..., Any]:
    """What torch._dynamo calls for each of its graphs. With a `launcher` all of it must be one region, which is made to
    run many steps a launch: NotOneRegion otherwise."""
    graph_report = GraphReport(target=report.target if report is not None else "")
    if report is not None:
        report.graphs.append(graph_report)
    title = title_of(graph_module)
    try:
        if any(isinstance(x, torch.Tensor) and (x.is_neg() or x.is_conj()) for x in example_inputs):
            raise Eager(LAZY)
        if options.choose == "inductor":
            raise WholeGraph('options={"choose": "inductor"}')
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            if options.differentiate_twice and options.fallback:
                raise Eager(TWICE)
            capture.say_once(TRAINS)
            raise WholeGraph(TRAINS)
        if _ahead_of_time():
            raise UnsupportedGraph(AHEAD)
        if launcher is None and options.choose == "measure":
            return _fastest(graph_module, example_inputs, options, graph_report, explained=report is not None)
        costs.prepare()
        captured = Captured(graph_module, example_inputs, options, graph_report, launcher)
        return _complete(captured, title)
    except Eager as reason:
        graph_report.whole, graph_report.whole_on = str(reason), "eager PyTorch"
        if launcher is not None:
            raise NotOneRegion(graph_report.whole) from None
        if not options.fallback:
            raise UnsupportedGraph(f'options={{"fallback": False}}, and {graph_report.whole}.') from None
        log.info("%s: the whole graph runs on eager PyTorch: %s", title, graph_report.whole)
        return graph_module.forward  # type: ignore[no-any-return]
    except WholeGraph as reason:
        graph_report.whole = str(reason)
        if launcher is not None:
            raise NotOneRegion(str(reason)) from None
        if not options.fallback:
            raise UnsupportedGraph(
                f'options={{"fallback": False}}, and the graph cannot run on ark: {reason}.'
            ) from None
        log.info("%s: the whole graph runs on Inductor: %s", title, reason)
    except BaseException:  # Dynamo will try again, or the user hears of it: no graph was compiled
        if report is not None:
            report.graphs.remove(graph_report)
        raise
    return inductor_fallback.whole(graph_module, example_inputs)


def _complete(captured: Captured, title: str) -> Callable[..., Any]:
    with progress.shown(f"compiling ark's regions of {title}"):
        captured.compile_regions()
        return captured.finish()


def _fastest(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport, explained: bool
) -> Callable[..., Any]:
    """Whoever was the fastest of the three before; or what decides it. `explained`: ark's regions are wanted even where
    another runs the graph."""
    title = title_of(graph_module)
    if not capture.exchanges(graph_module):
        capture.check_static(graph_module, "example_value")
    device = next((x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.is_cuda), torch.device("cpu"))
    text = f"{choice.text_of(graph_module, example_inputs)}\nminimum {options.minimum} nan {options.nan}"
    text += "" if options.cache == "auto" else f" cache {options.cache}"
    name = choice.key(text, workers.count(options.threads, device), device)

    def tell(chosen: choice.Choice) -> None:
        report.choice = chosen
        log.info("%s runs on %s: measured %s", title, NAMES[chosen.runs_on], chosen)

    known = choice.recall(name)
    if known is not None:
        tell(known)
    names = known.names if known is not None and not explained else set(NAMES)
    # Ranks whose results went into each other's decisions must not differ in their last bits: they measure before the
    # first result, and the first one to have done so decides.
    waits = options.wait or not options.fallback or known is not None or _ranks() > 1
    if waits and "ark" in names:
        costs.prepare()
    captured = None
    if "ark" in names or not options.fallback:
        captured = Captured(graph_module, example_inputs, options, report)
        if captured.has_collectives:  # ranks would have to measure together, and one may compile again alone
            report.choice = None
            return _complete(captured, title)
    contestants: dict[str, Callable[..., Any]] = {}
    if "inductor" in names:
        try:
            with progress.shown(f"Inductor compiles {title}"):
                copied = graph_module if len(names) == 1 else inductor_fallback.copy_of(graph_module)
                contestants["inductor"] = inductor_fallback.whole(copied, example_inputs)
        except Exception as error:
            if captured is None:
                raise
            log.warning("%s: Inductor does not compile it, ark does: %s", title, inductor_fallback.first_line(error))
            return _complete(captured, title)
    if "eager" in names:
        contestants["eager"] = graph_module.forward
    if not waits and captured is not None:
        return serving.Serving(title, captured, contestants, name, tell, device.type == "cuda").function()
    if "ark" in names and captured is not None:
        contestants["ark"] = _complete(captured, title)
    if known is not None:
        return serving.taken(contestants, known)
    assert captured is not None
    return serving.Rehearsed(title, contestants, captured.written, name, tell, device.type == "cuda").function()


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _ahead_of_time() -> bool:
    """Whether what is compiled is to be saved: how Dynamo's aot_compile sets AOTAutograd for the time of the call."""
    from torch._functorch import config

    return all(getattr(config, name, False) for name in ("bundled_autograd_cache", "bypass_autograd_cache_key"))
