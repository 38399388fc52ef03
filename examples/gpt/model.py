"""A small byte-level GPT: the model that examples/train_gpt.py trains.

A pre-norm transformer with rotary positions. The output layer shares the embedding's weights, whose small initial
values keep the first loss near ln(256). The tokens are the 256 byte values, so that there is no tokenizer to download
and any text works. Nothing here depends on distributed training, which is the trainer's task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128


def rotary_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of positions 0 to length - 1, [length, head size / 2] each."""
    half = config.width // config.heads // 2
    angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding: rotates pairs of channels by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.norm_mlp = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class GPT(nn.Module):
    """Maps bytes to logits of the next byte."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.width % (2 * config.heads) != 0:
            raise ValueError(f"width {config.width} must be a multiple of twice the heads ({config.heads})")
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        cosine, sine = rotary_tables(config, config.context)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Layers that add to the residual stream start small, so that it does not grow with depth.
                scale = (2 * config.layers) ** -0.5 if name.endswith(("project.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 if weight is self.embedding.weight else scale * weight.size(1) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        cosine, sine = self.cosine[:length], self.sine[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.linear(self.norm(x), self.embedding.weight)


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte of predicting each byte of [batch, length + 1] windows from those before.

    It is a function, not a method, because DistributedDataParallel only handles calls of the model itself.
    """
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
