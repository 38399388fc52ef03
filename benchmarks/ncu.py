"""Runs a program under Nsight Compute and returns its kernels' metrics. For benchmarks that show causes."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def metrics_of(
    command: Sequence[str], metrics: Sequence[str], kernel: str, skip: int, count: int
) -> dict[str, float] | str:
    """Each metric's mean over `count` launches of kernels whose name matches, after `skip`; or why there is none.

    Caches keep their contents between launches, and clocks stay as they are, as in a program's own run.
    """
    program = shutil.which("ncu") or next(iter(map(str, Path("/usr/local").glob("cuda*/bin/ncu"))), None)
    if program is None:
        return "there is no ncu (Nsight Compute) on this machine's PATH"
    options = ["--metrics", ",".join(metrics), "--cache-control", "none", "--clock-control", "none", "--csv"]
    options += ["--kernel-name", f"regex:{kernel}", "--launch-skip", str(skip), "--launch-count", str(count)]
    done = subprocess.run([program, *options, *command], capture_output=True, text=True)
    if '"ID"' not in done.stdout:
        return f"exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
    values: dict[str, list[float]] = {}
    for line in csv.DictReader(io.StringIO(done.stdout[done.stdout.find('"ID"') :])):
        name = f"{line['Metric Name']} ({line['Metric Unit']})"
        values.setdefault(name, []).append(float(line["Metric Value"].replace(",", "")))
    return {name: sum(each) / len(each) for name, each in values.items()}
