"""The doctor's test of collectives on CPU tensors: two processes, one all_reduce over "ark".

Run as a module: the parent starts two children, which meet through a file in a temporary folder, and prints one line.
With the argument "job" this process is a rank of a torchrun job, and prints the job's nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any


def rank_main(rank: int, path: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    store = dist.FileStore(path, 2)
    dist.init_process_group("ark", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    tensor = torch.arange(5, dtype=torch.float32) + rank
    started = time.perf_counter()
    dist.all_reduce(tensor)
    micros = (time.perf_counter() - started) * 1e6
    if tensor.tolist() != [1, 3, 5, 7, 9]:
        raise SystemExit(f"wrong sum on rank {rank}: {tensor.tolist()}")
    dist.destroy_process_group()
    if rank == 0:
        print(f"two processes agree; the first one took {micros:.0f} us")


def job_main() -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("ark", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if tensor.item() != world:
        raise SystemExit(f"wrong sum on rank {dist.get_rank()}: {tensor.item()}, not {world}")
    group: Any = dist.group.WORLD
    plan = group._get_backend(torch.device("cpu")).plan
    print(plan or f"1 node ({world} {'rank' if world == 1 else 'ranks'}), shared memory")
    dist.destroy_process_group()


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="ark-doctor-") as folder:
        path = os.path.join(folder, "store")
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "ark_torch.tools._probe_collective", str(rank), path],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=100) for process in children]
        finally:
            for process in children:
                process.kill()
    for process, (_, errors) in zip(children, outputs, strict=True):
        if process.returncode:
            print((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1], file=sys.stderr)
            return 1
    print(outputs[0][0].strip().splitlines()[-1])
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["job"]:
        job_main()
    elif len(sys.argv) == 3:
        rank_main(int(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main())
