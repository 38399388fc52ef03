"""The shapes of GPT-2 XL and BERT-Large for benchmarks/training.py, as plain modules and as Hugging Face's own.

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


SHAPES = {
    "gpt2-xl": Shape(48, 1600, 25, 50000, True, 4),
    "bert-large": Shape(24, 1024, 16, 30000, False, 10),
    "tiny": Shape(2, 64, 2, 100, True, 2, 16),
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


class Transformer(nn.Module):
    """Takes tokens, returns the loss. The embedding is also the output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(max(512, shape.sequence), shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t().to(x.dtype)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class HuggingFace(nn.Module):
    """Hugging Face's model with the same call."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        common = {"vocab_size": shape.vocabulary, "attn_implementation": "sdpa"}
        if shape.causal:
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
        inner = self.model.transformer.h if hasattr(self.model, "transformer") else self.model.bert.encoder.layer
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
        block.forward = torch.compile(block.forward)  # so that FSDP's hooks stay outside
    return model
