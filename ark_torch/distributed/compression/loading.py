"""Clips a bucket's outliers before few-bit quantization; error feedback keeps what the clipping removes.

Error feedback needs a quantizer whose error is smaller than its input. The 2^bits levels span a bucket's minimum to its
maximum: with one to three bits and a few outliers, most elements are nearer to zero than to any level, the error
exceeds the gradient, and residuals grow from step to step. Levels that span a few standard deviations have the least
error (Max 1960): ends at 0.8, 1.49 and 2.05 deviations from the mean for normal values, and at 0.71, 1.63 and 2.56 for
Laplace values; gradients are in between. With one bit, the two levels are the means of 1-bit SGD (Seide 2014) for a
normal bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ENDS = {1: 0.8, 2: 1.5, 3: 2.3}


def loaded(
    data: Tensor,
    residual: Tensor,
    rows: int,
    numels: Sequence[int],
    widths: Sequence[tuple[int, int]],
    run: Callable[[Tensor], Tensor],
) -> Tensor:
    """`run(input)` with data + residual, clipped where bits are few; the clipped part returns to the residual.

    Args:
        data: `[rows * sum(numels)]`, to be quantized.
        residual: float32, of data's shape; `run` reads and updates it.
        rows: number of repetitions of the layers' layout in `data`.
        numels: number of elements of each layer in a row.
        widths: bits and bucket of each layer.
        run: the exchange.
    """
    full = torch.add(residual, data)
    drawn = torch.empty_like(data)
    for row, to_row in zip(full.view(rows, -1), drawn.view(rows, -1), strict=True):
        parts = zip(row.split_with_sizes(list(numels)), to_row.split_with_sizes(list(numels)), widths, strict=True)
        for layer, to, (bits, bucket) in parts:
            if bits in ENDS:
                _draw_in(layer, to, bucket, ENDS[bits])
            else:
                to.copy_(layer)
    residual.zero_()
    result = run(drawn)
    # A bucket with a NaN arrives as NaN and leaves no residual.
    residual.add_(full).sub_(drawn).nan_to_num_(0.0, 0.0, 0.0)
    return result


def _draw_in(layer: Tensor, to: Tensor, bucket: int, ends: float) -> None:
    """Clips `[n]` bucket by bucket to within `ends` deviations of the bucket's mean."""
    whole = len(layer) // bucket * bucket
    for part, width in ((slice(0, whole), bucket), (slice(whole, None), len(layer) - whole)):
        if width and len(layer[part]):
            buckets = layer[part].view(-1, width)
            mean = buckets.mean(1, keepdim=True)
            square = torch.linalg.vector_norm(buckets, dim=1, keepdim=True).square() / width
            reach = (square - mean.square()).clamp_(min=0).sqrt_() * ends
            to[part].view(-1, width).copy_(buckets.clamp(mean - reach, mean + reach))
