"""The applications of benchmarks/cache_policy.py: models at real sizes, with random weights.

`small` builds the same graphs at sizes for a CPU, to test the benchmark itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "compile"))

import models
import real_sizes

Made = tuple[nn.Module, tuple[Any, ...]]
Application = Callable[[torch.device, bool], Made]
QWEN = models.Config(896, 24, 14, 2, 4864, 151936, 1024, theta=1000000.0)


def llama(sizes: models.Config, batch: int, filled: int, steps: int = 1, padded: bool = False) -> Application:
    """A decoding step of `batch` sequences after `filled` positions. With several `steps` at once it is a prompt. With
    `padded`, each sequence begins at a position of its own."""

    def make(device: torch.device, small: bool) -> Made:
        far, new = (filled // 16, max(1, steps // 16)) if small else (filled, steps)
        own = {**vars(real_sizes.SMALL_LLAMA if small else sizes), "max_len": max(64, (far + new + 63) // 64 * 64)}
        config = models.Config(**own)
        with device:
            model = real_sizes.ready(models.Llama(config, batch, torch.bfloat16), torch.bfloat16, 0.02)
            for cache in model.caches():
                cache[:, :, :far] = torch.randn_like(cache[:, :, :far])
            first = (torch.randint(0, far // 2, (batch,)),) if padded else ()
            return model, (torch.randint(0, config.vocab, (batch, new)), torch.arange(far, far + new), *first)

    return make


def of_case(name: str) -> Application:
    def make(device: torch.device, small: bool) -> Made:
        case, dtype = real_sizes.MODELS[name]
        made = case(dtype, device, small)
        return made.model, made.inputs

    return make


class Pooled(nn.Module):
    """Pooled embeddings only."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(rows, dim)) for _ in range(tables))

    def forward(self, indices: list[Tensor], offsets: Tensor) -> Tensor:
        bags = zip(self.tables, indices, strict=True)
        return torch.cat([F.embedding_bag(index, table, offsets, mode="sum") for table, index in bags], 1)


def pooled(device: torch.device, small: bool) -> Made:
    """The indices follow Zipf's law (exponent 1.05), like those of real users and items."""
    tables, rows, dim, batch, each = (2, 200, 16, 8, 4) if small else (8, 1_000_000, 64, 2048, 32)
    with device:
        model = real_sizes.ready(Pooled(tables, rows, dim), torch.float32)
        shares = torch.arange(1, rows + 1, dtype=torch.float64) ** -1.05
        below = (shares / shares.sum()).cumsum(0)
        indices = [torch.searchsorted(below, torch.rand(batch * each, dtype=torch.float64)) for _ in range(tables)]
        indices = [torch.randperm(rows)[one.clamp(max=rows - 1)] for one in indices]
        return model, (indices, torch.arange(0, batch * each, each))


class Chain(nn.Module):
    """Row operations of one shape, where each reads what the previous one wrote."""

    def __init__(self, kind: str, dim: int, length: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            y = norm(x) if self.kind == "norm" else F.softmax(x, -1)
            x = x.roll(1, 0) + y  # mixes rows, so that the next operation reads other workers' results
        return x


def chain(kind: str) -> Application:
    def make(device: torch.device, small: bool) -> Made:
        rows, dim = (16, 64) if small else (4096, 4096)
        with device:
            return real_sizes.ready(Chain(kind, dim), torch.bfloat16), (torch.randn(rows, dim, dtype=torch.bfloat16),)

    return make


class Vit(nn.Module):
    """ViT-B/16: patch projection as a product, a pre-norm encoder, and the classes from the first row."""

    def __init__(self, dim: int, heads: int, layers: int, patches: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.patches, self.head = nn.Linear(768, dim), nn.Linear(dim, classes)
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.randn(1, patches + 1, dim) * 0.02)
        parts = {"n1": (dim,), "qkv": (dim, 3 * dim), "out": (dim, dim), "n2": (dim,)}
        parts |= {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.LayerNorm(*s) if n[0] == "n" else nn.Linear(*s) for n, s in parts.items()})
            for _ in range(layers)
        )
        self.last = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), self.patches(x)], 1) + self.places
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["n1"](x)).chunk(3, -1)
            q, k, v = (t.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
            x = x + layer["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
            x = x + layer["down"](F.gelu(layer["up"](layer["n2"](x))))
        return self.head(self.last(x)[:, 0])


def vit(batch: int) -> Application:
    def make(device: torch.device, small: bool) -> Made:
        sizes = (64, 4, 2, 9, 10) if small else (768, 12, 12, 196, 1000)
        with device:
            model = real_sizes.ready(Vit(*sizes), torch.float16)
            return model, (torch.randn(batch, sizes[3], 768, dtype=torch.float16),)

    return make


APPLICATIONS: dict[str, Application] = {
    "llama-1b decode": llama(real_sizes.LLAMA_1B, 1, 512),
    "llama-1b decode, context 8192": llama(real_sizes.LLAMA_1B, 1, 8192),
    "llama-1b decode, batch 16": llama(real_sizes.LLAMA_1B, 16, 512),
    "qwen2.5-0.5b decode": llama(QWEN, 1, 512),
    "qwen2.5-0.5b decode, batch 16, context 2048": llama(QWEN, 16, 2048),
    "gpt2-xl decode": of_case("gpt2-xl"),
    "llama-1b prefill 512": llama(real_sizes.LLAMA_1B, 1, 0, 512),
    "bert-large": of_case("bert-large"),
    "dlrm": of_case("dlrm"),
    "pooled embedding, Zipf": pooled,
    "norm chain": chain("norm"),
    "softmax chain": chain("softmax"),
    "eight experts": of_case("eight experts"),
    "vit-b/16": vit(1),
    "vit-b/16, batch 8": vit(8),
}
