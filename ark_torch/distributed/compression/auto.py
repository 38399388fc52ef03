"""Bits chosen layer by layer: the least error that a number of bytes can buy.

The problem is CGX's (2111.08617, section on adaptive compression), turned round: they look for the fewest bytes at a
given error, here it is the least error at given bytes. What quantising a layer to some bits loses is modelled from two
sums over its buckets, measured on the gradients of the first steps and added up over ranks: energy (squares) and spread
(n * (max - min)^2). A uniform quantiser loses spread / (2^bits - 1)^2 / 12; up to three bits with error feedback, where
values far out are drawn in (loading.py), a share of the energy. Bits are handed out one by one, each to the layer that
loses most error for a byte (marginal analysis: Fox 1966; Shoham and Gersho 1988, "Efficient bit allocation for an
arbitrary set of quantizers"): optimal up to the size of the last layer that did not fit.

CGX adds up absolute errors, which fits SGD. Adam and its kin divide by the gradient's size, so an error counts there
by its share of the layer's energy, for as many elements as the layer has: `relative=True`, the default.
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
    """Bits by measured gradients, for `State(bits=Auto(...))`: layers without a rule of their own get 1 to 8 bits.

    budget: bits an element, on average over these layers, that the chosen bits may take (4.0: as many bytes as 4 bits
        everywhere). The choice never takes more.
    steps: steps that are measured, with `start` bits everywhere, before bits are chosen.
    every: steps after which bits are chosen anew, from the newest `steps` steps; None: once.
    start: bits until then.
    least: the fewest bits of a layer.
    relative: errors count by their share of a layer's gradient (Adam and its kin); False: as they are (SGD).
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
        """Whether gradients of this step (from 0 on) are measured."""
        return step < self.steps if self.every is None else step % self.every < self.steps

    def chooses(self, step: int) -> bool:
        """Whether bits are chosen at the end of this step."""
        return (step if self.every is None else step % self.every) == self.steps - 1


# What drawing in loses of a bucket's variance, between normal (0.36, 0.12, 0.04) and Laplace's values (0.5, 0.2, 0.07).
DRAWN_IN = {1: 0.43, 2: 0.155, 3: 0.055}


def sums_of(gradient: Tensor, bucket: int) -> Tensor:
    """Energy and spread of a gradient, float64 `[2]` on its device."""
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
    """What a layer loses with 1 to 8 bits."""
    scale = numel / energy if relative and energy > 0 else 1.0
    return [
        scale * (DRAWN_IN[bits] * energy if feedback and bits in DRAWN_IN else spread / ((1 << bits) - 1) ** 2 / 12)
        for bits in range(1, 9)
    ]


def allocate(errors: Sequence[Sequence[float]], numels: Sequence[int], budget: float, least: int = 2) -> list[int]:
    """Bits of each layer, `least` to 8, that minimise the summed error within `budget` * sum(numels) bits.

    `errors`: of each layer, with 1 to 8 bits. Ties go to the layer that stands first, so that ranks with the same
    numbers choose the same bits.
    """
    bits = [least] * len(numels)
    left = int(budget * sum(numels)) - least * sum(numels)

    def best(layer: int) -> tuple[float, int, int]:
        """The step up that gains most for a bit, which may be of several bits."""
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
