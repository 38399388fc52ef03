"""A small recommender with tables distributed over ranks, and a loop that trains it without ark_torch.train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.nn import ShardedEmbeddingBags

TABLES = {"user": (50, 16), "item": (3, 16), "shop": (17, 16), "day": (7, 16)}
SAMPLES, LONGEST = 6, 3


class Recommender(nn.Module):
    """Pooled bags of four tables, followed by a perceptron."""

    def __init__(self, device: torch.device | str = "cpu", **kwargs: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bags = ShardedEmbeddingBags(TABLES, device=device, max_values=SAMPLES * LONGEST, **kwargs)
        self.rest = nn.Sequential(nn.Linear(len(TABLES) * 16, 12), nn.ReLU(), nn.Linear(12, 1)).to(device)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        jagged = SimpleNamespace(values=lambda: values, lengths=lambda: lengths)
        return self.rest(self.bags(jagged).flatten(1)).squeeze(1)


def batch(number: int, rank: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Returns values padded to the same number in each batch, lengths, and targets."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    lengths = torch.randint(0, LONGEST + 1, (len(TABLES), SAMPLES), generator=generator)
    values = torch.zeros(len(TABLES) * SAMPLES * LONGEST, dtype=torch.int64)
    used = [
        torch.randint(0, rows, (int(one.sum()),), generator=generator)
        for (rows, _), one in zip(TABLES.values(), lengths, strict=True)
    ]
    values[: int(lengths.sum())] = torch.cat(used)
    clicks = torch.randint(0, 2, (SAMPLES,), generator=generator).float()
    return {
        name: one.to(device) for name, one in (("values", values), ("lengths", lengths.flatten()), ("clicks", clicks))
    }


def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(given["values"], given["lengths"]), given["clicks"])


def optimizer_of(model: Recommender, **kwargs: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of all parameters that the backward pass does not update."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, **kwargs)


def in_a_loop(
    model: Recommender, steps: int, rank: int, device: torch.device | str = "cpu", **kwargs: Any
) -> list[Tensor]:
    """Returns losses. DistributedDataParallel wraps the perceptron; the tables' module averages by itself."""
    model.rest = DDP(model.rest)
    optimizer, losses = optimizer_of(model, **kwargs), []
    for number in range(steps):
        optimizer.zero_grad()
        value = loss(model, batch(number, rank, device))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    model.rest = model.rest.module
    return losses
