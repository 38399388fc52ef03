"""A report of ark_torch.explain as one self-contained page: tables, and each region's schedule to zoom into.

The page loads nothing. The timelines' data is in the page as JSON, drawn by timeline_page.py's script.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from ark_torch._version import __version__
from ark_torch.compile import accesses
from ark_torch.compile.report import NAMES, counted
from ark_torch.compile.timeline_page import SCRIPT, STYLE

if TYPE_CHECKING:
    from ark_torch.compile.report import GraphReport, PieceReport, Report


def page(report: Report) -> str:
    """The whole document."""
    timelines: list[dict[str, Any]] = []
    body = "".join(_body(report, timelines))
    data = json.dumps(timelines, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>ark_torch: explain</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}"
        f'<script type="application/json" id="timelines">{data}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )


def frame(report: Report) -> str:
    """The page for a notebook, in a frame of its own, so that styles and names do not interfere."""
    document = escape(page(report), quote=True)
    return f'<iframe srcdoc="{document}" style="width:100%;height:640px;border:1px solid #ccc"></iframe>'


def _body(report: Report, timelines: list[dict[str, Any]]) -> Iterator[str]:
    yield f"<h1>torch.compile(backend=&quot;ark&quot;), explained</h1>\n<p>{escape(_summary(report))}</p>\n"
    for note in report.notes:
        yield f'<p class="note">{escape(note)}</p>\n'
    for number, graph in enumerate(report.graphs):
        yield f"<h2>Graph {number}</h2>\n"
        yield from _graph(graph)
        for piece in graph.pieces:
            if piece.region is not None:
                yield from _region(f"Graph {number}, {piece.name}", piece, timelines)
    if report.graph_breaks:
        yield "<h2>Graph breaks</h2>\n<ul>"
        yield from (f"<li>{escape(reason.splitlines()[0])}</li>" for reason in report.graph_breaks if reason)
        yield "</ul>\n"
    yield f"<footer>ark_torch {escape(__version__)}, PyTorch {escape(str(torch.__version__))}</footer>\n"


def _summary(report: Report) -> str:
    ours = sum(piece.nodes for graph in report.graphs for piece in graph.pieces if piece.runs_on == "ark")
    whole = sum(bool(graph.whole) for graph in report.graphs)
    parts = [counted(len(report.graphs), "graph"), counted(len(report.regions), "region")]
    parts.append(f"{ours} of {counted(sum(graph.nodes for graph in report.graphs), 'operator')} on ark")
    parts.append(f"{counted(len(report.fallbacks), 'operator')} that ark does not run")
    parts += [f"{counted(whole, 'graph')} not on ark at all"] if whole else []
    parts += [counted(len(report.graph_breaks), "graph break")] if report.graph_breaks else []
    return ", ".join(parts) + "."


def _graph(graph: GraphReport) -> Iterator[str]:
    if graph.whole:
        yield f"<p>The whole graph runs on {escape(graph.whole_on)}: {escape(graph.whole)}.</p>\n"
        return
    yield f"<p>{counted(graph.nodes, 'operator')}, {counted(graph.in_place, 'input')} updated in place.</p>\n"
    if (choice := graph.choice) is not None:
        would = "" if choice.runs_on == "ark" else " This is how ark would run it."
        yield f"<p>Runs on {NAMES[choice.runs_on]}: measured {escape(str(choice))}.{would}</p>\n"
    of_pieces = ("piece", "runs on", "operators", "estimated us", "why")
    yield _table(of_pieces, [_piece(piece) for piece in graph.pieces], "pieces")
    if graph.fallbacks:
        places = Counter(
            (f.operator, f.reason, f.module or "-", f"{f.file}:{f.line}" if f.file else "-") for f in graph.fallbacks
        )
        yield "<h3>What ark does not run</h3>\n"
        heads = ("times", "operator", "reason", "module", "source")
        yield _table(heads, [(str(count), *key) for key, count in places.most_common()], "fallbacks")


def _piece(piece: PieceReport) -> Sequence[str]:
    common = ", ".join(f"{name} {count}" for name, count in piece.operators.most_common(6))
    estimated = f"{piece.region.estimated_us:.1f}" if piece.region is not None else ""
    return (piece.name, NAMES[piece.runs_on], f"{piece.nodes} ({common})", estimated, piece.reason)


def _region(title: str, piece: PieceReport, timelines: list[dict[str, Any]]) -> Iterator[str]:
    plans = [("", piece.plan_json)]
    if piece.target_plan is not None:
        plans.append(("planned for ", piece.target_plan))
    for how, text in plans:
        plan = json.loads(text)
        target = plan["target"]["name"]
        yield f"<h3>{escape(title)}: {how}{escape(target)}</h3>\n<p>{escape(memory(plan))}</p>\n"
        heads = ("kind", "stages", "tasks", "MFLOP", "MB", "estimated us of all workers")
        yield _table(heads, [_shown(*row) for row in work_by_kind(plan)], "work")
        caches = ("operator", "operand", "access", "cache policy", "times", "MB", "MB until read again")
        yield f"<p>{escape(accesses.line(plan))}</p>\n"
        yield _table(caches, accesses.rows(plan), "caches")
        yield f'<div class="timeline" data-plan="{len(timelines)}"></div>\n'
        timelines.append(timeline(plan))


def memory(plan: dict[str, Any]) -> str:
    """One line about the plan's frame, and the memory of its temporaries."""
    workers, events = counted(len(plan["queues"]), "worker"), counted(len(plan["events"]), "event")
    return (
        f"{counted(len(plan['tasks']), 'task')} on {workers}, {events}, estimated "
        f"{plan['estimated_us']:.1f} us (costs {plan['target']['costs']}). Temporaries take "
        f"{plan['arena_bytes'] / 1024:.1f} KB, in eager PyTorch {plan['eager_peak_bytes'] / 1024:.1f} KB."
    )


def work_by_kind(plan: dict[str, Any]) -> list[tuple[str, int, int, float, float, float]]:
    """A row per kind of stage, costliest first: name, stages, tasks, MFLOP, MB, estimated microseconds."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    for stage in plan["stages"]:
        row = kinds[stage["name"]]
        amounts = (1, stage["tasks"], stage["flops"] / 1e6, stage["bytes"] / 1e6, stage["cost_us"])
        for column, amount in enumerate(amounts):
            row[column] += amount
    ordered = sorted(kinds.items(), key=lambda item: -item[1][4])
    return [(name, int(stages), int(tasks), *rest) for name, (stages, tasks, *rest) in ordered]  # type: ignore[misc]


def _shown(name: str, stages: int, tasks: int, mflop: float, megabytes: float, cost: float) -> Sequence[str]:
    return (name, str(stages), str(tasks), f"{mflop:.3f}", f"{megabytes:.3f}", f"{cost:.1f}")


def timeline(plan: dict[str, Any]) -> dict[str, Any]:
    """What the page's script draws: a task is [worker, begin us, length us, stage, first row, last row, waits for]."""
    events = [event.get("of", "") for event in plan["events"]]
    tasks = []
    for task in plan["tasks"]:
        waits = list(dict.fromkeys(events[event] for event in task["waits"]))
        begin, length = round(task["begin_us"], 4), round(task["cost_us"], 4)
        tasks.append([task["worker"], begin, length, task["stage"], task["begin"], task["end"], waits])
    return {
        "target": plan["target"]["name"],
        "workers": len(plan["queues"]),
        "stages": [[stage["name"], stage["kind"], stage["origin"]] for stage in plan["stages"]],
        "tasks": tasks,
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>\n'
