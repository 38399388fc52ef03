"""Values far out are drawn in before few bits are given to a bucket; error feedback keeps what that takes away.

Error feedback needs a quantiser whose error is smaller than what it quantises. From a bucket's least to its greatest
value there are 2^bits levels: with one to three bits, and a few values far out, most elements are nearer to zero than
to any level, the error exceeds the gradient, and residuals grow from step to step. Levels that span a few standard
deviations have the least error (Max 1960): ends of 0.8, 1.49 and 2.05 deviations from the mean for normal values and
0.71, 1.63 and 2.56 for Laplace's; gradients lie between. With one bit the two levels are the means of 1-bit SGD (Seide
2014) for a normal bucket.
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
    """`run(input)` with data + residual drawn in where bits are few; what is left out goes back to the residual.

    Args:
        data: `[rows * sum(numels)]`: what is to be quantised.
        residual: float32, of data's shape; `run` takes and renews it.
        rows: how often the layers stand behind one another.
        numels: elements of each layer in a row.
        widths: bits and bucket of each layer.
        run: the exchange.
    """
    full = data.float() + residual
    drawn = torch.empty_like(data)
    wide = full.view(rows, -1).split_with_sizes(list(numels), dim=1)
    narrow = drawn.view(rows, -1).split_with_sizes(list(numels), dim=1)
    for layer, to, (bits, bucket) in zip(wide, narrow, widths, strict=True):
        to.copy_(_drawn_in(layer, bucket, ENDS[bits]) if bits in ENDS else layer)
    residual.zero_()
    result = run(drawn)
    # A bucket with a NaN arrives as NaN and leaves nothing behind.
    residual += (full - drawn.float()).nan_to_num_(0.0, 0.0, 0.0)
    return result


def _drawn_in(layer: Tensor, bucket: int, ends: float) -> Tensor:
    """`[rows, n]`, bucket by bucket within `ends` deviations of the bucket's mean."""
    whole = layer.shape[1] // bucket * bucket
    parts = []
    for part, width in ((layer[:, :whole], bucket), (layer[:, whole:], layer.shape[1] - whole)):
        if part.numel():
            buckets = part.reshape(-1, width)
            deviation, mean = torch.std_mean(buckets, dim=1, keepdim=True, correction=0)
            reach = deviation * ends
            parts.append(buckets.clamp(mean - reach, mean + reach).view_as(part))
    return torch.cat(parts, dim=1) if parts else layer
