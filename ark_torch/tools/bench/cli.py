"""Command line of the benchmark: the collectives of ark against Gloo and, where it is installed, Open MPI.

    python -m ark_torch.tools.bench                     # everything: about ten minutes on two cores
    python -m ark_torch.tools.bench --quick             # a glance: about a minute
    python -m ark_torch.tools.bench --ops all_reduce --ranks 2 --sizes 4K,1M

Figures taken on a busy machine are worth little: the load is noted beside them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import launch, report, table
from .config import Config, parse_size, sizes_between
from .operations import DTYPES, OPERATIONS, REDUCE_OPS

QUICK_OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
QUICK_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)


def names(allowed: Any, what: str) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(part.strip() for part in text.split(","))
        for name in chosen:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is no {what}; there are: {', '.join(allowed)}")
        return chosen

    return parse


def size_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rank_list(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(part) for part in text.split(","))
    except ValueError:
        ranks = (0,)
    if any(not 2 <= number <= 16 for number in ranks):
        raise argparse.ArgumentTypeError(f"{text!r} does not list numbers of ranks from 2 to 16, such as 2,4")
    return ranks


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ark_torch.tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ops", type=names(OPERATIONS, "operation"), help=f"of {','.join(OPERATIONS)}")
    add("--ranks", type=rank_list, default=(2, 4), help="numbers of processes (default: 2,4)")
    add("--sizes", type=size_list, help="default: 4 to 256M, factor 4")
    add("--dtype", choices=DTYPES, default="float32")
    add("--redop", choices=REDUCE_OPS, default="sum")
    add("--backend", default="ark", help="the backend that is measured (default: ark)")
    add("--rounds", type=positive, default=7, help="turns of each backend (default: 7)")
    add("--no-mpi", action="store_true", help="leave Open MPI out even where it is installed")
    add("--quick", action="store_true", help="few sizes, five operations, three rounds")
    add("--output", type=Path, default=Path("benchmarks/results"), help="folder for the JSON and the picture")
    return parser


def configure(arguments: argparse.Namespace, mpi: bool, world: int) -> Config:
    return Config(
        world=world,
        operations=arguments.ops,
        sizes=arguments.sizes,
        backends=(arguments.backend, "gloo") if arguments.backend != "gloo" else ("gloo",),
        mpi=mpi,
        dtype=arguments.dtype,
        redop=arguments.redop,
        rounds=arguments.rounds,
        batch_seconds=0.01 if arguments.quick else 0.03,
        overhead=world == 2,
    )


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not dist.is_backend_available(arguments.backend):
        parser.error(f"backend {arguments.backend!r} is not known to this PyTorch")
    arguments.ops = arguments.ops or (QUICK_OPERATIONS if arguments.quick else tuple(OPERATIONS))
    arguments.sizes = arguments.sizes or (QUICK_SIZES if arguments.quick else sizes_between(4, 256 << 20, 4))
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 3)
    needed = 4 * max(arguments.ranks) * max(arguments.sizes)
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > room:
        limit = room // (4 * max(arguments.ranks)) >> 20
        parser.error(f"--sizes up to {max(arguments.sizes) >> 20}M need more memory than there is; stay below {limit}M")

    why_not = "left out (--no-mpi)" if arguments.no_mpi else launch.why_no_mpi()
    if not why_not and arguments.dtype in ("bfloat16",):
        why_not = f"MPI has no {arguments.dtype}"
    about = report.surroundings(report.shown_command("-m ark_torch.tools.bench"), mpi=not why_not)
    machine = about["machine"]
    print(f"# {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']}; PyTorch {torch.__version__}")
    print(f"# MPI: {why_not or about['versions']['mpi']}", flush=True)
    if machine["load_before"] > 0.5:
        print("# other programs are running: what follows says more about them than about the backends", flush=True)
    if about["environment"]:
        print(f"# set in the environment: {about['environment']}", flush=True)
    rows: list[dict[str, Any]] = []
    overhead: dict[str, float] = {}
    try:
        for world in arguments.ranks:
            for row in launch.run_ranks(configure(arguments, not why_not, world)):
                if "overhead" in row:
                    overhead = row["overhead"]
                else:
                    rows.append(row)
    except launch.BenchmarkFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table.summary(rows))
    name = "collectives-quick" if arguments.quick else "collectives"
    report.write_json(arguments.output / f"{name}.json", about, rows, overhead_us=overhead)
    why_no_picture = report.draw(arguments.output / f"{name}.png", about, rows)
    print(f"# written to {arguments.output}: {name}.json, {why_no_picture or f'{name}.png'}")
    return 1 if any(timing["wrong"] for row in rows for timing in list(row["timings"].values())[:1]) else 0
