"""Where the time of a step goes in a loop kernel: waits and work by phase, from the stamps of its tasks (ARK_TRACE).

    python benchmarks/loop_account.py [--model llama-1b] [--steps 12] [--device cuda] [--output FOLDER]

A phase is all stages of the same operators in the same module, whichever layer that is of. Of each: its tasks, how long
a worker (on a GPU a multiprocessor) works on them and waits before them in a step, how long one takes, and how long its
stages last, from the first task's begin to the last one's end, one stage after the other. What no task accounts for is
the way from one to the next. The step is that of median length; stamps make it somewhat longer than it is without.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import gpu_models
import real_sizes
import torch

from ark_torch import _C
from ark_torch.tools._trace_files import Step, merge, read, steps_of
from ark_torch.tools.bench import report

Row = dict[str, Any]


@torch.no_grad()
def traced(arguments: argparse.Namespace) -> tuple[list[Step], dict[str, Any]]:
    """The steps of a model's one region, without the first ones, and its plan."""
    with tempfile.TemporaryDirectory(prefix="ark-account-") as folder:
        path = Path(folder) / "trace.json"
        os.environ |= {"ARK_TRACE": str(path), "ARK_TRACE_MB": "1024"}
        case = gpu_models.case_of(arguments.model, None, arguments)
        call, told = gpu_models.of_ark(case.model)
        for _ in range(arguments.steps + 2):
            call(*case.inputs)
        gpu_models.finish(gpu_models.device_of(arguments))
        _C.plan.flush_trace()
        (region,) = told.regions
        return steps_of(merge([read(path)]))[2:], json.loads(region.plan_json)


def phase_of(stage: dict[str, Any]) -> str:
    """Its operators, and the first module that they are of, without the layer's number."""
    module = stage["origin"].partition(";")[0].partition(" (")[0]
    return f"{stage['name']} {re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', module)}"


def account(step: Step, plan: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Of the whole step, and of its phases in the order in which they begin; microseconds."""
    stages, tasks = plan["stages"], plan["tasks"]
    waited: dict[int, float] = defaultdict(float)  # a task's waits for several events are at the same time
    done: dict[int, list[Any]] = defaultdict(list)
    for one in step.slices:
        if one.kind == "wait":
            before = one.arguments["before_task"]
            waited[before] = max(waited[before], one.length)
        else:
            done[tasks[one.arguments["task"]]["stage"]].append(one)
    workers = len(plan["queues"])
    begin = min(one.begin for slices in done.values() for one in slices)
    length = max(one.end for slices in done.values() for one in slices) - begin
    phases: dict[str, Row] = {}
    for stage, slices in sorted(done.items(), key=lambda item: min(one.begin for one in item[1])):
        name = phase_of(stages[stage])
        row = phases.setdefault(name, {"phase": name, "stages": 0, "tasks": 0, "work": 0.0, "waits": 0.0, "lasts": 0.0})
        row["stages"] += 1
        row["tasks"] += len(slices)
        row["work"] += sum(one.length for one in slices) / workers
        row["waits"] += sum(waited[one.arguments["task"]] for one in slices) / workers
        row["lasts"] += max(one.end for one in slices) - min(one.begin for one in slices)
        row["longest"] = max(row.get("longest", 0.0), *(one.length for one in slices))
    rows = list(phases.values())
    for row in rows:
        row["task"] = row["work"] * workers / row["tasks"]
    whole: Row = {"length": length, "workers": workers, "tasks": len(tasks)}
    whole |= {name: sum(row[name] for row in rows) for name in ("work", "waits")}
    whole["between"] = length - whole["work"] - whole["waits"]
    return whole, rows


def table(whole: Row, rows: list[Row]) -> str:
    lines = [
        f"A step of {whole['length']:.0f} us, {whole['tasks']} tasks on {whole['workers']} workers. A worker works "
        f"{whole['work']:.0f} us, waits {whole['waits']:.0f} us, and is between tasks for {whole['between']:.0f} us.",
        "",
        "| phase | stages | tasks | work a worker, us | waits a worker | a task | longest | lasts |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = " | ".join(f"{row[name]:.1f}" for name in ("work", "waits", "task", "longest", "lasts"))
        lines.append(f"| {row['phase']} | {row['stages']} | {row['tasks']} | {times} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=real_sizes.MODELS, default="llama-1b")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", choices=("cuda", "as-cuda"), default="cuda", help="as-cuda: small, on the CPU")
    parser.add_argument("--output", type=Path, default=gpu_models.FOLDER / "results")
    arguments = parser.parse_args()
    about = gpu_models.surroundings(arguments)
    steps, plan = traced(arguments)
    steps.sort(key=lambda step: step.length)
    whole, rows = account(steps[len(steps) // 2], plan)
    path = arguments.output / f"loop_account_{gpu_models.slug(arguments.device)}.json"
    report.write_json(path, {**about, "model": arguments.model, "step": whole}, rows)
    print(table(whole, rows))
    print(f"# written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
