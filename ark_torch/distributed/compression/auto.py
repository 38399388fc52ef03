"""Chooses bits per layer: the least error within a budget of bytes.

This is the dual of CGX's problem (2111.08617, section on adaptive compression), which minimizes bytes at a given error.
A layer's quantization error is modeled from two sums over its buckets, measured on the first steps' gradients and
summed over ranks: energy (sum of squares) and spread (n * (max - min)^2). A uniform quantizer loses
spread / (2^bits - 1)^2 / 12; with up to three bits and error feedback, which clips outliers (loading.py), it loses a
fixed share of the energy. Each step gives bits to the layer that gains most per byte (marginal analysis: Fox 1966;
Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers"): optimal up to the size of the
last layer that did not fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ark_torch.distributed.compression.rules import check_bits


@dataclass(frozen=True)
class Auto:
    """Chooses 1 to 8 bits for each layer without a rule, from measured gradients: `State(bits=Auto(...))`.

    Args:
        budget: upper limit for the average bits per element of these layers (4.0: as many bytes as 4 bits everywhere).
        steps: number of steps to measure, with `start` bits everywhere, before bits are chosen.
        every: number of steps between choices, each made from the newest `steps` steps; None: choose once.
        start: bits until the first choice.
        least: minimum bits of a layer.
        relative: whether an error counts by its share of the layer's energy, times the layer's number of elements: Adam
            and similar optimizers divide by the gradient's magnitude. False: absolute errors, as in CGX (SGD).
    """

    budget: float = 4.0
    steps: int = 10
    every: int | None = None
    start: int = 4
    least: int = 2
    relative: bool = True

    def __post_init__(self) -> None:
        check_bits("Auto.start", self.start)
        check_bits("Auto.least", self.least)
        if not self.least <= self.budget <= 8:
            raise ValueError(f"ark: Auto.budget is {self.budget}: it is from Auto.least ({self.least}) to 8 bits.")
        if self.steps < 1:
            raise ValueError(f"ark: Auto.steps is {self.steps}: at least one step is measured.")
        if self.every is not None and self.every < self.steps:
            raise ValueError(f"ark: Auto.every is {self.every}: it is None, or at least Auto.steps ({self.steps}).")

    def measures(self, step: int) -> bool:
        """Whether the gradients of this step (counted from 0) are measured."""
        return step < self.steps if self.every is None else step % self.every < self.steps

    def chooses(self, step: int) -> bool:
        """Whether bits are chosen at the end of this step."""
        return (step if self.every is None else step % self.every) == self.steps - 1


# Share of a bucket's variance lost to clipping, between normal (0.36, 0.12, 0.04) and Laplace values (0.5, 0.2, 0.07).
DRAWN_IN = {1: 0.43, 2: 0.155, 3: 0.055}


def sums_of(gradient: Tensor, bucket: int) -> Tensor:
    """A gradient's energy and spread, float64 `[2]` on its device."""
    flat = gradient.detach().reshape(-1).float()
    whole = flat.numel() // bucket * bucket
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    for part, width in ((flat[:whole], bucket), (flat[whole:], flat.numel() - whole)):
        if part.numel():
            low, high = part.view(-1, width).aminmax(dim=1)
            sums[0] += part.square().sum(dtype=torch.float64)
            sums[1] += width * (high - low).double().square().sum()
    return sums


def errors_of(energy: float, spread: float, numel: int, feedback: bool, relative: bool) -> list[float]:
    """A layer's error with 1 to 8 bits."""
    scale = numel / energy if relative and energy > 0 else 1.0
    return [
        scale * (DRAWN_IN[bits] * energy if feedback and bits in DRAWN_IN else spread / ((1 << bits) - 1) ** 2 / 12)
        for bits in range(1, 9)
    ]


def allocate(errors: Sequence[Sequence[float]], numels: Sequence[int], budget: float, least: int = 2) -> list[int]:
    """Each layer's bits, `least` to 8, that minimize the total error within `budget` * sum(numels) bits.

    `errors` holds each layer's error with 1 to 8 bits. Ties go to the first layer, so that ranks with the same numbers
    choose the same bits.
    """
    bits = [least] * len(numels)
    left = int(budget * sum(numels)) - least * sum(numels)

    def best(layer: int) -> tuple[float, int, int]:
        """The increase that gains most per bit; it may add several bits."""
        now = bits[layer]
        steps = ((errors[layer][now - 1] - errors[layer][to - 1], to) for to in range(now + 1, 9))
        gain, to = max(((gain / ((to - now) * max(1, numels[layer])), to) for gain, to in steps), default=(0.0, 8))
        return -gain, layer, to

    queue = [best(layer) for layer in range(len(numels))]
    heapq.heapify(queue)
    while queue:
        gain, layer, to = heapq.heappop(queue)
        cost = (to - bits[layer]) * numels[layer]
        if cost > left or gain >= 0:
            continue
        left -= cost
        bits[layer] = to
        heapq.heappush(queue, best(layer))
    return bits
