"""Inputs of decode.py's contenders: key and value caches with the same content for all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from llama.model import Llama, LlamaConfig


def fill(model: Llama, whole: LlamaConfig, length: int) -> None:
    """Fills positions before `length` with random keys and values, equal in all models. A shard gets those of its
    heads.
    """
    generator = torch.Generator().manual_seed(length)
    for cache in model.caches():
        heads = cache.shape[1]
        first = dist.get_rank() * heads if heads < whole.kv_heads else 0
        shape = (whole.batch, whole.kv_heads, length, whole.head_dim)
        values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)  # exact in every model's type
        cache.zero_()
        cache[:, :, :length] = values[:, first : first + heads]
