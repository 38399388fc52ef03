"""What decode.py's contenders are given: caches of keys and values, filled alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from llama.model import Llama, LlamaConfig


def fill(model: Llama, whole: LlamaConfig, length: int) -> None:
    """Keys and values at the positions before `length`: random, and the same for all models; a share has its heads."""
    generator = torch.Generator().manual_seed(length)
    for cache in model.caches():
        heads = cache.shape[1]
        first = dist.get_rank() * heads if heads < whole.kv_heads else 0
        shape = (whole.batch, whole.kv_heads, length, whole.head_dim)
        values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)  # which a model of any type has exactly
        cache.zero_()
        cache[:, :, :length] = values[:, first : first + heads]
