"""Compares ark's expert-parallel mixture of experts with all-to-alls and grouped products one after the other.

    python benchmarks/fused_moe.py --ranks 2 [--shapes E8-K2-1024x4096-T16] [--device cpu]

E experts over all ranks, K choices per token, dim x ffn, T tokens per rank; gated SiLU, bfloat16 (float32 on CPU).
Choices are uniform, weights go through a softmax. Ways:

experts        PyTorch's products of this rank's experts alone, with the same number of local rows for each
experts_ark    the same by torch.ops.ark.moe_experts
eager_nccl     tokens sorted by expert, all_to_all_single of counts and rows, torch._grouped_mm (off Hopper and on CPU
               a loop over experts), all_to_all_single, index_add_; the host reads the counts (Gloo on CPU)
even_nccl      the same with known counts: the same number of rows for each expert (at least one), so that the host
               need not wait and a graph can contain it
inductor_nccl  even_nccl through torch.compile
dispatch       ark_torch.ops.moe_dispatch and moe_combine with nothing in between
pieces         moe_dispatch, torch.ops.ark.moe_experts, moe_combine
layer          ark_torch.ops.moe_layer
step           moe_layer forward and backward; eager_step: the same of eager_nccl

On GPUs each way but eager_nccl is captured in a CUDA graph of two calls with different tokens and replayed back to
back. A figure is the median over rounds of the slowest rank's time per call. `eager_us`: the same calls outside of a
graph. The even ways use other choices than the random ones, but as many. Results of layer and pieces are compared
with eager_nccl's within rounding, and each graph's with its own eager result bit for bit. A way that cannot be captured
or does not run has its error in `failed`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import Any

import on_gpus
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from fused import CALLS, Call, captured, timed
from gpu_ranks import ark_group, rival_group
from on_gpus import Rank, Row
from torch import Tensor

from ark_torch.ops import moe_combine, moe_dispatch, moe_layer

SIZES = ("1024x4096", "2048x8192", "1024x16384")
TOKENS = (1, 4, 16, 64, 384, 1024, 4096)
SHAPES = tuple(f"E8-K2-{sizes}-T{tokens}" for sizes in SIZES for tokens in TOKENS)
OURS = ("dispatch", "pieces", "layer", "step")
OTHERS = ("experts", "experts_ark", "eager_step")  # without rivals


class Mixture:
    """One shape on one rank: tokens, experts, and the ways through them."""

    def __init__(self, rank: Rank, shape: str, groups: dict[str, Any]) -> None:
        self.rank, self.shape, self.groups = rank, shape, groups
        found = re.fullmatch(r"E(\d+)-K(\d+)-(\d+)x(\d+)-T(\d+)", shape)
        if found is None:
            raise ValueError(f"{shape!r} is no shape: say E8-K2-1024x4096-T16, for example")
        self.experts, self.k, self.dim, self.ffn, self.tokens = (int(part) for part in found.groups())
        self.cuda, self.world = rank.device.type == "cuda", rank.ranks
        self.local = self.experts // self.world
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.grouped = self.cuda and torch.cuda.get_device_capability()[0] >= 9
        generator = torch.Generator(device=rank.device).manual_seed(1 + rank.rank)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=rank.device)

        self.x = [draw(self.tokens, self.dim).to(self.dtype) for _ in range(CALLS)]
        scores = [draw(self.tokens, self.experts) for _ in range(CALLS)]
        picked = [one.topk(self.k) for one in scores]
        self.ids = [one.indices for one in picked]
        self.weights = [one.values.softmax(1) for one in picked]
        self.w1 = (draw(self.local, 2 * self.ffn, self.dim) * self.dim**-0.5).to(self.dtype)
        self.w2 = (draw(self.local, self.dim, self.ffn) * self.ffn**-0.5).to(self.dtype)
        self.bound = {"max_tokens": self.tokens}
        # Even: choice i goes to expert i, the same number for each. If they do not divide evenly, the last ones go
        # nowhere.
        self.share = -(-self.tokens * self.k // self.experts)
        self.even_ends = torch.arange(1, self.local + 1, device=rank.device, dtype=torch.int32) * (
            self.share * self.world
        )
        self.even_counts = self.even_ends.diff(prepend=self.even_ends.new_zeros(1)).long()
        rows = self.world * self.share * self.local
        self.rows = draw(rows, self.dim).to(self.dtype)
        order = torch.arange(self.share * self.experts, device=rank.device) % max(self.tokens, 1)
        self.even_tokens = order
        self.compiled = torch.compile(self.even, dynamic=False)

    def products(self, rows: Tensor, ends: Tensor, counts: list[int] | None) -> Tensor:
        if self.grouped:
            hidden = torch._grouped_mm(rows, self.w1.transpose(1, 2), ends)
            inner = F.silu(hidden[:, : self.ffn]) * hidden[:, self.ffn :]
            return torch._grouped_mm(inner, self.w2.transpose(1, 2), ends)
        parts = []
        for e, part in enumerate(rows.split(counts or [len(rows) // self.local] * self.local)):
            hidden = part @ self.w1[e].t()
            parts.append((F.silu(hidden[:, : self.ffn]) * hidden[:, self.ffn :]) @ self.w2[e].t())
        return torch.cat(parts)

    def eager(self, i: int) -> Tensor:
        group, flat = self.groups["rival"], self.ids[i].flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        sent = counts.view(self.world, self.local).sum(1).tolist()
        table = theirs.view(self.world, self.local)
        received = table.sum(1).tolist()
        rows = self.x[i][order // self.k]
        came = funcol.all_to_all_single_autograd(rows, received, sent, group)
        expert = torch.arange(self.local, device=flat.device).repeat(self.world).repeat_interleave(table.flatten())
        sort = expert.argsort(stable=True)
        of = table.sum(0)
        y = self.products(came[sort], of.cumsum(0, dtype=torch.int32), None if self.grouped else of.tolist())
        back = torch.empty_like(y).index_copy(0, sort, y)
        mine = funcol.all_to_all_single_autograd(back, sent, received, group)
        weighted = mine.float() * self.weights[i].flatten()[order][:, None]
        total = torch.zeros(self.tokens, self.dim, device=flat.device)
        return total.index_add(0, order // self.k, weighted).to(self.dtype)

    def even(self, x: Tensor, weights: Tensor) -> Tensor:
        group = self.groups["rival"]
        came = funcol.all_to_all_single(x[self.even_tokens], None, None, group)
        by_expert = came.view(self.world, self.local, self.share, self.dim).transpose(0, 1).reshape(-1, self.dim)
        y = self.products(by_expert, self.even_ends, None)
        y = y.view(self.local, self.world, self.share, self.dim).transpose(0, 1).reshape(-1, self.dim)
        mine = funcol.all_to_all_single(y, None, None, group)
        weighted = mine.float() * weights.flatten()[self.even_tokens * self.k % weights.numel()][:, None]
        total = torch.zeros(self.tokens, self.dim, device=x.device)
        return total.index_add(0, self.even_tokens, weighted).to(self.dtype)

    def dispatch(self, i: int) -> Tensor:
        ids, group = self.ids[i], self.groups["ark"]
        rows, _, handle = moe_dispatch(self.x[i], ids, group, num_experts=self.experts, **self.bound)
        return moe_combine(rows, handle, self.weights[i])

    def pieces(self, i: int) -> Tensor:
        ids, group = self.ids[i], self.groups["ark"]
        rows, counts, handle = moe_dispatch(self.x[i], ids, group, num_experts=self.experts, **self.bound)
        y = torch.ops.ark.moe_experts(rows, counts, self.w1, self.w2, "silu")
        return moe_combine(y, handle, self.weights[i])

    def layer(self, i: int) -> Tensor:
        group = self.groups["ark"]
        return moe_layer(self.x[i], self.ids[i], self.weights[i], self.w1, self.w2, group, **self.bound)

    def step(self, i: int, forward: Call) -> Tensor:
        for one in (self.w1, self.w2, self.x[i]):
            one.requires_grad_()
        with torch.enable_grad():
            out = forward(i)
            gradients = torch.autograd.grad(out, (self.x[i], self.w1, self.w2), torch.ones_like(out))
        for one in (self.w1, self.w2, self.x[i]):
            one.requires_grad_(False)
        return torch.stack([one.flatten()[0] for one in gradients])

    def ways(self) -> dict[str, Call]:
        rival = "nccl" if self.cuda else "gloo"
        return {
            "experts": lambda i: self.products(self.rows, self.even_ends, None),
            "experts_ark": lambda i: torch.ops.ark.moe_experts(self.rows, self.even_counts, self.w1, self.w2, "silu"),
            f"eager_{rival}": self.eager,
            f"even_{rival}": lambda i: self.even(self.x[i], self.weights[i]),
            f"inductor_{rival}": lambda i: self.compiled(self.x[i], self.weights[i]),
            "dispatch": self.dispatch,
            "pieces": self.pieces,
            "layer": self.layer,
            "eager_step": lambda i: self.step(i, self.eager),
            "step": lambda i: self.step(i, self.layer),
        }


def measured(rank: Rank, call: Call, rounds: int, row: Row, name: str) -> Tensor | None:
    """Adds the way's figures to the row and returns its last result. An error on one rank is reported to all."""
    graphed = rank.device.type == "cuda" and not name.startswith("eager_")
    problem, run, eager, outs = "", None, [], None
    try:
        eager = [call(i) for i in range(CALLS)]
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        if graphed:
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


def compare(rank: Rank, work: Mixture, arguments: argparse.Namespace) -> Row:
    row: Row = {"work": "mixture of experts", "shape": work.shape, "ranks": rank.ranks}
    row |= {"dtype": str(work.dtype).removeprefix("torch."), "us": {}, "eager_us": {}, "wrong": {}, "failed": {}}
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, call in work.ways().items():
            if (arguments.ways and name not in arguments.ways) or (name.endswith("step") and not arguments.training):
                continue
            result = measured(rank, call, arguments.rounds, row, name)
            if result is not None:
                results[name] = result
    wanted = next((results[name] for name in results if name in ("eager_nccl", "eager_gloo")), None)
    for name in ("pieces", "layer"):
        if name in results and wanted is not None:
            wrong = int((~torch.isclose(results[name].float(), wanted.float(), rtol=2e-2, atol=5e-2)).sum())
            row["wrong"][name] = max(rank.share(wrong))
    for key, ratio in (("us", "faster_than_rival"), ("eager_us", "faster_than_rival_eager")):
        us = row[key]
        rivals = {name: value for name, value in us.items() if name not in (*OURS, *OTHERS)}
        if "layer" in us and rivals:
            row[ratio] = min(rivals.values()) / us["layer"]
        if "layer" in us and "experts" in us and key == "us":
            row["of_experts"] = us["experts"] / us["layer"]
    return row


def line(row: Row) -> str:
    us = " ".join(f"{name} {value:.1f}" for name, value in ({**row["eager_us"], **row["us"]}).items())
    names = ("faster_than_rival", "faster_than_rival_eager", "of_experts")
    ratios = " ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
    wrong = {name: count for name, count in row["wrong"].items() if count}
    return f"{row['shape']:24} {us} | {ratios} | wrong {wrong or 0}" + (f" | {row['failed']}" if row["failed"] else "")


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = {"rival": rival_group(rank), "ark": ark_group(rank)}
    estimate = 5.0
    for shape in arguments.shapes:
        if not rank.time_for(estimate):
            continue
        began = time.monotonic()
        torch._dynamo.reset()
        work = Mixture(rank, shape, groups)
        row = compare(rank, work, arguments)
        rank.write(row)
        rank.say(line(row))
        del work
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        estimate = max(rank.share(time.monotonic() - began)) * 1.5


def table(about: dict[str, Any]) -> str:
    """Formats Markdown: microseconds per call, in a graph where there is one, and the ratios of the goals."""
    rows = [row | {"us": row["eager_us"] | row["us"]} for row in about["rows"]]
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    ratios = ("faster_than_rival", "faster_than_rival_eager", "of_experts")
    heads = ["shape", *names, "rival / layer", "both eager", "experts / layer"]
    lines = [on_gpus.origin(about), "", "| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for row in rows:
        cells = [f"{row['us'][name]:.1f}" if name in row["us"] else "-" for name in names]
        cells += [f"{row[key]:.2f}" if key in row else "-" for key in ratios]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "fused_moe.json", 225)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="E8-K2-1024x4096-T16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", help="these alone")
    parser.add_argument("--training", action="store_true", help="forward and backward, too")
    arguments = parser.parse_args()
    about, rows, problem = on_gpus.measure(measure, arguments)
    print(table({**about, "rows": rows}))
    return 1 if problem or any(any(row["wrong"].values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
