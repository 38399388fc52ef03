"""Compares compressed all-reduces with exact ones, and the quantiser alone with the memory bandwidth.

    python benchmarks/compressed.py --ranks 2 [--sizes 8 64 256] [--device cpu]

All-reduces of --sizes megabytes of bfloat16 (float32 on CPU), through torch.distributed. Ways:

exact_nccl                     the rival's all_reduce (Gloo on CPU)
exact_ark                      ark's
ark_8, ark_4, ark_2, ark_fp8   ark_torch.distributed.compressed_all_reduce with that many bits
carried_exact, carried_4       CPU: the same in an ark group that Gloo carries, as between machines

The quantiser is measured on one rank: torch.ops.ark.quantize and dequantize of the largest of these sizes, with nearest
and with stochastic rounding. On CPU the size is at most 8 MB, because allocating larger results takes longer than the
work. GB/s count bytes read and written. `copy` is a copy of the tensor, which shows the memory bandwidth.

On GPUs each way is captured in a CUDA graph and replayed back to back. A figure is the median over rounds of the
slowest rank's time. Results are compared with the exact sum and may differ by half a step of each quantisation.
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
from gpu_ranks import ark_group, first_call, rival_group
from on_gpus import MB, Rank, Row
from torch import Tensor

import ark_torch
from ark_torch.distributed import compressed_all_reduce

SIZES = (1.0, 8.0, 64.0, 256.0)  # MB
WIDTHS: dict[str, dict[str, Any]] = {
    "8": {"bits": 8},
    "4": {"bits": 4},
    "2": {"bits": 2},
    "fp8": {"bits": 8, "format": "fp8"},
}
WINDOW_US = 20_000.0
Call = Callable[[], Any]


def timed(rank: Rank, call: Call, rounds: int, alone: bool = False) -> list[float]:
    """Returns microseconds per call, one figure per round."""
    cuda = rank.device.type == "cuda"
    call()
    if cuda:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            call()
        call = graph.replay

    def once(times: int) -> float:
        if not alone:
            rank.barrier()
        if not cuda:
            began = time.perf_counter()
            for _ in range(times):
                call()
            return (time.perf_counter() - began) / times * 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        call()  # synchronizes the ranks
        begin.record()
        for _ in range(times):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / times * 1e3

    estimate = once(2)
    if not alone:
        estimate = max(rank.share(estimate))
    times = max(2, min(200, round(WINDOW_US / estimate)))
    return [once(times) for _ in range(rounds)]


def dtype_of(rank: Rank) -> torch.dtype:
    return torch.bfloat16 if rank.device.type == "cuda" else torch.float32


def carried_group(rank: Rank) -> Any:
    options = ark_torch.Options()
    options.shared_memory = ark_torch.Options.SharedMemory.OFF
    return first_call(rank, dist.new_group(backend="ark", pg_options=options))


def all_reduce_ways(rank: Rank, x: Tensor, groups: dict[str, Any]) -> dict[str, Call]:
    def exact(group: Any) -> Call:
        def call() -> Tensor:
            dist.all_reduce(mine, group=group)
            return mine

        mine = torch.zeros_like(x)  # sums of zeros stay zero after any number of calls
        return call

    rival = "nccl" if rank.device.type == "cuda" else "gloo"
    ways: dict[str, Call] = {f"exact_{rival}": exact(groups["rival"]), "exact_ark": exact(groups["ark"])}
    for name, settings in WIDTHS.items():
        ways[f"ark_{name}"] = lambda settings=settings: compressed_all_reduce(x, group=groups["ark"], **settings)
    if "carried" in groups:
        ways["carried_exact"] = exact(groups["carried"])
        ways["carried_4"] = lambda: compressed_all_reduce(x, bits=4, group=groups["carried"])
    return ways


def wrong(rank: Rank, name: str, result: Tensor, x: Tensor, total: Tensor) -> int:
    """Counts elements that are farther from the exact sum than the two quantisations allow."""
    width = name.rpartition("_")[2]
    if width == "fp8":  # 3 bits of mantissa: at most 1/16 of the largest value
        reach = (x.abs().max() + total.abs().max()).float()
        bound = reach / 16
    else:
        levels = 2 ** int(width) - 1
        bound = (rank.ranks * 2 * x.float().abs().max() + 4 * total.abs().max()) / levels / 2 + total.abs().max() / 128
    return int(((result.float() - total).abs() > bound).sum())


def compare(rank: Rank, size: float, groups: dict[str, Any], arguments: argparse.Namespace) -> Row:
    count = max(1, round(size * MB / torch.empty(0, dtype=dtype_of(rank)).element_size()))
    x = rank.random(count).to(dtype_of(rank))
    total = x.float().clone()
    dist.all_reduce(total, group=groups["ark"])
    row: Row = {"work": "all_reduce", "mb": size, "ranks": rank.ranks, "dtype": str(x.dtype).removeprefix("torch.")}
    row |= {"us": {}, "wrong": {}}
    for name, call in all_reduce_ways(rank, x, groups).items():
        if arguments.ways and name not in arguments.ways:
            continue
        row["us"][name] = rank.slowest(timed(rank, call, arguments.rounds))
        if "exact" not in name:
            row["wrong"][name] = max(rank.share(wrong(rank, name, call(), x, total)))
    us = row["us"]
    for ours, theirs in (
        ("exact_ark", "ark"),
        ("exact_nccl", "ark"),
        ("exact_gloo", "ark"),
        ("carried_exact", "carried"),
    ):
        if ours in us:
            row[f"{ours}_over"] = {n: us[ours] / us[n] for n in us if n.startswith(theirs) and "exact" not in n}
    return row


def quantiser(rank: Rank, size: float, arguments: argparse.Namespace) -> list[Row]:
    """Measures the quantiser, on rank 0 only."""
    rows: list[Row] = []
    for dtype in dict.fromkeys((dtype_of(rank), torch.bfloat16)):
        count = round(size * MB / torch.empty(0, dtype=dtype).element_size())
        x = rank.random(count).to(dtype)
        to = torch.empty_like(x)

        def speed(bytes_moved: float, call: Call) -> float:
            times = sorted(timed(rank, call, arguments.rounds, alone=True))
            return bytes_moved / times[len(times) // 2] / 1e3

        copy = speed(2 * x.nbytes, lambda to=to, x=x: to.copy_(x))
        for name, rounding in ((n, r) for n in WIDTHS for r in ("nearest", "stochastic")):
            bits, format = WIDTHS[name]["bits"], WIDTHS[name].get("format", "uniform")
            codes = torch.ops.ark.quantize(x, bits, 512, format, rounding, 1)
            moved = x.nbytes + codes.nbytes
            row: Row = {
                "work": "quantiser",
                "mb": size,
                "ranks": rank.ranks,
                "dtype": str(dtype).removeprefix("torch."),
            }
            row |= {"codes": name, "rounding": rounding, "copy_gb_s": copy, "ratio": x.nbytes / codes.nbytes}
            row["quantise_gb_s"] = speed(
                moved, lambda x=x, b=bits, f=format, r=rounding: torch.ops.ark.quantize(x, b, 512, f, r, 1)
            )
            row["dequantise_gb_s"] = speed(
                moved,
                lambda c=codes, n=count, d=dtype, b=bits, f=format: torch.ops.ark.dequantize(c, n, d, b, 512, f),
            )
            rows.append(row)
    return rows


def line(row: Row) -> str:
    if row["work"] == "quantiser":
        return (
            f"{row['mb']:g} MB {row['dtype']} {row['codes']:>3} {row['rounding']:10} quantise "
            f"{row['quantise_gb_s']:.1f} dequantise {row['dequantise_gb_s']:.1f} copy {row['copy_gb_s']:.1f} GB/s"
        )
    us = " ".join(f"{name} {value:.0f}" for name, value in row["us"].items())
    return f"{row['mb']:g} MB us: {us} | wrong {({n: c for n, c in row['wrong'].items() if c}) or 0}"


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = {"rival": rival_group(rank), "ark": ark_group(rank)}
    if rank.device.type == "cpu":
        groups["carried"] = carried_group(rank)
    estimate = 5.0
    for size in arguments.sizes:
        if not rank.time_for(estimate):
            continue
        began = time.monotonic()
        row = compare(rank, size, groups, arguments)
        rank.write(row)
        rank.say(line(row))
        estimate = max(rank.share(time.monotonic() - began)) * 4
    largest = max(arguments.sizes)
    if rank.device.type == "cpu":
        largest = min(largest, 8.0)
    if rank.time_for(10.0):
        for row in quantiser(rank, largest, arguments) if rank.rank == 0 else []:
            rank.write(row)
            rank.say(line(row))
        rank.barrier()


def table(about: dict[str, Any], alone: bool = True) -> str:
    """Formats Markdown: milliseconds of all-reduces, then the quantiser's bandwidth if `alone`."""
    lines = [on_gpus.origin(about), ""]
    reduces = [row for row in about["rows"] if row["work"] == "all_reduce"]
    names = list(dict.fromkeys(name for row in reduces for name in row["us"]))
    lines += ["| all_reduce, ms | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for row in reduces:
        cells = [f"{row['us'][name] / 1e3:.3f}" if name in row["us"] else "-" for name in names]
        size = f"{row['mb']:g} MB" if row["mb"] >= 1 else f"{row['mb'] * 1024:g} KB"
        lines.append(f"| {size} {row['dtype']}, {row['ranks']} ranks | " + " | ".join(cells) + " |")
    if not alone:
        return "\n".join(lines)
    lines += ["", "| quantiser, GB/s | bytes / | quantise | dequantise | copy |", "| --- | --- | --- | --- | --- |"]
    for row in about["rows"]:
        if row["work"] == "quantiser":
            lines.append(
                f"| {row['dtype']}, {row['codes']}, {row['rounding']} | {row['ratio']:.1f} | "
                f"{row['quantise_gb_s']:.1f} | {row['dequantise_gb_s']:.1f} | {row['copy_gb_s']:.1f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "compressed.json", 240)
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES), metavar="MB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", help="these all-reduces alone")
    arguments = parser.parse_args()
    about, rows, problem = on_gpus.measure(measure, arguments)
    print(table({**about, "rows": rows}))
    return 1 if problem or any(any(row.get("wrong", {}).values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
