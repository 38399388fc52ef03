"""The shapes of GPT-2 XL, BERT-Large and Llama 1B for benchmarks/training.py, as plain modules and Hugging Face's own.

Weights and tokens are random, without dropout. Sequences have 384 tokens, as in the ARK paper. The tests run the same
code on a tiny shape without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    causal: bool
    batch: int  # per GPU
    sequence: int = 384
    groups: int = 0  # heads of keys and values of a Llama; 0: another model


SHAPES = {
    "gpt2-xl": Shape(48, 1600, 25, 50000, True, 4),
    "bert-large": Shape(24, 1024, 16, 30000, False, 10),
    "llama-1b": Shape(16, 2048, 32, 128256, True, 4, groups=8),
    "tiny": Shape(2, 64, 2, 100, True, 2, 16),
    "tiny-llama": Shape(2, 64, 4, 100, True, 2, 16, groups=2),
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, shape.causal
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class LlamaBlock(nn.Module):
    """Rotated positions, grouped heads, RMS norms and SwiGLU of four times the width, without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups, self.size = shape.heads, shape.groups, shape.hidden // shape.heads
        self.before_attention, self.before_mlp = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.groups) * self.size, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate, self.up = (nn.Linear(shape.hidden, 4 * shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)
        angles = torch.arange(shape.sequence)[:, None] * 500000.0 ** -(torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.turns[:, : x.shape[2]].to(x.dtype)  # type: ignore[index]
        one, two = x.chunk(2, -1)
        return torch.cat([one * cosine - two * sine, two * cosine + one * sine], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, -1, self.size).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.groups, self.groups], 1)
        query, key = self.rotated(query), self.rotated(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        inner = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class Transformer(nn.Module):
    """Takes tokens, returns the loss. The embedding is also the output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        llama = shape.groups > 0
        self.positions = None if llama else nn.Embedding(max(512, shape.sequence), shape.hidden)
        self.blocks = nn.ModuleList((LlamaBlock if llama else Block)(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if llama else nn.LayerNorm)(shape.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t().to(x.dtype)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class HuggingFace(nn.Module):
    """Hugging Face's model with the same call."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        common = {"vocab_size": shape.vocabulary, "attn_implementation": "sdpa"}
        if shape.groups:
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                num_hidden_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
                num_key_value_heads=shape.groups, intermediate_size=4 * shape.hidden, tie_word_embeddings=True,
                use_cache=False, **common,
            )  # fmt: skip
            self.model = LlamaForCausalLM(config)
        elif shape.causal:
            from transformers import GPT2Config, GPT2LMHeadModel

            config = GPT2Config(
                n_layer=shape.layers, n_embd=shape.hidden, n_head=shape.heads, n_positions=512,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **common,
            )  # fmt: skip
            self.model = GPT2LMHeadModel(config)
        else:
            from transformers import BertConfig, BertForMaskedLM

            config = BertConfig(
                num_hidden_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
                intermediate_size=4 * shape.hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **common,
            )  # fmt: skip
            self.model = BertForMaskedLM(config)

    @property
    def blocks(self) -> nn.ModuleList:
        lists = {"transformer": "transformer.h", "bert": "bert.encoder.layer", "model": "model.layers"}
        path = next(path for name, path in lists.items() if hasattr(self.model, name))
        inner = self.model.get_submodule(path)
        assert isinstance(inner, nn.ModuleList)
        return inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


IMPLEMENTATIONS: dict[str, Callable[[Shape], nn.Module]] = {"plain": Transformer, "huggingface": HuggingFace}


def build(implementation: str, shape: Shape, device: torch.device, compiled: bool) -> nn.Module:
    """Builds the model with the same weights on all ranks."""
    torch.manual_seed(0)
    with device:
        model = IMPLEMENTATIONS[implementation](shape)
    blocks: Iterable[nn.Module] = model.blocks  # type: ignore[assignment]
    for block in blocks if compiled else ():
        block.forward = torch.compile(block.forward, dynamic=False)  # so that FSDP's hooks stay outside
    return model
