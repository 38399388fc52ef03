"""PyTorch's ways to allow products of float32 in TF32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

WAYS = ("allow_tf32", "set_float32_matmul_precision", "fp32_precision", "fp32_precision of all")


@contextlib.contextmanager
def allowed(way: str = "allow_tf32") -> Iterator[None]:
    """Within it the products are allowed, by this way alone; then they are not."""
    products = torch.backends.cuda.matmul
    assert products.fp32_precision != "tf32"
    before = products.fp32_precision
    try:
        if way == "allow_tf32":
            products.allow_tf32 = True
        elif way == "set_float32_matmul_precision":
            torch.set_float32_matmul_precision("high")
        elif way == "fp32_precision":
            products.fp32_precision = "tf32"
        else:
            products.fp32_precision = "none"  # follows the setting of all
            torch.backends.fp32_precision = "tf32"
        yield
    finally:
        # PyTorch refuses to read the older settings where they differ from the newer ones.
        if way == "fp32_precision of all":
            torch.backends.fp32_precision = "none"
        if way.startswith("fp32_precision"):
            products.fp32_precision = before
        else:
            torch.set_float32_matmul_precision("highest")
    assert products.fp32_precision != "tf32" and not products.allow_tf32  # the older one can be read
