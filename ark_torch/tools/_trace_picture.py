"""Draws one step of a timeline as SVG: one lane per worker, tasks colored by kind, waits in gray.

A CPU's few workers have labels, and their tasks names; a GPU's hundreds of workers are thin lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from ark_torch.tools._trace_files import Slice, Step

WIDTH, MARGIN, TOP, LANE = 1400, 110, 58, 34
THIN, MANY = 5, 40  # height of a lane if there are more lanes than this
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
WAIT = "#d3d3d3"


def estimated(plan: dict[str, Any]) -> Step:
    """The step that a plan (its JSON) expects, if all tasks take their estimated time."""
    slices = []
    for task in plan["tasks"]:
        stage = plan["stages"][task["stage"]]
        waits = [plan["events"][event].get("of", "nothing") for event in task["waits"]]
        tile = f"{task['begin']} to {task['end']}" + (", a replica" if task.get("replica") else "")
        tile += f", waits for {'; '.join(waits)}" if waits else ""
        arguments = {"origin": stage["origin"], "tile": tile}
        slices.append(Slice(stage["name"], stage["kind"], task["begin_us"], task["cost_us"], task["worker"], arguments))
    return Step(plan["target"]["name"], 0, 0.0, max((one.end for one in slices), default=1e-3), 0, slices)


def _colours(slices: Sequence[Slice]) -> dict[str, str]:
    kinds = dict.fromkeys(one.kind for one in slices if one.kind != "wait")
    return {kind: COLOURS[min(i, len(COLOURS) - 1)] for i, kind in enumerate(kinds)} | {"wait": WAIT}


def _slice(one: Slice, x: float, y: float, width: float, lane: int, colour: str) -> str:
    told = f"{one.name}: {one.length:.2f} us"
    if origin := one.arguments.get("origin"):
        told += f", {origin}, {one.arguments['tile']}"
    text = (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" height="{lane - 1 - lane // 6}" fill="{colour}" '
        f'stroke="white" stroke-width="{0.3 if lane == LANE else 0.1}"><title>{escape(told)}</title></rect>\n'
    )
    room = int(width / 5.6) if lane == LANE else 0
    if room >= 5:
        name = one.name if len(one.name) <= room else one.name[: room - 1] + "…"
        text += (
            f'<text x="{x + 3:.1f}" y="{y + 17:.1f}" font-size="10" pointer-events="none" '
            f'fill="{"#555" if one.kind == "wait" else "white"}">{escape(name)}</text>\n'
        )
    return text


def draw(steps: Sequence[Step], most_us: float = float("inf")) -> str:
    """Steps of several ranks share one axis, from the first task to the last step's end, or for at most `most_us`."""
    begin = min((one.begin for step in steps for one in step.slices), default=steps[0].begin)
    last = max(step.end for step in steps)
    end = min(last, begin + most_us)
    scale = (WIDTH - MARGIN - 12) / max(end - begin, 1e-3)
    colours = _colours([one for step in steps for one in step.slices])
    lanes = sum(step.workers for step in steps)
    lane = LANE if lanes <= MANY else THIN
    height = TOP + lanes * lane + 28
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
    ]
    tasks = sum(one.kind != "wait" for step in steps for one in step.slices)
    title = f"{steps[0].region}: one step, {last - begin:.0f} us, {tasks} tasks"
    title += f"; its first {end - begin:.0f} us" if end < last else ""
    out.append(f'<text x="8" y="18" font-size="14">{escape(title)}</text>\n')
    x = float(MARGIN)
    for kind, colour in colours.items():
        out.append(f'<rect x="{x:.0f}" y="30" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 16:.0f}" y="40">{escape(kind)}</text>\n')
        x += 40 + 7 * len(kind)
    y = TOP
    several = len({step.rank for step in steps}) > 1
    for step in steps:
        by_worker: dict[int, list[Slice]] = defaultdict(list)
        for one in step.slices:
            by_worker[one.worker].append(one)
        for worker in range(step.workers):
            if lane == LANE or worker % 20 == 0:
                label = f"rank {step.rank}, worker {worker}" if several else f"worker {worker}"
                out.append(f'<text x="6" y="{y + lane // 2 + 1}">{label}</text>\n')
            for one in by_worker[worker]:
                width = (min(one.end, end) - one.begin) * scale
                if width > 0:
                    out.append(_slice(one, MARGIN + (one.begin - begin) * scale, y, width, lane, colours[one.kind]))
            y += lane
    for tick in range(11):
        x = MARGIN + (WIDTH - MARGIN - 12) * tick / 10
        out.append(f'<text x="{x:.0f}" y="{y + 16}" text-anchor="middle">{(end - begin) * tick / 10:.0f} us</text>\n')
    return "".join([*out, "</svg>\n"])
