"""ark's version of one graph: captured and lowered while torch._dynamo compiles, compiled and assembled later.

AOTAutograd (for inference, with Inductor's decompositions) makes the ATen graph. Its functional updates of inputs
become in-place writes again before the graph is cut into regions. build.py compiles the pieces.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ark_torch.compile import (
    aliasing,
    analysis,
    autograd_cache,
    decompositions,
    dense,
    embeddings,
    experts,
    fast_call,
    in_place,
    inductor_fallback,
    low_bits,
    products,
    progress,
    regions,
    softmax_attention,
    workers,
)
from ark_torch.compile.build import Builder, Launcher, NotOneRegion, static_inputs
from ark_torch.compile.eager_values import Eager
from ark_torch.compile.lowering import CPU, lower_whole, reason_against
from ark_torch.compile.operators import convolutions
from ark_torch.compile.operators.contractions import skips_positions
from ark_torch.compile.options import Options
from ark_torch.compile.report import Fallback, GraphReport, fallback_of, log, title_of
from ark_torch.errors import CompileError, UnsupportedGraph

if TYPE_CHECKING:
    from ark_torch.compile.ahead import AheadOfTime, Opened

TRAINS = (
    "it was traced with gradients on, and ark compiles inference only; if this model is not trained, call it under "
    "torch.no_grad() or torch.inference_mode() and ark's kernels run it"
)
# No guard ensures this layout for later calls, neither here nor in Inductor's graphs.
MERGED = "arguments overlap, and one of them is written"  # AOTAutograd merged them into one argument
SKIPS = 'options={"nan": "exact"}, and ark\'s attention passes over what its mask leaves out'


def device_of_inputs(inputs: Sequence[Any]) -> torch.device:
    return next((x.device for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda), CPU)


class WholeGraph(Exception):
    """The graph goes to Inductor unchanged; the message says why."""


class Captured:
    """A graph with regions that ark runs. Any thread may call compile_regions(); the others need a thread on which
    torch._dynamo may compile: assemble_next() until to_assemble() is 0, then finish()."""

    def __init__(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        report: GraphReport,
        launcher: Launcher | None = None,
        ahead: bool = False,
        keeps: Callable[[Captured], bool] | None = None,
    ) -> None:
        """Captures and lowers the graph. Raises Eager or WholeGraph if it is not for ark, and errors that `options`
        asks for. `ahead`: compiles at once, to be saved; raises NotOneRegion if that is not possible. `keeps`: whether
        ark is to run it in any case, so that it is compiled at once, and kept for later processes if it can be; with
        it the graph may also come from there."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.exc import RestartAnalysis

        self._options, self._title = options, title_of(graph_module)
        self._builder: Builder | None = None
        self._assembled: Callable[..., Any] = self._not_yet
        self._loaded: AheadOfTime | None = None
        self._complete = False  # compile_regions() has nothing left to do
        self.collectives: list[Node] = []
        self.on_gpus_alone = False  # no tensor of the graph is elsewhere, numbers apart
        self.exchanged_rows = 0
        way: list[fast_call.Way] = []
        threads = workers.count(options.threads, device_of_inputs(example_inputs))

        def trains(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            raise WholeGraph(TRAINS)

        def infers(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if len(inputs) < len(example_inputs):
                raise Eager(MERGED)
            with self.our_mistakes():
                self._builder = cut(graph, options, report, launcher)
                self._builder.lower()
            self.collectives = [node for node in graph.graph.nodes if _is_collective(node)]
            self.on_gpus_alone = all(map(_is_on_gpu, graph.graph.nodes))
            self.exchanged_rows = max(map(_exchanged_rows, graph.graph.nodes), default=0)
            way.append(fast_call.Way(inputs))
            if ahead:
                with self.our_mistakes():
                    self._made.compile_regions()
                    return self._made.ahead_of_time()  # type: ignore[no-any-return]
            if kept is not None:
                whole = self._to_be_kept(way[0], example_inputs) if keeps is not None and keeps(self) else None
                if whole is not None:
                    return whole
                autograd_cache.not_kept()
            return self._run

        kept: Opened | None = None
        try:
            with contextlib.ExitStack() as stack:
                compilers: list[Any] = [trains, infers]
                if keeps is not None and autograd_cache.usable(example_inputs):
                    kept = stack.enter_context(autograd_cache.opened(self._title, options, threads, example_inputs))
                if kept is not None:
                    compilers = [autograd_cache.serializable(one) for one in compilers]
                self._call: Callable[..., Any] = aot_autograd(
                    fw_compiler=compilers[0],
                    inference_compiler=compilers[1],
                    decompositions=decompositions.table(),
                    keep_inference_input_mutations=True,
                )(graph_module, example_inputs)
        except (
            WholeGraph,
            Eager,
            UnsupportedGraph,
            CompileError,
            NotOneRegion,
            RestartAnalysis,
        ):  # the last is Dynamo's own way of retrying
            raise
        except Exception as error:
            # An error in AOTAutograd stops Inductor too; users get the error that Inductor raises, which they may know.
            log.debug("capture failed", exc_info=True)
            raise WholeGraph(f"it could not be captured ({inductor_fallback.first_line(error)})") from error
        if ahead:
            return
        if kept is not None and kept.found is not None and self._builder is None:
            self._loaded = kept.found
            log.info("%s is taken whole from AOTAutograd's cache", self._title)
            self._assembled, self._complete = self._loaded.run or self._not_yet, True
            self._is_open, self.written = self._loaded.is_open, self._loaded.written
        else:
            self._is_open = fast_call.is_open(way, example_inputs)
            self.written = aliasing.written(way, example_inputs)
        if launcher is None:
            self._call = aliasing.around(
                self._call, graph_module.forward, self.written, example_inputs, options.fallback
            )

    def saveable(self) -> Any:
        """What compiling ahead of time returns to PyTorch."""
        from ark_torch.compile import ahead

        return ahead.callable_of(self._call)

    def certain(self) -> str:
        return self._made.certain() if self._loaded is None else self._loaded.certain

    def compile_regions(self, stopped: Callable[[], bool] = lambda: False) -> None:
        if self._complete:
            return
        with self.our_mistakes(stopped):
            self._made.compile_regions(stopped)

    def _to_be_kept(self, way: fast_call.Way, example_inputs: Sequence[Any]) -> AheadOfTime | None:
        """Compiles the graph, which ark runs in any case. Returns what AOTAutograd's cache takes, if it can be kept."""
        with progress.shown(f"compiling ark's regions of {self._title}"), self.our_mistakes():
            self._made.compile_regions()
        self._complete = True
        try:
            whole: AheadOfTime = self._made.ahead_of_time()
        except Exception as reason:  # also where its library cannot be read: the graph runs all the same
            log.info("%s is not kept in AOTAutograd's cache: %s", self._title, inductor_fallback.first_line(reason))
            return None
        whole.certain = self._made.certain()
        whole.is_open, whole.written = fast_call.is_open([way], example_inputs), aliasing.written([way], example_inputs)
        return whole

    def to_assemble(self) -> int:
        return self._made.to_assemble() if self._loaded is None else 0

    def assemble_next(self) -> None:
        with self.our_mistakes():
            self._made.assemble_next()

    def finish(self) -> Callable[..., Any]:
        """The function that takes the graph's arguments."""
        if self._loaded is None:
            with self.our_mistakes():
                self._assembled = self._made.assemble()
        self._builder = None
        return fast_call.around(self._call, self._assembled, self._is_open)

    @property
    def _made(self) -> Builder:
        assert self._builder is not None
        return self._builder

    def _run(self, arguments: list[Any]) -> Any:
        return self._assembled(arguments)

    _run._boxed_call = True  # type: ignore[attr-defined]

    @staticmethod
    def _not_yet(arguments: list[Any]) -> Any:
        raise AssertionError("a graph is called before it is assembled")

    @contextlib.contextmanager
    def our_mistakes(self, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Handles defects of ark, and compiler errors with fallback=False."""
        try:
            yield
        except (WholeGraph, Eager, UnsupportedGraph, NotOneRegion):
            raise
        except Exception as error:
            if stopped():
                raise
            told = inductor_fallback.first_line(error)
            if not self._options.fallback:
                if isinstance(error, CompileError):
                    raise
                raise UnsupportedGraph(f"ark does not compile a graph: {told}") from error
            log.warning("%s: ark fails on it, and it goes to Inductor: %s", self._title, told, exc_info=True)
            raise WholeGraph(f"ark failed on it ({told})") from error


def _is_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", "") in ("_c10d_functional", "_c10d_functional_autograd", "c10d", "ark")


def _exchanged_rows(node: Node) -> int:
    """Rows of what a collective gives that has the same shape on all ranks; 0 for other nodes."""
    value = node.meta.get("val")
    if not _is_collective(node) or not isinstance(value, torch.Tensor) or value.dim() < 2 or value.numel() == 0:
        return 0
    if not any(kind in str(node.target) for kind in ("all_reduce", "all_gather", "reduce_scatter")):
        return 0
    return int(value.numel() // value.shape[-1])


@functools.cache
def say_once(text: str) -> None:
    log.warning("A graph runs on Inductor, not on ark: %s. (Said once.)", text)


def exchanges(graph_module: GraphModule) -> bool:
    """Whether a graph of torch._dynamo has an all-to-all. A mixture of experts reads its sizes from tensors."""
    return any("all_to_all" in str(node.target) for node in graph_module.graph.nodes)


def check_static(graph_module: GraphModule, kept_as: str = "val") -> None:
    """Raises WholeGraph if a size is symbolic. `kept_as`: the meta key of nodes' values."""
    for node in graph_module.graph.nodes:
        value = node.meta.get(kept_as)
        symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and any(not isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))
        )
        if symbolic:
            shown = list(value.shape) if isinstance(value, torch.Tensor) else value
            raise WholeGraph(
                f"sizes are symbolic ({node.name} is {shown}): "
                "ark compiles fixed sizes; torch.compile(dynamic=False) makes a kernel for each size"
            )


def device_of(nodes: Iterable[Node]) -> torch.device:
    """The device of the graph's regions: the GPU that has most results, if it can run them, else the CPU."""
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
        say_once(f"its GPU's driver is not one that loop kernels can use ({problem.splitlines()[0].rstrip('.')})")
        return False
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        say_once(f"its GPU has compute capability {major}.{minor}, and loop kernels need 8.0")
        return False
    return True


def cut(graph_module: GraphModule, options: Options, report: GraphReport, launcher: Launcher | None = None) -> Builder:
    """Cuts a functional ATen graph into pieces, and returns their builder."""
    if options.fallback and launcher is None:
        foretold = _foretold(graph_module, report.target)
        # What remains of these in a graph may be static even if the graph was not: counts of routed rows are symbols.
        report.products = experts.fuse(graph_module.graph)
        check_static(graph_module)
        report.products += [*products.fuse(graph_module.graph), *embeddings.fuse(graph_module.graph), *foretold]
        graph_module.recompile()
        for line in report.products:
            log.info("%s: %s", title_of(graph_module), line)
    check_static(graph_module)
    report.in_place = in_place.restore(graph_module)
    report.weights = low_bits.mark(
        graph_module.graph, static_inputs(graph_module), forced=options.choose == "ark" or not options.fallback
    )
    for line in report.weights:
        log.info("%s: %s", title_of(graph_module), line)
    needed = analysis.dependencies(graph_module)
    device = device_of(needed)
    if device.type == "cpu" and dense.rewrite(graph_module):
        needed = analysis.dependencies(graph_module)
    softmax_attention.mark(graph_module.graph, masked=options.nan != "exact")
    mutated = {root for node in needed for root in analysis.written_roots(node)}
    # views are computed on meta tensors, which need no fake mode and would be slow in one
    with unset_fake_temporarily():
        whole = lower_whole(list(needed), static_inputs(graph_module), mutated, device)
        reasons: dict[Node, str] = {}
        if whole is None:
            reasons = {node: why for node in needed if (why := reason_against(node, mutated, device)) is not None}
        if options.nan == "exact":
            reasons.update((node, SKIPS) for node in needed if skips_positions(node))
        if options.fallback and launcher is None and device.type == "cpu":
            left = {node: why for node in needed if node not in reasons and (why := convolutions.slower(node))}
            reasons.update(left)
    pieces, given = regions.cut(needed, lambda node: node not in reasons, options.minimum, analysis.waits(needed))
    report.nodes = len(needed)
    report.fallbacks = [fallback_of(node, reason) for node, reason in reasons.items()]
    for fallback in report.fallbacks:
        log.info("%s falls back on %s", title_of(graph_module), fallback)
    if not options.fallback and report.fallbacks and launcher is None:
        raise UnsupportedGraph(_forbidden(report.fallbacks))
    if not any(piece.ark for piece in pieces):
        raise WholeGraph(_nothing(report.fallbacks, given))
    if launcher is not None:
        _check_one_region(pieces, report.fallbacks)
    if len(pieces) > 1:
        whole = None
    return Builder(graph_module, pieces, given, mutated, options, report, launcher, device, whole)


def _is_on_gpu(node: Node) -> bool:
    tensor = analysis.tensor_of(node)
    return tensor is None or tensor.is_cuda or tensor.dim() == 0


def _foretold(graph_module: GraphModule, target: str) -> list[str]:
    from ark_torch.compile import inductor_pass  # it imports Inductor

    return inductor_pass.foretold(graph_module.graph, target) if target else []


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
