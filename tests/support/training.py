"""Small GPT-2-, BERT- and ViT-like modules, batches and losses: the same on every rank and in every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, TOKENS, CLASSES = 32, 4, 61, 7


class Block(nn.Module):
    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)), self.dropout)
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norms[1](x)))), self.dropout)


class Language(nn.Module):
    """Tied embeddings, as in GPT-2 (causal) and BERT."""

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.Sequential(*(Block(causal, dropout) for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.t()


class Vision(nn.Module):
    """Patches by a convolution, a class token, and a batch norm with running statistics in buffers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, WIDTH, 4, 4), nn.BatchNorm2d(WIDTH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(False, dropout) for _ in range(2)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.patches(images)).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.first.expand(len(x), -1, -1), x], 1))
        return self.head(x[:, 0])


NAMES = ("gpt2", "bert", "vit")


def make(name: str, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Vision(dropout) if name == "vit" else Language(name == "gpt2", dropout)


def batch(name: str, step: int, rank: int = 0, rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name == "vit":
        images = torch.randn(rows, 3, 16, 16, generator=generator)
        return {"inputs": images, "labels": torch.randint(CLASSES, (rows,), generator=generator)}
    tokens = torch.randint(TOKENS, (rows, length + 1), generator=generator)
    return {"inputs": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["inputs"])
    return functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())


def weights(model: nn.Module) -> Tensor:
    """Returns all weights and running statistics as one vector of float64."""
    values = [t.detach().double().reshape(-1).cpu() for t in (*model.parameters(), *model.buffers())]
    return torch.cat(values)
