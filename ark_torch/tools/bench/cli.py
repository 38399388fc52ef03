"""`ark bench`: compares the collectives of ark with Gloo and, if installed, Open MPI.

Results from a busy machine are unreliable, so the load is recorded with them. --developer, for work on ark_torch
itself, adds the project's goals and tables for its README.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from ark_torch import _suggest

from .config import DTYPES, OPERATION_NAMES, REDUCTIONS, Config, parse_size, sizes_between

QUICK_OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
QUICK_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
DESCRIPTION = """\
Measure collectives on CPU tensors: each operation at each size, with the backend "ark", Gloo and (where mpi4py and Open
MPI are installed) MPI taking turns in the same processes. The columns are those of nccl-tests; every result is checked.
"""
EXAMPLES = """\
examples:
  ark bench                                            every operation, 2 and 4 ranks: about ten minutes on two cores
  ark bench --quick                                    five operations at five sizes: about a minute
  ark bench --ops all_reduce --ranks 2 --sizes 4K,1M   these alone
  ark bench --quick --output results                   a JSON file and a picture, too
"""


def names(allowed: Any, what: str) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        chosen = tuple(part.strip() for part in text.split(","))
        for name in chosen:
            if name not in allowed:
                meant = _suggest.did_you_mean(name, allowed)
                raise argparse.ArgumentTypeError(f"{name!r} is no {what}{meant}; there are: {', '.join(allowed)}")
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
        prog="ark bench", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is measured").add_argument
    what("--ops", type=names(OPERATION_NAMES, "operation"), metavar="OP,...", help=f"of {', '.join(OPERATION_NAMES)}")
    what("--ranks", type=rank_list, default=(2, 4), metavar="N,...", help="numbers of processes (default: 2,4)")
    what("--sizes", type=size_list, metavar="BYTES,...", help="such as 4,64K,1M (default: 4 to 256M, factor 4)")
    what("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    what("--redop", choices=REDUCTIONS, default="sum", help="reduction (default: %(default)s)")
    what("--backend", default="ark", metavar="NAME", help="backend that is measured (default: %(default)s)")
    what("--no-mpi", action="store_true", help="leave Open MPI out even where it is installed")
    how = parser.add_argument_group("how").add_argument
    how("--quick", action="store_true", help="few sizes, five operations, three rounds")
    how("--rounds", type=positive, default=7, metavar="N", help="turns of each backend (default: %(default)s)")
    how("--output", type=Path, metavar="DIR", help="write a JSON file and a picture to this folder")
    how("--developer", action="store_true", help="for work on ark_torch itself: verdicts; writes to benchmarks/results")
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
        goals=arguments.developer,
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.developer and arguments.output is None:
        arguments.output = Path("benchmarks/results")

    from ark_torch import _autoload

    _autoload.ready()
    import torch
    import torch.distributed as dist

    from . import launch, report, table

    if not dist.is_backend_available(arguments.backend):
        known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
        meant = _suggest.did_you_mean(arguments.backend, known)
        parser.error(f"backend {arguments.backend!r} is not known to this PyTorch{meant}")
    arguments.ops = arguments.ops or (QUICK_OPERATIONS if arguments.quick else OPERATION_NAMES)
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
    about = report.surroundings(shlex.join(["ark", "bench", *argv]), mpi=not why_not)
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
    if arguments.developer:
        print(table.goals_met(rows))
    if arguments.output is not None:
        keep(arguments, about, rows, overhead)
    return 1 if any(timing["wrong"] for row in rows for timing in list(row["timings"].values())[:1]) else 0


def keep(
    arguments: argparse.Namespace, about: dict[str, Any], rows: list[dict[str, Any]], overhead: dict[str, float]
) -> None:
    from . import report

    name = "collectives-quick" if arguments.quick else "collectives"
    report.write_json(arguments.output / f"{name}.json", about, rows, overhead_us=overhead)
    why_no_picture = report.draw(arguments.output / f"{name}.png", about, rows)
    print(f"# written to {arguments.output}: {name}.json, {why_no_picture or f'{name}.png'}")
