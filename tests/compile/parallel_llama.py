"""Hugging Face's Llama, tensor parallel over a group's ranks, for tests and benchmarks/compile_models.py.

It imports transformers only when a model is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


def make(layers: int, max_len: int) -> Any:
    """Makes the model with random weights and a number of heads that four ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=100,
        max_position_embeddings=max_len,
    )
    return LlamaForCausalLM(config).eval()


def plan() -> dict[str, ParallelStyle]:
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + [f"mlp.{name}_proj" for name in ("gate", "up")]
    rows = ("self_attn.o_proj", "mlp.down_proj")
    styles: dict[str, ParallelStyle] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    return styles | {f"model.layers.*.{name}": RowwiseParallel() for name in rows}


def cache_of(config: Any, dtype: torch.dtype, ranks: int) -> Any:
    """Returns a static cache with the heads of one of that many ranks."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=config.max_position_embeddings)
    cache.early_initialization(1, config.num_key_value_heads // ranks, config.head_dim, dtype, "cpu")
    return cache
