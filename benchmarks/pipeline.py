"""Measures a pipeline-parallel training step: torch.distributed.pipelining over NCCL and over ark, and captured.

    python benchmarks/pipeline.py --ranks 2 [--schedules 1F1B] [--micro-batches 8] [--device cpu]

The set-up of the ARK paper (section 7.4), reduced to as many stages as there are GPUs: layers of GPT-3 6.7B's shape
(hidden size 4096, 32 heads), --layers per stage, sequences of 2048 tokens, one per micro-batch; bfloat16 weights, fused
AdamW, the mean square of the last stage's output as loss. Contenders:

nccl            schedule.step() over NCCL (Gloo on CPUs), then the optimizer's step, called by the host
ark             the same over ark
captured_NAME   ark_torch.train.capture(schedule, optimizer) over either: one launch per step

The learning rate is 0, so that all contenders have the same losses, which must agree within rounding. A figure is the
median over rounds of the slowest rank's time per step. A contender that could not be captured reports why.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import on_gpus
import torch
from gpu_ranks import ark_group, rival_group
from on_gpus import Rank, Row
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional
from training_models import Block, Shape

from ark_torch.train import capture

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
CLOSE = 0.02  # relative, for losses of bfloat16 sums


class Setting:
    """This rank's stages, created anew for each contender, and the batch."""

    def __init__(self, rank: Rank, name: str, arguments: argparse.Namespace) -> None:
        self.rank, self.name, self.arguments = rank, name, arguments
        self.shape = Shape(0, arguments.hidden, arguments.heads, 0, True, 1, arguments.sequence)
        self.each = 1 if name in ("GPipe", "1F1B") else 2
        count = arguments.micro_batches
        self.inputs, self.target = (
            rank.random(count, self.shape.sequence, self.shape.hidden, source=source) for source in (0, 1)
        )

    def stages(self, group: Any) -> tuple[Any, list[nn.Module]]:
        rank, count = self.rank, self.rank.ranks * self.each
        parts = []
        for at in range(self.each):
            torch.manual_seed(rank.rank + rank.ranks * at)
            blocks = max(1, self.arguments.layers // self.each)
            with rank.device:
                parts.append(nn.Sequential(*(Block(self.shape) for _ in range(blocks))).to(torch.bfloat16))
        stages = [
            pipelining.PipelineStage(part, rank.rank + rank.ranks * at, count, rank.device, group=group)
            for at, part in enumerate(parts)
        ]
        made = getattr(pipelining, f"Schedule{self.name}")
        of = stages if self.each > 1 else stages[0]
        return made(of, n_microbatches=self.arguments.micro_batches, loss_fn=functional.mse_loss), parts

    def contender(self, group: Any, captured: bool) -> tuple[Callable[[], Tensor], Callable[[], str]]:
        """Returns a step that returns its loss, and a function that says why it is not captured."""
        schedule, parts = self.stages(group)
        options = {"fused": True} if self.rank.device.type == "cuda" else {}
        optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=0.0, **options)
        if captured:
            step = capture(schedule, optimizer)
            return lambda: step((self.inputs, self.target)), lambda: step.reason
        first, last = self.rank.rank == 0, self.rank.rank == self.rank.ranks - 1

        def by_hand() -> Tensor:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            more = {"target": self.target, "losses": losses} if last else {}
            schedule.step(*((self.inputs,) if first else ()), **more, return_outputs=False)
            optimizer.step()
            return torch.stack(losses).mean() if last else torch.tensor(float("nan"))

        return by_hand, lambda: ""


def compare(rank: Rank, name: str, groups: dict[str, Any], arguments: argparse.Namespace) -> Row:
    setting = Setting(rank, name, arguments)
    gc.collect()  # frees the graphs of the previous schedule
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()

    def synchronize() -> None:
        if rank.device.type == "cuda":
            torch.cuda.synchronize()

    ways: dict[str, tuple[Callable[[], Tensor], Callable[[], str]]] = {}
    losses, reasons = {}, {}
    for captured in (False, True):
        for group_name, group in groups.items():
            way = f"captured_{group_name}" if captured else group_name
            ways[way] = setting.contender(group, captured)
            for _ in range(5):
                loss = ways[way][0]()
            synchronize()
            losses[way] = next(value for value in rank.share(loss.item()) if value == value)
            reasons[way] = ways[way][1]()
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            ways[way][0]()
            synchronize()
            rank.barrier()
            began = time.perf_counter()
            for _ in range(arguments.steps):
                ways[way][0]()
            synchronize()
            taken[way].append((time.perf_counter() - began) / arguments.steps * 1e3)
    rival = next(iter(groups))
    ms = {way: rank.slowest(times) for way, times in taken.items()}
    wrong = [way for way, loss in losses.items() if abs(loss - losses[rival]) > CLOSE * abs(losses[rival])]
    return {
        "schedule": name,
        "ranks": rank.ranks,
        "micro_batches": arguments.micro_batches,
        "ms": ms,
        "spread": {way: max(times) / statistics.median(times) for way, times in taken.items()},
        "losses": losses,
        "wrong": wrong,
        "reasons": {way: why for way, why in reasons.items() if why},
        "faster": {way: ms[rival] / time for way, time in ms.items() if way != rival},
    }


def line(row: Row) -> str:
    times = ", ".join(f"{way} {time:.2f}" for way, time in row["ms"].items())
    return f"{row['schedule']:22}| ms: {times} | wrong: {row['wrong'] or 0} {row['reasons'] or ''}"


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    rival = "nccl" if rank.device.type == "cuda" else "gloo"
    groups = {rival: rival_group(rank), "ark": ark_group(rank)}
    groups |= {f"ark_{name}": ark_group(rank, variables) for name, variables in arguments.ark}
    estimate = 15.0
    for name in arguments.schedules:
        if not rank.time_for(estimate):
            continue
        began = time.monotonic()
        row = compare(rank, name, groups, arguments)
        rank.write(row)
        rank.say(line(row))
        estimate = max(rank.share(time.monotonic() - began)) * 1.5


def table(about: dict[str, Any]) -> str:
    """Formats Markdown: milliseconds per step, and the speedup over the rival's schedule."""
    ways = list(about["rows"][0]["ms"])
    lines = [
        on_gpus.origin(about),
        "",
        "| schedule | ranks | micro-batches | " + " | ".join(ways) + " | ark / rival | captured_ark / rival |",
        "| --- " * (len(ways) + 5) + "|",
    ]
    for row in about["rows"]:
        cells = [f"{row['ms'][way]:.2f}" + (" (eager)" if way in row["reasons"] else "") for way in ways]
        cells += [f"{row['faster'][way]:.2f}" for way in ("ark", "captured_ark")]
        lines.append(f"| {row['schedule']} | {row['ranks']} | {row['micro_batches']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "pipeline.json", 120)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="of a stage (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    arguments = parser.parse_args()
    about, rows, problem = on_gpus.measure(measure, arguments)
    if rows:
        print(table({**about, "rows": rows}))
    return 1 if problem or any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
