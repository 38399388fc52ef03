"""Runs the same work eagerly, with Inductor where asked, and with ark, and prints what each does a second.

The first call of each compiles and is not counted. Results must be those of eager PyTorch: a wrong one ends the
program, whose exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SIZES = ("tiny", "small", "large")


@dataclass(frozen=True)
class Compile:
    """Compiles a function for one size after the other."""

    backend: str
    options: dict[str, Any] | None = None

    def __call__(self, function: Any, **more: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend=self.backend, options=self.options, dynamic=False, **more)


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--beside", nargs="*", default=[], choices=("inductor",), help="who else is measured")
    parser.add_argument("--times", type=int, default=3, help="counted runs of each")
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
    ways.update({name: Compile(name) for name in beside})
    ways["ark"] = Compile("ark", {"choose": "ark"})
    return ways


def compare(
    title: str,
    unit: str,
    work: Callable[[Compile | None], Callable[[], tuple[Any, int]]],
    arguments: argparse.Namespace,
    same: Callable[[Any, Any], bool],
) -> bool:
    """`work` takes a compiler and returns what is run: its result, and how many units that was. Returns whether all
    results are as `same` wants them, given the eager one and another."""
    print(f"{title} ({arguments.device}, {arguments.dtype})")
    expected, right, base = None, True, 0.0
    for name, compiler in compilers(arguments.beside).items():
        run = work(compiler)
        result, _ = run()
        run()
        begin = time.perf_counter()
        units = sum(run()[1] for _ in range(arguments.times))
        if arguments.device.startswith("cuda"):
            torch.cuda.synchronize()
        rate = units / (time.perf_counter() - begin)
        if compiler is None:
            expected, base = result, rate
        good = compiler is None or same(expected, result)
        right = right and good
        told = "" if good else "   WRONG: not eager PyTorch's result"
        print(f"  {name:<10} {rate:10.1f} {unit}   {rate / base:5.2f}x{told}", flush=True)
        if arguments.rows is not None:
            row = {"what": title, "unit": unit, "by": name, "rate": rate, "right": good}
            with arguments.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"size": arguments.size, "dtype": arguments.dtype}) + "\n")
    return right
