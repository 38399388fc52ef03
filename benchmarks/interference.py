"""Measures how collectives and computation slow each other down: matrix products on one stream, collectives on another.

    python benchmarks/interference.py --ranks 2 [--operations all_reduce] [--megabytes 64] [--contenders ark nccl]

Products are 4096^3 in bfloat16. Collectives of 25 MB (DDP's default bucket), 64 and 256 MB are called eagerly, one
after the other, on a high-priority stream. Both streams are filled before they start. They start at the end of a first
collective, which synchronizes the ranks. A slowdown compares the time of one while both streams were busy with its time
alone. `together` is the time until a fixed amount of both is done (the same for all contenders), and `sooner` is NCCL's
divided by this contender's. Contenders take turns; a figure is the median over rounds of the slowest rank's. Values are
random. On two ranks every all_reduce doubles them, and the final result is checked, ark's bit for bit.

Contenders: ark, and ark_NAME for each --ark NAME:VARIABLE=VALUE; ark_registered if the package registers memory; nccl
(plain tensors, its default policy); nccl_registered, nccl_efficiency and nccl_zero (registered windows, CTA policy
default, efficiency, zero); symm (PyTorch's symmetric memory: two-shot all-reduce, low-contention all-gather).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import on_gpus
import torch
from interference_contenders import (
    RIVALS,
    SMALLEST,  # noqa: F401  (for those who import this: the values of `wrong`)
    Contender,
    make_contenders,
    make_groups,
    most_calls,
)
from interference_streams import Bench, Run  # noqa: F401  (Run: what Bench.run returns)
from on_gpus import MB, Rank, Row

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
CHOICES = (*OPERATIONS, "all_gather_in_place")  # as in FSDP: each rank's part is already in its place


def amounts(bench: Bench, rival: Contender, window_us: float) -> tuple[int, int]:
    """Returns how many products and collectives of the rival fill the window alone. Equal on all ranks."""
    rank = bench.rank
    alone = bench.run(20, None, 0)
    calibration = bench.run(0, rival, 8)
    one_product = max(rank.share(alone.each(alone.products)))
    one_collective = max(rank.share(calibration.each(calibration.collectives)))
    collectives = max(6, min(round(window_us / one_collective), most_calls(rank.ranks), 200))
    return max(6, min(round(collectives * one_collective / one_product), 500)), collectives


def compare(bench: Bench, contenders: list[Contender], arguments: argparse.Namespace) -> list[Row]:
    """Compares all contenders for one operation and size, in turns."""
    rank = bench.rank
    for contender in contenders:  # keeps first-call costs out of the figures
        bench.run(2, contender, 2)
    rival = next(contender for contender in contenders if contender.name in RIVALS)
    products, collectives = amounts(bench, rival, arguments.window_ms * 1e3)
    keys = ("alone_us", "product_us", "collective_us", "together_ms")
    taken: dict[str, dict[str, list[float]]] = {c.name: {key: [] for key in keys} for c in contenders}
    wrong = {c.name: 0 for c in contenders}
    products_alone: list[float] = []
    for turn in range(arguments.rounds + 1):  # the first one is a warm-up
        alone = bench.run(products, None, 0)
        if turn:
            products_alone.append(alone.each(alone.products))
        for contender in contenders:
            quiet = bench.run(0, contender, collectives)
            both = bench.run(products, contender, collectives)
            wrong[contender.name] = max(wrong[contender.name], contender.wrong(collectives + 1))
            if turn:
                times = quiet.each(quiet.collectives), both.each(both.products), both.each(both.collectives)
                for key, value in zip(keys, (*times, both.total / 1e3), strict=True):
                    taken[contender.name][key].append(value)
    product_alone = rank.slowest(products_alone)
    rows = []
    for contender in contenders:
        row = {"operation": contender.operation, "ranks": rank.ranks, "bytes": contender.count * 2}
        row |= {"contender": contender.name, "products": products, "collectives": collectives}
        row |= {"product_alone_us": product_alone}
        row |= {key: rank.slowest(rounds) for key, rounds in taken[contender.name].items()}
        row |= {"wrong": max(rank.share(wrong[contender.name])), "rounds_of_rank_0": taken[contender.name]}
        rows.append(row)
    of_rival = next(row for row in rows if row["contender"] in RIVALS)
    for row in rows:
        row["product_slowdown"] = row["product_us"] / row["product_alone_us"]
        row["collective_slowdown"] = row["collective_us"] / row["alone_us"]
        row["sooner"] = of_rival["together_ms"] / row["together_ms"]
    return rows


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = make_groups(rank, arguments)
    bench = Bench(rank, arguments.product)
    bench.run(10, None, 0)
    estimate = 1.0
    rank.say(HEADING)
    for operation in arguments.operations:
        for megabytes in arguments.megabytes:
            if not rank.time_for(estimate):
                continue
            began = time.monotonic()
            each = 8 * rank.ranks
            count = max(int(megabytes * MB) // 2 // each, 1) * each
            contenders = make_contenders(rank, groups, operation, count)
            for row in compare(bench, contenders, arguments):
                rank.write(row)
                rank.say(line(row))
            for contender in contenders:
                contender.close()
            del contenders
            if rank.device.type == "cuda":
                torch.cuda.empty_cache()
            estimate = max(rank.share(time.monotonic() - began)) * 1.5  # the next size may be larger


# --- showing -------------------------------------------------------------------------------------------------------

HEADING = (
    f"{'operation':11} {'ranks':>5} {'MB':>5} {'contender':16} {'alone us':>9} {'GB/s':>5} {'product us':>10} "
    f"{'product':>8} {'collective':>10} {'together ms':>11} {'sooner':>6} {'wrong':>5}"
)


def bus(row: Row) -> float:
    """Returns nccl-tests' bus bandwidth, without computation."""
    share = (row["ranks"] - 1) / row["ranks"] * (2 if row["operation"] == "all_reduce" else 1)
    return float(row["bytes"] / row["alone_us"] * 1e-3 * share)


def line(row: Row) -> str:
    return (
        f"{row['operation']:11} {row['ranks']:>5} {row['bytes'] / MB:>5.0f} {row['contender']:16} "
        f"{row['alone_us']:>9.1f} {bus(row):>5.0f} {row['product_alone_us']:>10.1f} x{row['product_slowdown']:>7.3f} "
        f"x{row['collective_slowdown']:>9.2f} {row['together_ms']:>11.2f} {row['sooner']:>6.2f} {row['wrong']:>5}"
    )


def table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance.md."""
    lines = [
        on_gpus.origin(about),
        "",
        "| | ranks | MB | | alone, us | products slow down by | collective by | both done sooner than with NCCL |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in about["rows"]:
        lines.append(
            f"| {row['operation']} | {row['ranks']} | {row['bytes'] / MB:.0f} | {row['contender']} "
            f"| {row['alone_us']:.0f} | {row['product_slowdown'] - 1:.1%} | {row['collective_slowdown'] - 1:.0%} "
            f"| {row['sooner']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "interference.json", 75)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=CHOICES)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[25, 64, 256])
    parser.add_argument("--contenders", nargs="+", default=[], help="default: all; NCCL is always one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-ms", type=float, default=15.0, help="how long one run is (default: 15)")
    parser.add_argument("--product", type=int, default=4096, help="rows and columns of the matrices (default: 4096)")
    arguments = parser.parse_args()
    _, rows, problem = on_gpus.measure(measure, arguments)
    wrong = sorted({row["contender"] for row in rows if row["wrong"]})
    if wrong:
        print(f"# WRONG RESULTS: {', '.join(wrong)}", file=sys.stderr)
    return 1 if problem or wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
