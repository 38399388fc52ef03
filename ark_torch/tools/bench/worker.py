"""One rank of the benchmark: `python -m ark_torch.tools.bench.worker CONFIG PORT RESULTS`, started by launch.py.

Rank and number of ranks come from RANK and WORLD_SIZE or, under mpirun, from Open MPI. Each backend has its own group
in the same processes. For each case rank 0 appends a JSON line to RESULTS and prints it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import table
from .config import Config
from .measure import Bench, Binder, bind_to, bind_to_mpi
from .operations import OPERATIONS, Case

EMPTY = "empty"  # PyTorch's fake backend, which does nothing: the cost of a call before any backend


def make_binders(config: Config, timeout: timedelta) -> dict[str, Binder]:
    binders = {name: bind_to(dist.new_group(backend=name, timeout=timeout)) for name in config.backends}
    if config.mpi:
        import mpi4py

        mpi4py.rc.thread_level = "funneled"  # only one thread calls MPI, so it need not lock
        from mpi4py import MPI

        binders["mpi"] = bind_to_mpi(MPI.COMM_WORLD)
    return binders


def run_cases(bench: Bench, config: Config, rank: int, emit: Any) -> None:
    itemsize = getattr(torch, config.dtype).itemsize
    for name in config.operations:
        operation = OPERATIONS[name]
        if rank == 0:
            print(table.heading(name, config), flush=True)
        # Small sizes may have the same count: at least one element per rank.
        counts = sorted({operation.count_for(size, itemsize, config.world) for size in config.sizes})
        for count in counts if name != "barrier" else [0]:
            case = Case(rank, config.world, count, config.dtype, config.redop)
            timings = bench.run(operation, case, list(bench.binders))
            if rank == 0:
                row = {
                    "operation": name,
                    "ranks": config.world,
                    "bytes": count * itemsize,
                    "count": count,
                    "dtype": config.dtype,
                    "redop": config.redop if operation.reduces else "",
                    "bus_factor": operation.bus_factor(config.world),
                    "timings": {backend: asdict(timing) for backend, timing in timings.items()},
                }
                emit(row)
                print(table.row_line(row, config.goals), flush=True)


def run_overhead(bench: Bench, config: Config, rank: int, emit: Any) -> None:
    """One all_reduce call on 4 bytes, compared with a backend that does nothing. The result is not checked."""
    try:
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend "fake"

        bench.binders[EMPTY] = bind_to(dist.new_group(backend="fake"))
    except (ImportError, RuntimeError, ValueError) as error:
        if rank == 0:
            print(f"# the empty backend could not be made: {error}", flush=True)
    case = Case(rank, config.world, 1, "float32", "sum")
    timings = bench.run(OPERATIONS["all_reduce"], case, list(bench.binders))
    bench.binders.pop(EMPTY, None)
    if rank == 0:
        overhead = {backend: timing.median for backend, timing in timings.items()}
        emit({"overhead": overhead, "ranks": config.world})
        print(table.overhead_line(overhead, config.goals), flush=True)


def main() -> None:
    config = Config.from_json(sys.argv[1])
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "-1")))
    torch.set_num_threads(1)
    timeout = timedelta(seconds=config.timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.world, timeout=timeout)
    control = dist.group.WORLD
    assert control is not None
    binders = make_binders(config, timeout)
    bench = Bench(control, binders, config.rounds, config.batch_seconds)
    with open(sys.argv[3], "a", encoding="utf-8") as results:

        def emit(row: dict[str, Any]) -> None:
            results.write(json.dumps(row) + "\n")
            results.flush()

        run_cases(bench, config, rank, emit)
        if config.overhead:
            run_overhead(bench, config, rank, emit)
    dist.barrier()
    time.sleep(0.1)  # lets Gloo's threads release their last tensors before the groups are destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
