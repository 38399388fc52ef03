"""The benchmark's text output, with the columns of nccl-tests: size, count, type, redop, time, algbw, busbw, #wrong.

algbw is bytes / time; busbw is algbw times the operation's factor, which makes operations and numbers of ranks
comparable (2(n-1)/n for all_reduce). Each rival's time and its ratio to ours follow.
"""

from __future__ import annotations

from typing import Any

from . import goals
from .config import Config

Row = dict[str, Any]


def heading(operation: str, config: Config) -> str:
    ours, *rivals = [*config.backends, *(["mpi"] if config.mpi else [])]
    columns = f"{'size':>11} {'count':>10} {'type':>9} {'redop':>5} {ours + ' us':>10} {'+-%':>4}"
    columns += f" {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    columns += "".join(f" {rival + ' us':>10} {'ratio':>6}" for rival in rivals)
    if len(rivals) > 1:
        columns += f" {'best':>6}"
    columns += "  goal" if config.goals else ""
    return f"\n# {operation}, {config.world} ranks (GB/s; ratio: how many times as fast as the rival)\n{columns}"


def ratio_to(row: Row, rival: str) -> float | None:
    """The rival's time / ours; None if one of the two failed or did not run."""
    timings = list(row["timings"].values())
    theirs = row["timings"].get(rival)
    if not timings or theirs is None or timings[0]["error"] or theirs["error"]:
        return None
    return float(theirs["median"] / timings[0]["median"])


def show_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def rivals_of(row: Row) -> list[str]:
    return list(row["timings"])[1:]


def best_ratio(row: Row) -> float | None:
    """The ratio to the fastest rival."""
    ratios = [ratio for rival in rivals_of(row) if (ratio := ratio_to(row, rival)) is not None]
    return min(ratios, default=None)


def verdict(row: Row) -> str:
    """Goals apply to Gloo and float32; wrong results never meet them."""
    if row["dtype"] != "float32":
        return ""
    if next(iter(row["timings"].values()))["wrong"]:
        return "WRONG"
    return goals.verdict(row["operation"], row["ranks"], row["bytes"], ratio_to(row, "gloo"))


def row_line(row: Row, with_goals: bool = False) -> str:
    ours = next(iter(row["timings"].values()))
    head = f"{row['bytes']:>11} {row['count']:>10} {row['dtype']:>9} {row['redop'] or 'none':>5}"
    if ours["error"]:
        line = f"{head} failed: {ours['error']}"
    else:
        algbw = row["bytes"] / ours["median"] / 1e3
        spread = 100 * ours["spread"] / ours["median"]
        line = f"{head} {ours['median']:>10.2f} {spread:>4.0f} {algbw:>7.2f} {algbw * row['bus_factor']:>7.2f}"
        line += f" {ours['wrong']:>6}"
    notes = []
    for rival in rivals_of(row):
        theirs = row["timings"][rival]
        ratio = ratio_to(row, rival)
        time = "failed" if theirs["error"] else f"{theirs['median']:.2f}"
        line += f" {time:>10} {show_ratio(ratio):>6}"
        if theirs["error"]:
            notes.append(f"{rival}: {theirs['error']}")
        if theirs["wrong"]:
            notes.append(f"{rival}: {theirs['wrong']} wrong")
    if len(rivals_of(row)) > 1:
        line += f" {show_ratio(best_ratio(row)):>6}"
    line += f"  {verdict(row)}" if with_goals else ""
    return line + (f"  ({'; '.join(notes)})" if notes else "")


def overhead_line(overhead: dict[str, float], with_goals: bool = False) -> str:
    times = ", ".join(f"{backend} {time:.1f} us" for backend, time in overhead.items() if time > 0)
    line = f"\n# One all_reduce of 4 bytes: {times} (empty: a backend that does nothing)"
    ours = next(iter(overhead.values()))
    if not with_goals:
        return line
    return line + f"; goal {'met' if 0 < ours <= goals.OVERHEAD_US else 'MISSED'} <={goals.OVERHEAD_US:g} us"


def summary(rows: list[Row]) -> str:
    """The last lines of nccl-tests: the reference backend's wrong values and mean bus bandwidth."""
    timings = [(row, next(iter(row["timings"].values()))) for row in rows]
    wrong = sum(timing["wrong"] for _, timing in timings)
    failed = sum(bool(timing["error"]) for _, timing in timings)
    speeds = [
        row["bytes"] / t["median"] / 1e3 * row["bus_factor"] for row, t in timings if t["median"] and row["bytes"]
    ]
    mean = sum(speeds) / len(speeds) if speeds else 0.0
    state = "FAILED" if wrong or failed else "OK"
    failures = f", {failed} cases failed" if failed else ""
    return f"\n# Out of bounds values : {wrong} {state}{failures}\n# Avg bus bandwidth    : {mean:.4g} GB/s"


def goals_met(rows: list[Row]) -> str:
    """Lists how many goals were met, and which were missed."""
    verdicts = [text for row in rows if (text := verdict(row))]
    missed = [row for row in rows if verdict(row) and not verdict(row).startswith("met")]
    lines = [f"\n# Goals: {len(verdicts) - len(missed)} of {len(verdicts)} met"]
    for row in missed:
        reached = show_ratio(ratio_to(row, "gloo")) or "no ratio"
        lines.append(f"#   {row['operation']}, {row['ranks']} ranks, {row['bytes']} bytes: {reached} ({verdict(row)})")
    return "\n".join(lines)
