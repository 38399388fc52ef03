"""Formats the measurements of benchmarks/decode.py: a table and a picture, from the JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]


def table(about: dict[str, Any]) -> str:
    """Formats ark beside the best of Inductor's modes over each carrier."""
    machine, versions = about["machine"], about["versions"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, PyTorch {versions['torch']}; {about['date']}.",
        "",
        "| ranks x threads | dtype | position | ark, ms | Inductor, ms | eager, ms | times as fast as Inductor "
        "| error: ark / Inductor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in about["rows"]:
        times, errors = row["microseconds"], row["error"]
        inductor, eager = _best(row, "inductor"), _best(row, "eager")
        ark = [f"{times[name] / 1e3:.2f}" + (" (resident)" if name != "ark" else "") for name in _named(row, "ark")]
        rivals = ", ".join(f"{times[name] / 1e3:.2f}{_over(name)}" for name in inductor)
        ratios = ", ".join(f"{times[name] / times['ark']:.2f}" for name in inductor)
        lines.append(
            f"| {row['ranks']} x {row['threads']} | {row['dtype']} | {row['position']} | {', '.join(ark)} | {rivals} "
            f"| {', '.join(f'{times[name] / 1e3:.2f}{_over(name)}' for name in eager)} | {ratios} "
            f"| {errors['ark']:.1e} / {max(errors[name] for name in inductor):.1e} |"
        )
    return "\n".join(lines)


def _named(row: Row, prefix: str) -> list[str]:
    return [name for name in row["microseconds"] if name == prefix or name.startswith((prefix + " ", prefix + ","))]


def _over(name: str) -> str:
    carrier = name.partition(" over ")[2]
    return f" ({carrier})" if carrier else ""


def _best(row: Row, prefix: str) -> list[str]:
    """Returns the fastest contender of that name for each carrier."""
    best: dict[str, str] = {}
    for name in _named(row, prefix):
        carrier = _over(name)
        if carrier not in best or row["microseconds"][name] < row["microseconds"][best[carrier]]:
            best[carrier] = name
    return list(best.values())


def draw(about: dict[str, Any], path: Path) -> str:
    """Draws milliseconds per step by position, one panel per number of ranks. Returns the reason if there is no
    picture.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    cases: dict[tuple[int, str], list[Row]] = {}
    for row in about["rows"]:
        cases.setdefault((row["ranks"], row["dtype"]), []).append(row)
    if not cases:
        return "no picture: nothing was measured"
    figure = Figure(figsize=(5.5 * len(cases), 4.2), layout="constrained")
    for axes, ((ranks, dtype), rows) in zip(
        figure.subplots(1, len(cases), squeeze=False)[0], cases.items(), strict=True
    ):
        for name in rows[0]["microseconds"]:
            points = [(row["position"], row["microseconds"][name] / 1e3) for row in rows]
            style = {"color": "black", "linewidth": 2.2} if name.startswith("ark") else {"linewidth": 1.0}
            if "," in name:
                style["linestyle"] = "--"
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
        axes.set(
            title=f"{ranks} rank(s) of {rows[0]['threads']} thread(s), {dtype}", xlabel="position", ylabel="ms a step"
        )
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return ""
