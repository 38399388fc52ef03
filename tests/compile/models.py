"""Small models with random weights, in the forms that the compiler gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128
    vocab: int = 100
    max_len: int = 32
    eps: float = 1e-5
    theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class Attention(nn.Module):
    """Attention with a KV cache that is updated in place."""

    def __init__(self, config: Config, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        size = config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * size, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * size, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * size, bias=False)
        self.wo = nn.Linear(config.heads * size, config.dim, bias=False)
        shape = (batch, config.kv_heads, config.max_len, size)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=dtype), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=dtype), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        q, k, v = (
            w(x).view(batch, steps, -1, self.config.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        self.k_cache.index_copy_(2, pos, k)
        self.v_cache.index_copy_(2, pos, v)
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(batch, steps, -1))


class Block(nn.Module):
    def __init__(self, config: Config, batch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.n1, self.n2 = RMSNorm(config.dim, config.eps), RMSNorm(config.dim, config.eps)
        self.attn = Attention(config, batch, dtype)
        self.w1 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x), cos, sin, pos, mask)
        h = self.n2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    """Decoder with grouped heads, rotary embeddings and static caches. `pos` is a tensor: one graph serves all."""

    def __init__(self, config: Config, batch: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.emb = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, batch, dtype) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.eps)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.to(dtype)
        size = config.head_dim
        inverse = 1.0 / (config.theta ** (torch.arange(0, size, 2).float() / size))
        angles = torch.outer(torch.arange(config.max_len).float(), inverse)
        angles = torch.cat([angles, angles], -1)
        self.register_buffer("cos", angles.cos().to(dtype))
        self.register_buffer("sin", angles.sin().to(dtype))
        self.register_buffer("positions", torch.arange(config.max_len))

    def forward(self, ids: Tensor, pos: Tensor, first: Tensor | None = None) -> Tensor:
        """first: each sequence's first position, if padding on the left stands before it."""
        x = self.emb(ids)
        cos, sin = self.cos[pos], self.sin[pos]
        mask = (self.positions[None, :] <= pos[:, None])[None, None]
        if first is not None:
            mask = mask & (self.positions >= first[:, None])[:, None, None]
        for layer in self.layers:
            x = layer(x, cos, sin, pos, mask)
        return self.head(self.norm(x)[:, -1])

    def caches(self) -> list[Tensor]:
        return [b for name, b in self.named_buffers() if name.endswith("_cache")]


class Encoder(nn.Module):
    """BERT's layer: biases, post-LayerNorm, exact GELU, an additive padding mask."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 2, vocab: int = 50, length: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.first = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    qkv=nn.Linear(dim, 3 * dim),
                    out=nn.Linear(dim, dim),
                    n1=nn.LayerNorm(dim),
                    up=nn.Linear(dim, 4 * dim),
                    down=nn.Linear(4 * dim, dim),
                    n2=nn.LayerNorm(dim),
                )
            )
            for _ in range(layers)
        )
        self.pool = nn.Linear(dim, dim)

    def forward(self, ids: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        mask = torch.where(present[:, None, None, :], 0.0, torch.finfo(x.dtype).min).to(x.dtype)
        for layer in self.layers:
            q, k, v = layer["qkv"](x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = layer["n1"](x + layer["out"](h.transpose(1, 2).flatten(2)))
            x = layer["n2"](x + layer["down"](F.gelu(layer["up"](x))))
        return x, torch.tanh(self.pool(x[:, 0]))


class Decoder(nn.Module):
    """GPT-2: learned positions, pre-LayerNorm, causal attention over the whole text, tanh GELU, tied head."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 2, vocab: int = 50, length: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    n1=nn.LayerNorm(dim),
                    qkv=nn.Linear(dim, 3 * dim),
                    out=nn.Linear(dim, dim),
                    n2=nn.LayerNorm(dim),
                    up=nn.Linear(dim, 4 * dim),
                    down=nn.Linear(4 * dim, dim),
                )
            )
            for _ in range(layers)
        )
        self.last = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["n1"](x)).split(x.shape[-1], dim=2)
            q, k, v = (t.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](h.transpose(1, 2).reshape(x.shape))
            x = x + layer["down"](F.gelu(layer["up"](layer["n2"](x)), approximate="tanh"))
        return F.linear(self.last(x), self.words.weight)


class ResidualBlock(nn.Module):
    """Two convolutions. Transposed ones fall back."""

    def __init__(self, channels: int = 8, transposed: bool = False) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.c1, self.c2 = (kind(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.b1, self.b2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))


class Experts(nn.Module):
    """Top-2 of several SwiGLU networks per token, with gathered weights (as in gpt-fast and Mixtral)."""

    def __init__(self, dim: int = 48, hidden: int = 80, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, experts, bias=False)
        self.up, self.side = (nn.Parameter(torch.randn(experts, hidden, dim) * dim**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        shares, experts = torch.topk(F.softmax(self.gate(tokens).float(), -1), self.chosen, -1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        h = F.silu(torch.einsum("ti,taoi->tao", tokens, self.up[experts]))
        h = h * torch.einsum("ti,taoi->tao", tokens, self.side[experts])
        y = torch.einsum("tao,taio->tai", h, self.down[experts])
        return x + torch.einsum("tai,ta->ti", y, shares).view(x.shape)


class SortedExperts(nn.Module):
    """The same choice with rows sorted by expert and grouped products (as Hugging Face's "grouped_mm"); bfloat16."""

    def __init__(self, dim: int = 48, hidden: int = 80, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.gate = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, dim, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        shares, experts = torch.topk(F.softmax(self.gate(x).float(), -1), self.chosen, -1)
        chosen = experts.flatten()
        order = torch.argsort(chosen, stable=True)
        counts = torch.histc(chosen.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // self.chosen]
        h = torch._grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)
        y = torch._grouped_mm(F.silu(h), self.down.transpose(-2, -1), offs=ends)
        y = y * shares.flatten()[order].to(y.dtype)[:, None]
        return torch.zeros_like(x).index_add(0, order // self.chosen, y)
