"""Models at real sizes with random weights, on any device. `small` is for testing a script.

A Llama of 1.2 billion weights, BERT-Large, GPT-2 XL (decoding with a cache), a layer of eight experts and a DLRM. `run`
calls a model from its initial state each time, as exactness.py requires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import exactness
import models
import recommender
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LLAMA_1B = models.Config(2048, 16, 32, 8, 8192, 128256, 1024, theta=500000.0)
SMALL_LLAMA = models.Config(64, 2, 4, 2, 128, 500, 1024)


@dataclass
class Case:
    model: nn.Module
    run: exactness.Run
    inputs: tuple[Any, ...]  # of one call


class CachedDecoder(models.Decoder):
    """GPT-2 decoding with caches of keys and values, updated in place."""

    def __init__(self, dim: int, heads: int, layers: int, vocab: int, length: int) -> None:
        super().__init__(dim, heads, layers, vocab, length)
        for layer in range(layers):
            for name in "kv":
                cache = torch.zeros(1, heads, length, dim // heads)
                self.register_buffer(f"{name}_{layer}_cache", cache, persistent=False)

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.words(ids) + self.places(pos)
        seen = self.caches()
        mask = torch.arange(seen[0].shape[2], device=ids.device)[None, :] <= pos[:, None]
        for i, layer in enumerate(self.layers):
            q, k, v = layer["qkv"](layer["n1"](x)).split(x.shape[-1], dim=2)
            q, k, v = (t.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
            for cache, new in zip(seen[2 * i :], (k, v), strict=False):
                cache.index_copy_(2, pos, new)
            h = F.scaled_dot_product_attention(q, seen[2 * i], seen[2 * i + 1], attn_mask=mask[None, None])
            x = x + layer["out"](h.transpose(1, 2).reshape(x.shape))
            x = x + layer["down"](F.gelu(layer["up"](layer["n2"](x)), approximate="tanh"))
        return F.linear(self.last(x)[:, -1], self.words.weight)

    def caches(self) -> list[Tensor]:
        return [b for name, b in self.named_buffers() if name.endswith("_cache")]


def ready(model: nn.Module, dtype: torch.dtype, spread: float = 0.0) -> Any:
    """Prepares for inference. `spread`, if given, redraws the matrices' elements with that spread."""
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters() if spread else ():
        if parameter.dim() > 1:
            parameter.normal_(0, spread)
    return model.to(dtype)


def fill(model: Any, length: int) -> None:
    """Fills positions before `length` with random keys and values, the same for every model of a shape."""
    for number, cache in enumerate(model.caches()):
        generator = torch.Generator(cache.device).manual_seed(number)
        shape = (*cache.shape[:2], length, cache.shape[3])
        cache.zero_()
        cache[:, :, :length] = torch.randn(shape, generator=generator, device=cache.device, dtype=torch.bfloat16)


def decoding(model: Any, vocab: int, filled: int, device: torch.device) -> Case:
    """Decodes eight tokens from the beginning, and eight after `filled` positions."""
    tokens = torch.randint(0, vocab, (16, 1, 1), device=device)
    places = torch.arange(filled + 8, device=device)

    def run(call: Any, dtype: torch.dtype) -> list[Tensor]:
        results = []
        for begin in (0, filled):
            fill(call, begin)
            first = 8 if begin else 0
            results += [call(tokens[first + i], places[begin + i : begin + i + 1]) for i in range(8)]
        return results

    return Case(model, run, (tokens[8], places[filled : filled + 1]))


def llama(dtype: torch.dtype, device: torch.device, small: bool, layers: int = 0) -> Case:
    config = models.Config(**{**vars(SMALL_LLAMA if small else LLAMA_1B), **({"layers": layers} if layers else {})})
    with device:
        model = ready(models.Llama(config, 1, dtype), dtype, 0.02)
    return decoding(model, config.vocab, 512, device)


def gpt2(dtype: torch.dtype, device: torch.device, small: bool) -> Case:
    sizes = (64, 4, 2, 500, 1024) if small else (1600, 25, 48, 50257, 1024)
    with device:
        model = ready(CachedDecoder(*sizes), dtype, 0.02)
    return decoding(model, sizes[3], 512, device)


def bert(dtype: torch.dtype, device: torch.device, small: bool, batch: int = 1, length: int = 384) -> Case:
    dim, heads, layers, vocab = (64, 4, 2, 500) if small else (1024, 16, 24, 30522)
    length = length // 8 if small else length
    with device:
        model = ready(models.Encoder(dim, heads, layers, vocab, length), dtype, 0.02)
        ids, present = torch.randint(0, vocab, (batch, length)), torch.ones(batch, length, dtype=torch.bool)
        present[:, length - length // 8 :] = False
    return Case(model, lambda call, _: list(call(ids, present)), (ids, present))


def experts(dtype: torch.dtype, device: torch.device, small: bool) -> Case:
    """Tokens whose choice of experts does not depend on rounding."""
    dim, hidden = (64, 96) if small else (2048, 8192)
    with device:
        model = ready(models.Experts(dim, hidden), dtype)
        x = torch.randn(200, dim).to(dtype)
        gates = F.linear(F.layer_norm(x.double(), (dim,)), model.gate.weight.double()).softmax(-1).topk(3).values
        x = x[(gates[:, 1] / gates[:, 2]).topk(8).indices]
    return Case(model, lambda call, dtype: [call(x.to(dtype))], (x,))


def dlrm(dtype: torch.dtype, device: torch.device, small: bool) -> Case:
    tables, rows, dim, batch, each = (4, 60, 16, 8, 3) if small else (26, 100000, 128, 512, 20)
    pairs = tables * (tables + 1) // 2
    with device:
        model = recommender.Dlrm(tables, rows, dim)
        if not small:
            model.bottom, model.top = recommender.mlp(13, 512, 256, dim), recommender.mlp(dim + pairs, 1024, 512, 1)
        model = ready(model, dtype)
        dense = torch.randn(batch, 13)
        indices = [torch.randint(0, rows, (each * batch,)) for _ in range(tables)]
        offsets = [torch.randint(0, each * batch, (batch,)).sort().values for _ in range(tables)]
        for one in offsets:
            one[0] = 0
    given = (dense.to(dtype), indices, offsets)
    return Case(model, lambda call, dtype: [call(dense.to(dtype), indices, offsets)], given)


MODELS: dict[str, tuple[Callable[..., Case], torch.dtype]] = {
    "llama-1b": (llama, torch.bfloat16),
    "bert-large": (bert, torch.float16),
    "gpt2-xl": (gpt2, torch.bfloat16),
    "eight experts": (experts, torch.bfloat16),
    "dlrm": (dlrm, torch.float32),
}
