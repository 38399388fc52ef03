"""Compares collectives on CUDA tensors: ark, NCCL and PyTorch's symmetric memory, in a graph and eager.

    python benchmarks/cuda_collectives.py --ranks 2 4 --output benchmarks/results/cuda_collectives.json
    python benchmarks/cuda_collectives.py --ranks 4 --nodes 2    ark's group as if two machines had two GPUs each
    python benchmarks/cuda_collectives.py --ark few:bulk_move_from=1,ring_blocks=16 ...
                                           with another group of ark's, whose moves go by 16 blocks
    python benchmarks/cuda_collectives.py --contenders ark ark_alone nccl --within 1.05 --ranks 2 ...
                                           fails if ark's default is slower than the best of the others
    python benchmarks/cuda_collectives.py --dtypes bfloat16 float32 --sizes 4194304 26214400 --eager-to 26214400 ...
                                           also float32, and larger sizes from Python

There is one process per GPU. All implementations of a row (benchmarks/cuda_contenders.py) run interleaved in the same
processes. A figure is the median over rounds of the slowest rank's time, in microseconds per call. In a graph: 20 calls
per graph, fewer for large ones; the GPUs begin together, after a small all_reduce, with the host ahead of them. Eager:
called from Python, back to back, for sizes up to --eager-to. Values are random and renewed before every round. ark's
results are checked: sums against a float32 sum in rank order, moves against NCCL's. NVLink multicast is off for all.
`bytes` is the larger side of the operation, as in nccl-tests; busbw uses nccl-tests' factors. Rows of older files have
no `dtype`: theirs is bfloat16.

`--device cpu` runs the same code on CPU tensors, ark against Gloo, without graphs. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cuda_contenders import RIVALS, Row, finish, make_groups
from on_gpus import variant

KB, MB = 1 << 10, 1 << 20
SIZES = [1 * KB, 8 * KB, 32 * KB, 128 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB, 1024 * MB]
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
DTYPES = ["bfloat16", "float32"]
ROUNDS = 9
HOST_AHEAD = 1_000_000  # cycles, some 500 us


def bus_factor(operation: str, ranks: int) -> float:
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "send_recv") else (ranks - 1) / ranks


def timed_in_graphs(row: Row, loops: int) -> dict[str, list[float]]:
    graphs = {}
    for name, call in row.calls.items():
        graph = torch.cuda.CUDAGraph()
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(loops):
                call()
        graphs[name] = graph
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    together, late = torch.zeros(1, device="cuda"), 0
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 2):
        for name, graph in graphs.items():
            row.renew()
            torch.cuda.synchronize()
            torch.cuda._sleep(HOST_AHEAD)  # until the host has queued what follows
            dist.all_reduce(together, group=row.groups["nccl"])
            start.record()
            graph.replay()
            end.record()
            late += start.query()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / loops)
    if late > 0:
        print(f"{late} graphs began before the host of rank {row.rank} had launched them", file=sys.stderr)
    return times


def timed_eagerly(row: Row, loops: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in row.calls}
    for turn in range(ROUNDS + 1):
        for name, call in row.calls.items():
            row.renew()
            finish(row.device)
            begin = time.perf_counter()
            for _ in range(loops):
                call()
            finish(row.device)
            if turn >= 1:
                times[name].append((time.perf_counter() - begin) * 1e6 / loops)
    return times


def slowest(times: dict[str, list[float]], row: Row) -> dict[str, float]:
    """Returns the median over rounds of the slowest rank's time."""
    medians = {}
    for name, rounds in times.items():
        tensor = torch.tensor(rounds, device=row.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=row.groups[row.rival])
        medians[name] = statistics.median(tensor.tolist())
    return medians


def wrong_on_all_ranks(row: Row) -> int:
    """The sum of the ranks' counts; -1 is that of a row that no rank checks."""
    wrong = row.wrong()
    total = torch.tensor(max(wrong, 0), device=row.device)
    dist.all_reduce(total, group=row.groups[row.rival])
    return int(total) if wrong >= 0 else -1


def measured(row: Row, eager_to: int) -> dict[str, Any]:
    """Checks and times a row's contenders."""
    size, on_gpu = row.size, row.device.type == "cuda"
    loops = 20 if size <= 4 * MB else 5 if size <= 64 * MB else 2
    begin = time.perf_counter()
    wrong = wrong_on_all_ranks(row)
    first_s = time.perf_counter() - begin  # kernels are loaded, and NCCL is made where the dispatch wants it
    graph = slowest((timed_in_graphs if on_gpu else timed_eagerly)(row, loops), row)
    eager = slowest(timed_eagerly(row, 50 if size <= MB else 20), row) if size <= eager_to else {}
    return {"wrong": wrong, "first_s": round(first_s, 2), "graph_us": graph, "eager_us": eager}


def run(rank: int, ranks: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpu = arguments.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        RIVALS[device.type], rank=rank, world_size=ranks, timeout=timedelta(seconds=60),
        device_id=device if on_gpu else None,
    )  # fmt: skip
    if arguments.nodes > 1:
        os.environ["ARK_NODE"] = str(rank * arguments.nodes // ranks)
    alone = "ark_alone" in arguments.contenders
    groups = make_groups(device, timedelta(seconds=20), arguments.reduction, alone, arguments.ark)
    if on_gpu:
        torch.cuda.set_stream(torch.cuda.Stream())  # NCCL does not use copy engines on the default stream
    rows = []
    for operation, dtype, size in itertools.product(arguments.operations, arguments.dtypes, arguments.sizes):
        kinds = arguments.reduction, getattr(torch, dtype), device.type
        row = Row(operation, size, rank, ranks, groups, arguments.contenders, *kinds)
        entry = {"operation": operation, "dtype": dtype, "ranks": ranks, "bytes": size}
        if arguments.nodes > 1:
            entry["nodes"] = arguments.nodes
        if arguments.reduction != "exact":
            entry["reduction"] = arguments.reduction
        entry |= measured(row, arguments.eager_to)
        row.close()
        del row
        if on_gpu:
            torch.cuda.empty_cache()
            entry["free_mb"] = torch.cuda.mem_get_info()[0] >> 20
        graph = entry["graph_us"]
        entry["busbw"] = size / graph["ark"] * 1e-3 * bus_factor(operation, ranks)
        rival = min(us for name, us in graph.items() if not name.startswith("ark"))
        entry["ratio"] = rival / graph["ark"]
        if "ark_registered" in graph:
            entry["ratio_registered"] = rival / graph["ark_registered"]
        rows.append(entry)
        if rank == 0:
            print(line(entry), flush=True)
            Path(arguments.output + f".{ranks}").write_text(json.dumps(rows))
    dist.destroy_process_group()


def dtype_of(entry: dict[str, Any]) -> str:
    return str(entry.get("dtype", "bfloat16"))


def good(entry: dict[str, Any], within: float) -> bool:
    best = min(us for name, us in entry["graph_us"].items() if name != "ark")
    return entry["wrong"] <= 0 and entry["graph_us"]["ark"] <= within * best


def line(entry: dict[str, Any]) -> str:
    shown = " ".join(f"{name} {us:.1f}" for name, us in entry["graph_us"].items())
    eager = " ".join(f"{name} {us:.1f}" for name, us in entry["eager_us"].items() if name in ("ark", *RIVALS.values()))
    registered = f" {entry['ratio_registered']:.2f}" if "ratio_registered" in entry else ""
    return (
        f"{entry['operation']:14} {dtype_of(entry):8} {entry['ranks']} ranks {entry['bytes']:>11} B  {shown}  "
        f"ratio {entry['ratio']:.2f}{registered}"
        f"  {entry['busbw']:.0f} GB/s  wrong {entry['wrong']}" + (f"  eager: {eager}" if eager else "")
    )


def table(report: dict[str, Any]) -> str:
    """Formats a report's table in docs/performance.md, with a column of dtypes if there are several."""
    dtypes = list(dict.fromkeys(dtype_of(row) for row in report["rows"]))
    several = len(dtypes) > 1
    lines = [
        f"{report['machine'].split(',')[0]}, PyTorch {report['versions']['torch']}, NCCL {report['versions']['nccl']},",
        f"NVLink multicast off; {' and '.join(dtypes)}, microseconds a call, the slowest rank; {report['date'][:10]}.",
        "",
        "| |" + " dtype |" * several + " ranks | bytes | ark, in a graph | registered | best rival, in a graph "
        "| ratios | eager: ark / NCCL |",
        "|" + " --- |" * (8 + several),
    ]
    for row in report["rows"]:
        rivals = {name: us for name, us in row["graph_us"].items() if not name.startswith("ark")}
        best = min(rivals, key=lambda name: rivals[name])
        timed = [us for name in ("ark", *RIVALS.values()) if (us := row["eager_us"].get(name)) is not None]
        eager = " / ".join(f"{us:.0f}" for us in timed)
        size, registered, ratio = row["bytes"], "", f"{row['ratio']:.2f}"
        if "ark_registered" in row["graph_us"]:
            registered = f"{row['graph_us']['ark_registered']:.1f}"
            ratio += f", {row['ratio_registered']:.2f}"
        shown = f"{size >> 30} GB" if size >= 1 << 30 else f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
        dtype = f" {dtype_of(row)} |" * several
        lines.append(
            f"| {row['operation']} |{dtype} {row['ranks']} | {shown} | {row['graph_us']['ark']:.1f} | {registered} "
            f"| {rivals[best]:.1f} ({best}) | {ratio} | {eager} |"
        )
    earlier = sorted({(row["operation"], row["measured"][:10]) for row in report["rows"] if "measured" in row})
    if earlier:
        lines += ["", "Measured earlier: " + ", ".join(f"{operation} ({day})" for operation, day in earlier) + "."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--nodes", type=int, default=1, help="among which ark's group divides the ranks (ARK_NODE)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=DTYPES)
    parser.add_argument("--eager-to", type=int, default=MB, metavar="BYTES", help="largest size of eager calls")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that the script works")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--contenders", nargs="+", default=[], help="of cuda_contenders.py, and nccl; default: all")
    parser.add_argument(
        "--ark", type=variant, action="append", default=[], metavar="NAME:FIELD=VALUE[,...]",
        help="one more ark group, by a rule of a CUDA dispatch table: contenders ark_NAME and ark_NAME_registered",
    )  # fmt: skip
    parser.add_argument("--reduction", choices=["exact", "fast"], default="exact", help="of ark's sums")
    parser.add_argument(
        "--within", type=float, help="fail if ark takes longer than this many times the best of the others, or is wrong"
    )
    parser.add_argument("--output", default="benchmarks/results/cuda_collectives.json")
    arguments = parser.parse_args()
    if arguments.contenders:
        arguments.contenders = sorted(
            {"ark", RIVALS[arguments.device], *arguments.contenders, *(f"ark_{name}" for name, _ in arguments.ark)}
        )
    on_gpu = arguments.device == "cuda"
    rows = []
    for ranks in arguments.ranks:
        if on_gpu and ranks > torch.cuda.device_count():
            sys.exit(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(run, (ranks, arguments, port), nprocs=ranks)
        part = Path(arguments.output + f".{ranks}")
        rows += json.loads(part.read_text())
        part.unlink()
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if on_gpu else "CPU"
    report = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{gpus}, {platform.processor()}",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        },
        "multicast": "off",
        "rows": rows,
    }
    Path(arguments.output).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.within and (failed := [line(row) for row in rows if not good(row, arguments.within)]):
        told = f"{len(failed)} of {len(rows)} rows are wrong, or slower than {arguments.within} x the best:"
        sys.exit("\n".join([told, *failed]))


if __name__ == "__main__":
    main()
