"""Measures models at their real sizes on one GPU, for decode.py and compile_models.py with --device cuda.

Contenders run the same model on the same inputs. They take turns of a few calls each, so that drift of the machine
affects all equally. Times are between CUDA events of neighbouring calls. "graph": the call captured in a CUDA graph by
hand, which torch.compile's modes without graphs need to be fast; mode="max-autotune" makes its own graphs. Errors are
relative to the model in float64. Compile times are of fresh processes: cold with an empty cache, then again with what
the first one cached.

--beside PROGRAM also runs another program and keeps its output, for example a bare loop over the same bytes, which
shows the limit of this machine.

--device as-cuda runs all of it on the CPU with small models, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compile_overhead import first_call

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "tests" / "compile"))

import exactness  # noqa: E402
import real_sizes  # noqa: E402

Step = Callable[[], Any]
Row = dict[str, Any]
WAYS = ("eager", "ark", "inductor", "inductor, max-autotune", 'inductor, mode="max-autotune"')
MODES = {WAYS[3]: "max-autotune-no-cudagraphs", WAYS[4]: "max-autotune"}
OWN_GRAPHS = WAYS[4]
CHOSEN = "ark, default"  # the default choice of backend="ark"
TYPES = ("float32", "float16", "bfloat16")
CALLS = 12  # per contender and turn; the first two do not count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda", "as-cuda"), default="cpu", help="cuda: real sizes, one GPU")
    parser.add_argument("--only", nargs="+", choices=real_sizes.MODELS, default=[], help="on a GPU: of the models")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=[], help="on a GPU: of the models' types")
    parser.add_argument(
        "--ways", nargs="+", choices=(*WAYS, CHOSEN), default=list(WAYS), help="on a GPU: what is compared"
    )
    parser.add_argument("--turns", type=int, default=20, help="on a GPU: of each contender")
    parser.add_argument(
        "--seconds", type=float, default=1200, help="on a GPU: after so many nothing is begun, nor compiled further"
    )
    parser.add_argument("--no-compile-times", action="store_true", help="on a GPU: no compiling in fresh processes")
    parser.add_argument("--beside", type=Path, metavar="PROGRAM", help="on a GPU: run too; what it prints is kept")
    parser.add_argument("--compile-once", default="", help=argparse.SUPPRESS)


def device_of(arguments: argparse.Namespace) -> torch.device:
    return torch.device("cuda" if arguments.device == "cuda" else "cpu")


def case_of(name: str, dtype: torch.dtype | None, arguments: argparse.Namespace) -> real_sizes.Case:
    make, usual = real_sizes.MODELS[name]
    torch.manual_seed(0)
    return make(dtype or usual, device_of(arguments), arguments.device == "as-cuda")


def of_ark(model: Any, **given: Any) -> tuple[Any, Report]:
    """The model compiled by ark's regions, or with options of its own, and the report of its graphs."""
    told, chosen = Report(), options.parse(None, given or {"choose": "ark"})
    return torch.compile(model, backend=lambda g, x: backend.compile_graph(g, x, chosen, told), dynamic=False), told


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def captured(step: Step) -> Step:
    """Returns the graph's replay. It keeps `step` alive, and so the parameters that the graph reads."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads may call the driver meanwhile
        step()

    def replay(_alive: Step = step) -> None:
        graph.replay()

    return replay


def in_turns(steps: dict[str, Step], turns: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Returns for each: median, 10th and 90th percentile of the microseconds from the end of one call to the next."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            times[name] += on_device(step) if device.type == "cuda" else on_host(step)
    deciles = {name: statistics.quantiles(taken, n=10) for name, taken in times.items()}
    return {name: {"median": ten[4], "p10": ten[0], "p90": ten[8]} for name, ten in deciles.items()}


def on_device(step: Step) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events[2:])]


def on_host(step: Step) -> list[float]:
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e6)
    return times[2:]


@contextlib.contextmanager
def until(ends: float) -> Iterator[None]:
    """Interrupts work that is still running at `ends`."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError("the time that --seconds allows is over")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(ends - time.time(), 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def measured(name: str, dtype: torch.dtype | None, arguments: argparse.Namespace, ends: float) -> Row:
    device = device_of(arguments)
    case = case_of(name, dtype, arguments)
    kind = next(case.model.parameters()).dtype
    wanted = exactness.exact(case.model, case.run)
    row: Row = {"model": name, "dtype": str(kind).removeprefix("torch."), "device": device.type}
    row |= {"error": {}, "first_call_seconds": {}, "left_out": []}
    steps: dict[str, Step] = {}
    for way in arguments.ways:
        if time.time() > ends:
            row["left_out"].append(way)
            continue
        call: Any = case.model
        if way == "ark":
            call, told = of_ark(case.model)
        elif way != "eager":
            call = torch.compile(case.model, dynamic=False, mode=MODES.get(way))

        def step(call: Any = call) -> Any:
            return call(*case.inputs)

        begin = time.perf_counter()
        try:
            with until(ends):
                step()
                finish(device)
        except Exception:  # raised by the compiler because it was interrupted
            if time.time() < ends:
                raise
            row["left_out"].append(way)
            continue
        row["first_call_seconds"][way] = time.perf_counter() - begin
        if way == "ark":
            row |= made_of(told)
        if way != OWN_GRAPHS:  # the next call overwrites its results
            row["error"][way] = exactness.error(case.run(call, kind), wanted)
        if way in ("eager", "ark", OWN_GRAPHS) or device.type == "cpu":
            steps[way] = step
        if way not in ("eager", OWN_GRAPHS) and device.type == "cuda":
            steps[f"{way}, graph"] = captured(step)
    row["microseconds"] = times = in_turns(steps, arguments.turns, device)
    best = {who: [t["median"] for n, t in times.items() if n.startswith(who)] for who in ("ark", "inductor")}
    row["ratio"] = min(best["inductor"]) / min(best["ark"]) if all(best.values()) else None
    return row


def made_of(told: Report) -> Row:
    pieces = [piece for graph in told.graphs for piece in graph.pieces]
    regions = [piece.region for piece in pieces if piece.runs_on == "ark"]
    fell = [f"{f.operator}: {f.reason}" for f in told.fallbacks] + [g.whole for g in told.graphs if g.whole]
    fell += [piece.reason for piece in pieces if piece.runs_on != "ark" and piece.reason]
    return {"regions": len(regions), "resources": [dict(r.resources) for r in regions], "fallbacks": fell}


def compile_seconds(name: str, arguments: argparse.Namespace) -> Row:
    """Times the first calls with default options of two processes, one after the other, whose folders for ark's and
    PyTorch's caches are empty at first."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as cache:
        for when in ("cold", "cached"):
            environ = {**os.environ, "ARK_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
            command = [sys.executable, sys.argv[0], "--device", arguments.device, "--compile-once", name]
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, text=True)
            found[when] = json.loads(done.stdout.splitlines()[-1])
    return {"compiling": found}


@torch.no_grad()
def compile_once(arguments: argparse.Namespace) -> None:
    case = case_of(arguments.compile_once, None, arguments)
    print(json.dumps(first_call(case.model, case.inputs, None)))


def surroundings(arguments: argparse.Namespace) -> dict[str, Any]:
    import on_gpus  # not at the top: it sets environment variables that CPU ranks must not have

    return on_gpus.surroundings(device_of(arguments).type)


def beside(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the output lines of the --beside program."""
    if not arguments.beside:
        return {}
    done = subprocess.run([arguments.beside], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return {"beside": {"program": arguments.beside.name, "lines": done.stdout.splitlines()}}


def slug(device: str) -> str:
    """Returns "h200" for an NVIDIA H200, "rehearsal" for runs on the CPU."""
    return torch.cuda.get_device_name(0).split()[1].lower() if device == "cuda" else "rehearsal"


def main(name: str, chosen: list[tuple[str, torch.dtype | None]], arguments: argparse.Namespace) -> int:
    """Measures the models, prints the table and writes `name`_h200.json."""
    if arguments.compile_once:
        compile_once(arguments)
        return 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{name}.py: this PyTorch sees no GPU")
    about = surroundings(arguments) | beside(arguments)
    path = arguments.output / f"{name}_{slug(arguments.device)}.json"
    ends = time.time() + arguments.seconds
    rows = []
    for model, dtype in chosen:
        kind = str(dtype or real_sizes.MODELS[model][1]).removeprefix("torch.")
        if (arguments.only and model not in arguments.only) or (arguments.types and kind not in arguments.types):
            continue
        row = measured(model, dtype, arguments, ends)
        if time.time() < ends and dtype is None and not arguments.no_compile_times:
            row |= compile_seconds(model, arguments)
        rows.append(row)
        bench.write_json(path, about, rows)
    print(table({**about, "rows": rows}))
    print(f"# written to {path}")
    return 0


# The table in docs/performance.md.


def table(about: dict[str, Any]) -> str:
    lines = [
        f"{about.get('gpus', about['machine']['cpu'])}, PyTorch {about['versions']['torch']}; {about['date']}.",
        "",
        "| model | contender | median, us | p10 to p90 | error | first call, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in about["rows"]:
        for name, times in row["microseconds"].items():
            way = name.removesuffix(", graph")
            error = f"{row['error'][way]:.1e}" if way in row["error"] else ""
            spread = f"{times['p10']:.0f} to {times['p90']:.0f}"
            seconds = f"{row['first_call_seconds'][way]:.1f}"
            lines.append(
                f"| {row['model']}, {row['dtype']} | {name} | {times['median']:.0f} | {spread} | {error} | {seconds} |"
            )
    lines += ["", *(sentence(row) for row in about["rows"]), *about.get("beside", {}).get("lines", [])]
    return "\n".join(lines)


def sentence(row: Row) -> str:
    text = f"{row['model']}, {row['dtype']}: "
    text += f"{row['ratio']:.2f} times as fast as the quickest of Inductor's" if row["ratio"] else "nothing to compare"
    for when, found in row.get("compiling", {}).items():
        text += f"; {when}: first call {found['first_call_s']:.1f} s, its region {found['plan_and_compiler_s']:.2f} s"
    left = f"; left out for time: {', '.join(row['left_out'])}" if row["left_out"] else ""
    fell = f"; falls back: {'; '.join(row['fallbacks'])}" if row.get("fallbacks") else ""
    return text + fell + left + "."
