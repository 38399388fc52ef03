"""Products of many rows in half types in loop kernels on a GPU: shapes, odd ones too, and layouts against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.limit(120)

# How a and b lie; rows, columns, depth.
CASES = [
    ("linear", 384, 1024, 1024),
    ("linear", 384, 3072, 1024),
    ("linear", 384, 1024, 4096),
    ("linear", 384, 1000, 40),
    ("linear", 17, 64, 64),
    ("linear", 33, 100, 72),
    ("linear", 130, 150, 100),
    ("linear", 200, 264, 192),
    ("linear", 257, 77, 333),
    ("plain", 384, 1024, 1024),
    ("plain", 100, 160, 104),
    ("plain", 70, 75, 77),
    ("a transposed", 128, 264, 104),
    ("a transposed", 77, 99, 65),
    ("both transposed", 136, 160, 192),
    ("a at odd places", 200, 200, 128),
    ("every other of a", 64, 64, 64),
]


def operands(layout: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    b = drawn(k, n) if layout in ("plain", "a transposed") else drawn(n, k).t()
    if layout in ("a transposed", "both transposed"):
        return drawn(k, m).t(), b, drawn(n)
    if layout == "a at odd places":
        return drawn(m, k + 5)[:, 3 : 3 + k], b, drawn(n)
    if layout == "every other of a":
        return drawn(m, 2 * k)[:, ::2], b, drawn(n)
    return drawn(m, k), b, drawn(n)


@pytest.mark.parametrize("dtype, close", [(torch.float16, 5.2e-4), (torch.bfloat16, 4.1e-3)])
def test_products_of_many_rows(dtype: torch.dtype, close: float) -> None:
    """Rounded once, from sums in float32; the same bits each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    given = [operands(*case, dtype) for case in CASES]

    def products(given: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
        return [torch.addmm(bias, a, b) for a, b, bias in given]

    with torch.no_grad():
        call = torch.compile(products, backend="ark", options={"choose": "ark"}, dynamic=False)
        got, again = call(given), call(given)
    for case, (a, b, bias), one, other in zip(CASES, given, got, again, strict=True):
        wide_a, wide_b = a.double(), b.double()
        want = wide_a @ wide_b + bias.double()
        scale = (wide_a.square() @ wide_b.square() + 1).sqrt() + want.abs()
        assert float(((one.double() - want).abs() / scale).max()) < close, case
        assert torch.equal(one, other), case
