"""From a graph of torch._dynamo to a function: capture, and which operators are ark's. build.py compiles the pieces.

Graphs that train go to Inductor whole: loop kernels for backward passes are not written. So do graphs with symbolic
sizes, and graphs of which ark runs nothing. AOTAutograd (inference, Inductor's decompositions) makes the ATen graph of
the others; its updates of inputs become writes in place again before regions are cut.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ark_torch.compile import aliasing, analysis, costs, decompositions, in_place, regions, rest, straight
from ark_torch.compile.build import Builder, Launcher, NotOneRegion
from ark_torch.compile.eager_values import RunsEagerly
from ark_torch.compile.lowering import CPU, reason_against
from ark_torch.compile.operators.contractions import skips_positions
from ark_torch.compile.options import Options
from ark_torch.compile.report import Fallback, GraphReport, Report, fallback_of, log, title_of
from ark_torch.errors import CompileError, UnsupportedGraph

TRAINS = (
    "it was traced with gradients on, and ark compiles inference only; if this model is not trained, call it under "
    "torch.no_grad() or torch.inference_mode() and ark's kernels run it"
)

TWICE = 'it was traced with gradients on, and options={"differentiate_twice": True}'


AHEAD = (
    "ark cannot save compiled regions to a file yet, as compiling ahead of time (aot_compile) needs: pass "
    'options={"choose": "inductor"} to torch.compile(backend="ark"), which hands the graph to Inductor whole.'
)


# Nothing guards that they lie that way the next time, in Inductor's graphs as little as here.
MERGED = "arguments overlap, and one of them is written"  # AOTAutograd has made one of several
# Generated code reads memory as it is, Inductor's too.
LAZY = "an argument is negated or conjugated lazily, as a view: resolve_neg() and resolve_conj() make it a plain tensor"


SKIPS = 'options={"nan": "exact"}, and ark\'s attention passes over what its mask leaves out'


class _WholeGraph(Exception):
    """The graph goes to Inductor as it came; the text says why."""


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
    try:
        if any(isinstance(x, torch.Tensor) and (x.is_neg() or x.is_conj()) for x in example_inputs):
            raise RunsEagerly(LAZY)
        if options.choose == "inductor":
            raise _WholeGraph('options={"choose": "inductor"}')
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            if options.differentiate_twice and options.fallback:
                graph_report.whole, graph_report.whole_on = TWICE, "eager PyTorch"
                return graph_module.forward  # type: ignore[no-any-return]
            _say_once(TRAINS)
            raise _WholeGraph(TRAINS)
        if _ahead_of_time():
            raise UnsupportedGraph(AHEAD)
        return _capture(graph_module, example_inputs, options, graph_report, launcher)
    except RunsEagerly as reason:
        graph_report.whole, graph_report.whole_on = str(reason), "eager PyTorch"
        if launcher is not None:
            raise NotOneRegion(graph_report.whole) from None
        if not options.fallback:
            raise UnsupportedGraph(f'options={{"fallback": False}}, and {graph_report.whole}.') from None
        log.info("%s: the whole graph runs on eager PyTorch: %s", title_of(graph_module), graph_report.whole)
        return graph_module.forward  # type: ignore[no-any-return]
    except _WholeGraph as reason:
        graph_report.whole = str(reason)
        if launcher is not None:
            raise NotOneRegion(str(reason)) from None
        if not options.fallback:
            raise UnsupportedGraph(
                f'options={{"fallback": False}}, and the graph cannot run on ark: {reason}.'
            ) from None
        log.info("%s: the whole graph runs on Inductor: %s", title_of(graph_module), reason)
    except BaseException:  # Dynamo will try again, or the user hears of it: no graph was compiled
        if report is not None:
            report.graphs.remove(graph_report)
        raise
    return rest.whole(graph_module, example_inputs)


def _ahead_of_time() -> bool:
    """Whether what is compiled is to be saved: how Dynamo's aot_compile sets AOTAutograd for the time of the call."""
    from torch._functorch import config

    return all(getattr(config, name, False) for name in ("bundled_autograd_cache", "bypass_autograd_cache_key"))


@functools.cache
def _say_once(text: str) -> None:
    log.warning("A graph runs on Inductor, not on ark: %s. (Said once.)", text)


def _capture(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    report: GraphReport,
    launcher: Launcher | None,
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import RestartAnalysis

    costs.prepare()
    way: list[straight.Way] = []

    def trains(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        raise _WholeGraph(TRAINS)

    def infers(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if len(inputs) < len(example_inputs):
            raise RunsEagerly(MERGED)
        try:
            call = compile_inference(graph, options, report, launcher)
        except (_WholeGraph, RunsEagerly, UnsupportedGraph, NotOneRegion):
            raise
        except Exception as error:  # a mistake of ours, or what the compiler said with fallback=False
            if not options.fallback:
                if isinstance(error, CompileError):
                    raise
                raise UnsupportedGraph(f"ark does not compile a graph: {rest.first_line(error)}") from error
            told = rest.first_line(error)
            log.warning("%s: ark fails on it, and it goes to Inductor: %s", title_of(graph), told, exc_info=True)
            raise _WholeGraph(f"ark failed on it ({rest.first_line(error)})") from error
        way.append(straight.Way(call, inputs))
        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    try:
        captured: Callable[..., Any] = aot_autograd(
            fw_compiler=trains,
            inference_compiler=infers,
            decompositions=decompositions.table(),
            keep_inference_input_mutations=True,
        )(graph_module, example_inputs)
    except (
        _WholeGraph,
        RunsEagerly,
        UnsupportedGraph,
        NotOneRegion,
        RestartAnalysis,
    ):  # the last: Dynamo's own way of trying again
        raise
    except Exception as error:
        # What stops AOTAutograd stops Inductor too, and what it then raises is what users know.
        log.debug("capture failed", exc_info=True)
        raise _WholeGraph(f"it could not be captured ({rest.first_line(error)})") from error
    if launcher is None:
        captured = aliasing.around(captured, graph_module.forward, way, example_inputs, options.fallback)
    return straight.around(captured, way, example_inputs)


def _check_static(graph_module: GraphModule) -> None:
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and any(not isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))
        )
        if symbolic:
            shown = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise _WholeGraph(
                f"sizes are symbolic ({node.name} is {shown}): "
                "ark compiles fixed sizes; torch.compile(dynamic=False) makes a kernel for each size"
            )


def device_of(nodes: Iterable[Node]) -> torch.device:
    """Where the graph's regions run: the GPU that has most of its results, if one can run them, or else the CPU."""
    devices: Counter[torch.device] = Counter()
    for node in nodes:
        value = node.meta.get("val")
        devices.update({one.device for one in tree_leaves(value) if isinstance(one, torch.Tensor)})
    gpus = [device for device, _ in devices.most_common() if device.type == "cuda"]
    return gpus[0] if gpus and _runs_loop_kernels(gpus[0].index) else CPU


@functools.cache
def _runs_loop_kernels(device: int) -> bool:
    from ark_torch import _C

    if problem := _C._cuda_driver_problem():
        _say_once(f"its GPU's driver is not one that loop kernels can use ({problem.splitlines()[0].rstrip('.')})")
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        _say_once(f"its GPU has compute capability {major}.{minor}, and loop kernels need 8.0")
        return False
    return True


def compile_inference(
    graph_module: GraphModule, options: Options, report: GraphReport, launcher: Launcher | None = None
) -> Callable[..., Any]:
    """A functional ATen graph as a function of a list of its arguments."""
    _check_static(graph_module)
    report.in_place = in_place.restore(graph_module)
    needed = analysis.dependencies(graph_module)
    mutated = {root for node in needed for root in analysis.written_roots(node)}
    device = device_of(needed)
    with unset_fake_temporarily():  # views are worked out on meta tensors, which need no fake mode and are dear in one
        reasons = {node: reason for node in needed if (reason := reason_against(node, mutated, device)) is not None}
        if options.nan == "exact":
            reasons.update((node, SKIPS) for node in needed if skips_positions(node))
    pieces, given = regions.cut(needed, lambda node: node not in reasons, options.minimum, analysis.waits(needed))
    report.nodes = len(needed)
    report.fallbacks = [fallback_of(node, reason) for node, reason in reasons.items()]
    for fallback in report.fallbacks:
        log.info("%s falls back on %s", title_of(graph_module), fallback)
    if not options.fallback and report.fallbacks and launcher is None:
        raise UnsupportedGraph(_forbidden(report.fallbacks))
    if not any(piece.ark for piece in pieces):
        raise _WholeGraph(_nothing(report.fallbacks, given))
    if launcher is not None:
        _check_one_region(pieces, report.fallbacks)
    return Builder(graph_module, pieces, given, mutated, options, report, launcher, device).build()


def _check_one_region(pieces: Sequence[regions.Piece], fallbacks: Sequence[Fallback]) -> None:
    if len(pieces) == 1 and pieces[0].ark:
        return
    alike = list(dict.fromkeys(str(fallback) for fallback in fallbacks))
    more = f", and {len(alike) - 5} more" if len(alike) > 5 else ""
    raise NotOneRegion(f"a step is {len(pieces)} regions: {'; '.join(alike[:5]) or 'some are too small'}{more}")


def _forbidden(fallbacks: Sequence[Fallback]) -> str:
    lines = "\n".join(f"  {fallback}" for fallback in fallbacks[:20])
    more = f"\n  and {len(fallbacks) - 20} more" if len(fallbacks) > 20 else ""
    return f'options={{"fallback": False}}, and ark does not run:\n{lines}{more}'


def _nothing(fallbacks: Sequence[Fallback], given: Sequence[Node]) -> str:
    if fallbacks:
        return f"nothing in it is worth a region of its own; first of {len(fallbacks)} that fall back: {fallbacks[0]}"
    return f"it has {len(given)} operators, too few for a region" if given else "it computes nothing"
