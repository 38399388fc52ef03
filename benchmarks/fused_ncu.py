"""Why the pooled embedding takes the time it takes: its kernel's counters on one GPU, by Nsight Compute.

    python benchmarks/fused_ncu.py --output benchmarks/results/fused_ncu.json

The kernel of ark_torch.ops.embedding_bag_all_to_all in a group of one rank, where its stores go to its own memory:
the same loads, sums and order of work as with peers. Shapes and data are those of fused.py, for two ranks' batch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ncu
import torch
import torch.distributed as dist
from fused import ROWS, SHAPES, sizes_of

from ark_torch.ops import embedding_bag_all_to_all
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).parent
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM",
    "dram__bytes_read.sum": "read",
    "lts__t_sector_hit_rate.pct": "L2 hits",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed": "L1",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stalled on loads",
    "launch__registers_per_thread": "registers",
}


def pool(shape: str, calls: int) -> None:
    """The work under ncu."""
    tables, dim, length, batch = sizes_of(shape)
    bags = 2 * batch
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    dist.init_process_group("ark", rank=0, world_size=1)
    generator = torch.Generator(device="cuda").manual_seed(1)
    whole = torch.randn(tables, ROWS, dim, generator=generator, device="cuda").to(torch.bfloat16)
    indices = torch.randint(0, ROWS, (tables, bags * length), generator=generator, device="cuda", dtype=torch.int32)
    begins = torch.arange(0, bags * length, length, device="cuda", dtype=torch.int32)
    with torch.no_grad():
        for _ in range(calls):
            embedding_bag_all_to_all(
                list(whole), list(indices), [begins] * tables, dist.group.WORLD, tables_per_rank=[tables]
            )
    torch.cuda.synchronize()
    dist.destroy_process_group()


def table(about: dict[str, Any]) -> str:
    """Formats Markdown, a line for each shape."""
    names = list(METRICS.values())
    lines = [
        f"{about['gpu']}, PyTorch {about['versions']['torch']}; {about['date']}.",
        "",
        "| shape | " + " | ".join(names) + " |",
    ]
    lines.append("| --- " * (len(names) + 1) + "|")
    for row in about["rows"]:
        cells = [row["metrics"].get(name, "-") for name in METRICS]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="T8-D128-L32-B1024")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "fused_ncu.json")
    parser.add_argument("--under", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.under:
        pool(arguments.under, 4)
        return 0
    rows = []
    for shape in arguments.shapes:
        command = [sys.executable, str(FOLDER / "fused_ncu.py"), "--under", shape]
        found = ncu.metrics_of(command, list(METRICS), "bag", 1, 2)
        if isinstance(found, str):
            print(f"# {shape}: no figures: {found}")
            continue
        named = {name.partition(" (")[0]: (value, name.partition(" (")[2][:-1]) for name, value in found.items()}
        metrics = {name: f"{value:,.4g} {unit}".strip() for name, (value, unit) in named.items()}
        rows.append({"shape": shape, "metrics": metrics})
        print(shape, metrics, flush=True)
    about = {**bench.surroundings(bench.shown_command("benchmarks/fused_ncu.py")), "gpu": torch.cuda.get_device_name()}
    bench.write_json(arguments.output, about, rows)
    print(table({**about, "rows": rows}))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
