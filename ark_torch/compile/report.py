"""What became of a model's graphs, for `ark_torch.explain` and the log."""

from __future__ import annotations

import ast
import functools
import json
import linecache
import logging
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from ark_torch.compile import accesses, analysis

if TYPE_CHECKING:
    from ark_torch.compile.choice import Choice

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
        return f"{self.operator}: {self.reason} ({f'{self.module}, ' if self.module else ''}{place})"


def fallback_of(node: Node, reason: str) -> Fallback:
    return Fallback(name_of(node), reason, analysis.module_of(node), *analysis.source_of(node))


def name_of(node: Node) -> str:
    """The operator's name; AOTAutograd wraps others' operators that write their arguments (auto_functionalized)."""
    wrapped = node.args[0] if node.args and "auto_functionalized" in str(node.target) else None
    return str(wrapped if isinstance(wrapped, torch._ops.OpOverload) else node.target)


# Who may run a graph or a piece of one.
NAMES = {"ark": "ark", "inductor": "Inductor", "eager": "eager PyTorch"}


@dataclass
class PieceReport:
    """One piece of a graph, as run by ark. `runs_on` is "ark", "inductor" or "eager"."""

    name: str
    runs_on: str
    nodes: int
    operators: Counter[str]
    reason: str = ""
    region: Any = None  # _C.plan.Region, if one was compiled
    target_plan: str | None = None  # JSON of the plan for Report.target

    @property
    def plan_json(self) -> str:
        return str(self.region.json()) if self.region is not None else ""

    def __str__(self) -> str:
        common = ", ".join(f"{name} {count}" for name, count in self.operators.most_common(6))
        rarer = len(self.operators) - 6
        more = f" and {counted(rarer, 'other')}" if rarer > 0 else ""
        parts = [f"{counted(self.nodes, 'operator')} ({common}{more})"]
        if self.region is not None:
            parts.append(f"estimated {self.region.estimated_us:.1f} us (costs {self.region.costs})")
        why = f"; {self.reason}" if self.reason else ""
        planned = f"\n    {accesses.line(json.loads(self.plan_json))}" if self.region is not None else ""
        if self.target_plan is not None:
            planned += f"\n    {frame_text(self.target_plan)}"
        return f"{self.name} runs on {NAMES[self.runs_on]}: {', '.join(parts)}{why}{planned}"


@dataclass
class GraphReport:
    """One graph of torch._dynamo. `choice` is the measured decision who runs it; None: as its pieces say."""

    nodes: int = 0
    choice: Choice | None = None
    certain: str = ""  # why ark runs it without being measured, unless that is asked for
    pieces: list[PieceReport] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    whole: str = ""  # why the whole graph went elsewhere
    whole_on: str = "Inductor"
    forward: str = ""  # of a graph that trains: what its forward pass takes without gradients
    products: list[str] = field(default_factory=list)  # what became of collectives next to products
    weights: list[str] = field(default_factory=list)  # which products read quantized weights, and why others do not
    in_place: int = 0  # inputs that are updated in place
    target: str = ""  # additional target of plans, for inspection

    def __str__(self) -> str:
        if self.whole:
            told = [f"  {line}" for line in (self.forward, *self.products) if line]
            return "\n".join([f"the whole graph runs on {self.whole_on}: {self.whole}", *told])
        operators, pieces = counted(self.nodes, "operator"), counted(len(self.pieces), "piece")
        lines = [f"{operators} in {pieces}, {counted(self.in_place, 'input')} updated in place"]
        if self.certain:
            lines.append(f"  ark runs it, by default without being measured: {self.certain}")
        if self.choice is not None:
            as_ark = "" if self.choice.runs_on == "ark" else "; as ark would run it:"
            lines[0] += f"; runs on {NAMES[self.choice.runs_on]}, measured {self.choice}{as_ark}"
        lines += [f"  {piece}" for piece in self.pieces]
        lines += [f"  {line}" for line in (*self.products, *self.weights)]
        alike = Counter((f.operator, f.reason) for f in self.fallbacks)
        first = {(f.operator, f.reason): f for f in reversed(self.fallbacks)}
        lines += [
            f"  falls back{f', {count} times' if count > 1 else ''}: {first[key]}" for key, count in alike.most_common()
        ]
        return "\n".join(lines)


@dataclass
class Report:
    """All graphs of one model compiled so far."""

    graphs: list[GraphReport] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)  # torch._dynamo's reasons
    target: str = ""  # regions are also planned for this target
    notes: list[str] = field(default_factory=list)  # about the explained call

    @property
    def regions(self) -> list[PieceReport]:
        return [piece for graph in self.graphs for piece in graph.pieces if piece.region is not None]

    @property
    def fallbacks(self) -> list[Fallback]:
        return [fallback for graph in self.graphs for fallback in graph.fallbacks]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one self-contained HTML page: tables, and each region's schedule to zoom into. Raises
        OSError if the file cannot be written."""
        from ark_torch.compile import report_html

        Path(path).write_text(report_html.page(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        from ark_torch.compile import report_html

        return report_html.frame(self)

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was compiled (was the model compiled before, or is there nothing to compile?)"
        lines = [f"note: {note}" for note in self.notes]
        lines += [f"graph {i}: {graph}" for i, graph in enumerate(self.graphs)]
        lines += [f"graph break: {reason.splitlines()[0]}" for reason in self.graph_breaks if reason]
        return "\n".join(lines)


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def frame_text(plan_json: str) -> str:
    """One line about a plan for another target."""
    plan = json.loads(plan_json)
    frame, loader = plan["frame"], plan["frame"]["loader"]
    return (
        f"for {plan['target']['name']}: {frame['workers']} workers, {len(plan['tasks'])} tasks in {frame['phases']} "
        f"phases, estimated {plan['estimated_us']:.1f} us; loaded ahead {loader['bytes'] / 1e6:.2f} MB in "
        f"{loader['loads']} pages of at most {loader['page_bytes'] // 1024} KB, {loader['bytes_in_flight'] // 1024} KB "
        f"of a worker in flight; waits: {frame['waits']['packets']} for packets, "
        f"{frame['waits']['counters']} for counters; {accesses.line(plan)}"
    )


# Library functions that call the user's: mostly decorators.
_WRAPPERS = re.compile(r"_?(call_impl|fn|inner|wrapped_call_impl)|(decorate|wrap(ped|per)?)(_\w+)?|\w+_wrapper")


def title_of(graph_module: GraphModule) -> str:
    """A graph's name in profiles, timelines, errors and the log: class (or file) and function that were compiled, past
    decorators, then torch._dynamo's number of the compilation, as in PyTorch's own logs: "Llama.forward[0/0]"."""
    title = "graph"
    for node in graph_module.graph.nodes:
        called = _CALL.findall(node.meta.get("stack_trace") or "")
        if called:
            file, line, function = next((one for one in called if not _WRAPPERS.fullmatch(one[2])), called[0])
            title = f"{_class_at(file, int(line)) or Path(file).stem}.{function}"
            break
    compiling = torch._guards.CompileContext.current_compile_id()
    return title + (f"[{compiling}]" if compiling is not None else "")


_CALL = re.compile(r'^ *File "(.+)", line (\d+), in (.+?) *$', re.M)


def _class_at(file: str, line: int) -> str:
    """The innermost class around a line of a file; "" for none."""
    around = [(first, name) for first, last, name in _classes(file) if first <= line <= last]
    return max(around, default=(0, ""))[1]


@functools.lru_cache(32)
def _classes(file: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):  # for example a notebook's cell with magic commands
        return []
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return [(node.lineno, node.end_lineno or node.lineno, node.name) for node in classes]


def operators_of(nodes: list[Node]) -> Counter[str]:
    """Counts by name, without namespace ("aten.") and overload (".default")."""
    return Counter(_NAMESPACES.sub("", name_of(node)).partition(".")[0] for node in nodes)


_NAMESPACES = re.compile(r"^(aten|prims|_c10d_functional)\.")
