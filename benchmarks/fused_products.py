"""Compares matrix products fused with a collective with the two run one after the other.

    python benchmarks/fused_products.py --ranks 2 [--shapes all_reduce-1x4096x8192] [--device cpu]

A tensor-parallel linear layer, rows x depth x columns of a rank's product, bfloat16 (float32 on CPU): linear and
all_reduce, linear and reduce_scatter (rows: of the product), all_gather and linear (rows: of the product, so of all
ranks). The shapes are those of Llama 8B and 70B, split over two ranks. Ways:

product        torch.mm alone
eager_nccl     torch.mm and the collective of NCCL (Gloo on CPU)
inductor_nccl  the same through torch.compile
symm_mem       PyTorch's symmetric memory: torch.ops.symm_mem.fused_matmul_reduce_scatter, fused_all_gather_matmul; for
               all_reduce torch.mm into symmetric memory and its one-shot all-reduce (from 256 KB two-shot)
unfused        ark_torch.ops: torch.mm and ark's collective
fused          ark_torch.ops: one kernel
default        ark_torch.ops: the form that it chooses
compiled       the code of inductor_nccl over ark by torch.compile(backend="ark"), which finds the operators

On GPUs each way is captured in a CUDA graph of two calls with different matrices and replayed back to back. A figure is
the median over rounds of the slowest rank's time per call. `eager_us`: the same calls outside of a graph. Results are
compared with eager_nccl's within rounding, and each graph's with its own eager result bit for bit. A way that cannot be
captured or does not run has its error in `failed`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import on_gpus
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from fused import CALLS, Call, captured, timed
from gpu_ranks import ark_group, rival_group
from on_gpus import Rank, Row
from torch import Tensor

from ark_torch.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

SHAPES = (
    "all_reduce-1x4096x8192", "all_reduce-16x4096x8192", "all_reduce-384x2048x4096", "all_reduce-2048x4096x8192",
    "all_gather-2048x4096x14336", "all_gather-8192x4096x14336", "all_gather-2048x8192x28672",
    "reduce_scatter-2048x7168x4096", "reduce_scatter-8192x7168x4096", "reduce_scatter-2048x14336x8192",
)  # fmt: skip
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": matmul_all_reduce, "reduce_scatter": matmul_reduce_scatter, "all_gather": all_gather_matmul,
}  # fmt: skip
OURS = ("unfused", "fused", "default", "compiled")
TWO_SHOT_BYTES = 256 << 10


class Product:
    """One shape on one rank: matrices, and the ways to multiply them."""

    def __init__(self, rank: Rank, shape: str, groups: dict[str, Any]) -> None:
        self.rank, self.shape, self.groups = rank, shape, groups
        self.kind, _, sizes = shape.partition("-")
        self.rows, self.depth, self.columns = (int(part) for part in sizes.split("x"))
        self.cuda = rank.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        generator = torch.Generator(device=rank.device).manual_seed(1 + rank.rank)
        mine = self.rows // rank.ranks if self.kind == "all_gather" else self.rows

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=rank.device).to(self.dtype)

        self.a = [draw(mine, self.depth) for _ in range(CALLS)]
        self.weights = [draw(self.columns, self.depth) * self.depth**-0.5 for _ in range(CALLS)]
        self.whole = draw(self.rows, self.depth) if self.kind == "all_gather" else None
        self.compiled = torch.compile(self.functional, dynamic=False)
        self.arks = torch.compile(lambda a, w: self.functional(a, w, "ark"), backend="ark", dynamic=False)
        self.symmetric: list[Tensor] = []

    def product(self, i: int) -> Tensor:
        return torch.mm(self.a[i] if self.whole is None else self.whole, self.weights[i].t())

    def eager(self, i: int) -> Tensor:
        group, ranks = self.groups["rival"], self.rank.ranks
        if self.kind == "all_gather":
            gathered = self.a[i].new_empty(self.rows, self.depth)
            dist.all_gather_into_tensor(gathered, self.a[i], group=group)
            return torch.mm(gathered, self.weights[i].t())
        made = torch.mm(self.a[i], self.weights[i].t())
        if self.kind == "all_reduce":
            dist.all_reduce(made, group=group)
            return made
        out = made.new_empty(self.rows // ranks, self.columns)
        dist.reduce_scatter_tensor(out, made, group=group)
        return out

    def functional(self, a: Tensor, weight: Tensor, whose: str = "rival") -> Tensor:
        group = self.groups[whose]
        if self.kind == "all_gather":
            return torch.mm(funcol.all_gather_tensor(a, 0, group), weight.t())
        made = torch.mm(a, weight.t())
        if self.kind == "all_reduce":
            return funcol.all_reduce(made, "sum", group)
        return funcol.reduce_scatter_tensor(made, "sum", 0, group)

    def symm_mem(self, i: int) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        name = self.groups["rival"].group_name
        if self.kind == "all_gather":
            weights = [self.weights[i].t()]
            return torch.ops.symm_mem.fused_all_gather_matmul(self.a[i], weights, 0, name, return_A=False)[1][0]
        if self.kind == "reduce_scatter":
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.a[i], self.weights[i].t(), "sum", 0, name)
        while len(self.symmetric) < CALLS:
            place = symmetric.empty(self.rows, self.columns, dtype=self.dtype, device=self.rank.device)
            symmetric.rendezvous(place, name)
            self.symmetric.append(place)
        place = self.symmetric[i]
        torch.mm(self.a[i], self.weights[i].t(), out=place)
        if place.nbytes < TWO_SHOT_BYTES:
            return torch.ops.symm_mem.one_shot_all_reduce(place, "sum", name)
        return torch.ops.symm_mem.two_shot_all_reduce_(place, "sum", name)

    def ark(self, form: str) -> Call:
        operator = OPERATORS[self.kind]
        return lambda i: operator(self.a[i], self.weights[i].t(), self.groups["ark"], form=form)

    def ways(self) -> dict[str, Call]:
        rival = "nccl" if self.cuda else "gloo"
        ways: dict[str, Call] = {
            "product": self.product,
            f"eager_{rival}": self.eager,
            f"inductor_{rival}": lambda i: self.compiled(self.a[i], self.weights[i]),
            "unfused": self.ark("unfused"),
            "default": self.ark("auto"),
            "compiled": lambda i: self.arks(self.a[i], self.weights[i]),
        }
        return ways | ({"symm_mem": self.symm_mem, "fused": self.ark("fused")} if self.cuda else {})


def measured(rank: Rank, call: Call, rounds: int, row: Row, name: str) -> Tensor | None:
    """Adds the way's figures to the row and returns its last result. An error on one rank is reported to all."""
    cuda = rank.device.type == "cuda"
    problem, run, eager, outs = "", None, [], None
    try:
        eager = [call(i) for i in range(CALLS)]
        if cuda:
            torch.cuda.synchronize()
            run, outs = captured(call)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    if any(problems := rank.share(problem)):
        row["failed"][name] = next(one for one in problems if one)
        return None
    wanted = eager[-1].clone()
    for key, of in (("us", run), ("eager_us", lambda: [call(i) for i in range(CALLS)])):
        if of is not None:
            row[key][name] = rank.slowest(timed(rank, of, rounds if key == "us" else 2))
    if outs is not None:
        row["wrong"][f"{name}_graph"] = max(rank.share(int((outs[-1] != wanted).sum())))
    return wanted


def compare(rank: Rank, work: Product, arguments: argparse.Namespace) -> Row:
    row: Row = {"work": f"linear + {work.kind}", "shape": work.shape, "ranks": rank.ranks}
    row |= {"dtype": str(work.dtype).removeprefix("torch."), "us": {}, "eager_us": {}, "wrong": {}, "failed": {}}
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, call in work.ways().items():
            if arguments.ways and name not in arguments.ways:
                continue
            result = measured(rank, call, arguments.rounds, row, name)
            if result is not None:
                results[name] = result
    wanted = next((results[name] for name in results if name.startswith("eager_")), None)
    for name, result in results.items():
        if name == "product" or wanted is None:
            continue
        wrong = int((~torch.isclose(result.float(), wanted.float(), rtol=2e-2, atol=5e-2)).sum())
        row["wrong"][name] = max(rank.share(wrong))
    us = row["us"] or row["eager_us"]
    rivals = {name: value for name, value in us.items() if name not in (*OURS, "product")}
    if "default" in us and rivals:
        row["best_rival"] = min(rivals, key=lambda name: rivals[name])
        row["faster_than_rival"] = rivals[row["best_rival"]] / us["default"]
    if "default" in us and "product" in us:
        row["of_product"] = us["product"] / us["default"]
    return row


def line(row: Row) -> str:
    us = " ".join(f"{name} {value:.1f}" for name, value in (row["us"] or row["eager_us"]).items())
    ratios = " ".join(f"{name} {row[name]:.3f}" for name in ("faster_than_rival", "of_product") if name in row)
    wrong = {name: count for name, count in row["wrong"].items() if count}
    return f"{row['shape']:28} {us} | {ratios} | wrong {wrong or 0}" + (f" | {row['failed']}" if row["failed"] else "")


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = {"rival": rival_group(rank), "ark": ark_group(rank)}
    estimate = 5.0
    for shape in arguments.shapes:
        if not rank.time_for(estimate):
            continue
        began = time.monotonic()
        torch._dynamo.reset()
        work = Product(rank, shape, groups)
        row = compare(rank, work, arguments)
        rank.write(row)
        rank.say(line(row))
        del work
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        estimate = max(rank.share(time.monotonic() - began)) * 1.5


def table(about: dict[str, Any]) -> str:
    """Formats Markdown: microseconds per call, and the ratios of the goals."""
    rows = [row | {"us": row["us"] or row["eager_us"]} for row in about["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    lines = [on_gpus.origin(about), "", "| shape | " + " | ".join(names) + " | rival / ark | product / ark |",
             "| --- " * (len(names) + 3) + "|"]  # fmt: skip
    for row in rows:
        cells = [f"{row['us'][name]:.1f}" if name in row["us"] else "-" for name in names]
        cells += [f"{row[key]:.2f}" if key in row else "-" for key in ("faster_than_rival", "of_product")]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "fused_products.json", 225)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="all_reduce-16x4096x8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", help="these alone")
    arguments = parser.parse_args()
    about, rows, problem = on_gpus.measure(measure, arguments)
    print(table({**about, "rows": rows}))
    return 1 if problem or any(any(row["wrong"].values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
