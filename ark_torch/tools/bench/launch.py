"""Starts the ranks of one benchmark run and collects rank 0's results: through mpirun if Open MPI takes part, else as
plain processes. A rank that fails ends the others; nothing is left running."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch.distributed as dist

from .config import Config

WORKER = "ark_torch.tools.bench.worker"


class BenchmarkFailed(RuntimeError):
    pass


def why_no_mpi() -> str:
    """Why MPI cannot take part; "" if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return "" if "Open MPI" in answer else "mpirun is not Open MPI's"


def run_ranks(config: Config) -> list[dict[str, Any]]:
    """Runs the ranks to their end; returns the measured rows."""
    # The parent holds the store: its port is certainly free, and ranks may start in any order.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        results = os.path.join(folder, "rows.jsonl")
        command = [sys.executable, "-m", WORKER, config.to_json(), str(store.port), results]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if config.mpi:
            processes = [subprocess.Popen([*mpirun(config.world), *command], env=environment)]
        else:
            processes = [
                subprocess.Popen(command, env=environment | {"RANK": str(rank), "WORLD_SIZE": str(config.world)})
                for rank in range(config.world)
            ]
        try:
            wait_for(processes)
        finally:
            end(processes)
        with open(results, encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def mpirun(world: int) -> list[str]:
    """Ranks may outnumber cores and are not bound, like those of the other backends."""
    command = ["mpirun", "-n", str(world), "--oversubscribe", "--bind-to", "none"]
    return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits for all processes; raises as soon as one fails."""
    running = list(processes)
    while running:
        for process in list(running):
            code = process.poll()
            if code is None:
                continue
            running.remove(process)
            if code != 0:
                raise BenchmarkFailed(f"a rank of the benchmark ended with exit code {code}; its message is above")
        time.sleep(0.05)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # mpirun forwards it to its ranks
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
