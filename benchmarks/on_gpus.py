"""Shared code of the GPU benchmarks: ranks that end in time, a command line and a report.

A benchmark must fit a limit of time. Ranks ask `Rank.time_for()` before each measurement, the parent process ends those
that are late, and what was measured until then is still written. There is one process per GPU; gpu_ranks.py has the
code of a rank.

`--device cpu` runs the same code on CPU tensors, ark against Gloo, with small sizes. The tests use it where there is no
GPU. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_ranks import Rank, Row, environment  # noqa: F401  (environment: beside `variant`, whose text it applies)

from ark_torch.tools.bench import report

FOLDER = Path(__file__).resolve().parent
KB, MB = 1 << 10, 1 << 20
GRACE_S = 8.0  # beyond the limit, to finish a measurement in progress


# --- what a command line has in common ---------------------------------------------------------------------------


def parser(doc: str | None, output: str, seconds: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of GPUs (default: 2)")
    made.add_argument("--seconds", type=float, default=seconds, help="limit of it all (default: %(default)g)")
    made.add_argument("--output", type=Path, default=FOLDER / "results" / output, help="JSON (default: %(default)s)")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that the script works")
    made.add_argument(
        "--ark", type=variant, action="append", default=[], metavar="NAME:VARIABLE=VALUE[,...]",
        help="one more ark group, made with these environment variables, or (in lower case) with this rule of a CUDA "
        "dispatch table, such as engine:copy_engine_from=1048576",
    )  # fmt: skip
    return made


def variant(text: str) -> tuple[str, dict[str, str]]:
    """NAME:ARK_X=1,ARK_Y=2"""
    name, _, rest = text.partition(":")
    pairs = dict(item.partition("=")[::2] for item in rest.split(",") if item)
    if not name or not all(pairs) or not all(pairs.values()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:VARIABLE=VALUE[,VARIABLE=VALUE]")
    return name, pairs


def check_machine(arguments: argparse.Namespace) -> None:
    """Exits with one sentence if the machine cannot run the benchmark."""
    if arguments.device == "cpu":
        return
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: this PyTorch sees no GPU")
    most = max(arguments.ranks)
    if most > torch.cuda.device_count():
        sys.exit(f"{Path(sys.argv[0]).name}: --ranks {most}, and this machine has {torch.cuda.device_count()} GPUs")


# --- processes ---------------------------------------------------------------------------------------------------


Body = Callable[[Rank, argparse.Namespace], None]


def _run_rank(body: Body, rank: Rank, arguments: argparse.Namespace, port: int) -> None:
    faulthandler.dump_traceback_later(max(1.0, rank.ends - time.time() + GRACE_S - 2))  # to see where it hangs
    try:
        if rank.device.type == "cuda":
            torch.cuda.set_device(rank.device)
        else:
            torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, rank.ranks, False, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.ranks)
        rank.control = dist.group.WORLD
        body(rank, arguments)
        rank.barrier()
        if rank.skipped:
            rank.say(f"# {rank.skipped} measurements left out: {arguments.seconds:g} s are over (--seconds)")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # skips destroying the groups, which takes NCCL seconds


def run(body: Body, ranks: int, arguments: argparse.Namespace, ends: float) -> tuple[list[Row], str]:
    """Returns the rows that rank 0 wrote, and what went wrong, if anything did."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        rows = Path(folder) / "rows"
        rows.touch()
        processes = []
        for number in range(ranks):
            device = torch.device("cuda", number) if arguments.device == "cuda" else torch.device("cpu")
            rank = Rank(number, ranks, device, ends, rows)
            processes.append(context.Process(target=_run_rank, args=(body, rank, arguments, store.port), daemon=True))
            processes[-1].start()
        problem = ""
        while any(process.is_alive() for process in processes):
            try:
                time.sleep(0.05)
            except KeyboardInterrupt:  # keep what has been measured
                problem, ends = "it was interrupted", 0.0
            failed = [number for number, process in enumerate(processes) if process.exitcode not in (None, 0)]
            if failed and not problem:
                problem = f"rank {failed[0]} of {ranks} failed with exit code {processes[failed[0]].exitcode}"
                ends = min(ends, time.time() + 3 - GRACE_S)  # gives the other ranks time to report their errors
            if time.time() > ends + GRACE_S:
                problem = problem or f"{ranks} ranks were not done after {arguments.seconds:g} s and were ended"
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join(10)
                break
        return [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()], problem


def measure(body: Body, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Row], str]:
    """Runs the body for each number of ranks and writes the JSON. Returns its parts, and what went wrong."""
    check_machine(arguments)
    about = surroundings(arguments.device)
    rows: list[Row] = []
    problem = ""
    ends = time.time() + arguments.seconds
    for ranks in arguments.ranks:
        more, problem = run(body, ranks, arguments, ends)
        rows += more
        if problem:
            about["problem"] = problem
            print(f"# {problem}", file=sys.stderr, flush=True)
            break
    about["seconds"] = round(time.time() - ends + arguments.seconds, 1)
    report.write_json(arguments.output, about, rows)
    return about, rows, problem


def surroundings(device: str) -> dict[str, Any]:
    about = report.surroundings(report.shown_command(f"benchmarks/{Path(sys.argv[0]).name}"))
    about["multicast"] = "off"
    if device == "cuda":
        about["gpus"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        about["versions"]["cuda"] = torch.version.cuda
        about["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError, IndexError):
            text = Path("/proc/driver/nvidia/version").read_text()
            about["versions"]["driver"] = text.splitlines()[0].split("  ")[1]
    return about


# --- tables for the documents -------------------------------------------------------------------------------------


def origin(about: dict[str, Any]) -> str:
    versions = about["versions"]
    return (
        f"{about.get('gpus', about['machine']['cpu'])}, PyTorch {versions['torch']}, NCCL {versions.get('nccl', '-')}, "
        f"NVLink multicast off; {about['date']}."
    )
