"""Decides who runs a graph of torch._dynamo, and returns the function that does.

Training graphs go to Inductor whole, since there are no loop kernels for backward passes. So do graphs with symbolic
sizes, and graphs without a part that ark can run. For the others the fastest of three is used (options.choose): ark's
regions with Inductor for the rest, Inductor alone, as torch.compile without ark, and eager PyTorch. A known choice
applies at once, and so does one that is certain (certain.py). Otherwise Inductor serves while serving.py decides in the
background, or the first call decides (options.wait).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from ark_torch.compile import capture, choice, costs, inductor_fallback, meeting, progress, serving, workers
from ark_torch.compile.build import Launcher, NotOneRegion
from ark_torch.compile.capture import TRAINS, Captured, WholeGraph
from ark_torch.compile.eager_values import Eager
from ark_torch.compile.options import Options
from ark_torch.compile.report import NAMES, GraphReport, Report, log, title_of
from ark_torch.errors import UnsupportedGraph

TWICE = 'it was traced with gradients on, and options={"differentiate_twice": True}'

AHEAD = (
    "ark does not save this graph, as compiling ahead of time (aot_compile) needs: {}. Pass "
    'options={{"choose": "inductor"}} to torch.compile(backend="ark"), which hands the graph to Inductor whole.'
)
# Rows of collectives up to which loop kernels are taken where ranks do not measure together, per device type. Two H200,
# tensor parallel Llama: a decoding step takes 0.6 times Inductor's time, a prefill of 2048 tokens 1.6 times.
_FEW_ROWS = {"cuda": 128}
# Generated code, including Inductor's, reads memory without resolving lazy views.
LAZY = "an argument is negated or conjugated lazily, as a view: resolve_neg() and resolve_conj() make it a plain tensor"


def compile_graph(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: Report | None = None,
    launcher: Launcher | None = None,
) -> Callable[..., Any]:
    """Called by torch._dynamo for each graph. With a `launcher` the whole graph must be one region, built to run many
    steps per launch; otherwise raises NotOneRegion."""
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
            return _to_be_saved(graph_module, example_inputs, options, graph_report)
        if launcher is None and options.choose == "measure":
            return _fastest(graph_module, example_inputs, options, graph_report, explained=report is not None)
        costs.prepare()
        keeps = (lambda captured: True) if report is None and launcher is None else None
        captured = Captured(graph_module, example_inputs, options, graph_report, launcher, keeps=keeps)
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
    except BaseException:  # Dynamo retries, or the user sees the error: no graph was compiled
        if report is not None:
            report.graphs.remove(graph_report)
        raise
    return inductor_fallback.whole(graph_module, example_inputs, graph_report if report is not None else None)


def _to_be_saved(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport
) -> Callable[..., Any]:
    """Ark's regions as a function that PyTorch saves. With choose="measure", which has no calls to measure here, ark's
    regions are taken where they are all of the graph, and Inductor's function elsewhere."""
    costs.prepare()
    try:
        with progress.shown(f"compiling ark's regions of {title_of(graph_module)}"):
            captured = Captured(graph_module, example_inputs, options, report, ahead=True)
            return captured.saveable()  # type: ignore[no-any-return]
    except (NotOneRegion, Eager, WholeGraph) as reason:
        if options.choose == "ark" or not options.fallback:
            raise UnsupportedGraph(AHEAD.format(reason)) from None
        raise WholeGraph(f"ark does not save it ({reason})") from None


def _complete(captured: Captured, title: str) -> Callable[..., Any]:
    with progress.shown(f"compiling ark's regions of {title}"):
        captured.compile_regions()
        return captured.finish()


def _fastest(
    graph_module: GraphModule, example_inputs: Sequence[Any], options: Options, report: GraphReport, explained: bool
) -> Callable[..., Any]:
    """Returns the fastest of the three if known, or a function that finds it. `explained`: compile ark's regions even
    if another contestant runs the graph."""
    title = title_of(graph_module)
    if not capture.exchanges(graph_module):
        capture.check_static(graph_module, "example_value")
    device = capture.device_of_inputs(example_inputs)
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
    # Ranks whose results went into each other's decisions must not differ in their last bits. So they measure before
    # the first result, and the first rank to finish decides.
    waits = options.wait or not options.fallback or known is not None or _ranks() > 1
    captured = None
    if "ark" in names or not options.fallback or _ranks() > 1:  # only capture shows the collectives
        if waits:
            costs.prepare()
        if explained or (known is not None and names != {"ark"}):
            keeps = None
        else:  # what is certain, or was chosen
            keeps = lambda captured: known is not None or bool(captured.certain())  # noqa: E731
        captured = Captured(graph_module, example_inputs, options, report, keeps=keeps)
        if known is None and options.fallback and (reason := captured.certain()):
            report.certain = reason
            if not options.wait:
                log.info("%s runs on ark, without being measured: %s", title, reason)
                return _complete(captured, title)
    together, otherwise = None, "ark"
    if captured is not None and captured.collectives:
        otherwise = _unmeasured(captured.exchanged_rows, device, options)
        group = meeting.group_of(captured.collectives)
        # On GPUs the first call would also wait for Inductor's kernels, and where the rows are many for minutes of
        # compiling loop kernels, which have lost whenever they were measured: only where the user has asked.
        if group is None or not options.fallback or (device.type == "cuda" and not options.wait):
            report.choice = None
            if otherwise == "inductor":
                raise WholeGraph(
                    f"its collectives have {captured.exchanged_rows} rows, and Inductor's products win there"
                )
            return _complete(captured, title)
        together = meeting.Meeting(group, text, device)
        names.add(otherwise)
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
            if together is None:
                return _complete(captured, title)
            names.add("ark")
            otherwise = "ark"
    if "eager" in names:
        contestants["eager"] = graph_module.forward
    if not waits and captured is not None:
        return serving.Serving(title, captured, contestants, name, tell, device.type == "cuda").function()
    if "ark" in names and captured is not None:
        contestants["ark"] = _complete(captured, title)
    if known is not None and together is None:
        return serving.taken(contestants, known)
    assert captured is not None
    on_gpu, written = device.type == "cuda", captured.written
    return serving.Rehearsed(title, contestants, written, name, tell, on_gpu, together, otherwise).function()


def _unmeasured(rows: int, device: torch.device, options: Options) -> str:
    """Who runs a graph whose collectives have so many rows, where ranks do not measure. All ranks see the same number.

    With many rows Inductor's products win, with ark's collectives.
    """
    return "inductor" if options.fallback and rows > _FEW_ROWS.get(device.type, rows) else "ark"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _ahead_of_time() -> bool:
    """Whether the result will be saved: Dynamo's aot_compile sets AOTAutograd's configuration like this during the
    call."""
    from torch._functorch import config

    return all(getattr(config, name, False) for name in ("bundled_autograd_cache", "bypass_autograd_cache_key"))
