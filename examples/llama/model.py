"""A Llama in plain PyTorch: rotary embeddings, grouped KV heads, RMSNorm, SwiGLU, and a KV cache written in place.

Decoding reads its position from a tensor, so that one compiled graph serves every position up to max_len. The cache is
created for a batch. A step writes the keys and values of its positions and attends to all earlier ones.

Tensor parallel: each rank of `group` holds its share of the heads, of the MLP's hidden units and of the vocabulary
(shard()). all_reduce adds partial results, and all_gather collects the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

# Before PyTorch 2.13 its name was all_gather_tensor.
gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


@dataclass(frozen=True)
class LlamaConfig:
    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    ffn: int = 1408
    vocabulary: int = 2048
    max_len: int = 512
    batch: int = 1
    eps: float = 1e-5
    theta: float = 500000.0
    head_dim: int = 64


def rotary_tables(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, each [max_len, head_dim]."""
    frequencies = 1.0 / config.theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.max_len).float(), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return x if group is None else collectives.all_reduce(x, "sum", group)


def together(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the columns of all ranks, side by side."""
    if group is None:
        return part
    parts = gather(part, 0, group).view(group.size(), *part.shape)
    return parts.transpose(0, 1).reshape(part.shape[0], -1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)
        shape = (config.batch, config.kv_heads, config.max_len, config.head_dim)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q = q * cos + rotate(q) * sin
        k = k * cos + rotate(k) * sin
        self.k_cache.index_copy_(2, positions, k)
        self.v_cache.index_copy_(2, positions, v)
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        return summed(self.wo(out.transpose(1, 2).reshape(batch, length, -1)), self.group)


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return summed(self.down(F.silu(self.gate(x)) * self.up(x)), self.group)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config, group)
        self.mlp_norm = RMSNorm(config.hidden, config.eps)
        self.mlp = MLP(config, group)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *rest)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Maps ids [batch, length] and positions [length], int64, to the last position's logits, [batch, vocabulary]."""

    def __init__(self, config: LlamaConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Block(config, group) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocabulary // (1 if group is None else group.size()), bias=False)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("places", torch.arange(config.max_len))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = (self.places[None, :] <= positions[:, None])[None, None]
        for layer in self.layers:
            x = layer(x, self.cos[positions], self.sin[positions], positions, mask)
        return together(self.head(self.norm(x)[:, -1]), self.group)

    def caches(self) -> list[Tensor]:
        return [buffer for name, buffer in self.named_buffers() if name.endswith("_cache")]


@torch.no_grad()
def shard(model: Llama, group: dist.ProcessGroup) -> Llama:
    """Returns this rank's share of a model, with its own weights."""
    rank, size, config = dist.get_rank(group), dist.get_world_size(group), model.config
    own = replace(config, heads=config.heads // size, kv_heads=config.kv_heads // size, ffn=config.ffn // size)
    part = Llama(own, group).to(next(model.parameters()).dtype).requires_grad_(False).eval()
    weights = model.state_dict()
    for name, weight in part.state_dict().items():
        whole = weights[name]
        for dim, length in enumerate(weight.shape):
            if length != whole.shape[dim]:
                whole = whole.narrow(dim, rank * length, length)
        weight.copy_(whole)
    return part
