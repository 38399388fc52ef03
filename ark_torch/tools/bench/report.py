"""Writes a benchmark's results: a JSON file that also records where and how they were measured, and a picture."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ark_torch import __version__

from . import table

Row = dict[str, Any]


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def revision() -> str:
    """The commit of the measured source tree, with a + if files differ from it; "" outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def mpi_version() -> str:
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=10)
        return done.stdout.splitlines()[0] if done.stdout else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


def surroundings(command: str, mpi: bool = False) -> dict[str, Any]:
    """Machine, versions, date and command of a measurement, recorded before it starts."""
    versions = {"ark_torch": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if mpi:
        versions["mpi"] = mpi_version()
    return {
        "command": command,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": revision(),
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "kernel": platform.release().partition("-")[0],
            "vectors": torch.backends.cpu.get_cpu_capability(),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": versions,
        # Variables that affect ark: ARK_DISABLE, for example, would compare Gloo with itself.
        "environment": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(("ARK_", "TORCH_DIST"))
        },
    }


def shown_command(module: str) -> str:
    return " ".join(["python", *module.split(), *sys.argv[1:]])


def write_json(path: Path, about: dict[str, Any], rows: list[Row], **more: Any) -> None:
    """Writes one row per line, so that a new measurement gives a readable diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({**about, **more}, indent=1)
    lines = ",\n".join(" " + json.dumps(row) for row in rows)
    path.write_text(f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def draw(path: Path, about: dict[str, Any], rows: list[Row]) -> str:
    """Draws time and ratio by size, one row of plots per operation; returns the reason if it cannot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    rows = [row for row in rows if row["bytes"] > 0]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    worlds = sorted({row["ranks"] for row in rows})
    if not operations:
        return "no picture: nothing was measured that has a size"
    columns = len(worlds) + 1
    figure = Figure(figsize=(5 * columns, 3.2 * len(operations) + 0.6), layout="constrained")
    axes = figure.subplots(len(operations), columns, squeeze=False)
    for line, operation in enumerate(operations):
        ratios = axes[line][-1]
        for column, world in enumerate(worlds):
            chosen = [row for row in rows if row["operation"] == operation and row["ranks"] == world]
            draw_times(axes[line][column], chosen, f"{operation}, {world} ranks")
            for rival in dict.fromkeys(name for row in chosen for name in table.rivals_of(row)):
                points = [(row["bytes"], ratio) for row in chosen if (ratio := table.ratio_to(row, rival)) is not None]
                if points:
                    ratios.plot(*zip(*points, strict=True), marker=".", label=f"{rival}, {world} ranks")
        ratios.axhline(1, color="grey", linewidth=1)
        ratios.set(xscale="log", yscale="log", title=f"{operation}: times as fast as", xlabel="bytes")
        ratios.grid(alpha=0.3)
        ratios.legend(fontsize="small")
    machine, versions = about["machine"], about["versions"]
    text = f"{machine['cpu']}, {machine['cores']} cores, PyTorch {versions['torch']}, {about['date']}"
    figure.suptitle(text, fontsize="small")
    figure.savefig(path, dpi=80)
    return ""


def draw_times(axes: Any, rows: list[Row], title: str) -> None:
    for name in dict.fromkeys(name for row in rows for name in row["timings"]):
        good = [row for row in rows if name in row["timings"] and not row["timings"][name]["error"]]
        sizes = [row["bytes"] for row in good]
        timings = [row["timings"][name] for row in good]
        axes.errorbar(sizes, [t["median"] for t in timings], [t["spread"] for t in timings], marker=".", label=name)
    axes.set(xscale="log", yscale="log", title=title, xlabel="bytes", ylabel="us")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
