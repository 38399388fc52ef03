"""Whether the user allows products of float32 in TF32: on tensor cores, with 10 bits of mantissa.

PyTorch has three settings for it: allow_tf32 and fp32_precision of torch.backends.cuda.matmul (or, for all operators,
of torch.backends), and torch.set_float32_matmul_precision(). The newest, fp32_precision, follows the others; the older
ones raise an error where it alone was set. torch._dynamo guards it, so that a change compiles anew.
"""

from __future__ import annotations

import torch


def tf32() -> bool:
    """Read when a graph is lowered: its products have it as an attribute, and so have keys of what is compiled."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
