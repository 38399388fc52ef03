"""Compares communication fused into the computation that produces it with the two run one after the other.

    python benchmarks/fused.py --ranks 2 [--shapes T8-D128-L32-B1024] [--device cpu]
    python benchmarks/fused.py --plot           measures nothing: table and picture from the JSON

Pooled embeddings with their all-to-all: T tables per rank with D columns (bfloat16; float32 on CPU), bags of L random
rows and B samples per rank. Each rank ends with [B, all tables, D] of its own samples. Ways:

eager_nccl     F.embedding_bag over all of the rank's tables at once, all_to_all_single, permute (Gloo on CPU)
inductor_nccl  the same through torch.compile
pool           ark's own kernel for all bags of this rank, without communication
pool_ark       pool, then all_to_all_single of ark's group, permute
pool_nccl      the same over NCCL
fused          ark_torch.ops.embedding_bag_all_to_all
compiled_ark   F.embedding_bag of each table, stack, all_to_all_single, permute through torch.compile(backend="ark")
fused_step     fused forward and backward (dense gradients of the tables); eager_step: the same of eager_nccl

On GPUs each way is captured in a CUDA graph of two calls with different indices and replayed back to back. A figure is
the median over rounds of the slowest rank's time per call. Results are compared: fused with pool_ark bit for bit, with
the others within rounding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_gpus
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from gpu_ranks import ark_group, rival_group
from on_gpus import Rank, Row
from torch import Tensor

from ark_torch.ops import embedding_bag_all_to_all

SHAPES = ("T8-D128-L32-B1024", "T8-D128-L32-B4096", "T32-D128-L8-B8192", "T32-D256-L32-B4096")
ROWS = 100_000
CALLS = 2  # per graph
WINDOW_US = 20_000.0
Call = Callable[[int], Tensor]


def sizes_of(shape: str) -> tuple[int, int, int, int]:
    tables, dim, length, batch = (int(part[1:]) for part in shape.split("-"))
    return tables, dim, length, batch


class Embedding:
    """One shape on one rank: tables, bags, and the ways to pool them."""

    def __init__(self, rank: Rank, shape: str, groups: dict[str, Any], rows: int) -> None:
        self.rank, self.shape, self.groups = rank, shape, groups
        self.tables, self.dim, self.length, self.batch = sizes_of(shape)
        self.rows, self.bags = rows, rank.ranks * self.batch
        cuda = rank.device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        generator = torch.Generator(device=rank.device).manual_seed(1 + rank.rank)
        whole = torch.randn(self.tables * rows, self.dim, generator=generator, device=rank.device)
        self.whole = whole.to(self.dtype).requires_grad_()
        self.parts = [part.detach().requires_grad_() for part in self.whole.detach().split(rows)]
        shape_of = (self.tables, self.bags, self.length)
        self.indices = [
            torch.randint(0, rows, shape_of, generator=generator, device=rank.device, dtype=torch.int32)
            for _ in range(CALLS)
        ]
        first = torch.arange(self.tables, device=rank.device, dtype=torch.int32)[:, None, None] * rows
        # In the order in which the all-to-all sends: [rank and sample, table].
        self.flat = [(one + first).transpose(0, 1).reshape(-1, self.length).contiguous() for one in self.indices]
        self.lists = [[table.reshape(-1) for table in one] for one in self.indices]
        begins = torch.arange(0, self.bags * self.length, self.length, device=rank.device, dtype=torch.int32)
        self.offsets = [begins] * self.tables
        self.compiled = torch.compile(self.functional, dynamic=False)
        self.compiled_apart = torch.compile(self.tables_apart, backend="ark", dynamic=False)
        generator.manual_seed(99 + rank.rank)
        out = (self.batch, rank.ranks * self.tables, self.dim)
        self.gradient = torch.randn(out, generator=generator, device=rank.device).to(self.dtype)

    def arranged(self, received: Tensor) -> Tensor:
        ranks = self.rank.ranks
        parts = received.view(ranks, self.batch, self.tables, self.dim)
        return parts.permute(1, 0, 2, 3).reshape(self.batch, ranks * self.tables, self.dim)

    def exchanged(self, pooled: Tensor, group: Any) -> Tensor:
        received = torch.empty_like(pooled)
        dist.all_to_all_single(received, pooled, group=group)
        return self.arranged(received)

    def functional(self, flat: Tensor, whole: Tensor) -> Tensor:
        pooled = F.embedding_bag(flat, whole, mode="sum")
        return self.arranged(funcol.all_to_all_single_autograd(pooled, None, None, self.groups["rival"]))

    def eager(self, i: int) -> Tensor:
        return self.exchanged(F.embedding_bag(self.flat[i], self.whole, mode="sum"), self.groups["rival"])

    def inductor(self, i: int) -> Tensor:
        return self.compiled(self.flat[i], self.whole)

    def pool(self, i: int) -> Tensor:
        alone = self.groups["alone"]
        return embedding_bag_all_to_all(self.parts, self.lists[i], self.offsets, alone, tables_per_rank=[self.tables])

    def fused(self, i: int) -> Tensor:
        known = [self.tables] * self.rank.ranks
        return embedding_bag_all_to_all(
            self.parts, self.lists[i], self.offsets, self.groups["ark"], tables_per_rank=known
        )

    def tables_apart(self, lists: list[Tensor]) -> Tensor:
        pooled = [
            F.embedding_bag(i, part, o, mode="sum") for i, part, o in zip(lists, self.parts, self.offsets, strict=True)
        ]
        return self.arranged(funcol.all_to_all_single(torch.stack(pooled, 1), None, None, self.groups["ark"]))

    def compiled_ark(self, i: int) -> Tensor:
        with torch.no_grad():
            return self.compiled_apart(self.lists[i])

    def fused_step(self, i: int) -> Tensor:
        return torch.cat([one.flatten()[:1] for one in torch.autograd.grad(self.fused(i), self.parts, self.gradient)])

    def eager_step(self, i: int) -> Tensor:
        return torch.autograd.grad(self.functional(self.flat[i], self.whole), self.whole, self.gradient)[0][0]

    def ways(self) -> dict[str, Call]:
        rival = "nccl" if self.rank.device.type == "cuda" else "gloo"
        return {
            f"eager_{rival}": self.eager,
            f"inductor_{rival}": self.inductor,
            "pool": self.pool,
            f"pool_{rival}": lambda i: self.exchanged(self.pool(i), self.groups["rival"]),
            "pool_ark": lambda i: self.exchanged(self.pool(i), self.groups["ark"]),
            "fused": self.fused,
            "compiled_ark": self.compiled_ark,
            "eager_step": self.eager_step,
            "fused_step": self.fused_step,
        }


def captured(call: Call) -> tuple[Callable[[], Any], list[Tensor]]:
    """Captures both calls in one graph. Returns its replay and the output tensors."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        outs = [call(i) for i in range(CALLS)]
    return graph.replay, outs


def timed(rank: Rank, run: Callable[[], Any], rounds: int) -> list[float]:
    """Returns microseconds per call, one figure per round."""
    cuda = rank.device.type == "cuda"

    def once(times: int) -> float:
        rank.barrier()
        if not cuda:
            began = time.perf_counter()
            for _ in range(times):
                run()
            return (time.perf_counter() - began) / times / CALLS * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        run()  # synchronizes the ranks
        begin.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / times / CALLS * 1e3

    estimate = max(rank.share(once(2)))
    times = max(2, min(200, round(WINDOW_US / estimate / CALLS)))
    return [once(times) for _ in range(rounds)]


def compare(rank: Rank, work: Embedding, arguments: argparse.Namespace) -> Row:
    cuda = rank.device.type == "cuda"
    row: Row = {"work": "embedding", "shape": work.shape, "ranks": rank.ranks, "rows": work.rows}
    row |= {"dtype": str(work.dtype).removeprefix("torch."), "us": {}, "wrong": {}}
    results: dict[str, Tensor] = {}
    for name, call in work.ways().items():
        if arguments.ways and name not in arguments.ways:
            continue
        training = name.endswith("step")
        if training and not arguments.training:
            continue
        with torch.set_grad_enabled(training):
            for i in range(CALLS):
                results[name] = call(i)
            if cuda:
                torch.cuda.synchronize()
            run, outs = captured(call) if cuda else (lambda call=call: [call(i) for i in range(CALLS)], None)
            row["us"][name] = rank.slowest(timed(rank, run, arguments.rounds))
            if outs is not None:
                results[name] = outs[-1]
                eager = call(CALLS - 1)
                row["wrong"][f"{name}_graph"] = max(rank.share(int((eager != outs[-1]).sum())))
                del eager
            del run, outs
    wanted = results.get("pool_ark", results.get("fused"))
    for name, result in results.items():
        if name == "pool" or name.endswith("step") or wanted is None:
            continue
        exact = name in ("fused", "pool_ark", "pool_nccl", "pool_gloo")
        if exact:
            wrong = int((result != wanted).sum())
        else:
            wrong = int((~torch.isclose(result.float(), wanted.float(), rtol=2e-2, atol=5e-2)).sum())
        row["wrong"][name] = max(rank.share(wrong))
    us = row["us"]
    rivals = [us[name] for name in us if name.split("_")[0] in ("eager", "inductor") and not name.endswith("step")]
    if "fused" in us:
        if rivals:
            row["faster_than_rival"] = min(rivals) / us["fused"]
        if "pool" in us:
            row["of_pool"] = us["fused"] / us["pool"]
        if "pool_ark" in us:
            row["of_pool_ark"] = us["fused"] / us["pool_ark"]
    if "fused_step" in us and "eager_step" in us:
        row["step_faster"] = us["eager_step"] / us["fused_step"]
    return row


def line(row: Row) -> str:
    us = " ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
    ratios = " ".join(
        f"{name} {row[name]:.3f}"
        for name in ("faster_than_rival", "of_pool", "of_pool_ark", "step_faster")
        if name in row
    )
    wrong = {name: count for name, count in row["wrong"].items() if count}
    return f"{row['shape']:22} {us} | {ratios} | wrong {wrong or 0}"


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = {"rival": rival_group(rank), "ark": ark_group(rank)}
    alone = [dist.new_group([r], backend="ark") for r in range(rank.ranks)]
    groups["alone"] = alone[rank.rank]
    estimate = 5.0
    for shape in arguments.shapes:
        if not rank.time_for(estimate):
            continue
        began = time.monotonic()
        work = Embedding(rank, shape, groups, arguments.rows)
        row = compare(rank, work, arguments)
        rank.write(row)
        rank.say(line(row))
        del work
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
        estimate = max(rank.share(time.monotonic() - began)) * 2


def table(about: dict[str, Any]) -> str:
    """Formats Markdown: microseconds per call, and the ratios of the goals."""
    names = list(dict.fromkeys(name for row in about["rows"] for name in row["us"]))
    lines = [on_gpus.origin(about), "", "| shape | " + " | ".join(names) + " | rival / fused | fused / pool | fused / "
             "pool_ark |", "| --- " * (len(names) + 4) + "|"]  # fmt: skip
    for row in about["rows"]:
        cells = [f"{row['us'][name]:.0f}" if name in row["us"] else "-" for name in names]
        cells += [f"{row[key]:.2f}" if key in row else "-" for key in ("faster_than_rival", "of_pool", "of_pool_ark")]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    shares = [row["of_pool_ark"] for row in about["rows"] if "of_pool_ark" in row]
    if shares:
        lines.append(f"\nFused against pooling and all-to-all, mean: {statistics.mean(shares):.2f}")
    return "\n".join(lines)


def draw(about: dict[str, Any], path: Path) -> str:
    """Draws each way's time, relative to the fused operator's, by shape. Returns the reason if there is no picture."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error} (pip install matplotlib)"
    rows = [row for row in about["rows"] if "fused" in row["us"]]
    ways = [way for way in dict.fromkeys(way for row in rows for way in row["us"]) if not way.endswith("_step")]
    if not rows:
        return "no picture: nothing was measured"
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, way in enumerate(ways):
        places = [at + (number - len(ways) / 2) * 0.8 / len(ways) for at in range(len(rows))]
        heights = [row["us"].get(way, 0.0) / row["us"]["fused"] for row in rows]
        bars = axes.bar(places, heights, 0.8 / len(ways), align="edge", label=way)
        labels = [f"{row['us'][way]:.0f}" if way in row["us"] else "" for row in rows]
        axes.bar_label(bars, labels, fontsize="xx-small")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["shape"] for row in rows])
    axes.set(ylabel="time beside the fused operator's", title="pooled embeddings with their all-to-all; us on the bars")
    axes.legend(fontsize="small")
    figure.suptitle(on_gpus.origin(about), fontsize="small")
    figure.savefig(path, dpi=100)
    return ""


def main() -> int:
    parser = on_gpus.parser(__doc__, "fused.json", 240)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="T8-D128-L32-B1024")
    parser.add_argument("--rows", type=int, default=ROWS, help="of each table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", help="these alone")
    parser.add_argument("--training", action="store_true", help="steps with the backward pass, too")
    parser.add_argument("--plot", action="store_true", help="measure nothing: draw what --output has")
    arguments = parser.parse_args()
    if arguments.plot:
        about = json.loads(arguments.output.read_text(encoding="utf-8"))
        print(table(about))
        if why := draw(about, arguments.output.with_suffix(".png")):
            sys.exit(why)
        return 0
    about, rows, problem = on_gpus.measure(measure, arguments)
    print(table({**about, "rows": rows}))
    return 1 if problem or any(any(row["wrong"].values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
