"""Measures messages from one GPU to another by engine and size: one-way latency and throughput (ARK paper, Figure 8).

    python benchmarks/dma.py [--engines packet bulk] [--sizes 16 8192] [--blocks 8]

Engines (benchmarks/dma/channel*.cuh; one device API: put, signal, wait, flush):
  cpu          the host waits for the producing kernel, copies, waits, launches the consuming kernel (C-Drv)
  proxy        a kernel writes a request into a ring in host memory; a host thread starts a copy engine (G-Drv-S)
  copy_engine  copies posted ahead on a stream, each released by a word that a kernel writes
  store        stores by one or several blocks, a fence, a flag word
  warp         the same by warps, each with its own messages
  packet       16-byte packets that carry their own epoch
  bulk         TMA, started by one thread per block (G-Drv-H: GPU threads start the engine)
Latency: half a round trip inside running kernels (cpu: including launches), the best of 1, 4 and 16 blocks.
Throughput: a stream of messages, each signalled by its count, with --blocks blocks (one SM each), the best of three.
Data is random, and what arrived last is compared with what was sent. A C++ program measures; it is compiled first
(--build: only that).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dma_program
import on_gpus
from on_gpus import FOLDER, KB, MB, Row

from ark_torch.tools.bench import report

ENGINES = ("cpu", "proxy", "copy_engine", "store", "warp", "packet", "bulk")
SIZES = (16, 256, 1 * KB, 4 * KB, 8 * KB, 16 * KB, 64 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB, 64 * MB)
GOALS = {"latency_us": 2.3, "times_cpu": 8.0, "of_copy_engine": 0.85}  # for messages of 8 KB


def run(program: Path, arguments: argparse.Namespace, seconds: float) -> tuple[list[Row], str]:
    """Returns the program's measurements, and what went wrong."""
    command = dma_program.command(
        program,
        engines=",".join(arguments.engines),
        sizes=",".join(map(str, sorted(arguments.sizes))),
        blocks=str(arguments.blocks),
        seconds=f"{seconds:.0f}",
    )
    rows: list[Row] = []
    problem = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = time.monotonic() + seconds + on_gpus.GRACE_S
        with ThreadPoolExecutor(1) as watcher:
            watcher.submit(kill_late, process, timer)
            assert process.stdout is not None
            for text in process.stdout:
                try:
                    row = json.loads(text)
                except ValueError:
                    break  # the process was killed in the middle of a line
                if row.get("late"):
                    print(f"# the rest is left out: {arguments.seconds:g} s are over (--seconds)")
                    continue
                rows.append(row)
                print(line(row), flush=True)
            code = process.wait()
    if code != 0:
        problem = f"the program ended with exit code {code}" + (" (killed: too late)" if code == -9 else "")
    return rows, problem


def kill_late(process: subprocess.Popen[str], deadline: float) -> None:
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            return
        time.sleep(0.1)


def show(size: int) -> str:
    return f"{size >> 20} MB" if size >= MB else f"{size >> 10} KB" if size >= KB else f"{size} B"


def line(row: Row) -> str:
    figure = f"{row['us']:>9.2f} us  " if row["what"] == "latency" else f"{row['gbps']:>9.2f} GB/s"
    wrong = f"  {row['wrong']} bytes WRONG" if row["wrong"] else ""
    return f"{show(row['bytes']):>6} {row['engine']:12} {row['what']:10} {figure} {row['blocks']:>3} blocks{wrong}"


def of(rows: list[Row], what: str) -> dict[str, dict[int, float]]:
    """engine -> bytes -> figure"""
    key = "us" if what == "latency" else "gbps"
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["what"] == what:
            found.setdefault(row["engine"], {})[row["bytes"]] = row[key]
    return found


def verdicts(rows: list[Row]) -> list[str]:
    """Compares the figures with the goals for messages of 8 KB."""
    latency, throughput = of(rows, "latency"), of(rows, "throughput")
    size = 8 * KB
    texts = []
    own = {
        engine: latency[engine][size]
        for engine in ("packet", "bulk", "store", "warp")
        if size in latency.get(engine, {})
    }
    if own:
        best = min(own, key=lambda engine: own[engine])
        met = "met" if own[best] <= GOALS["latency_us"] else "missed"
        texts.append(f"8 KB one way: {own[best]:.2f} us ({best}); goal {GOALS['latency_us']}: {met}")
        if size in latency.get("cpu", {}):
            times = latency["cpu"][size] / own[best]
            met = "met" if times >= GOALS["times_cpu"] else "missed"
            texts.append(f"times better than CPU-driven: {times:.1f}; goal {GOALS['times_cpu']}: {met}")
    streams = [engine for engine in ("bulk", "warp", "store", "packet") if size in throughput.get(engine, {})]
    if streams and "copy_engine" in throughput:
        best = max(streams, key=lambda engine: throughput[engine][size])
        share = throughput[best][size] / max(throughput["copy_engine"].values())
        met = "met" if share >= GOALS["of_copy_engine"] else "missed"
        texts.append(f"8 KB pipelined, {best}: {share:.0%} of the copy engine's best; goal 85%: {met}")
    return texts


def table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance.md."""
    lines = [on_gpus.origin(about)]
    for what, unit in (("latency", "one way, us"), ("throughput", "GB/s")):
        figures = of(about["rows"], what)
        sizes = sorted({size for by_size in figures.values() for size in by_size})
        lines += ["", f"| {unit} | " + " | ".join(map(show, sizes)) + " |", "|" + " --- |" * (len(sizes) + 1)]
        for engine, by_size in figures.items():
            cells = [f"{by_size[size]:.3g}" if size in by_size else "" for size in sizes]
            lines.append(f"| {engine} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "; ".join(verdicts(about["rows"])) + "."])


def draw(about: dict[str, Any], path: Path) -> str:
    """Draws latency and throughput by size. Returns the reason if there is no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    if not about["rows"]:
        return "no picture: nothing was measured"
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, what, label in zip(
        figure.subplots(1, 2), ("latency", "throughput"), ("us, one way", "GB/s"), strict=True
    ):
        for engine, by_size in of(about["rows"], what).items():
            axes.plot(list(by_size), list(by_size.values()), marker=".", label=engine)
        axes.set(xscale="log", yscale="log", xlabel="bytes of a message", ylabel=label, title=what)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(on_gpus.origin(about), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, multiples of 16 up to 64 MB")
    parser.add_argument("--blocks", type=int, default=8, help="SMs that a stream may use (default: 8)")
    parser.add_argument("--seconds", type=float, default=60, help="limit of the measurement (default: 60)")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "dma.json")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="only compile the program, into this folder")
    parser.add_argument("--program", type=Path, help="the compiled program (default: compile it now)")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        if size % 16 or not 16 <= size <= 64 * MB or size & (size - 1):
            parser.error(f"--sizes {size}: it takes powers of two from 16 to {64 * MB}")
    if not 1 <= arguments.blocks <= 16:
        parser.error(f"--blocks {arguments.blocks}: it takes 1 to 16")
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        print(dma_program.build(arguments.build))
        return 0
    arguments.device, arguments.ranks = "cuda", [2]
    on_gpus.check_machine(arguments)
    about = on_gpus.surroundings("cuda")
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        program = arguments.program or dma_program.build(Path(folder))
        rows, problem = run(program, arguments, arguments.seconds)
    if problem:
        about["problem"] = problem
        print(f"# {problem}", file=sys.stderr)
    report.write_json(arguments.output, about, rows)
    why = draw(about | {"rows": rows}, arguments.output.with_suffix(".png"))
    if why:
        print(f"# {why}", file=sys.stderr)
    for text in verdicts(rows):
        print(f"# {text}")
    wrong = sorted({row["engine"] for row in rows if row["wrong"]})
    if wrong:
        print(f"# WRONG RESULTS: {', '.join(wrong)}", file=sys.stderr)
    return 1 if problem or wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
