"""What became of a model's graphs, for `ark_torch.explain` and for the log."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ark_torch.compile import analysis

log = logging.getLogger("ark_torch.compile")


@dataclass(frozen=True)
class Fallback:
    """One operator that ark does not run."""

    operator: str
    reason: str
    module: str
    file: str
    line: int

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "no source line recorded"
        return f"{self.operator}: {self.reason} ({self.module or 'no module'}, {place})"


def fallback_of(node: Node, reason: str) -> Fallback:
    module = ""
    for name, _ in (node.meta.get("nn_module_stack") or {}).values():
        module = name
    return Fallback(str(node.target), reason, module, *analysis.source_of(node))


@dataclass
class PieceReport:
    """One piece of a graph. `runs_on` is "ark", "inductor" or "eager"; while "measure" no call has decided yet."""

    name: str
    runs_on: str
    nodes: int
    operators: Counter[str]
    reason: str = ""
    region: Any = None  # _C.plan.Region, where one was compiled
    ark_us: float = 0.0
    inductor_us: float = 0.0
    target_plan: tuple[str, str] | None = None  # JSON and drawing of the plan for Report.target

    @property
    def plan_json(self) -> str:
        return str(self.region.json()) if self.region is not None else ""

    def __str__(self) -> str:
        common = ", ".join(f"{name} {count}" for name, count in self.operators.most_common(6))
        times = f", ark {self.ark_us:.1f} us, inductor {self.inductor_us:.1f} us" if self.ark_us else ""
        estimate = ""
        if self.region is not None:
            estimate = f", estimated {self.region.estimated_us:.1f} us (costs {self.region.costs})"
        why = f"; {self.reason}" if self.reason else ""
        planned = f"\n    {frame_text(self.target_plan[0])}" if self.target_plan is not None else ""
        return f"{self.name}: {self.runs_on}, {self.nodes} operators ({common}){estimate}{times}{why}{planned}"


@dataclass
class GraphReport:
    """One graph of torch._dynamo."""

    nodes: int = 0
    pieces: list[PieceReport] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    whole: str = ""  # why the whole graph went elsewhere
    whole_on: str = "Inductor"
    in_place: int = 0  # inputs that are updated where they lie
    target: str = ""  # what plans are made for besides, to be looked at

    def __str__(self) -> str:
        if self.whole:
            return f"the whole graph runs on {self.whole_on}: {self.whole}"
        lines = [f"{self.nodes} operators, {len(self.pieces)} pieces, {self.in_place} inputs updated in place"]
        lines += [f"  {piece}" for piece in self.pieces]
        alike = Counter((f.operator, f.reason) for f in self.fallbacks)
        first = {(f.operator, f.reason): f for f in reversed(self.fallbacks)}
        lines += [f"  falls back, {count} times: {first[key]}" for key, count in alike.most_common()]
        return "\n".join(lines)


@dataclass
class Report:
    """All graphs of one model, as far as they have been compiled."""

    graphs: list[GraphReport] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)  # torch._dynamo's reasons
    target: str = ""  # regions are planned for it too

    @property
    def regions(self) -> list[PieceReport]:
        return [piece for graph in self.graphs for piece in graph.pieces if piece.region is not None]

    @property
    def fallbacks(self) -> list[Fallback]:
        return [fallback for graph in self.graphs for fallback in graph.fallbacks]

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was compiled (was the model compiled before, or is there nothing to compile?)"
        lines = [f"graph {i}: {graph}" for i, graph in enumerate(self.graphs)]
        lines += [f"graph break: {reason.splitlines()[0]}" for reason in self.graph_breaks if reason]
        return "\n".join(lines)


def frame_text(plan_json: str) -> str:
    """One line about a plan for another target."""
    plan = json.loads(plan_json)
    frame, loader = plan["frame"], plan["frame"]["loader"]
    return (
        f"for {plan['target']['name']}: {frame['workers']} workers, {len(plan['tasks'])} tasks in {frame['phases']} "
        f"phases, estimated {plan['estimated_us']:.1f} us; loaded ahead {loader['bytes'] / 1e6:.2f} MB in "
        f"{loader['loads']} pages of at most {loader['page_bytes'] // 1024} KB, {loader['bytes_in_flight'] // 1024} KB "
        f"of a worker in flight; waits: {frame['waits']['packets']} for packets, "
        f"{frame['waits']['counters']} for counters"
    )


def title_of(graph_module: GraphModule) -> str:
    """What regions are called in profiles, timelines and errors: file and function that were compiled, and which of
    torch._dynamo's graphs it is: "ark::model.forward[0/0]", to which the number of the piece comes."""
    function = "graph"
    for node in graph_module.graph.nodes:
        frames = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
        outermost = next((line for line in frames if line.startswith('File "')), "")
        if ", in " in outermost:
            file = outermost[6:].partition('"')[0].rpartition("/")[2].removesuffix(".py")
            function = f"{file}.{outermost.rpartition(', in ')[2]}"
            break
    compiling = torch._guards.CompileContext.current_compile_id()
    return f"ark::{function}" + (f"[{compiling}]" if compiling is not None else "")


def operators_of(nodes: list[Node]) -> Counter[str]:
    """By name, without namespace ("aten.") and overload (".default")."""
    return Counter(_NAMESPACES.sub("", str(node.target)).partition(".")[0] for node in nodes)


_NAMESPACES = re.compile(r"^(aten|prims|_c10d_functional)\.")
