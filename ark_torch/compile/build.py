"""The pieces of one captured graph, compiled and put together: ark's become regions of the plan compiler, the others
Inductor's. Where the choice is to be measured, a piece of ark's is compiled by both."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from ark_torch.compile import analysis, choice, costs, regions, rest, workers
from ark_torch.compile.assemble import Step, assemble
from ark_torch.compile.ir import Strided, Unsupported
from ark_torch.compile.lowering import CPU, Lowering
from ark_torch.compile.options import Options
from ark_torch.compile.report import GraphReport, PieceReport, log, operators_of, title_of
from ark_torch.errors import CompileError


class NotOneRegion(Exception):
    """A graph that was to be one region is not; the text says why."""


# What calls a region whose steps are chained: with the region and its inputs, instead of the region itself.
Launcher = Callable[[Any, list[Any]], Sequence[Any]]


def static_inputs(graph_module: GraphModule) -> list[Node]:
    """Placeholders of parameters and buffers."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    indices = metadata.static_input_indices if metadata is not None else None
    return [placeholders[i] for i in indices or () if i < len(placeholders)]


class Builder:
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
        device: torch.device = CPU,
    ) -> None:
        self._module, self._pieces, self._mutated = graph_module, pieces, mutated
        self._options, self._report, self._launcher = options, report, launcher
        self._device = device
        self._given = frozenset(given)
        self._static = static_inputs(graph_module)
        self._threads = workers.count(options.threads, device)
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
        back = len(piece.nodes) - few
        parts = [f"{back} that ark does not run"] if back else []
        if few:
            parts.append(f"{few} too few in a row for a region (option minimum, {self._options.minimum})")
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
        lowering = Lowering(self._static, self._mutated, self._device)
        try:
            with unset_fake_temporarily():
                lowering.run(piece.nodes, results)
            fallback = self._options.fallback and self._launcher is None
            otherwise = self._otherwise(lowering, piece, results) if fallback else None
            name = f"ark::{self._title} {number}"
            region = make_region(lowering, name, self._threads, otherwise, self._launcher is not None)
        except (Unsupported, RuntimeError, ValueError) as error:
            if self._launcher is not None:
                raise NotOneRegion(rest.first_line(error)) from error
            if not self._options.fallback:
                raise
            log.warning("%s, piece %d falls back to Inductor: %s", self._title, number, rest.first_line(error))
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
        """Runs calls whose group turns out not to be carried by ark on a GPU: node by node."""
        if self._device.type == "cpu" or not lowering.graph.groups:
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
        alone = Lowering(device=self._device)
        with unset_fake_temporarily():
            alone.operand(root)
            view = alone.operand(node)
        assert isinstance(view, Strided)
        return view

    def _contest(
        self, lowering: Lowering, region: Any, piece: regions.Piece, results: list[Node], told: PieceReport
    ) -> Any:
        name = choice.key(lowering.graph.text(), self._threads, self._device)

        def tell(chosen: choice.Choice) -> None:
            told.runs_on, told.ark_us, told.inductor_us = chosen.runs_on, chosen.ark_us, chosen.inductor_us
            log.info("%s, %s", self._title, told)

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
    """The C++ side: plans, validates, compiles (or takes from the cache) and loads. `otherwise` runs calls whose group
    ark does not carry; `chained` makes a region that runs many steps a launch."""
    from ark_torch import _C, _jit
    from ark_torch.compile import trace

    plan = getattr(_C, "plan", None)
    if plan is None:
        raise CompileError("the extension of this ark_torch was built without the plan compiler")
    _jit.configure()
    trace.configure()
    graph = plan.Graph()
    lowering.graph.emit(graph)
    options = {
        "threads": threads,
        "device": lowering.device.index if lowering.device.type == "cuda" else -1,
        "groups": lowering.graph.groups,
        "otherwise": otherwise,
        "chained": chained,
        "measured_costs": costs.are_measured(),
    }
    begin = time.perf_counter()
    region = plan.Region(graph, name, options)
    origin = "taken from the cache" if region.from_cache else "compiled"
    title, _, number = name.removeprefix("ark::").rpartition(" ")
    log.info("%s, piece %s: planned, and its kernel %s, in %.3f s", title, number, origin, time.perf_counter() - begin)
    return region


def plan_for(lowering: Lowering, target: str) -> tuple[str, str]:
    """The region's plan for another target, to be looked at: JSON and drawing."""
    from ark_torch import _C

    graph = _C.plan.Graph()
    lowering.graph.emit(graph)
    return _C.plan.plan_for(graph, target)
