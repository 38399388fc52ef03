"""The trained model writes one byte per step, with a cache of keys and values, in four ways that are compared.

A step takes a byte and its position and draws the next byte. Its noise is given, so that all ways draw the same. The
cache has a place for every position of the text, and attention sees the last `context` of them, as in training. It is
written in place, and the position is a tensor, so that one compiled step serves all positions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ark_torch

from .model import GPT, VOCABULARY, rotary_tables, rotate

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # (first byte, its position, noise per step) -> the following bytes
OPTIONS = {"choose": "ark"}  # the demo shows ark; by default the faster one is used
WAYS = ("eager", "Inductor", "ark", "ark, resident")


class Decoder(nn.Module):
    """Maps tokens [1, n] at positions [n] to the last one's logits, [1, 256]. The cache has `length` positions."""

    keys: Tensor
    values: Tensor
    cosine: Tensor
    sine: Tensor
    places: Tensor

    def __init__(self, gpt: GPT, length: int) -> None:
        super().__init__()
        self.gpt, config = gpt, gpt.config
        shape = (config.layers, 1, config.heads, length, config.width // config.heads)
        cosine, sine = rotary_tables(config, length)
        for name, buffer in (("keys", torch.zeros(shape)), ("values", torch.zeros(shape)), ("cosine", cosine)):
            self.register_buffer(name, buffer)
        self.register_buffer("sine", sine)
        self.register_buffer("places", torch.arange(length))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        config, count = self.gpt.config, tokens.size(1)
        cosine, sine = self.cosine[positions], self.sine[positions]
        seen = (self.places <= positions[:, None]) & (self.places > positions[:, None] - config.context)
        x = self.gpt.embedding(tokens)
        for layer, block in enumerate(self.gpt.blocks):
            assert isinstance(block.qkv, nn.Module)
            qkv = block.qkv(block.norm_attention(x)).view(1, count, 3, config.heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            keys, values = self.keys[layer], self.values[layer]
            keys.index_copy_(2, positions, rotate(key, cosine, sine))
            values.index_copy_(2, positions, value)
            mixed = F.scaled_dot_product_attention(rotate(query, cosine, sine), keys, values, attn_mask=seen)
            x = x + block.project(mixed.transpose(1, 2).reshape(1, count, config.width))
            x = x + block.down(F.relu(block.up(block.norm_mlp(x))).square())
        return F.linear(self.gpt.norm(x)[:, -1], self.gpt.embedding.weight)


def make_step(decoder: Decoder, temperature: float) -> Step:
    def step(token: Tensor, position: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        logits = decoder(token, position) / temperature + noise  # Gumbel noise: the argmax is a random draw
        return logits.argmax(-1, keepdim=True), position + 1

    return step


def one_by_one(step: Step) -> Run:
    """One call from Python per byte."""

    def run(token: Tensor, position: Tensor, noise: Tensor) -> Tensor:
        written = []
        for row in noise:
            token, position = step(token, position, row)
            written.append(token)
        return torch.cat(written).flatten()

    return run


def one_launch(step: Step) -> Run:
    """All bytes from one launch, or an error if that is not possible."""
    loop = ark_torch.resident(step, options={**OPTIONS, "fallback": False})

    def run(token: Tensor, position: Tensor, noise: Tensor) -> Tensor:
        return loop(token, position, steps=len(noise), inputs=(noise,)).kept[0].flatten()

    return run


def way_of(name: str, step: Step) -> Run:
    if name == "eager":
        return one_by_one(step)
    if name == "Inductor":
        return one_by_one(torch.compile(step, dynamic=False))
    if name == "ark":
        return one_by_one(torch.compile(step, backend="ark", options=OPTIONS, dynamic=False))
    return one_launch(step)


@dataclass
class Written:
    """The text of one way, and its speed."""

    text: list[int]
    first_call_seconds: float
    tokens_per_second: float = 0.0
    as_eager: int = 0  # length of the common prefix with eager's bytes


class Writer:
    """One way, with its own cache."""

    def __init__(self, name: str, gpt: GPT, prompt: bytes, noise: Tensor, temperature: float) -> None:
        device = gpt.embedding.weight.device
        self._decoder = Decoder(gpt, len(prompt) + len(noise)).to(device)
        self._run = way_of(name, make_step(self._decoder, temperature))
        self._prompt = torch.tensor([list(prompt)], device=device)
        self._noise, self._temperature = noise.to(device), temperature

    def write(self) -> tuple[list[int], float]:
        """Returns the text after the prompt, and the seconds that its steps took (without the prompt)."""
        count = self._prompt.size(1)
        logits = self._decoder(self._prompt, torch.arange(count, device=self._prompt.device))  # once, eagerly
        first = (logits / self._temperature + self._noise[0]).argmax(-1, keepdim=True)
        position = torch.tensor([count], device=first.device)
        begin = time.perf_counter()
        rest = self._run(first, position, self._noise[1:])
        text = [int(first), *rest.tolist()]
        return text, time.perf_counter() - begin


@torch.no_grad()
def compare(gpt: GPT, prompt: bytes, count: int, temperature: float, seed: int, rounds: int = 3) -> dict[str, Written]:
    """Writes the same text in every way. The ways take turns, and a rate is the median over rounds."""
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.empty(count, 1, VOCABULARY).exponential_(generator=generator).log()
    writers = {name: Writer(name, gpt, prompt, noise, temperature) for name in WAYS}
    found = {}
    for name, writer in writers.items():
        text, seconds = writer.write()
        found[name] = Written(text, seconds)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, writer in writers.items():
            text, seconds = writer.write()
            if text != found[name].text:
                raise RuntimeError(f"{name} has written another text the second time")
            times[name].append(seconds)
    for name, one in found.items():
        one.tokens_per_second = (count - 1) / statistics.median(times[name])
        pairs = zip(one.text, found["eager"].text, strict=True)
        one.as_eager = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), count)
    return found
