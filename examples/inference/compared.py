"""Runs the same work eagerly, with Inductor where asked, and with ark, and prints what each does a second.

The first two calls of each compile and are not counted. Then all take turns, and the median counts. Results must be
those of eager PyTorch: with a wrong one the program's exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SIZES = ("tiny", "small", "large")
BESIDE = {"inductor": None, "reduce-overhead": "reduce-overhead"}  # Inductor's modes; the second takes CUDA graphs
Run = Callable[[], tuple[Any, int]]
Rates = dict[str, list[float]]  # of each contender: units a second, run by run


@dataclass(frozen=True)
class Compile:
    """Compiles a function for one size after the other."""

    backend: str
    options: dict[str, Any] | None = None
    mode: str | None = None

    def __call__(self, function: Any, **more: Any) -> Any:
        chosen = {"backend": self.backend, "options": self.options, "mode": self.mode}
        return torch.compile(function, dynamic=False, **chosen, **more)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--beside", nargs="*", default=[], choices=BESIDE, help="who else is measured")
    parser.add_argument("--times", type=int, default=3, help="counted runs of each")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after so many, compiling included, no further run is begun"
    )
    parser.add_argument(
        "--size",
        default="tiny",
        choices=SIZES,
        help="of the model with random weights: small for a CPU, large for a GPU",
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append what was measured, a line of JSON for each")
    return parser


def compilers(beside: list[str]) -> dict[str, Compile | None]:
    """By name: how each compiles a function; None: not at all. ark compiles its kernels in the first call here; without
    "choose" it would measure itself against Inductor over the first calls."""

    ways: dict[str, Compile | None] = {"eager": None}
    ways.update({name: Compile("inductor", mode=BESIDE[name]) for name in beside})
    ways["ark"] = Compile("ark", {"choose": "ark"})
    return ways


def in_turns(
    runs: dict[str, Run], arguments: argparse.Namespace, ends: float, after_a_turn: Callable[[Rates], None]
) -> Rates:
    """Units a second of each run. Turns are alternated, so that what else the machine does meets all alike."""
    rates: Rates = {name: [] for name in runs}
    for turn in range(arguments.times):
        for name, run in list(runs.items())[:: -1 if turn % 2 else 1]:
            begin = time.perf_counter()
            units = run()[1]
            if arguments.device.startswith("cuda"):
                torch.cuda.synchronize()
            rates[name].append(units / (time.perf_counter() - begin))
        after_a_turn(rates)
        if time.monotonic() > ends:
            break
    return rates


def compare(
    title: str,
    unit: str,
    work: Callable[[Compile | None], Run],
    arguments: argparse.Namespace,
    same: Callable[[Any, Any], bool],
) -> bool:
    """`work` takes a compiler and returns what is run: its result, and how many units that was. Returns whether all
    results are as `same` wants them, given the eager one and another."""
    print(f"{title} ({arguments.device}, {arguments.dtype})", flush=True)
    ends = time.monotonic() + arguments.seconds
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # all contenders compile the same functions
    runs, good, expected = dict[str, Run](), dict[str, bool](), None
    for name, compiler in compilers(arguments.beside).items():
        runs[name] = work(compiler)
        result, _ = runs[name]()
        expected = result if compiler is None else expected
        good[name] = compiler is None or same(expected, result)
        runs[name]()
    others = arguments.rows.read_text(encoding="utf-8") if arguments.rows and arguments.rows.exists() else ""

    def keep(rates: Rates) -> None:
        """Rewrites the rows after each turn, so that a run which is ended early leaves those of the turns it had."""
        if arguments.rows is None:
            return
        row = {"what": title, "unit": unit, "size": arguments.size, "dtype": arguments.dtype}
        lines = [
            json.dumps(row | {"by": name, "rate": statistics.median(of), "runs": len(of), "right": good[name]})
            for name, of in rates.items()
        ]
        beside = arguments.rows.with_suffix(".new")
        beside.write_text(others + "\n".join([*lines, ""]), encoding="utf-8")
        beside.replace(arguments.rows)

    rates = in_turns(runs, arguments, ends, keep)
    base = statistics.median(rates["eager"])
    for name, of in rates.items():
        rate = statistics.median(of)
        told = "" if good[name] else "   WRONG: not eager PyTorch's result"
        print(f"  {name:<15} {rate:10.1f} {unit}   {rate / base:5.2f}x{told}", flush=True)
    return all(good.values())
