"""Runs the pieces that ark does not: with Inductor, or node by node (fx.Interpreter) where Inductor cannot.

This is the only file that knows Inductor. compile_fx_inner takes ATen graphs without a second AOTAutograd; two parts of
its environment must be provided here: what it records about output strides in the tracing context, and that its results
keep the graph's strides, since the next piece was compiled for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from ark_torch.compile import analysis, decompositions, eager_values
from ark_torch.compile.report import GraphReport, log

Boxed = Callable[[list[Any]], Sequence[Any]]


def whole(
    graph_module: GraphModule, example_inputs: Sequence[Any], report: GraphReport | None = None
) -> Callable[..., Any]:
    """Compiles a graph of torch._dynamo like backend="inductor", except for eager_values. May modify the graph.
    `report`: is told what became of collectives."""
    from torch._inductor.compile_fx import compile_fx

    graphs = [one for one in graph_module.modules() if isinstance(one, GraphModule)]
    table = eager_values.table() if any(eager_values.concerns(one.graph) for one in graphs) else None
    try:
        compiled: Any = compile_fx(
            graph_module, list(example_inputs), config_patches=_patches(report), decompositions=table
        )
    except eager_values.Eager:
        return graph_module.forward  # type: ignore[no-any-return]
    return compiled  # type: ignore[no-any-return]


def copy_of(graph_module: GraphModule) -> GraphModule:
    """A copy of a graph of torch._dynamo for someone who modifies it, as Inductor does."""
    copied = GraphModule(graph_module, _copy(graph_module.graph), graph_module.__class__.__name__)
    copied.meta.update(graph_module.meta)
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(graph_module, name):
            setattr(copied, name, getattr(graph_module, name))
    for node, copy in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(node, "_dynamo_source"):  # not part of a node's meta (PyTorch issue 141640)
            copy._dynamo_source = node._dynamo_source
    return copied


def _patches(report: GraphReport | None) -> dict[str, Any] | None:
    """Patches that fuse products and collectives in Inductor's graphs too, including those of backward passes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from ark_torch.compile.inductor_pass import FuseCollectives, FuseJoint

    return {"joint_custom_pre_pass": FuseJoint(), "post_grad_custom_pre_pass": FuseCollectives(report)}


@contextlib.contextmanager
def between_calls() -> Iterator[bool]:
    """The environment in which torch._dynamo compiles, for compilation at another time. False: another thread compiles,
    so now is not possible."""
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.utils import preserve_rng_state
    from torch.utils._python_dispatch import _disable_current_modes

    if not compile_lock.acquire(blocking=False):
        yield False
        return
    try:
        session = getattr(torch.compiler, "_compile_session_context", contextlib.nullcontext)  # PyTorch 2.11 has none
        with session(), _disable_current_modes(), torch.inference_mode(False), preserve_rng_state():
            yield True
    finally:
        compile_lock.release()


def extract(owner: GraphModule, nodes: Sequence[Node], results: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """A graph of `nodes`, with the views and constants that they need, and the nodes that are its arguments."""
    graph = Graph()
    made: dict[Node, Node] = {}
    arguments: list[Node] = []
    inside = frozenset(nodes)
    # Placeholders come first, so external nodes are found before anything is copied.
    for root in roots_read(nodes, results):
        if root.op != "get_attr" and analysis.producer_of(root) not in inside and not analysis.is_constant(root):
            made[root] = graph.placeholder(root.name)
            made[root].meta = dict(root.meta)
            arguments.append(root)

    def copy_of(node: Node) -> Node:
        if node not in inside and not analysis.is_free(node):
            # An in-place update by another piece: here it is the tensor that was written.
            base = analysis.base_of(node)
            if base is not None:
                return copy_of(base)
        if node not in made:
            made[node] = graph.node_copy(node, copy_of)
        return made[node]

    for node in nodes:
        copy_of(node)
    output = graph.output(tuple(copy_of(node) for node in results))
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    return GraphModule(owner, graph), arguments


def roots_read(nodes: Sequence[Node], results: Sequence[Node] = ()) -> list[Node]:
    """The roots of all arguments, each once, in order."""
    roots = {root: None for node in nodes for root in analysis.roots_read(node)}
    for node in results:
        roots.setdefault(analysis.root_of(node))
    return list(roots)


@contextlib.contextmanager
def _surroundings(fake_mode: Any) -> Iterator[None]:
    from torch._inductor.virtualized import V

    context = torch._guards.TracingContext.try_get()
    strides = patch.object(context, "output_strides", None) if context is not None else contextlib.nullcontext()
    with strides, V.set_fake_mode(fake_mode) if fake_mode is not None else contextlib.nullcontext():
        yield


def compile_piece(piece: GraphModule, static: Sequence[int]) -> tuple[Boxed, str]:
    """The piece as a function of a list, and what runs it: "inductor" or "eager"."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    fakes = [node.meta.get("val") for node in piece.graph.nodes if node.op == "placeholder"]
    computing = [node for node in piece.graph.nodes if not analysis.is_free(node)]
    if computing:
        try:
            with _surroundings(torch._guards.detect_fake_mode(fakes)), torch.no_grad():
                copied = GraphModule(piece, _copy(piece.graph))
                decompositions.for_inductor(copied.graph)
                if not any(analysis.written_roots(node) for node in computing):
                    joint_graph_passes(copied)
                code = compile_fx_inner(copied, fakes, static_input_idxs=list(static), is_inference=True)
                return lambda inputs: code(list(inputs)), "inductor"
        except Exception as error:
            log.warning("Inductor does not compile a piece (%s); it runs eagerly.", first_line(error))
    return interpreted(piece), "eager"


def interpreted(piece: GraphModule) -> Boxed:
    """Runs the piece node by node."""
    interpreter = Interpreter(piece)

    def run(inputs: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            return interpreter.run(*inputs)  # type: ignore[no-any-return]

    return run


def keep_apart(run: Boxed, written: Sequence[int]) -> Boxed:
    """Inductor may return part of an argument where the graph has a copy of it. For arguments that the graph writes
    somewhere (at positions `written`) this copies it again, since a later write would change the result."""

    def apart(inputs: list[Any]) -> Sequence[Any]:
        held = {inputs[i].untyped_storage()._cdata for i in written}
        results = run(inputs)
        return [
            result.clone() if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata in held else result
            for result in results
        ]

    return apart if written else run


def _copy(graph: Graph) -> Graph:
    """Copies a graph for passes to rewrite; Interpreter may need the original."""
    copied = Graph()
    nodes: dict[Node, Node] = {}
    for node in graph.nodes:
        nodes[node] = copied.node_copy(node, lambda n: nodes[n])
    return copied


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
