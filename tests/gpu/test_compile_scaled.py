"""Products of float8 rows (torch._scaled_mm), and PyTorch's own of int8 and int4 weights, in loop kernels on a GPU.

Few rows run on one kernel, within rounding of float64. test_compile_scaled_rows.py has many.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from compile_support import DEVICE, compiled, on_one_kernel
from torch import Tensor

sys.path += [
    str(Path(__file__).resolve().parents[1] / "compile"),
    str(Path(__file__).resolve().parents[2] / "examples"),
]

import models  # in tests/compile
from llama.quantized import quantize  # in examples/

from ark_torch.compile import tinygemm

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="PyTorch multiplies float8 from compute capability 8.9 on",
    ),
]

F8 = torch.float8_e4m3fn
ROWS = [1, 2, 7, 8, 9, 16]
SIZES = [(48, 256), (1008, 4096), (272, 768)]  # columns and depth


@pytest.mark.parametrize("kind", ["rows", "tensor"])
def test_scaled_mm(kind: str) -> None:
    """Rows become the numbers that eager PyTorch makes of them: results differ by less than bfloat16's place."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    weights = [torch.randn(n, k, device=DEVICE).to(F8) for n, k in SIZES]
    scales = [torch.rand(1, n if kind == "rows" else 1, device=DEVICE) + 0.5 for n, _ in SIZES]
    bias = [torch.randn(n, device=DEVICE).bfloat16() if i else None for i, (n, _) in enumerate(SIZES)]
    given = [(torch.randn(m, k, device=DEVICE) * 3).bfloat16() for m in ROWS for _, k in SIZES]
    of = [torch.rand(len(x) if kind == "rows" else 1, 1, device=DEVICE) + 0.5 for x in given]

    def call(given: list[Tensor]) -> list[Tensor]:
        products = []
        for i, (x, scale) in enumerate(zip(given, of, strict=True)):
            w, b, one = (each[i % len(SIZES)] for each in (weights, scales, bias))
            products.append(torch._scaled_mm(x.to(F8), w.t(), scale, b, bias=one, out_dtype=torch.bfloat16))
        return products

    with torch.no_grad():
        ours, report = compiled(call, minimum=1, fallback=False)
        got, again = ours(given), ours(given)
    on_one_kernel(report)
    for i, (x, scale, one, other) in enumerate(zip(given, of, got, again, strict=True)):
        w, b, add = (each[i % len(SIZES)] for each in (weights, scales, bias))
        right = x.to(F8).double() @ w.double().t() * scale * b + (0 if add is None else add.double())
        sizes = (x.double().square() @ w.double().square().t()).sqrt() * scale * b + right.abs()
        assert float(((one.double() - right).abs() / sizes).max()) < 4.1e-3, x.shape
        assert torch.equal(one, other), x.shape


def test_every_number_is_rounded_as_pytorch_does() -> None:
    """All of bfloat16 and float16, and float32 near the ties, through a product with the identity."""
    torch._dynamo.reset()
    bits = torch.arange(1 << 16, dtype=torch.int32, device=DEVICE).to(torch.int16)
    eye = torch.eye(64, device=DEVICE).to(F8)
    one = torch.ones((), device=DEVICE)
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            x = bits.view(dtype).view(-1, 16, 64)
            x = torch.where(x.abs() <= 464, x, torch.zeros_like(x))  # NaN would spread over the product's row
            ours, report = compiled(
                lambda x: torch._scaled_mm(x.to(F8), eye.t(), one, one, out_dtype=torch.bfloat16),
                minimum=1,
                fallback=False,
            )
            for rows in x:
                assert torch.equal(ours(rows).float(), rows.to(F8).float())
            on_one_kernel(report)
        ours, _ = compiled(
            lambda x: torch._scaled_mm(x.to(F8), eye.t(), one, one, out_dtype=torch.bfloat16), minimum=1, fallback=False
        )
        x = torch.full((2, 64), 465.0, device=DEVICE)
        x[1] = float("nan")
        assert bool(ours(x).isnan().all()) == bool(x.to(F8).float().isnan().all())


def test_a_dynamically_quantized_llama_is_one_kernel() -> None:
    """Near to the model without quantization, as eager PyTorch's quantized one is."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = models.Llama(models.Config(1024, 2, 16, 4, 2816, 512, 64), 1, torch.bfloat16).eval().to(DEVICE)
    ids = torch.randint(0, 512, (12, 1, 1), device=DEVICE)
    where = torch.arange(12, device=DEVICE)

    def steps(call: object) -> Tensor:
        for cache in (buffer for name, buffer in model.named_buffers() if "cache" in name):
            cache.zero_()
        return torch.cat([call(one, at.view(1)).flatten(1) for one, at in zip(ids, where, strict=True)])  # type: ignore[operator]

    with torch.no_grad():
        right = steps(model)
        quantize(model, "float8-dynamic")
        beside = steps(model)
        call, report = compiled(model, fallback=False)
        got = steps(call)
    on_one_kernel(report)
    assert "float8 rows" in report.graphs[0].weights[0]
    assert float((got - right).float().norm()) <= 1.25 * float((beside - right).float().norm())


def test_int8_weights_in_plain_order() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    codes = torch.randint(-128, 128, (96, 256), dtype=torch.int8, device=DEVICE)
    scale = (torch.rand(96, device=DEVICE) + 0.1).bfloat16()
    with torch.no_grad():
        ours, report = compiled(
            lambda x: torch.relu(torch.ops.aten._weight_int8pack_mm(x, codes, scale)), minimum=1, fallback=False
        )
        for m in (1, 5, 16):
            x = torch.randn(m, 256, device=DEVICE).bfloat16()
            right = torch.relu(x.double() @ codes.double().t() * scale.double())
            assert float((ours(x).double() - right).abs().max()) <= 2**-8 * float(right.abs().max())
    assert all(piece.runs_on == "ark" for graph in report.graphs for piece in graph.pieces)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("inner", [2, 8])
def test_int4_weights_in_pytorchs_tiles(inner: int, group: int) -> None:
    """Any words are codes. PyTorch's own kernel rounds more, so both are compared with float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    n, k = 96, 512
    words = torch.randint(-(1 << 31), 1 << 31, (n // 8, k // (inner * 16), 32, inner // 2), device=DEVICE)
    packed = words.to(torch.int32)
    scales = (torch.rand(k // group, n, 2, device=DEVICE) + 0.1).bfloat16()
    codes = tinygemm.unpack(packed)
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).double()
    scale, zero = (scales[..., i].double().repeat_interleave(group, 0) for i in range(2))
    weight = (numbers.t() - 8) * scale + zero

    def call(x: Tensor) -> Tensor:
        return torch.relu(torch.ops.aten._weight_int4pack_mm(x, packed, group, scales))

    with torch.no_grad():
        ours, report = compiled(call, minimum=1, fallback=False)
        for m in (1, 3, 16):
            x = torch.randn(m, k, device=DEVICE).bfloat16()
            right, theirs = torch.relu(x.double() @ weight), call(x)
            place = 2**-7 * float(right.abs().max())
            assert float((theirs.double() - right).abs().max()) <= 2 * place, "the order is not PyTorch's"
            assert float((ours(x).double() - right).abs().max()) <= place
    assert all(piece.runs_on == "ark" for graph in report.graphs for piece in graph.pieces)
