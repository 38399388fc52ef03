"""Products of many float8 rows (torch._scaled_mm) in loop kernels on a GPU: prompts, on float8 tensor cores.

Results are as close to float64 as PyTorch's own, whose tensor cores add with few bits, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compile_support import DEVICE, compiled, on_one_kernel
from torch import Tensor

sys.path += [
    str(Path(__file__).resolve().parents[1] / "compile"),
    str(Path(__file__).resolve().parents[2] / "examples"),
]

import models  # in tests/compile
from llama.quantized import quantize  # in examples/

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="only compute capability 9.0 has these instructions (wgmma)",
    ),
]

F8 = torch.float8_e4m3fn
ROWS = [17, 32, 72, 128, 200, 512]
# Columns and depth: a partial tile, several tiles, whole lines, and a depth that ends within a line.
SIZES = [(48, 256), (1008, 4096), (272, 784), (2048, 2048)]


def relative(got: Tensor, right: Tensor, norms: Tensor) -> float:
    return float(((got.double() - right).abs() / norms).max())


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize(
    "kind, dtype",
    [("rows", torch.bfloat16), ("tensor", torch.bfloat16), ("tensor", torch.float16), ("tensor", torch.float32)],
)
def test_many_rows(kind: str, dtype: torch.dtype, fast: bool) -> None:
    """Scales of rows and columns or of tensors, with a bias and without, in every shape of tile. Beside PyTorch's
    result, and with the same bits each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    weights = [torch.randn(n, k, device=DEVICE).to(F8) for n, k in SIZES]
    scales = [torch.rand(1, n if kind == "rows" else 1, device=DEVICE) + 0.5 for n, _ in SIZES]
    biased = dtype != torch.float32  # PyTorch has no other
    bias = [torch.randn(n, device=DEVICE).to(dtype) if i % 2 and biased else None for i, (n, _) in enumerate(SIZES)]
    given = [(torch.randn(m, k, device=DEVICE) * 3).bfloat16() for m in ROWS for _, k in SIZES]
    of = [torch.rand(len(x) if kind == "rows" else 1, 1, device=DEVICE) + 0.5 for x in given]

    def call(given: list[Tensor]) -> list[Tensor]:
        products = []
        for i, (x, scale) in enumerate(zip(given, of, strict=True)):
            w, b, one = (each[i % len(SIZES)] for each in (weights, scales, bias))
            codes = x.to(F8)
            products.append(torch._scaled_mm(codes, w.t(), scale, b, bias=one, out_dtype=dtype, use_fast_accum=fast))
        return products

    with torch.no_grad():
        ours, report = compiled(call, minimum=1, fallback=False)
        got, again, theirs = ours(given), ours(given), call(given)
    on_one_kernel(report)
    for i, (x, scale, one, other, beside) in enumerate(zip(given, of, got, again, theirs, strict=True)):
        w, b, add = (each[i % len(SIZES)] for each in (weights, scales, bias))
        right = x.to(F8).double() @ w.double().t() * scale * b + (0 if add is None else add.double())
        norms = (x.double().square() @ w.double().square().t()).sqrt() * scale * b + right.abs()
        place = torch.finfo(dtype).eps
        assert one.dtype == dtype and torch.equal(one, other), x.shape
        mine, its = relative(one, right, norms), relative(beside, right, norms)
        assert mine <= 1.5 * its + place + (0 if fast else 1e-4), (x.shape, w.shape, mine, its)
        assert mine < 2e-2, (x.shape, w.shape, mine)


def test_what_follows_is_part_of_the_product() -> None:
    """An activation behind the scales and the bias."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    weight, bias = torch.randn(512, 1024, device=DEVICE).to(F8), torch.randn(512, device=DEVICE).bfloat16()
    x = torch.randn(64, 1024, device=DEVICE).bfloat16()
    a, b = torch.rand(64, 1, device=DEVICE) / 50, torch.rand(1, 512, device=DEVICE) + 0.5

    def call(x: Tensor) -> Tensor:
        return F.gelu(torch._scaled_mm(x.to(F8), weight.t(), a, b, bias=bias, out_dtype=torch.bfloat16))

    with torch.no_grad():
        ours, report = compiled(call, minimum=1, fallback=False)
        got = ours(x)
    on_one_kernel(report)
    right = F.gelu(x.to(F8).double() @ weight.double().t() * a * b + bias.double())
    assert float((got.double() - right).abs().max()) <= 2**-7 * float(right.abs().max())


def test_a_prompt_of_a_dynamically_quantized_llama_is_one_kernel() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = models.Llama(models.Config(1024, 2, 16, 4, 2816, 512, 128), 1, torch.bfloat16).eval().to(DEVICE)
    ids, where = torch.randint(0, 512, (1, 100), device=DEVICE), torch.arange(100, device=DEVICE)

    def run(call: object) -> Tensor:
        for cache in (buffer for name, buffer in model.named_buffers() if "cache" in name):
            cache.zero_()
        result: Tensor = call(ids, where)  # type: ignore[operator]
        return result.clone()

    with torch.no_grad():
        right = run(model)
        quantize(model, "float8-dynamic")
        beside = run(model)
        call, report = compiled(model, fallback=False)
        got = run(call)
    on_one_kernel(report)
    assert "float8 rows" in report.graphs[0].weights[0]
    assert float((got - right).float().norm()) <= 1.25 * float((beside - right).float().norm())


def test_by_default_inductor_multiplies_many_rows() -> None:
    torch._dynamo.reset()
    weight, one = torch.randn(64, 128, device=DEVICE).to(F8), torch.ones((), device=DEVICE)

    def call(x: Tensor) -> Tensor:
        product = torch._scaled_mm((x * 2).to(F8), weight.t(), one, one, out_dtype=torch.bfloat16)
        return (product / 50).tanh() * 2 + 1

    x = torch.randn(32, 128, device=DEVICE)
    with torch.no_grad():
        ours, report = compiled(call, choose="measure")
        torch.testing.assert_close(ours(x), call(x), rtol=2e-2, atol=2e-2)
    assert any("more than 16 rows (32)" in line for line in report.graphs[0].weights)
