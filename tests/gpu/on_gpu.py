"""Shared by the rank bodies of tests/gpu: a GPU for each rank, and the group's CPU path as the reference.

A result must have the same bits whatever computed it. So every collective on CUDA tensors is compared with the same
call on CPU copies, which tests/distributed compares with NumPy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.crew import crew_of
from support.launcher import run_ranks
from support.rank import Rank
from support.reference import ALL_DTYPES, assert_same_bits, supported

GPUS = torch.cuda.device_count()
# Ranks of a test. ARK_TEST_RANKS may exceed the number of GPUs: ranks then share them, slowly.
WORLD = int(os.environ.get("ARK_TEST_RANKS") or (4 if GPUS >= 4 else 2 if GPUS >= 2 else 1))
SHARED = 0 < GPUS < WORLD
ENV: dict[str, str | None] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "ARK_TEST_DEVICE": "cuda",  # for the scripts of tests/distributed
    "ARK_TUNE": "0",  # the built-in dispatch on every GPU
    **({"ARK_SHARE_GPU": "1"} if SHARED else {}),
}
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
SPREAD = (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.bool)
SMALL = (0, 1, 3, 1023)
LARGE = (65537, (1 << 20) + 3)


def run(
    body: Any, *args: Any, world: int = WORLD, timeout: float = 240, own: bool = False, **options: Any
) -> list[Any]:
    """Runs the body on every GPU within a time limit, on existing ranks unless it asks for its own."""
    if not options and not own:
        return crew_of(world, ENV).run(body, *args, timeout=timeout)
    env = ENV | options.pop("env", {})
    return run_ranks(body, world, *args, env=env, timeout=timeout, **options)


def device_of(rank: Rank) -> torch.device:
    return torch.device("cuda", rank.rank % GPUS)


def start(rank: Rank, **options: Any) -> torch.device:
    """Sets the rank's GPU and joins the group."""
    device = device_of(rank)
    torch.cuda.set_device(device)
    rank.init(**options)
    return device


def go_on_without_the_last(rank: Rank, device: torch.device, count: int = 1000) -> float:
    """After a failure, checks that the device still works and that all ranks but the last can form a new group.

    Returns a sum of their ranks over the new group.
    """
    assert torch.full((1000,), 2.0, device=device).sum().item() == 2000
    dist.destroy_process_group()
    rank.init(world_size=rank.world_size - 1, store=rank.store("again"), timeout=60)
    again = torch.full((count,), float(rank.rank), device=device)
    dist.all_reduce(again)
    return again[0].item()


def factor(rank: int) -> float:
    return 0.25 + 0.375 * rank


def op(name: str, rank: int) -> Any:
    return dist._make_nccl_premul_sum(factor(rank)) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def cases() -> list[tuple[torch.dtype, str]]:
    return [(dtype, name) for dtype in ALL_DTYPES for name in OPS if supported(dtype, name)]


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Checks equality to the last bit, on any device."""
    assert_same_bits(flat(got), flat(expected), what)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1)


def busy(milliseconds: float = 20.0) -> None:
    """Keeps the current stream busy, so that anything that does not wait for it comes too early."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles, at about 1.5 GHz


def resources() -> dict[str, int]:
    """Returns what a process can leak: device memory outside of PyTorch, descriptors, mappings, threads."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "device": total - free - torch.cuda.memory_reserved(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
    }


def sum_of_ranks(world: int, offset: float = 0.0) -> float:
    return sum(r + 1 + offset for r in range(world))
