"""The training of all clients: a small network on the same random samples, and how they print the result."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(64, 16, generator=generator)
        self.targets = self.inputs.square().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def tell(model: nn.Module) -> None:
    """Starts a new line, whatever the other rank is printing."""
    norm = sum(p.detach().double().square().sum().item() for p in model.parameters())
    print(f"\nrank {dist.get_rank()} over {dist.get_backend()}: {norm:.9f}\n", end="", flush=True)
