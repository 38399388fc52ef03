"""Checks on a CPU that the default of torch.compile(backend="ark") is as fast as the fastest of its alternatives.

    python benchmarks/contest.py [--models llama t5 ...] [--seconds 90] [--resume] [--minutes 15] [--output FOLDER]

A row is a small model (contest_models.py). With empty caches, one process first calls plain torch.compile once. A
second process calls ark's default until it has chosen (--seconds at most), and times it beside eager PyTorch, plain
torch.compile and ark's regions alone ({"choose": "ark"}). They alternate round by round, and the figure is the least
median of a turn. The ratio is that of the default to the best of these three. If both run the same code, it is noise.
First calls include torch._dynamo's tracing. On two idle cores a row takes about half a minute.

Each row is written as soon as it is complete, with the machine's load before it. --resume continues from the file:
models that have a row are skipped, failed ones are tried again, and rows of other machines or versions are dropped.
With --minutes no model starts after that time. The same command continues later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contest_models
import cpu_tables
import torch

from ark_torch.compile import background
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
ROUNDS, TURN_S, MOST_CALLS = 7, 0.1, 200
SETTLED_S = 1.0  # without any choice in this time, all graphs have chosen
LIMIT_S = 900.0  # per process

Call = Callable[[], Any]


class Choices(logging.Handler):
    """A log handler that records what each graph runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[str] = []
        self.said: list[str] = []
        self.last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        for what in ("ark", "Inductor", "eager PyTorch"):
            if f" runs on {what}: " in said and "piece" not in said:
                self.chosen.append(what)
                self.said.append(said)
                self.last = time.monotonic()


def called(run: Any, given: dict[str, Any]) -> Call:
    return lambda: run(**given)


def seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def beside(calls: dict[str, Call]) -> dict[str, float]:
    """Returns milliseconds per call of each contender."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS):
        for name in list(calls) if number % 2 == 0 else list(calls)[::-1]:
            call = calls[name]
            call()
            each = seconds(call)
            runs = max(3, min(MOST_CALLS, int(TURN_S / max(each, 1e-6))))
            medians[name].append(statistics.median(seconds(call) for _ in range(runs)) * 1e3)
    return {name: min(times) for name, times in medians.items()}


def plain(name: str) -> dict[str, Any]:
    model, given = contest_models.make(name)
    return {"inductor_first_s": seconds(called(torch.compile(model), given))}


def chosen(name: str, limit: float) -> dict[str, Any]:
    heard = Choices()
    log = logging.getLogger("ark_torch.compile")
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    log.propagate = False
    model, given = contest_models.make(name)
    default = called(torch.compile(model, backend="ark"), given)
    first = seconds(default)
    deadline = time.monotonic() + limit
    slowest = 0.0
    while time.monotonic() < deadline:
        slowest = max(slowest, seconds(default))
        if not background.active() and heard.chosen and time.monotonic() - heard.last > SETTLED_S:
            break
    decided = not background.active() and bool(heard.chosen)
    by = " + ".join(dict.fromkeys(heard.chosen)) if decided else "not decided"
    ways: dict[str, Call] = {"eager": called(model, given)}
    for way, options in (("inductor", {}), ("ark", {"backend": "ark", "options": {"choose": "ark"}})):
        ways[way] = called(torch.compile(model, **options), given)
        ways[way]()
    ways["default"] = default
    milliseconds = beside(ways)
    best = min(milliseconds[way] for way in ("eager", "inductor", "ark"))
    return {
        "model": name,
        "chosen": by,
        "said": heard.said,
        "milliseconds": milliseconds,
        "ratio": milliseconds["default"] / best,
        "ark_first_s": first,
        "slowest_call_until_chosen_s": slowest,
    }


def child(work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], folder: str, sender: Any) -> None:
    os.environ["ARK_CACHE"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/ark", f"{folder}/inductor"
    with torch.no_grad():
        sender.send(work(*arguments))


def in_a_process(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Runs `work` in a process with empty caches. It is forked from a parent that has done the slow imports but no
    computing.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="ark-contest-") as folder:
        process = context.Process(target=child, args=(work, arguments, folder, sender))
        process.start()
        sender.close()
        try:
            if not receiver.poll(LIMIT_S):
                raise TimeoutError(f"{work.__name__}{arguments} takes longer than {LIMIT_S:.0f} s")
            return receiver.recv()  # type: ignore[no-any-return]
        except EOFError:
            process.join(30)
            raise EOFError(f"its process ended with exit code {process.exitcode}") from None
        finally:
            process.join(30)
            with contextlib.suppress(ValueError):
                process.kill()


HEAD = """\
| model | eager, ms | plain | ark alone | default | chosen | default / best | first call: default, s | plain |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['model']} | {row['error']} |" + " |" * 7
    ms = row["milliseconds"]
    times = " | ".join(f"{ms[way]:.2f}" for way in ("eager", "inductor", "ark", "default"))
    firsts = f"{row['ark_first_s']:.1f} | {row['inductor_first_s']:.1f}"
    return f"| {row['model']} | {times} | {row['chosen']} | {row['ratio']:.2f} | {firsts} |"


def table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance-cpu.md."""
    complete = [row for row in about["rows"] if "error" not in row]
    worst = max(complete, key=lambda row: row["ratio"])
    firsts = [row["ark_first_s"] / row["inductor_first_s"] for row in complete]
    told = (
        f"Worst default: {worst['ratio']:.2f} times the best ({worst['model']}). First call, default to plain: "
        f"{statistics.geometric_mean(firsts):.2f} (geometric mean), {max(firsts):.2f} at most."
    )
    return f"{cpu_tables.origin(about)}.\n\n{HEAD}" + "".join(line(row) + "\n" for row in about["rows"]) + f"\n{told}\n"


def kept(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a file that this run can continue from."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []

    def same(one: dict[str, Any]) -> dict[str, Any]:
        return {**one["versions"], **{name: one["machine"].get(name) for name in ("cpu", "cores", "vectors")}}

    if same(before) != same(about):
        print(f"{path} is of another machine or of other versions: all is measured anew", file=sys.stderr)
        return []
    return [row for row in before["rows"] if "error" not in row]


def measured(name: str, limit: float) -> dict[str, Any]:
    """Returns a row, or the error in its place, so that the other models are still measured."""
    load = round(os.getloadavg()[0], 2)
    try:
        row = {**in_a_process(plain, name), **in_a_process(chosen, name, limit)}
    except (TimeoutError, EOFError) as error:
        row = {"model": name, "error": str(error)}
    return {**row, "load_before": load, "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(contest_models.MODELS), choices=list(contest_models.MODELS))
    parser.add_argument("--seconds", type=float, default=90.0, help="at most, until the default has chosen")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there already")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no model later than that")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    import transformers  # before the fork, so that all children have it

    about = bench.surroundings(bench.shown_command("benchmarks/contest.py"))
    about["versions"]["transformers"] = transformers.__version__
    path = arguments.output / "contest.json"
    deadline = time.monotonic() + 60 * arguments.minutes
    rows = {row["model"]: row for row in (kept(path, about) if arguments.resume else [])}
    print(HEAD, end="", flush=True)
    for name in arguments.models:
        if name not in rows and time.monotonic() < deadline:
            rows[name] = measured(name, arguments.seconds)
            ordered = [rows[model] for model in contest_models.MODELS if model in rows]
            bench.write_json(path, about, ordered)
        print(line(rows[name]) if name in rows else f"| {name} | not begun |" + " |" * 7, flush=True)
    return 0 if all(name in rows and "error" not in rows[name] for name in arguments.models) else 1


if __name__ == "__main__":
    sys.exit(main())
