"""Compares ark's product of all experts' rows with PyTorch's grouped product: `python benchmarks/grouped_products.py`.

One GPU. Shapes say local experts, dim x ffn and rows an expert on average; 4-2048x8192-512 is what a rank of
fused_moe.py has with E8-K2-2048x8192-T1024 on two. Gated SiLU, bfloat16 (float32 on CPU). Counts of rows:

even           the same for each expert
random         as a router spreads tokens that choose uniformly (seeded)
zipf           in proportion to 1, 1/2, 1/3 ...

As in moe_layer, tensors have room for twice as many rows as there are. Ways:

kernel         torch.ops.ark.moe_experts_by(..., "kernel"): ark's kernel, twice
mixed          "mixed": ark's kernel with the activation, then PyTorch's grouped product
library        "library": PyTorch's grouped product twice, its activation and product over all the room in between
experts        torch.ops.ark.moe_experts, which chooses
first, second  one of PyTorch's grouped products alone

Each is captured in a CUDA graph of two calls and replayed back to back. A figure is the median over rounds, in
microseconds a call. `tflops`: of the ways that make both products. Results are compared with kernel's within rounding.
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from typing import Any

import on_gpus
import torch
from fused import CALLS, Call, captured, timed
from on_gpus import Rank, Row
from torch import Tensor

SIZES = ("1024x4096", "2048x8192", "1024x16384")
ROWS = (32, 192, 512, 2048)
SHAPES = tuple(f"4-{sizes}-{rows}" for sizes in SIZES for rows in ROWS)
SPREADS = ("even", "random", "zipf")
BOTH = ("kernel", "mixed", "library", "experts")


def counts_of(spread: str, experts: int, rows: int) -> list[int]:
    """How many rows each expert has; `rows` on average."""
    total = experts * rows
    if spread == "even":
        return [rows] * experts
    if spread == "random":
        generator = torch.Generator().manual_seed(rows)
        return torch.randint(experts, (total,), generator=generator).bincount(minlength=experts).tolist()
    shares = [1 / (1 + e) for e in range(experts)]
    counts = [int(total * share / sum(shares)) for share in shares]
    counts[0] += total - sum(counts)
    return counts


class Products:
    """One shape: rows, matrices, and the ways to multiply them."""

    def __init__(self, rank: Rank, shape: str, spread: str) -> None:
        found = re.fullmatch(r"(\d+)-(\d+)x(\d+)-(\d+)", shape)
        if found is None:
            raise ValueError(f"{shape!r} is no shape: say 4-2048x8192-512, for example")
        experts, dim, self.ffn, rows = (int(part) for part in found.groups())
        cuda = rank.device.type == "cuda"
        dtype = torch.bfloat16 if cuda else torch.float32
        generator = torch.Generator(device=rank.device).manual_seed(1)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=rank.device)

        counts = counts_of(spread, experts, rows)
        self.counts = torch.tensor(counts, device=rank.device)
        self.ends = self.counts.cumsum(0, dtype=torch.int32)
        self.used, room = sum(counts), 2 * sum(counts)
        self.rows = [draw(room, dim).to(dtype) for _ in range(CALLS)]
        self.inner = draw(room, self.ffn).to(dtype)
        self.w1 = (draw(experts, 2 * self.ffn, dim) * dim**-0.5).to(dtype)
        self.w2 = (draw(experts, dim, self.ffn) * self.ffn**-0.5).to(dtype)
        self.operations = 2 * self.used * 3 * dim * self.ffn
        self.grouped = cuda and torch.cuda.get_device_capability()[0] >= 9
        self.forms = ("kernel", "mixed", "library") if cuda else ("library",)

    def by(self, form: str) -> Call:
        return lambda i: torch.ops.ark.moe_experts_by(self.rows[i], self.counts, self.w1, self.w2, "silu", form)

    def ways(self) -> dict[str, Call]:
        ways: dict[str, Call] = {form: self.by(form) for form in self.forms}
        ways["experts"] = lambda i: torch.ops.ark.moe_experts(self.rows[i], self.counts, self.w1, self.w2, "silu")
        if self.grouped:
            ways["first"] = lambda i: torch._grouped_mm(self.rows[i], self.w1.transpose(1, 2), self.ends)
            ways["second"] = lambda i: torch._grouped_mm(self.inner, self.w2.transpose(1, 2), self.ends)
        return ways


def calls(call: Call) -> list[Tensor]:
    return [call(i) for i in range(CALLS)]


def compare(rank: Rank, shape: str, spread: str, rounds: int) -> Row:
    work = Products(rank, shape, spread)
    row: Row = {"work": "grouped products", "shape": shape, "spread": spread, "counts": work.counts.tolist()}
    row |= {"us": {}, "tflops": {}, "wrong": {}, "failed": {}}
    wanted = None
    for name, call in work.ways().items():
        run: Any = partial(calls, call)
        try:
            outs = run()
            if rank.device.type == "cuda":
                run, outs = captured(call)
                run()
                torch.cuda.synchronize()
        except Exception as error:
            row["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            continue
        row["us"][name] = rank.slowest(timed(rank, run, rounds))
        if name not in BOTH:
            continue
        row["tflops"][name] = round(work.operations / row["us"][name] / 1e6, 1)
        out = outs[-1][: work.used].float()
        wanted = out.clone() if wanted is None else wanted
        row["wrong"][name] = int((~torch.isclose(out, wanted, rtol=2e-2, atol=5e-2)).sum())
    return row


def line(row: Row) -> str:
    us = " ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
    wrong = {name: count for name, count in row["wrong"].items() if count}
    failed = f" | {row['failed']}" if row["failed"] else ""
    return f"{row['shape']:20} {row['spread']:7} {us} | TFLOPS {row['tflops']} | wrong {wrong or 0}{failed}"


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    import ark_torch.ops  # noqa: F401  (defines torch.ops.ark)

    for shape in arguments.shapes:
        for spread in arguments.spreads:
            if rank.time_for(2.0):
                row = compare(rank, shape, spread, arguments.rounds)
                rank.write(row)
                rank.say(line(row))


def main() -> int:
    parser = on_gpus.parser(__doc__, "grouped_products.json", 60)
    parser.set_defaults(ranks=[1])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="4-2048x8192-512")
    parser.add_argument("--spreads", nargs="+", default=list(SPREADS), choices=SPREADS)
    parser.add_argument("--rounds", type=int, default=3)
    _, rows, problem = on_gpus.measure(measure, parser.parse_args())
    return 1 if problem or any(row["failed"] or any(row["wrong"].values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
