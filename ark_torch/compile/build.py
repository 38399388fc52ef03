"""Compiles the pieces of one captured graph and joins them: ark's as regions of the plan compiler, the others with
Inductor.

There are three steps, since only the second may run on another thread: lower() while torch._dynamo compiles, then
compile_regions(), which is C++ and takes longest, then assemble(), in which Inductor compiles its pieces.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from ark_torch import _cost_files, env
from ark_torch.compile import analysis, certain, costs, inductor_fallback, regions, saved, tinygemm, workers
from ark_torch.compile.assemble import Step, assemble, describe
from ark_torch.compile.ir import Strided, Unsupported
from ark_torch.compile.lowering import CPU, Lowering
from ark_torch.compile.options import Options
from ark_torch.compile.report import GraphReport, PieceReport, log, name_of, operators_of, title_of
from ark_torch.errors import CompileError


class NotOneRegion(Exception):
    """A graph that was required to be one region is not; the message says why."""


# Calls a region whose steps are multi_step, given the region and its inputs.
Launcher = Callable[[Any, list[Any]], Sequence[Any]]


def static_inputs(graph_module: GraphModule) -> list[Node]:
    """The placeholders of parameters and buffers."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    indices = metadata.static_input_indices if metadata is not None else None
    return [placeholders[i] for i in indices or () if i < len(placeholders)]


class Builder:
    """Compiles the pieces of one graph and joins them."""

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
        whole: Lowering | None = None,
    ) -> None:
        """`whole`: the only piece as it was lowered already, still without results."""
        self._module, self._pieces, self._mutated = graph_module, pieces, mutated
        self._options, self._report, self._launcher = options, report, launcher
        self._device = device
        self._whole = whole
        self._given = frozenset(given)
        self._static = static_inputs(graph_module)
        self._threads = workers.count(options.threads, device)
        output = next(node for node in graph_module.graph.nodes if node.op == "output")
        self._outputs: list[Any] = list(output.args[0])
        self._views: dict[Node, Strided] = {}
        self._lowered: dict[int, Lowering] = {}  # by piece, as the next two
        self._regions: dict[int, Any] = {}
        self._failed: dict[int, str] = {}
        self._steps: list[Step] = []
        self._title = title_of(graph_module)

    def lower(self) -> None:
        for number, piece in enumerate(self._pieces):
            if piece.ark:
                with self._falling_back(number), unset_fake_temporarily():
                    lowering, self._whole = self._whole, None
                    if lowering is None:
                        lowering = Lowering(self._static, self._mutated, self._device)
                        lowering.lower_all(piece.nodes)
                    lowering.finish(self._results(number))
                    self._lowered[number] = lowering

    def certain(self) -> str:
        """Why ark is certain to be the fastest, after lower(); "": it is not."""
        if len(self._pieces) != 1 or set(self._lowered) != {0} or self._failed:
            return ""
        return certain.why(self._lowered[0].graph, self._device, self._threads)

    def compile_regions(self, stopped: Callable[[], bool] = lambda: False) -> None:
        for number, lowering in self._lowered.items():
            if stopped():
                raise CompileError(f"{self._title}: stopped before region {number}")
            with self._falling_back(number, stopped):
                fallback = self._options.fallback and self._launcher is None
                otherwise = self._otherwise(lowering, number) if fallback else None
                multi_step = self._launcher is not None
                self._regions[number] = make_region(
                    lowering, self._name(number), self._threads, otherwise, multi_step, self._options.cache
                )

    @contextlib.contextmanager
    def _falling_back(self, number: int, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        try:
            yield
        except (Unsupported, RuntimeError, ValueError) as error:
            if stopped():
                raise
            if self._launcher is not None:
                raise NotOneRegion(inductor_fallback.first_line(error)) from error
            if not self._options.fallback:
                raise
            self._failed[number] = inductor_fallback.first_line(error)
            log.warning("%s, piece %d falls back to Inductor: %s", self._title, number, self._failed[number])

    def to_assemble(self) -> int:
        """The number of calls of assemble_next() still needed."""
        return len(self._pieces) - len(self._steps)

    def assemble_next(self) -> None:
        number = len(self._steps)
        piece = self._pieces[number]
        if number in self._regions:
            step = self._ark_step(number, piece)
        else:
            # Inductor returns views as well as their bases, of any element type.
            views = []
            if not piece.ark:
                views = [n for n in self._returned_views() if analysis.producer_of(analysis.root_of(n)) in piece.nodes]
            results = list(dict.fromkeys(self._results(number) + views))
            step = self._rest_step(number, piece, results, self._failed.get(number) or self._why_rest(piece))
        self._steps.append(step)

    def assemble(self) -> Callable[..., Any]:
        while self.to_assemble():
            self.assemble_next()
        return assemble(self._module, self._steps, self._views, self._outputs)

    def ahead_of_time(self) -> Any:
        """The graph as AOTAutograd saves it, after compile_regions(). Raises NotOneRegion if a part is not ark's."""
        from ark_torch.compile.ahead import AheadOfTime

        if self._failed:
            raise NotOneRegion(next(iter(self._failed.values())))
        if rest := next((piece for piece in self._pieces if not piece.ark), None):
            more = f" and {len(rest.nodes) - 1} more" if len(rest.nodes) > 1 else ""
            raise NotOneRegion(f"Inductor would run {name_of(rest.nodes[0])}{more}")
        if any(lowering.graph.groups for lowering in self._lowered.values()):
            raise NotOneRegion("it has collectives, whose groups another process does not have")
        while self.to_assemble():
            self.assemble_next()
        program = describe(self._module, self._steps, self._views, self._outputs)
        parts = []
        for number, lowering in self._lowered.items():
            told, name, options = said_to_planner(lowering, self._name(number), self._threads, self._options.cache)
            unpacked = tuple(position for position, _ in lowering.unpacks.values())
            parts.append(saved.of_region(told, name, options, self._regions[number], unpacked))
        return AheadOfTime(program, parts, assemble(self._module, self._steps, self._views, self._outputs))

    def _name(self, number: int) -> str:
        return f"ark::{self._title} {number}"

    def _why_rest(self, piece: regions.Piece) -> str:
        """Why a piece is not ark's. The graph's fallbacks list says which operator fell back and why."""
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
                wanted.update(dict.fromkeys(inductor_fallback.roots_read(piece.nodes)))
        return [root for root in wanted if analysis.producer_of(root) in inside]

    def _rest_step(self, number: int, piece: regions.Piece, results: list[Node], reason: str = "") -> Step:
        extracted, arguments = inductor_fallback.extract(self._module, piece.nodes, results)
        static = [i for i, node in enumerate(arguments) if node in self._static]
        run, runs_on = inductor_fallback.compile_piece(extracted, static)
        run = inductor_fallback.keep_apart(run, [i for i, node in enumerate(arguments) if node in self._mutated])
        self._report.pieces.append(
            PieceReport(f"piece {number}", runs_on, len(piece.nodes), operators_of(piece.nodes), reason)
        )
        return Step(run, arguments, results)

    def _ark_step(self, number: int, piece: regions.Piece) -> Step:
        lowering, region = self._lowered[number], self._regions[number]
        told = PieceReport(f"piece {number}", "ark", len(piece.nodes), operators_of(piece.nodes), "", region)
        if self._report.target:
            told.target_plan = plan_for(lowering, self._report.target, self._options.cache)
        self._report.pieces.append(told)
        for node in self._returned_views():
            root = analysis.root_of(node)
            if root in lowering.outputs:
                self._views[node] = self._view_of(root, node)
        run = region
        if (launcher := self._launcher) is not None:
            told.reason = "all steps in one launch"
            run = functools.partial(launcher, region)
        run = tinygemm.around(run, [position for position, _ in lowering.unpacks.values()])
        return Step(run, lowering.inputs, lowering.outputs)

    def _otherwise(self, lowering: Lowering, number: int) -> inductor_fallback.Boxed | None:
        """Runs calls whose group turns out not to be carried by ark on a GPU, node by node."""
        if self._device.type == "cpu" or not lowering.graph.groups:
            return None
        piece, results = self._pieces[number], self._results(number)

        @functools.cache
        def made() -> tuple[inductor_fallback.Boxed, list[int], list[int]]:
            extracted, arguments = inductor_fallback.extract(self._module, piece.nodes, results)
            order = [lowering.inputs.index(node) for node in arguments]
            return inductor_fallback.interpreted(extracted), order, [results.index(node) for node in lowering.outputs]

        def run(inputs: list[Any]) -> Sequence[Any]:
            interpreted, order, back = made()
            given = interpreted([inputs[i] for i in order])
            return [given[i] for i in back]

        return run

    def _view_of(self, root: Node, node: Node) -> Strided:
        """The position of an output within the result that it is a view of."""
        alone = Lowering(device=self._device)
        with unset_fake_temporarily():
            alone.operand(root)
            view = alone.operand(node)
        assert isinstance(view, Strided)
        return view


def make_region(
    lowering: Lowering,
    name: str,
    threads: int,
    otherwise: inductor_fallback.Boxed | None = None,
    multi_step: bool = False,
    cache: str = "auto",
) -> Any:
    """Makes a region in C++: plans, validates, compiles (or takes from the cache) and loads. `otherwise` runs calls
    whose group ark does not carry; `multi_step` makes a region that runs many steps per launch; `cache` is the
    option."""
    from ark_torch import _C, _jit
    from ark_torch.compile import trace

    plan = getattr(_C, "plan", None)
    if plan is None:
        raise CompileError("the extension of this ark_torch was built without the plan compiler")
    _jit.configure()
    trace.configure()
    told, _, options = said_to_planner(lowering, name, threads, cache, multi_step)
    options["otherwise"] = otherwise
    graph = plan.Graph()
    lowering.graph.emit(graph)
    begin = time.perf_counter()
    portable = hasattr(plan.Region, "saved") and not options["groups"]  # a test's double is not
    key = saved.key_of(told, options) if portable else ""
    region = None
    if portable and (kernel := saved.carried(key)) is not None:
        try:
            region = plan.Region(graph, name, {**options, "saved": kernel})
        except CompileError as error:
            log.info("a loaded artifact is not used: %s", error)
            graph = plan.Graph()
            lowering.graph.emit(graph)
    region = plan.Region(graph, name, options) if region is None else region
    if portable:
        saved.record(key, saved.of_region(told, name, options, region))
    origin = "taken from the cache" if region.from_cache else "compiled"
    title, _, number = name.removeprefix("ark::").rpartition(" ")
    log.info("%s, piece %s: planned, and its kernel %s, in %.3f s", title, number, origin, time.perf_counter() - begin)
    return region


def said_to_planner(
    lowering: Lowering, name: str, threads: int, cache: str, multi_step: bool = False
) -> tuple[saved.Told, str, dict[str, Any]]:
    """What a region is planned from: its graph, name and options."""
    told = saved.Told()
    lowering.graph.emit(told)
    device = lowering.device.index if lowering.device.type == "cuda" else -1
    record = costs.of_gpu(device, lowering.graph) if device >= 0 else _cost_files.Record()
    options = {
        "threads": threads,
        "device": device,
        "groups": lowering.graph.groups,
        "multi_step": multi_step,
        "cache": cache,
        "caches": costs.of_caches(record),
        "measured_costs": costs.are_measured(),
        "costs": dict(record.costs),
        "costs_from": record.told,
        "dump_passes": env.read().dump_passes,
    }
    return told, name, options


def plan_for(lowering: Lowering, target: str, cache: str = "auto") -> str:
    """The region's plan for another target, for inspection: JSON and a drawing."""
    from ark_torch import _C

    graph = _C.plan.Graph()
    lowering.graph.emit(graph)
    return _C.plan.plan_for(graph, target, cache=cache)
