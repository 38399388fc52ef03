"""Trains a small vision transformer on scikit-learn's digits with DistributedDataParallel.

It shows what compressed gradients cost in test accuracy (benchmarks/compression_accuracy.py --task digits, and a short
form in the tests). scikit-learn includes the 1,797 images of 8 x 8 pixels, so nothing is downloaded. Every fifth image
is a test image; the ranks share the others. The seed determines weights and batches, but not the split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

PATCH, SIDE, CLASSES = 2, 8, 10
TEST_ONE_IN = 5


def load_images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns images in [0, 1] and labels, for training and for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    test = torch.arange(len(labels)) % TEST_ONE_IN == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


class VisionTransformer(nn.Module):
    """Patches of 2 x 2 pixels, learned positions, encoder layers, the mean over patches and a linear head."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        patches = (SIDE // PATCH) ** 2
        self.patch = nn.Linear(PATCH * PATCH, width)
        self.position = nn.Parameter(0.02 * torch.randn(patches, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        cut = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        scores: Tensor = self.head(self.encoder(self.patch(cut) + self.position).mean(1))
        return scores


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def train(
    steps: int,
    seed: int,
    rank: int,
    world: int,
    compress: Callable[[DistributedDataParallel], Any],
    batch: int = 32,
    evaluate_every: int = 50,
    layers: int = 2,
    width: int = 32,
    learning_rate: float = 3e-3,
) -> tuple[list[tuple[int, float]], Any]:
    """Trains over the default group. Returns test accuracy by step, and what `compress` returned for the model."""
    (images, labels), test = load_images()
    torch.manual_seed(seed)
    model = VisionTransformer(layers, width)
    ddp = DistributedDataParallel(model)
    state = compress(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=learning_rate, weight_decay=0.05)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    mine = torch.arange(rank, len(labels), world)
    found = [(0, accuracy(model, *test))]
    for step in range(1, steps + 1):
        drawn = mine[torch.randint(len(mine), (batch,), generator=generator)]
        loss = F.cross_entropy(ddp(images[drawn]), labels[drawn])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % evaluate_every == 0 or step == steps:
            found.append((step, accuracy(model, *test)))
    return found, state
