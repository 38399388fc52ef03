"""Formats the measurements of benchmarks/training.py: a line per contender, a table and the paper's two pictures.

The rows of the JSON are the only input, so that tables and pictures can be made again on any machine.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import on_gpus
from gpu_ranks import Rank, Row
from training_subject import FREE

HEADING = (
    f"{'model':11} {'modules':11} {'mode':8} {'ranks':>5} {'contender':14} {'step ms':>8} {'cost ms':>8} {'cost':>6} "
    f"{'faster':>7} {'during':>7} {'alone GB/s':>10} {'alike':>5} {'difference':>10}"
)


def line(row: Row) -> str:
    rates = [f"{row[key]:.0f}" if key in row else "-" for key in ("during_gbps", "alone_gbps")]
    checks = [str(row.get("ranks_alike", "-")), f"{row['difference']:.0e}" if "difference" in row else "-"]
    return (
        f"{row['model']:11} {row['implementation']:11} {row['mode']:8} {row['ranks']:>5} {row['contender']:14} "
        f"{row['step_ms']:>8.2f} {row['cost_ms']:>8.2f} {row['cost']:>6.1%} {row['faster']:>7.3f} {rates[0]:>7} "
        f"{rates[1]:>10} {checks[0]:>5} {checks[1]:>10}"
    )


def tell(rank: Rank, rows: list[Row], about: Row, began: float) -> None:
    step = {row["contender"]: row["step_ms"] for row in rows}
    rival = step.get("nccl", step.get("gloo", 0.0))
    for row in rows:
        row.update(about, ranks=rank.ranks, cost_ms=row["step_ms"] - step[FREE])
        row["cost"] = row["cost_ms"] / step[FREE]
        row["faster"] = rival / row["step_ms"]
        rank.write(row)
        rank.say(line(row))
    rank.say(f"# {about['model']} {about['mode']}: {time.monotonic() - began:.0f} s")


def table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance.md."""
    peaks = any("peak_gb" in row for row in about["rows"])
    lines = [
        on_gpus.origin(about),
        "",
        "| model | modules | mode | ranks | | step, ms | communication costs | times as fast as NCCL |"
        + (" peak of memory, GB |" if peaks else ""),
        "| --- | --- | --- | --- | --- | --- | --- | --- |" + (" --- |" if peaks else ""),
    ]
    for row in about["rows"]:
        lines.append(
            f"| {row['model']} | {row['implementation']} | {row['mode']} | {row['ranks']} | {row['contender']} "
            f"| {row['step_ms']:.1f} | {row['cost']:.1%} | {row['faster']:.2f} |"
            + (f" {row['peak_gb']:.1f} |" if "peak_gb" in row else " |" if peaks else "")
        )
    return "\n".join(lines)


def draw(about: dict[str, Any], path: Path) -> str:
    """Draws the paper's two pictures. Returns the reason if there is no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    cases: dict[str, list[Row]] = {}
    for row in about["rows"]:
        key = f"{row['model']}\n{row['mode']}, {row['ranks']} GPUs"
        cases.setdefault(key if row["implementation"] == "plain" else f"{key}, HF", []).append(row)
    if not cases:
        return "no picture: nothing was measured"
    contenders = list(dict.fromkeys(row["contender"] for row in about["rows"]))
    figure = Figure(figsize=(max(8.0, 2.4 * len(cases) + 3), 7.5), layout="constrained")
    steps, rates = figure.subplots(2, 1)
    width = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        places, times, during, alone = [], [], [], []
        for number, rows in enumerate(cases.values()):
            for row in rows:
                if row["contender"] == contender:
                    places.append(number + (index - (len(contenders) - 1) / 2) * width)
                    times.append(row["step_ms"])
                    during.append(row.get("during_gbps", 0.0))
                    alone.append(row.get("alone_gbps", 0.0))
        color = f"C{index}"
        steps.bar(places, times, width * 0.92, color=color, label=contender)
        if any(alone):
            rates.bar(places, alone, width * 0.92, color=color, alpha=0.3)
            rates.bar(places, during, width * 0.6, color=color, label=contender)
    steps.set(title="A training step, ms (free: without communication)", ylabel="ms")
    rates.set(title="All-reduce during training (full) and alone (pale)", ylabel="GB/s on the bus")
    for axes in (steps, rates):
        axes.set_xticks(range(len(cases)), list(cases), fontsize="small")
        axes.grid(axis="y", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(on_gpus.origin(about), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return ""
