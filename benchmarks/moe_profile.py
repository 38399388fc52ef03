"""Where the time of moe_layer in one kernel goes: `python benchmarks/moe_profile.py [--shapes E8-K2-1024x4096-T64]`.

Shapes as in fused_moe.py; two GPUs. Each block of a profiled launch tells how many cycles its warps spent on what
(device::MoeStamp); rank 0 prints the mean and the largest of all blocks, in microseconds of a launch, and how often it
happened in a block. Waits of a warp that multiplies: for a task, for loads, and for room for its result. A profiled
kernel is a little slower than others: its launches take `us`, and those of others `plain_us`, outside of a graph.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import on_gpus
import torch
from fused import CALLS, timed
from fused_moe import Mixture
from gpu_ranks import ark_group
from on_gpus import Rank, Row

STAMPS = ("whole", "prepared", "sent", "multiplied", "added", "task_wait", "loads_wait", "left_wait", "firsts",
          "seconds", "bring_rows", "bring_stage", "storing", "telling")  # fmt: skip
BLOCKS = 160
SHAPES = ("E8-K2-1024x4096-T1", "E8-K2-1024x4096-T64", "E8-K2-1024x4096-T1024", "E8-K2-1024x16384-T384")


def profile(rank: Rank, shape: str, groups: dict[str, Any], rounds: int) -> Row:
    work = Mixture(rank, shape, groups)
    stamps = torch.zeros(BLOCKS, len(STAMPS), 2, dtype=torch.int64, device=rank.device)
    row: Row = {"work": "profile of a mixture of experts", "shape": shape, "stamps": {}}
    with torch.no_grad():
        work.layer(0, "fused")
        calls = lambda: [work.layer(i, "fused") for i in range(CALLS)]  # noqa: E731
        row["plain_us"] = rank.slowest(timed(rank, calls, rounds))
        torch.ops.ark.moe_layer_profile(stamps)
        work.layer(0, "fused")
        row["us"] = rank.slowest(timed(rank, calls, rounds))
        torch.cuda.synchronize()
        torch.ops.ark.moe_layer_profile(None)
    told = stamps[stamps[:, 0, 0] > 0].double().cpu()
    properties = torch.cuda.get_device_properties(rank.device)
    cycles = getattr(properties, "clock_rate", 1_755_000) / 1000  # per microsecond, at most
    for number, name in enumerate(STAMPS):
        sums, counts = told[:, number, 0] / cycles, told[:, number, 1]
        row["stamps"][name] = [round(float(value), 1) for value in (sums.mean(), sums.max(), counts.mean())]
    return row


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = {"rival": None, "ark": ark_group(rank)}
    for shape in arguments.shapes:
        if not rank.time_for(5.0):
            continue
        row = profile(rank, shape, groups, arguments.rounds)
        rank.write(row)
        rank.say(f"{shape}: {row['plain_us']:.1f} us, profiled {row['us']:.1f}")
        for name, (mean, most, count) in row["stamps"].items():
            rank.say(f"  {name:12} mean {mean:8.1f}  most {most:8.1f} us  times {count:g}")


def main() -> int:
    parser = on_gpus.parser(__doc__, "moe_profile.json", 100)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="E8-K2-1024x4096-T16")
    parser.add_argument("--rounds", type=int, default=3)
    _, _, problem = on_gpus.measure(measure, parser.parse_args())
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
