"""Collectives on CUDA tensors: ark against NCCL (eager, in a graph, registered) and PyTorch's symmetric memory.

    python benchmarks/cuda_collectives.py --ranks 2 4 --output benchmarks/results/cuda_collectives.json

One process a GPU. All implementations of a row run interleaved in one process group's life; a figure is the median over
rounds of the slowest rank's time, in microseconds a call. In a graph: 20 calls a graph (fewer of large ones); eager:
from Python, back to back. Values are random and renewed before every round. Results are checked against a float32 sum
in rank order (ark: every bit). NVLink multicast is off for all of them. `bytes` is the larger side of the operation, as
in nccl-tests; busbw uses nccl-tests' factors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Call = Callable[[], Any]
KB, MB = 1 << 10, 1 << 20
SIZES = [1 * KB, 8 * KB, 32 * KB, 128 * KB, 256 * KB, 1 * MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB, 1024 * MB]
OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
ROUNDS = 9


def bus_factor(operation: str, ranks: int) -> float:
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", "send_recv") else (ranks - 1) / ranks


class Row:
    """The implementations of one operation at one size, on tensors of their own."""

    def __init__(self, operation: str, size: int, rank: int, ranks: int, groups: dict[str, Any]) -> None:
        self.operation, self.size, self.rank, self.ranks = operation, size, rank, ranks
        self.groups = groups
        self.count = max(size // 2 // ranks, 1) * ranks
        generator = torch.Generator(device="cuda").manual_seed(1000 * rank + 1)
        self.seed = torch.randn(self.count, generator=generator, device="cuda").to(torch.bfloat16)
        self.tensors: list[torch.Tensor] = []
        self.calls: dict[str, Call] = {"ark": self.through(groups["ark"]), "nccl": self.through(groups["nccl"])}
        if operation == "all_reduce":
            for rival in (self.add_registered, self.add_symmetric):
                try:
                    rival()
                except RuntimeError as error:  # on all ranks alike: a version or machine that has it not
                    if rank == 0:
                        print(f"left out: {rival.__name__}: {str(error).splitlines()[0]}", file=sys.stderr)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor)
        return tensor

    def renew(self) -> None:
        for tensor in self.tensors:
            tensor.copy_(self.seed[: tensor.numel()])

    def through(self, group: Any) -> Call:
        n, count, op = self.ranks, self.count, self.operation
        whole = self.own(torch.empty(count, dtype=torch.bfloat16, device="cuda"))
        if op == "all_reduce":
            self.result = {**getattr(self, "result", {}), id(group): whole}
            return lambda: dist.all_reduce(whole, group=group)
        if op == "broadcast":
            return lambda: dist.broadcast(whole, 0, group=group)
        other = torch.empty_like(whole)
        if op == "all_to_all":
            return lambda: dist.all_to_all_single(other, whole, group=group)
        if op == "send_recv":
            left, right = (self.rank - 1) % n, (self.rank + 1) % n

            def exchange() -> None:
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, whole, group=group, group_peer=right),
                        dist.P2POp(dist.irecv, other, group=group, group_peer=left),
                    ]
                )
                for work in works:
                    work.wait()

            return exchange
        part = self.own(torch.empty(count // n, dtype=torch.bfloat16, device="cuda"))
        if op == "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)

    def add_registered(self) -> None:
        group = self.groups["nccl"]
        backend = group._get_backend(torch.device("cuda"))
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            whole = self.own(torch.empty(self.count, dtype=torch.bfloat16, device="cuda"))
        try:
            backend.register_mem_pool(pool, True)
        except TypeError:
            backend.register_mem_pool(pool)
        self.pool = pool
        self.calls["nccl_registered"] = lambda: dist.all_reduce(whole, group=group)

    def add_symmetric(self) -> None:
        import torch.distributed._symmetric_memory as symmetric

        name = self.groups["nccl"].group_name
        tensor = self.own(symmetric.empty(self.count, dtype=torch.bfloat16, device="cuda"))
        symmetric.rendezvous(tensor, name)
        if self.size <= 4 * MB:
            self.calls["symm_one_shot"] = lambda: torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name)
        self.calls["symm_two_shot"] = lambda: torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", name)

    def close(self) -> None:
        if hasattr(self, "pool"):
            self.groups["nccl"]._get_backend(torch.device("cuda")).deregister_mem_pool(self.pool)
        self.calls.clear()
        self.tensors.clear()

    def wrong(self) -> int:
        """Elements of ark's all_reduce that differ from the float32 sum in rank order, rounded once."""
        if self.operation != "all_reduce" or self.size > 64 * MB:
            return -1
        inputs = torch.empty(self.ranks, self.count, dtype=torch.bfloat16, device="cuda")
        dist.all_gather_into_tensor(inputs, self.seed, group=self.groups["nccl"])
        total = inputs[0].float()
        for r in range(1, self.ranks):
            total += inputs[r].float()
        self.renew()
        self.calls["ark"]()
        torch.cuda.synchronize()
        found = self.result[id(self.groups["ark"])]
        return int((found.view(torch.int16) != total.to(torch.bfloat16).view(torch.int16)).sum())


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
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 2):
        for name, graph in graphs.items():
            row.renew()
            dist.all_reduce(torch.zeros(1, device="cuda"), group=row.groups["nccl"])
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                times[name].append(start.elapsed_time(end) * 1e3 / loops)
    return times


def timed_eagerly(row: Row, loops: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in row.calls}
    for turn in range(ROUNDS + 1):
        for name, call in row.calls.items():
            row.renew()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(loops):
                call()
            torch.cuda.synchronize()
            if turn >= 1:
                times[name].append((time.perf_counter() - begin) * 1e6 / loops)
    return times


def slowest(times: dict[str, list[float]], group: Any) -> dict[str, float]:
    """Median over rounds of the slowest rank."""
    medians = {}
    for name, rounds in times.items():
        tensor = torch.tensor(rounds, device="cuda")
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
        medians[name] = statistics.median(tensor.tolist())
    return medians


def run(rank: int, ranks: int, arguments: argparse.Namespace, port: int) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, timeout=timedelta(seconds=60), device_id=device)
    groups = {"nccl": dist.group.WORLD, "ark": dist.new_group(backend="ark", timeout=timedelta(seconds=20))}
    for group in groups.values():  # the first call meets the other ranks
        dist.all_reduce(torch.ones(1, device=device), group=group)
    rows = []
    for operation in arguments.operations:
        for size in arguments.sizes:
            loops = 20 if size <= 4 * MB else 5 if size <= 64 * MB else 2
            row = Row(operation, size, rank, ranks, groups)
            wrong = row.wrong()
            graph = slowest(timed_in_graphs(row, loops), groups["nccl"])
            eager = slowest(timed_eagerly(row, 50), groups["nccl"]) if size <= MB else {}
            row.close()
            del row
            torch.cuda.empty_cache()
            entry = {"operation": operation, "ranks": ranks, "bytes": size, "wrong": wrong}
            entry |= {"graph_us": graph, "eager_us": eager}
            entry["busbw"] = size / graph["ark"] * 1e-3 * bus_factor(operation, ranks)
            entry["ratio"] = min(us for name, us in graph.items() if name != "ark") / graph["ark"]
            rows.append(entry)
            if rank == 0:
                print(line(entry), flush=True)
                Path(arguments.output + f".{ranks}").write_text(json.dumps(rows))
    dist.destroy_process_group()


def line(entry: dict[str, Any]) -> str:
    shown = " ".join(f"{name} {us:.1f}" for name, us in entry["graph_us"].items())
    eager = " ".join(f"{name} {us:.1f}" for name, us in entry["eager_us"].items() if name in ("ark", "nccl"))
    return (
        f"{entry['operation']:14} {entry['ranks']} ranks {entry['bytes']:>11} B  {shown}  ratio {entry['ratio']:.2f}"
        f"  {entry['busbw']:.0f} GB/s  wrong {entry['wrong']}" + (f"  eager: {eager}" if eager else "")
    )


def table(report: dict[str, Any]) -> str:
    """The README's table of a report."""
    lines = [
        f"{report['machine'].split(',')[0]}, PyTorch {report['versions']['torch']}, NCCL {report['versions']['nccl']},",
        f"NVLink multicast off; bfloat16, microseconds a call, the slowest rank; {report['date'][:10]}.",
        "",
        "| | ranks | bytes | ark, in a graph | best rival, in a graph | ratio | eager: ark / NCCL |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        rivals = {name: us for name, us in row["graph_us"].items() if name != "ark"}
        best = min(rivals, key=lambda name: rivals[name])
        eager = f"{row['eager_us']['ark']:.0f} / {row['eager_us']['nccl']:.0f}" if row["eager_us"] else ""
        size = row["bytes"]
        shown = f"{size >> 30} GB" if size >= 1 << 30 else f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
        lines.append(
            f"| {row['operation']} | {row['ranks']} | {shown} | {row['graph_us']['ark']:.1f} | {rivals[best]:.1f} "
            f"({best}) | {row['ratio']:.2f} | {eager} |"
        )
    return "\n".join(lines)


def write_readme(report: dict[str, Any]) -> None:
    readme = Path(__file__).resolve().parents[1] / "README.md"
    begin, end = "<!-- cuda: begin -->\n", "<!-- cuda: end -->"
    head, _, rest = readme.read_text().partition(begin)
    readme.write_text(head + begin + table(report) + "\n" + end + rest.partition(end)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--output", default="benchmarks/results/cuda_collectives.json")
    parser.add_argument("--readme", action="store_true", help="measure nothing: bring the README's table up to date")
    arguments = parser.parse_args()
    if arguments.readme:
        return write_readme(json.loads(Path(arguments.output).read_text()))
    rows = []
    for ranks in arguments.ranks:
        if ranks > torch.cuda.device_count():
            sys.exit(f"--ranks {ranks}: this machine has {torch.cuda.device_count()} GPUs")
        mp.spawn(run, (ranks, arguments, 29500 + ranks), nprocs=ranks)
        part = Path(arguments.output + f".{ranks}")
        rows += json.loads(part.read_text())
        part.unlink()
    report = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {platform.processor()}",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        },
        "multicast": "off",
        "rows": rows,
    }
    Path(arguments.output).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
