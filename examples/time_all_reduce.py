"""The time of all_reduces in any job, such as of two machines: the first run of docs/rdma.md uses it.

    torchrun --nproc-per-node 2 examples/time_all_reduce.py --sizes 4K 1M 256M
    torchrun ... examples/time_all_reduce.py --sizes 1M --seconds 120   # a line a second: pull a cable meanwhile

CUDA tensors where there are GPUs, else CPU tensors. Times are those of the slowest rank; every sum is checked.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bytes_of(text: str) -> int:
    number = int(text[:-1]) * UNITS[text[-1]] if text[-1:] in UNITS else int(text)
    if number < 4:
        raise argparse.ArgumentTypeError("a size has at least 4 bytes")
    return number


def seconds_of(x: Tensor, calls: int) -> float:
    """Per call, of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - begin) / calls], device=x.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=bytes_of, default=[4 << 10, 1 << 20, 256 << 20], metavar="BYTES")
    parser.add_argument("--seconds", type=float, default=0, help="go on for so long, a line a second")
    parser.add_argument("--backend", default="ark")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(arguments.backend, timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    began = time.monotonic()
    while True:
        for size in arguments.sizes:
            x = torch.zeros(size // 4, device=arguments.device)
            x[-1] = rank + 1
            dist.all_reduce(x)
            if float(x[-1]) != world * (world + 1) / 2 or (len(x) > 1 and float(x[0]) != 0):
                raise SystemExit(f"rank {rank} of {world}: the sum of {size} bytes is wrong")
            x.zero_()
            calls = max(1, min(200, int(0.3 / max(seconds_of(x, 3), 1e-6))))
            took = min(seconds_of(x, calls) for _ in range(3))
            if rank == 0:
                print(f"all_reduce of {size} bytes on {world} ranks: {took * 1e6:.1f} us, {size / took / 1e9:.2f} GB/s")
        # All ranks go on alike.
        over = torch.tensor([time.monotonic() - began], device=arguments.device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if float(over) >= arguments.seconds:
            break
        time.sleep(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
