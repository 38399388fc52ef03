"""Shared code of the scripts: the group, a model, one batch per step, and the one-process result.

ARK_TEST_DEVICE=cuda puts everything on GPUs, rank r on GPU r. tests/gpu calls main() in ranks that already have a
group, which is then used and not destroyed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

BACKEND = os.environ.get("ARK_TEST_BACKEND", "ark")
KIND = os.environ.get("ARK_TEST_DEVICE", "cpu")
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if KIND == "cuda" else torch.device(KIND)
OWN_GROUP = not dist.is_initialized()


def start() -> tuple[int, int]:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        torch.backends.cuda.matmul.allow_tf32 = False
    if not dist.is_initialized():
        dist.init_process_group(BACKEND)
    return dist.get_rank(), dist.get_world_size()


def finish() -> None:
    dist.barrier()
    print(f"ok from rank {dist.get_rank()}", flush=True)
    if OWN_GROUP:
        dist.destroy_process_group()


def make_model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)).to(
        DEVICE
    )


def batch(step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(size, 16, generator=generator).to(DEVICE), torch.randn(size, 8, generator=generator).to(DEVICE)


def mine(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return tensor.chunk(world)[rank]


def train_alone(
    steps: int, optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None, model: nn.Module | None = None
) -> nn.Module:
    """Trains the same in one process on whole batches."""
    model = model or make_model()
    chosen = optimizer(model) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(step)
        chosen.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        chosen.step()
    return model


def assert_same_weights(got: dict[str, torch.Tensor], want: nn.Module, tolerance: float = 1e-5) -> None:
    for name, value in want.state_dict().items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
