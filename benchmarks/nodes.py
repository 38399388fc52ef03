"""Compares groups that span two machines with Gloo: two network namespaces, joined by a link of a given rate.

    sudo python benchmarks/nodes.py [--ranks 2] [--rates 1gbit 10gbit] [--sizes 8 1M 16M] [--output FOLDER]

Each namespace is a node of --ranks processes. The ranks of a node are consecutive, as with torchrun. tc shapes both
ends of the link (a token bucket of 256 KB). A group of backend "ark" and one of Gloo alternate round by round on the
same collective, and each result is checked. A time is the median of the slowest rank's rounds. The program needs root,
iproute2 and a kernel with network namespaces. Four ranks share two cores, so small times depend on the scheduler as
much as on the network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cpu_tables
import torch
import torch.distributed as dist

from ark_torch.tools.bench import report as bench
from ark_torch.tools.bench.config import parse_size, show_size

FOLDER = Path(__file__).resolve().parent
NODES = 2
COMPRESSED = "all_reduce in 4 bits"  # the rival is Gloo's exact one
OPERATIONS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "reduce",
    "all_to_all_single",
    COMPRESSED,
)
LIMIT_S = 400.0


def call_of(operation: str, x: torch.Tensor, out: torch.Tensor, group: Any) -> Callable[[], Any]:
    """`x` is this rank's tensor, with as many bytes as the row says."""
    if operation == COMPRESSED and group is dist.group.WORLD:
        from ark_torch.distributed import compressed_all_reduce

        return lambda: x.copy_(compressed_all_reduce(x, bits=4))
    if operation in ("all_reduce", COMPRESSED):
        return lambda: dist.all_reduce(x, group=group)
    if operation == "all_gather_into_tensor":
        return lambda: dist.all_gather_into_tensor(out, x, group=group)
    if operation == "reduce_scatter_tensor":
        return lambda: dist.reduce_scatter_tensor(out[: len(x) // dist.get_world_size()], x, group=group)
    if operation == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    if operation == "reduce":
        return lambda: dist.reduce(x, 0, group=group)
    return lambda: dist.all_to_all_single(out[: len(x)], x, group=group)


def made(operation: str, rank: int, count: int) -> torch.Tensor:
    if operation != COMPRESSED:
        return torch.full((count,), rank + 1.0)
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def right(operation: str, x: torch.Tensor, out: torch.Tensor, count: int) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    if operation == COMPRESSED:  # world + 1 roundings, each by at most half of (range / 15); a sum has a wider range
        inputs = [made(operation, r, count) for r in range(world)]
        ranges = sum(float(one.max() - one.min()) for one in inputs)
        return bool((x - sum(inputs)).abs().max() <= ranges / 15)
    total = world * (world + 1) / 2
    if operation in ("all_reduce", "reduce"):
        return (operation == "reduce" and rank > 0) or bool((x == total).all())
    if operation == "broadcast":
        return bool((x == 1).all())
    if operation == "reduce_scatter_tensor":
        return bool((out[: count // world] == total).all())
    each = count if operation == "all_gather_into_tensor" else count // world
    return all(bool((out[r * each : (r + 1) * each] == r + 1).all()) for r in range(world))


def rank_main(arguments: argparse.Namespace) -> None:
    import ark_torch  # noqa: F401

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("ark", timeout=timedelta(seconds=60))
    groups = {"ark": dist.group.WORLD, "gloo": dist.new_group(backend="gloo", timeout=timedelta(seconds=60))}
    rows = []
    for size in map(parse_size, arguments.sizes):
        count = max(world, size // 4 // world * world)
        out = torch.empty(count * world)
        for operation in OPERATIONS:
            times: dict[str, list[float]] = {name: [] for name in groups}
            for number in range(arguments.rounds + 1):
                for name in list(groups) if number % 2 == 0 else list(groups)[::-1]:
                    x = made(operation, rank, count)
                    out.fill_(-1)
                    call = call_of(operation, x, out, groups[name])
                    dist.barrier(group=groups[name])
                    begin = time.perf_counter()
                    call()
                    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                    if not right(operation, x, out, count):
                        raise RuntimeError(f"{name}: {operation} of {count * 4} bytes is wrong on rank {rank}")
                    dist.all_reduce(took, dist.ReduceOp.MAX, group=groups["gloo"])
                    if number > 0:
                        times[name].append(float(took) * 1e6)
            us = {name: round(statistics.median(of), 1) for name, of in times.items()}
            best = {name: round(min(of), 1) for name, of in times.items()}  # the least, which is nearest to idle cores
            rows.append({"operation": operation, "bytes": count * 4, "us": us, "best_us": best})
    if rank == 0:
        Path(arguments.rows).write_text(json.dumps(rows))
    dist.destroy_process_group()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def joined(rate: str) -> Iterator[list[tuple[str, str]]]:
    """Creates two namespaces and a link between them, shaped to the rate both ways."""
    tag = os.getpid() % 100_000
    places = [(f"arknode{tag}{end}", f"v{tag}{end}") for end in "ab"]
    try:
        for name, _ in places:
            ip("netns", "add", name)
        ip("link", "add", places[0][1], "type", "veth", "peer", "name", places[1][1])
        for number, (name, link) in enumerate(places):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", link)
            for one in (link, "lo"):
                ip("-n", name, "link", "set", one, "up")
            shape = ["tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", "rate", rate]
            subprocess.run([*shape, "burst", "256k", "latency", "100ms"], check=True, capture_output=True)
        yield places
    finally:
        for name, _ in places:  # this also deletes the link
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def measured(rate: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    world = NODES * arguments.ranks
    with joined(rate) as places, tempfile.TemporaryDirectory(prefix="ark-nodes-") as folder:
        rows = Path(folder) / "rows.json"
        about = {"WORLD_SIZE": str(world), "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29700", "OMP_NUM_THREADS": "1"}
        running = []
        for rank in range(world):
            name, link = places[rank // arguments.ranks]
            command = ["ip", "netns", "exec", name, sys.executable, __file__, "--rows", str(rows)]
            command += ["--rounds", str(arguments.rounds), "--sizes", *arguments.sizes]
            environment = {**os.environ, **about, "RANK": str(rank), "GLOO_SOCKET_IFNAME": link}
            running.append(subprocess.Popen(command, env=environment))
        deadline = time.monotonic() + LIMIT_S
        try:
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return [{"rate": rate, "ranks": arguments.ranks, **row} for row in json.loads(rows.read_text())]


def table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance-cpu.md."""
    rows = about["rows"]
    text = f"{cpu_tables.origin(about)}.\n"
    for rate in dict.fromkeys(row["rate"] for row in rows):
        of = {(row["operation"], row["bytes"]): row["us"] for row in rows if row["rate"] == rate}
        sizes = list(dict.fromkeys(size for _, size in of))
        ranks = next(row["ranks"] for row in rows if row["rate"] == rate)
        text += f"\n{NODES} nodes of {ranks} ranks, {rate}; ms over ark (times as fast as Gloo):\n\n"
        text += f"| | {' | '.join(show_size(size) for size in sizes)} |\n|{' --- |' * (len(sizes) + 1)}\n"
        for operation in dict.fromkeys(operation for operation, _ in of):
            cells = []
            for size in sizes:
                us = of[operation, size]
                cells.append(f"{us['ark'] / 1e3:.2f} ({us['gloo'] / us['ark']:.2f}x)")
            text += f"| {operation} | {' | '.join(cells)} |\n"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of each of the two nodes")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"], help="of the link, as tc writes them")
    parser.add_argument("--sizes", nargs="+", default=["16", "64K", "1M", "16M"], help="bytes of a rank's tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # where a rank writes its rows
    arguments = parser.parse_args()
    if arguments.rows:
        rank_main(arguments)
        return 0
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    about = bench.surroundings(bench.shown_command("benchmarks/nodes.py"))
    rows: list[dict[str, Any]] = []
    for rate in arguments.rates:
        rows += measured(rate, arguments)
        bench.write_json(arguments.output / "nodes.json", about, rows)
    print(table({**about, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
