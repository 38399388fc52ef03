"""Bits chosen layer by layer: the least error that a number of bytes can buy.

The problem is CGX's (2111.08617, section on adaptive compression), turned round: they look for the fewest bytes at a
given error, here it is the least error at given bytes. What rounding to `bits` bits costs a bucket of n elements whose
values span `range` is n * (range / (2^bits - 1))^2 / 12, the error of a uniform quantiser; a layer's error is then
spread / (2^bits - 1)^2 / 12, with spread the sum of n * range^2 over its buckets, measured on the gradients of the
first steps and summed over ranks. Bits are handed out one by one, each to the layer that loses most error for a byte
(marginal analysis: Fox 1966; Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers").
The error is convex in the bits, so the result is optimal up to the size of the last layer that did not fit.
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
    least: the fewest bits of a layer. One bit keeps two values a bucket, which costs more than it saves.
    """

    budget: float = 4.0
    steps: int = 10
    every: int | None = None
    start: int = 4
    least: int = 2

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


def spread_of(gradient: Tensor, bucket: int) -> Tensor:
    """The sum over buckets of n * (max - min)^2: a float64 of no dimension, on the gradient's device."""
    flat = gradient.detach().reshape(-1).float()
    whole = flat.numel() // bucket * bucket
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for part, width in ((flat[:whole], bucket), (flat[whole:], flat.numel() - whole)):
        if part.numel():
            low, high = part.view(-1, width).aminmax(dim=1)
            total += width * (high - low).double().square().sum()
    return total


def allocate(spreads: Sequence[float], numels: Sequence[int], budget: float, least: int = 2) -> list[int]:
    """Bits of each layer, `least` to 8, that minimise the summed error within `budget` * sum(numels) bits.

    Ties go to the layer that stands first, so that ranks with the same numbers choose the same bits.
    """
    bits = [least] * len(numels)
    left = int(budget * sum(numels)) - least * sum(numels)

    def gain(layer: int) -> float:
        now, then = (1.0 / ((1 << b) - 1) ** 2 for b in (bits[layer], bits[layer] + 1))
        return spreads[layer] * (now - then) / max(1, numels[layer])

    queue = [(-gain(layer), layer) for layer in range(len(numels)) if least < 8]
    heapq.heapify(queue)
    while queue:
        _, layer = heapq.heappop(queue)
        if numels[layer] > left or spreads[layer] <= 0:
            continue
        left -= numels[layer]
        bits[layer] += 1
        if bits[layer] < 8:
            heapq.heappush(queue, (-gain(layer), layer))
    return bits
