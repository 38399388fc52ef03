"""Shows where a loop kernel's step spends its time: waits and work by phase, from its tasks' time stamps (ARK_TRACE).

    python benchmarks/loop_account.py [--model llama-1b] [--steps 12] [--device cuda] [--output FOLDER]
        [--picture FILE] [--timeline FILE]
    python benchmarks/loop_account.py --ranks 2 ...    the tensor-parallel Llama (decode_ranks.py), on the rank that
                                                       starts the step last, and so does not wait for others to start

A phase is all stages of the same operators in the same module, over all layers. For each: its tasks, how long a worker
(a multiprocessor on a GPU) works on them and waits before them per step, how long one takes, and how long its stages
last, from the first task's start to the last one's end. The remaining time is spent between tasks. The step shown is
the one of median length; stamping makes it somewhat longer than it is otherwise. --picture draws the start of that
step, all ranks on one clock. --timeline writes the whole step for Perfetto (https://ui.perfetto.dev): one process per
rank, one track per worker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gpu_models
import many_rows
import real_sizes
import torch

sys.path.append(str(gpu_models.FOLDER.parent / "examples"))

from llama.quantized import FORMS, quantize

from ark_torch import _C
from ark_torch.tools._trace_files import Step, timeline_of, write
from ark_torch.tools._trace_picture import draw
from ark_torch.tools._trace_scan import scan
from ark_torch.tools.bench import report
from ark_torch.tools.trace import beside

Row = dict[str, Any]
WARM = 2  # warm-up steps, not counted


def trace_to(folder: str) -> Path:
    path = Path(folder) / "trace.json"
    os.environ |= {"ARK_TRACE": str(path), "ARK_TRACE_MB": "1024"}
    return path


@torch.no_grad()
def run_traced(call: Any, told: Any, inputs: tuple[Any, ...], arguments: argparse.Namespace) -> str:
    """Runs a model's only region for some steps and returns its plan."""
    for _ in range(arguments.steps + WARM):
        call(*inputs)
    gpu_models.finish(gpu_models.device_of(arguments))
    _C.plan.flush_trace()
    (region,) = told.regions
    return str(region.plan_json)


def on_one(arguments: argparse.Namespace) -> tuple[list[Path], str]:
    path = trace_to(arguments.folder)
    if arguments.model in many_rows.CASES:
        make, _ = many_rows.CASES[arguments.model]
        model, inputs = make(gpu_models.device_of(arguments), arguments.device == "as-cuda")
    else:
        case = gpu_models.case_of(arguments.model, None, arguments)
        model, inputs = case.model, case.inputs
    if arguments.weights:
        model = quantize(model, arguments.weights)
    return [path], run_traced(*gpu_models.of_ark(model), inputs, arguments)


def on_rank(rank: Any, arguments: argparse.Namespace) -> None:
    import decode_ranks

    trace_to(arguments.folder)
    model = decode_ranks.whole_model(rank.device.type == "cpu", rank.device)
    inputs = decode_ranks.inputs_on(rank.device)
    rank.write({"plan": run_traced(*decode_ranks.of_ark(rank, model)[1:], inputs, arguments)})


def on_several(arguments: argparse.Namespace) -> tuple[list[Path], str]:
    import on_gpus  # not at the top: it sets environment variables that a single rank must not have

    (row,), problem = on_gpus.run(on_rank, arguments.ranks, arguments, time.time() + 300)
    if problem:
        sys.exit(problem)
    return sorted(Path(arguments.folder).glob("trace.rank*.json")), row["plan"]


def traced(arguments: argparse.Namespace) -> tuple[list[Step], dict[str, Any]]:
    """Returns the steps of the region on all ranks, without the warm-up, and its plan."""
    with tempfile.TemporaryDirectory(prefix="ark-account-") as arguments.folder:
        paths, plan = on_one(arguments) if arguments.ranks == 1 else on_several(arguments)
        return scan(paths)[WARM * arguments.ranks :], json.loads(plan)


def phase_of(stage: dict[str, Any]) -> str:
    """Returns the stage's operators and their first module, without the layer's number."""
    module = stage["origin"].partition(";")[0].partition(" (")[0]
    return f"{stage['name']} {re.sub(r'(?<=[.])[0-9]+(?=[.]|$)', '*', module)}"


def account(step: Step, plan: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Returns microseconds of the whole step, and of its phases in the order in which they start."""
    stages, tasks = plan["stages"], plan["tasks"]
    waited: dict[int, float] = defaultdict(float)  # a task waits for several events at the same time
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
    parser.add_argument("--model", choices=[*real_sizes.MODELS, *many_rows.CASES], default="llama-1b")
    parser.add_argument("--weights", choices=FORMS, help="coded as in examples/llama/quantized.py; one rank")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", choices=("cuda", "as-cuda"), default="cuda", help="as-cuda: small, on the CPU")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--output", type=Path, default=gpu_models.FOLDER / "results")
    parser.add_argument("--picture", type=Path, help="draws the step to this file (SVG)")
    parser.add_argument(
        "--timeline", type=Path, help="writes the step to this file (JSON, packed where it ends in .gz)"
    )
    parser.add_argument("--microseconds", type=float, default=200.0, help="of the picture, from the step's begin")
    arguments = parser.parse_args()
    about = gpu_models.surroundings(arguments)
    steps, plan = traced(arguments)
    last = [max(beside(step, steps), key=lambda step: step.first) for step in steps if step.rank == 0]
    chosen = sorted(last, key=lambda step: step.length)[len(last) // 2]
    whole, rows = account(chosen, plan)
    ranks = "" if arguments.ranks == 1 else f"_{arguments.ranks}_ranks"
    weights = f"_{arguments.weights}" if arguments.weights else ""
    model = "" if arguments.model == "llama-1b" else f"_{re.sub('[ /,]+', '-', arguments.model)}"
    path = arguments.output / f"loop_account{model}{weights}{ranks}_{gpu_models.slug(arguments.device)}.json"
    report.write_json(
        path,
        {**about, "model": arguments.model, "weights": arguments.weights, "ranks": arguments.ranks, "step": whole},
        rows,
    )
    print(table(whole, rows))
    if arguments.timeline is not None:
        write(arguments.timeline, timeline_of(beside(chosen, steps)))
        print(f"# for Perfetto: {arguments.timeline}")
    if arguments.picture is not None:
        arguments.picture.write_text(draw(beside(chosen, steps), arguments.microseconds), encoding="utf-8")
        print(f"# drawn to {arguments.picture}")
    print(f"# written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
