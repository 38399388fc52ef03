"""The number of a loop kernel's workers: CPU threads, or a GPU's multiprocessors, all of them unless ranks share a GPU.

Ranks that share a GPU (ARK_SHARE_GPU) get equal numbers of its multiprocessors: under NVIDIA's Multi-Process Service
(MPS) all ranks' kernels can then be resident at once, without waiting for time slices. (MPS's own
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE does not help: on an H200, two processes of 50% got the same 66 of 132
multiprocessors.)
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ark_torch import env


def count(threads: int | None, device: torch.device) -> int:
    """`threads`: the option of that name, for the CPU. 0: every multiprocessor of the GPU."""
    if device.type == "cpu":
        return threads or torch.get_num_threads()
    if not env.read().share_gpu or not dist.is_initialized():
        return 0
    sharing = -(-dist.get_world_size() // torch.cuda.device_count())
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // sharing)
