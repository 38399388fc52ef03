"""Measures what gradient compression costs in accuracy, trained on two CPU ranks: the demo's GPT (held-out loss), or a
small vision transformer on scikit-learn's digits (test accuracy).

    python benchmarks/compression_accuracy.py [--task gpt|digits] [--steps 400] [--seeds 3] [--output FOLDER]

Every way (exact; 8, 4, 2 and 1 bits with and without error feedback; smaller buckets; bits chosen by Auto) trains the
same model on the same batches with each seed. A seed determines weights and batches. The JSON has the curve of every
run, and for each way the final mean, its spread over seeds and the difference from exact, seed by seed. --seconds ends
the program between two runs and writes what is complete. --resume skips runs that the file already has.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from ark_torch.tools.bench import report

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "examples"))

from gpt.data import load_corpus  # noqa: E402
from gpt.model import ModelConfig  # noqa: E402
from gpt.training import Place, TrainingConfig, compress, join_group, leave_group, train  # noqa: E402

MEASURES = {"gpt": "loss", "digits": "accuracy"}


def ways() -> dict[str, dict[str, Any] | None]:
    """Settings of compression.State by the name used in tables. None is exact."""
    from ark_torch.distributed.compression import Auto

    names = {8: "8 bits", 4: "4 bits", 2: "2 bits", 1: "1 bit"}
    with_feedback = {name: {"bits": bits, "error_feedback": True} for bits, name in names.items()}
    without = {f"{name}, no feedback": {"bits": bits, "error_feedback": False} for bits, name in names.items()}
    small = {f"{bits} bits, bucket 128": {"bits": bits, "bucket": 128} for bits in (4, 2)}
    chosen = {"3 bits": {"bits": 3}, "3 bits on average, by Auto": {"bits": Auto(budget=3.0)}}
    return {"exact": None, **with_feedback, **small, **chosen, **without}


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=list(MEASURES), default="gpt")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=400)
    add("--seeds", type=int, default=3)
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64)
    add("--batch", type=int, default=8, help="windows of 64 bytes, or images, a rank and step")
    add("--ways", nargs="+", help="some of the ways, by name")
    add("--evaluate-every", type=int, default=50, help="steps between two looks at what is held out")
    add("--seconds", type=float, default=1200.0, help="no run begins after so long")
    add("--resume", action="store_true", help="runs that the file has are not run again")
    add("--name", help="of the JSON and the picture")
    add("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    if arguments.name is None:
        arguments.name = "compression_digits" if arguments.task == "digits" else "compression_accuracy"
    return arguments


Row = dict[str, Any]


def gpt(arguments: argparse.Namespace, place: Place) -> Callable[[dict[str, Any] | None, int, int], Row]:
    """Returns a function that trains the demo's GPT: settings, seed and number in, a row out."""
    corpus = load_corpus()
    model = ModelConfig(arguments.layers, arguments.width, 4, 64)

    def run(how: dict[str, Any] | None, seed: int, number: int) -> Row:
        config = TrainingConfig(
            model, arguments.steps, arguments.batch, seed=seed, held_out_windows=512, compression=how,
            evaluate_every=arguments.evaluate_every,
        )  # fmt: skip
        result, _ = train(config, corpus, "ark", number, place, lambda *_: None)
        return {
            "held_out": result.held_out, "seconds": result.seconds,
            "bytes_sent": result.bytes_sent, "bytes_exact": result.bytes_exact,
        }  # fmt: skip

    return run


def vision(arguments: argparse.Namespace, place: Place) -> Callable[[dict[str, Any] | None, int, int], Row]:
    """Same as gpt(), for the vision transformer."""
    import digits

    def run(how: dict[str, Any] | None, seed: int, number: int) -> Row:
        join_group("ark", f"run{number}", place)
        try:
            started = time.monotonic()
            held_out, state = digits.train(
                arguments.steps, seed, place.rank, place.world, lambda ddp: compress(ddp, how) if how else None,
                arguments.batch, arguments.evaluate_every, arguments.layers, arguments.width,
            )  # fmt: skip
            row = {"held_out": held_out, "seconds": time.monotonic() - started}
        finally:
            leave_group()
        return {**row, "bytes_sent": state.bytes_sent if state else 0, "bytes_exact": state.bytes_exact if state else 0}

    return run


def run_rank(arguments: argparse.Namespace) -> None:
    store, rank, world = next(dist.rendezvous("env://"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    place = Place(store, rank, world, torch.device("cpu"))
    run = (vision if arguments.task == "digits" else gpt)(arguments, place)
    started, late, before = time.monotonic(), torch.zeros(1), earlier(arguments)
    runs = list(before.get("runs", []))
    done = {(row["way"], row["seed"]) for row in runs} if arguments.resume else set()
    command = shlex.join(["python", "benchmarks/compression_accuracy.py", *sys.argv[1:]])
    commands = dict.fromkeys([*before["command"].split("; "), command] if before else [command])
    conditions = report.surroundings("; ".join(commands))
    chosen = {name: how for name, how in ways().items() if arguments.ways is None or name in arguments.ways}
    left = [(seed, way) for seed in range(arguments.seeds) for way in chosen if (way, seed) not in done]
    for number, (seed, way) in enumerate(left):
        late[0] = time.monotonic() - started > arguments.seconds
        store.set(f"late{number}", str(int(late))) if rank == 0 else None
        if int(store.get(f"late{number}")):
            break
        row = run(chosen[way], seed, number)
        if rank == 0:
            runs = [other for other in runs if (other["way"], other["seed"]) != (way, seed)]
            runs.append({"way": way, "seed": seed, **row})
            print(f"seed {seed}, {way}: {row['held_out'][-1][1]:.4f} after {row['seconds']:.1f} s", flush=True)
            write(runs, arguments, {**conditions, "ranks": world})
    if rank == 0 and runs:
        for row in summary(runs, MEASURES[arguments.task]):
            print(
                f"{row['way']:<24} {row[MEASURES[arguments.task]]:.4f}  spread {row['spread'] or 0:.4f}  from exact "
                f"{row['from_exact'] or 0:+.4f}  bytes {row['bytes']:.3f}"
            )


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    model = {"layers": arguments.layers, "width": arguments.width}
    if arguments.task == "gpt":
        model["context"] = 64
    return {"model": model, "steps": arguments.steps, "batch": arguments.batch}


def earlier(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the file's content if it is of the same model and steps, so that its other runs are kept."""
    path = arguments.output / f"{arguments.name}.json"
    written = dict(json.loads(path.read_text())) if path.exists() else {}
    return written if all(written.get(key) == value for key, value in shape_of(arguments).items()) else {}


def write(runs: list[dict[str, Any]], arguments: argparse.Namespace, conditions: dict[str, Any]) -> None:
    """Writes the file. Called after each run, so that a later failure loses nothing."""
    runs = sorted(runs, key=lambda run: (run["seed"], list(ways()).index(run["way"])))
    measure = MEASURES[arguments.task]
    written = {**conditions, "task": arguments.task, **shape_of(arguments), "summary": summary(runs, measure)}
    written["runs"] = runs
    arguments.output.mkdir(parents=True, exist_ok=True)
    partial = arguments.output / f"{arguments.name}.json.partial"  # renamed when complete
    partial.write_text(json.dumps(written, indent=1) + "\n")
    partial.replace(arguments.output / f"{arguments.name}.json")
    draw(written, arguments.output / f"{arguments.name}.png")


def summary(runs: list[Row], measure: str) -> list[Row]:
    """Returns a row per way: mean and spread of the last value, and the difference from exact with the same seed."""
    last = {(run["way"], run["seed"]): run["held_out"][-1][1] for run in runs}
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        losses = [loss for (other, _), loss in last.items() if other == way]
        apart = [loss - last["exact", s] for (other, s), loss in last.items() if other == way and ("exact", s) in last]
        of_way = [run for run in runs if run["way"] == way]
        sent, exact = (sum(run[key] for run in of_way) for key in ("bytes_sent", "bytes_exact"))
        rows.append({
            "way": way, "seeds": len(losses), measure: statistics.fmean(losses),
            "spread": statistics.stdev(losses) if len(losses) > 1 else None,
            "from_exact": statistics.fmean(apart) if apart else None, "from_exact_by_seed": apart,
            "bytes": sent / exact if exact else 1.0,
        })  # fmt: skip
    return rows


def draw(written: dict[str, Any], path: Path) -> None:
    """Draws the curves (mean over seeds) on the left, the final value of every run on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    names = [row["way"] for row in written["summary"]]
    colours = pyplot.get_cmap("tab10")
    for index, way in enumerate(names):
        curves = [run["held_out"] for run in written["runs"] if run["way"] == way]
        steps = [step for step, _ in curves[0]]
        mean = [statistics.fmean(curve[i][1] for curve in curves) for i in range(len(steps))]
        forgetful = ", no feedback" in way
        colour = colours(names.index(way.removesuffix(", no feedback")) % 10)
        left.plot(steps[1:], mean[1:], "--" if forgetful else "-", color=colour, label=way)
        right.plot([curve[-1][1] for curve in curves], [index] * len(curves), "x" if forgetful else "o", color=colour)
    what = "test accuracy" if written["task"] == "digits" else "held-out loss, nats a byte"
    left.set(xlabel="step", ylabel=what, title="mean over seeds")
    left.legend(fontsize=8)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.set(xlabel=f"{what}, at the end, each seed")
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    arguments = arguments_of()
    if "RANK" in os.environ:
        run_rank(arguments)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun(["--standalone", f"--nproc-per-node={arguments.ranks}", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
