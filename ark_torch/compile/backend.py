"""From a graph of torch._dynamo to a function: capture, regions, and who runs each.

Graphs that train go to Inductor whole: loop kernels for backward passes are not written. So do graphs with symbolic
sizes, and graphs of which ark runs nothing. AOTAutograd (inference, Inductor's decompositions) makes the ATen graph of
the others; its updates of inputs become writes in place again before regions are cut.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from ark_torch.compile import analysis, choice, costs, decompositions, in_place, regions, rest, straight
from ark_torch.compile.assemble import Step, assemble
from ark_torch.compile.ir import Strided, Unsupported
from ark_torch.compile.lowering import Lowering, reason_against
from ark_torch.compile.options import Options
from ark_torch.compile.report import (
    Fallback,
    GraphReport,
    PieceReport,
    Report,
    fallback_of,
    log,
    operators_of,
    title_of,
)
from ark_torch.errors import CompilerNotAvailable, UnsupportedGraph

TRAINS = (
    "it was traced with gradients on, and ark compiles inference only; if this model is not trained, call it under "
    "torch.no_grad() or torch.inference_mode() and ark's kernels run it"
)

TWICE = 'it was traced with gradients on, and options={"differentiate_twice": True}'


class _Merged(Exception):
    """AOTAutograd has made one argument of several that overlap. Nothing guards that they lie that way the next time,
    in Inductor's graphs as little as here, so such a graph runs as it is."""


class _WholeGraph(Exception):
    """The graph goes to Inductor as it came; the text says why."""


class NotOneRegion(Exception):
    """A graph that was to be one region is not; the text says why."""


# What calls a region whose steps are chained: with the region and its inputs, instead of the region itself.
Launcher = Callable[[Any, list[Any]], Sequence[Any]]


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
        if options.choose == "inductor":
            raise _WholeGraph('options={"choose": "inductor"}')
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs):
            if options.differentiate_twice and options.fallback:
                graph_report.whole, graph_report.whole_on = TWICE, "eager PyTorch"
                return graph_module.forward  # type: ignore[no-any-return]
            _say_once(TRAINS)
            raise _WholeGraph(TRAINS)
        return _capture(graph_module, example_inputs, options, graph_report, launcher)
    except _Merged:
        graph_report.whole, graph_report.whole_on = "arguments overlap, and one of them is written", "eager PyTorch"
        if launcher is not None:
            raise NotOneRegion(graph_report.whole) from None
        if not options.fallback:
            raise UnsupportedGraph(f'options={{"fallback": False}}, and {graph_report.whole}.') from None
        log.info("the whole graph runs on eager PyTorch: %s", graph_report.whole)
        return graph_module.forward  # type: ignore[no-any-return]
    except _WholeGraph as reason:
        graph_report.whole = str(reason)
        if launcher is not None:
            raise NotOneRegion(str(reason)) from None
        if not options.fallback:
            raise UnsupportedGraph(
                f'options={{"fallback": False}}, and the graph cannot run on ark: {reason}.'
            ) from None
        log.info("the whole graph runs on Inductor: %s", reason)
    except BaseException:  # Dynamo will try again, or the user hears of it: no graph was compiled
        if report is not None:
            report.graphs.remove(graph_report)
        raise
    return rest.whole(graph_module, example_inputs)


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
            raise _Merged
        try:
            call = compile_inference(graph, options, report, launcher)
        except (_WholeGraph, _Merged, UnsupportedGraph, NotOneRegion):
            raise
        except Exception as error:  # a mistake of ours, or what the compiler said with fallback=False
            if not options.fallback:
                raise UnsupportedGraph(f"ark does not compile a graph: {rest.first_line(error)}") from error
            log.warning("ark fails on a graph, which goes to Inductor: %s", rest.first_line(error), exc_info=True)
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
        _Merged,
        UnsupportedGraph,
        NotOneRegion,
        RestartAnalysis,
    ):  # the last: Dynamo's own way of trying again
        raise
    except Exception as error:
        # What stops AOTAutograd stops Inductor too, and what it then raises is what users know.
        log.debug("capture failed", exc_info=True)
        raise _WholeGraph(f"it could not be captured ({rest.first_line(error)})") from error
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


def static_inputs(graph_module: GraphModule) -> list[Node]:
    """Placeholders of parameters and buffers."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    indices = metadata.static_input_indices if metadata is not None else None
    return [placeholders[i] for i in indices or () if i < len(placeholders)]


def compile_inference(
    graph_module: GraphModule, options: Options, report: GraphReport, launcher: Launcher | None = None
) -> Callable[..., Any]:
    """A functional ATen graph as a function of a list of its arguments."""
    _check_static(graph_module)
    report.in_place = in_place.restore(graph_module)
    needed = analysis.dependencies(graph_module)
    mutated = {root for node in needed for root in analysis.written_roots(node)}
    with unset_fake_temporarily():  # views are worked out on meta tensors, which need no fake mode and are dear in one
        reasons = {node: reason for node in needed if (reason := reason_against(node, mutated)) is not None}
    pieces, given = regions.cut(needed, lambda node: node not in reasons, options.minimum, analysis.waits(needed))
    report.nodes = len(needed)
    report.fallbacks = [fallback_of(node, reason) for node, reason in reasons.items()]
    for fallback in report.fallbacks:
        log.info("falls back: %s", fallback)
    if not options.fallback and report.fallbacks and launcher is None:
        raise UnsupportedGraph(_forbidden(report.fallbacks))
    if not any(piece.ark for piece in pieces):
        raise _WholeGraph(_nothing(report.fallbacks, given))
    if launcher is not None:
        _check_one_region(pieces, report.fallbacks)
    return _Builder(graph_module, pieces, given, mutated, options, report, launcher).build()


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


class _Builder:
    """Compiles the pieces of one graph and puts them together."""

    def __init__(
        self,
        graph_module: GraphModule,
        pieces: Sequence[regions.Piece],
        given: Sequence[Node],
        mutated: set[Node],
        options: Options,
        report: GraphReport,
        launcher: Launcher | None = None,
    ) -> None:
        self._module, self._pieces, self._mutated = graph_module, pieces, mutated
        self._options, self._report, self._launcher = options, report, launcher
        self._given = frozenset(given)
        self._static = static_inputs(graph_module)
        self._threads = options.threads or torch.get_num_threads()
        output = next(node for node in graph_module.graph.nodes if node.op == "output")
        self._outputs: list[Any] = list(output.args[0])
        self._views: dict[Node, Strided] = {}
        self._title = title_of(graph_module)

    def build(self) -> Callable[..., Any]:
        steps = []
        for number, piece in enumerate(self._pieces):
            results = self._results(number)
            if piece.ark:
                step = self._ark_step(number, piece, results)
            else:
                # Inductor returns views as well as their bases, of any element type.
                views = [n for n in self._returned_views() if analysis.producer_of(analysis.root_of(n)) in piece.nodes]
                step = self._rest_step(number, piece, list(dict.fromkeys(results + views)), self._why_rest(piece))
            steps.append(step)
        return assemble(self._module, steps, self._views, self._outputs)

    def _why_rest(self, piece: regions.Piece) -> str:
        """Why a piece is not ark's; which operator fell back for what stands among the graph's fallbacks."""
        few = sum(node in self._given for node in piece.nodes)
        parts = [f"{len(piece.nodes) - few} fall back"] if few < len(piece.nodes) else []
        if few:
            parts.append(f"{few} are too few in a row for a region (option minimum, {self._options.minimum})")
        return ", ".join(parts)

    def _returned_views(self) -> list[Node]:
        return [n for n in self._outputs if isinstance(n, Node) and analysis.root_of(n) is not n]

    def _results(self, number: int) -> list[Node]:
        """The roots made by a piece that other pieces or the graph's caller need."""
        inside = frozenset(self._pieces[number].nodes)
        wanted: dict[Node, None] = {}
        for node in self._outputs:
            if isinstance(node, Node):
                wanted.setdefault(analysis.root_of(node))
        for other, piece in enumerate(self._pieces):
            if other != number:
                wanted.update(dict.fromkeys(rest.roots_read(piece.nodes)))
        return [root for root in wanted if analysis.producer_of(root) in inside]

    def _rest_step(self, number: int, piece: regions.Piece, results: list[Node], reason: str = "") -> Step:
        extracted, arguments = rest.extract(self._module, piece.nodes, results)
        static = [i for i, node in enumerate(arguments) if node in self._static]
        run, runs_on = rest.compile_piece(extracted, static)
        run = rest.keep_apart(run, [i for i, node in enumerate(arguments) if node in self._mutated])
        self._report.pieces.append(
            PieceReport(f"piece {number}", runs_on, len(piece.nodes), operators_of(piece.nodes), reason)
        )
        return Step(run, arguments, results)

    def _ark_step(self, number: int, piece: regions.Piece, results: list[Node]) -> Step:
        lowering = Lowering(self._static, self._mutated)
        try:
            with unset_fake_temporarily():
                lowering.run(piece.nodes, results)
            fallback = self._options.fallback and self._launcher is None
            otherwise = self._otherwise(lowering, piece, results) if fallback else None
            name = f"{self._title} {number}"
            region = make_region(lowering, name, self._threads, otherwise, self._launcher is not None)
        except (CompilerNotAvailable, Unsupported, RuntimeError, ValueError) as error:
            if self._launcher is not None:
                raise NotOneRegion(rest.first_line(error)) from error
            if not self._options.fallback:
                raise
            log.warning("A region falls back to Inductor: %s", rest.first_line(error))
            return self._rest_step(number, piece, results, rest.first_line(error))
        told = PieceReport(f"piece {number}", "ark", len(piece.nodes), operators_of(piece.nodes), "", region)
        if self._report.target:
            told.target_plan = plan_for(lowering, self._report.target)
        self._report.pieces.append(told)
        for node in self._returned_views():
            root = analysis.root_of(node)
            if root in results:
                self._views[node] = self._view_of(root, node)
        run = region
        if (launcher := self._launcher) is not None:
            told.reason = "all steps in one launch"
            run = functools.partial(launcher, region)
        elif self._options.choose == "measure" and not lowering.graph.groups:
            run = self._contest(lowering, region, piece, results, told)
        return Step(run, lowering.inputs, lowering.outputs)

    def _otherwise(self, lowering: Lowering, piece: regions.Piece, results: list[Node]) -> rest.Boxed | None:
        """Runs calls whose arguments overlap where the region writes: node by node, in the program's order. Guards see
        to it that there are none, but not where the user leaves guards out."""
        if self._mutated.isdisjoint(lowering.inputs):
            return None

        @functools.cache
        def made() -> tuple[rest.Boxed, list[int], list[int]]:
            extracted, arguments = rest.extract(self._module, piece.nodes, results)
            order = [lowering.inputs.index(node) for node in arguments]
            return rest.interpreted(extracted), order, [results.index(node) for node in lowering.outputs]

        def run(inputs: list[Any]) -> Sequence[Any]:
            interpreted, order, back = made()
            given = interpreted([inputs[i] for i in order])
            return [given[i] for i in back]

        return run

    def _view_of(self, root: Node, node: Node) -> Strided:
        """Where an output lies within the result that it is a view of."""
        alone = Lowering()
        with unset_fake_temporarily():
            alone.operand(root)
            view = alone.operand(node)
        assert isinstance(view, Strided)
        return view

    def _contest(
        self, lowering: Lowering, region: Any, piece: regions.Piece, results: list[Node], told: PieceReport
    ) -> Any:
        name = choice.key(lowering.graph.text(), self._threads)

        def tell(chosen: choice.Choice) -> None:
            told.runs_on, told.ark_us, told.inductor_us = chosen.runs_on, chosen.ark_us, chosen.inductor_us
            log.info("%s runs on %s", told.name, told)

        known = choice.recall(name)
        if known is not None:
            tell(known)
            if known.runs_on == "ark":
                return region
        extracted, arguments = rest.extract(self._module, piece.nodes, results)
        static = [i for i, node in enumerate(arguments) if node in self._static]
        run, runs_on = rest.compile_piece(extracted, static)
        run = rest.keep_apart(run, [i for i, node in enumerate(arguments) if node in self._mutated])
        if runs_on != "inductor":
            return region
        # The same call for both: Inductor's arguments picked from the region's, results in the region's order.
        used = len(lowering.inputs)
        lowering.inputs += [node for node in arguments if node not in lowering.inputs]
        order = [lowering.inputs.index(node) for node in arguments]
        back = [results.index(node) for node in lowering.outputs]

        def inductor(inputs: list[Any]) -> Sequence[Any]:
            given = run([inputs[i] for i in order])
            return [given[i] for i in back]

        if known is not None:
            return inductor
        told.runs_on = "measure"
        ark = region if used == len(lowering.inputs) else lambda inputs: region(inputs[:used])
        written = [i for i, node in enumerate(lowering.inputs) if node in self._mutated]
        return choice.Contest(name, ark, inductor, written, tell)


def make_region(
    lowering: Lowering, name: str, threads: int, otherwise: rest.Boxed | None = None, chained: bool = False
) -> Any:
    """The C++ side: plans, validates, compiles (or takes from the cache) and loads. `otherwise` runs calls whose
    arguments share memory that the region writes; `chained` makes a region that runs many steps a launch."""
    from ark_torch import _C, _jit
    from ark_torch.compile import trace

    plan = getattr(_C, "plan", None)
    if plan is None:
        raise CompilerNotAvailable("the extension of this ark_torch was built without the plan compiler")
    _jit.configure()
    trace.configure()
    graph = plan.Graph()
    lowering.graph.emit(graph)
    options = {
        "threads": threads,
        "groups": lowering.graph.groups,
        "otherwise": otherwise,
        "chained": chained,
        "measured_costs": costs.are_measured(),
    }
    begin = time.perf_counter()
    region = plan.Region(graph, name, options)
    origin = "taken from the cache" if region.from_cache else "compiled"
    log.info("%s: kernel %s, %.3f s with its plan", name, origin, time.perf_counter() - begin)
    return region


def plan_for(lowering: Lowering, target: str) -> tuple[str, str]:
    """The region's plan for another target, to be looked at: JSON and drawing."""
    from ark_torch import _C

    graph = _C.plan.Graph()
    lowering.graph.emit(graph)
    return _C.plan.plan_for(graph, target)
