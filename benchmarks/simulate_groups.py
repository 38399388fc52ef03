"""Measures what the simulator of CPU groups is fitted to and judged by: one node, and two with a shaped link.

    sudo python benchmarks/simulate_groups.py [--passes 3] [--rates 10gbit 1gbit] [--output FOLDER]

Groups of 2 and 4 processes in one node, then two network namespaces of 2 processes each (nodes.py makes and shapes
them; this needs root). Each turn calls a collective back to back for some milliseconds, after a barrier; its time is
that of the slowest rank over the number of calls. Passes over all places are minutes apart. A row holds the least turn
of all passes, which is nearest to idle cores, and of each pass the least and the median; `loads` are the load averages
beside each place. Every result is checked once.

On a machine that also does other work, `--nice -10` puts the ranks before it, and they sleep between turns for twice
as long as a turn took; `--add` adds passes to those in the file.

Then `python benchmarks/simulate.py` fits every second size and judges the others.
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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import nodes
import torch
import torch.distributed as dist

from ark_torch.tools.bench import report as bench
from ark_torch.tools.bench.config import parse_size

FOLDER = Path(__file__).resolve().parent
OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single")
SIZES = ("64", "256", "1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M")
KEY = ("rate", "ranks", "operation", "bytes")
TURN_S, LIMIT_S = 0.004, 400.0
CALLS = 8, 500  # in a turn, of short ones
TURNS = ((0.004, 50), (0.05, 20), (float("inf"), 6))  # to so many seconds of a call


def turn(call: Any, calls: int, pause_s: float) -> float:
    """Seconds per call of the slowest rank."""
    time.sleep(pause_s)
    dist.barrier()
    call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor([(time.perf_counter() - begin) / calls], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def rank_main(arguments: argparse.Namespace) -> None:
    """Times every operation and size on this rank; rank 0 writes the rows. A size is the larger side's."""
    import ark_torch  # noqa: F401

    if arguments.nice:
        go_first(arguments.nice)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("ark", timeout=timedelta(seconds=60))
    rows = []
    for size in map(parse_size, arguments.sizes):
        count = max(world, size // 4 // world * world)
        for operation in arguments.operations:
            each = count // world if operation == "all_gather_into_tensor" else count
            x, out = nodes.made(operation, rank, each), torch.full((count,), -1.0)
            call = nodes.call_of(operation, x, out, dist.group.WORLD)
            call()
            if not nodes.right(operation, x, out, each):
                raise RuntimeError(f"{operation} of {count * 4} bytes is wrong on rank {rank}")
            x.fill_(0.0)  # sums of sums would overflow
            first = min(turn(call, 1, 0) for _ in range(5))
            least, most = CALLS if first < 0.01 else (1, 1)
            calls = max(least, min(most, int(TURN_S / first)))
            pause_s = 2 * calls * first if arguments.nice else 0
            turns = next(turns for limit, turns in TURNS if first < limit)
            times = [turn(call, calls, pause_s) * 1e6 for _ in range(turns)]
            rows.append({"operation": operation, "bytes": count * 4, "times": times})
    if rank == 0:
        Path(arguments.rows).write_text(json.dumps(rows))
    dist.destroy_process_group()


@contextlib.contextmanager
def placed(rate: str, ranks: int) -> Iterator[list[tuple[list[str], dict[str, str]]]]:
    """Yields how to start each rank: a command before Python's, and its environment."""
    if not rate:
        yield [([], {"MASTER_ADDR": "127.0.0.1"})] * ranks
        return
    with nodes.joined(rate) as places:
        yield [
            (["ip", "netns", "exec", name], {"MASTER_ADDR": "10.78.0.1", "GLOO_SOCKET_IFNAME": link})
            for name, link in places
            for _ in range(ranks // len(places))
        ]


def go_first(nice: int) -> None:
    """Gives this process a priority, also against other sessions; before it starts threads, which inherit it."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    with contextlib.suppress(FileNotFoundError):  # a kernel without autogroups
        Path("/proc/self/autogroup").write_text(str(nice))


def measured(rate: str, ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with placed(rate, ranks) as starts, tempfile.TemporaryDirectory(prefix="ark-simulate-") as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--rows", str(path), "--sizes", *arguments.sizes]
        command += ["--operations", *arguments.operations, "--nice", str(arguments.nice)]
        about = {"WORLD_SIZE": str(ranks), "MASTER_PORT": "29701", "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [*before, *command],
                env={**os.environ, **about, **environment, "RANK": str(rank)},
                start_new_session=True,
            )
            for rank, (before, environment) in enumerate(starts)
        ]
        deadline = time.monotonic() + LIMIT_S
        try:
            codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        rows: list[dict[str, Any]] = json.loads(path.read_text())
        return rows


def combined(passes: list[list[dict[str, Any]]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case: [least, median] turn of each pass, behind those of `before`, and the least of all."""
    made = {key_of(row): {**row, "passes": list(row["passes"])} for row in before}
    for row in (row for one in passes for row in one):
        times = row["times"]
        kept = made.setdefault(key_of(row), {**{name: row[name] for name in KEY}, "us": 0.0, "passes": []})
        kept["passes"].append([round(min(times), 2), round(statistics.median(times), 2)])
    for row in made.values():
        row["us"] = min(least for least, _ in row["passes"])
    return list(made.values())


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="of groups in one node")
    parser.add_argument("--rates", nargs="*", default=["10gbit", "1gbit"], help="of the link, as tc writes them")
    parser.add_argument("--node-ranks", type=int, default=2, help="of each of the two nodes")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS))
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="keep the passes that the file already has")
    parser.add_argument("--nice", type=int, default=0, help="of the ranks, -20 to 19")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "simulate_groups.json")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # where a rank writes its rows
    arguments = parser.parse_args()
    if arguments.rows:
        rank_main(arguments)
        return 0
    if arguments.rates and os.geteuid() != 0:
        parser.error("network namespaces need root; --rates without values measures one node alone")
    about = bench.surroundings(bench.shown_command("benchmarks/simulate_groups.py"))
    places = [("", ranks) for ranks in arguments.ranks]
    places += [(rate, nodes.NODES * arguments.node_ranks) for rate in arguments.rates]
    passes: list[list[dict[str, Any]]] = []
    earlier = json.loads(arguments.output.read_text()) if arguments.add else {"rows": [], "loads": []}
    loads = earlier["loads"]
    for number in range(arguments.passes):
        passes.append([])
        for rate, ranks in places:
            passes[-1] += [{"rate": rate, "ranks": ranks, **row} for row in measured(rate, ranks, arguments)]
            loads.append(round(os.getloadavg()[0], 2))
            print(f"pass {number + 1}: {ranks} ranks {rate or 'in one node'}, load {loads[-1]}", flush=True)
            bench.write_json(arguments.output, about, combined(passes, earlier["rows"]), loads=loads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
