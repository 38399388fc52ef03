"""Products of many rows with quantised weights in loop kernels on a GPU, compared with float64: prompts.

Codes are decoded into tiles that tensor cores multiply. Every form, and sizes that end within a tile or a line.
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
from coded import FORMS, coded
from llama.quantized import FORMS as MODULES  # in examples/
from llama.quantized import quantize

from ark_torch.compile import tinygemm

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="only compute capability 9.0 has these instructions (wgmma)",
    ),
]

SIZES = [(48, 256), (1000, 4096), (272, 768), (2048, 1280)]  # columns and depth
ROWS = [17, 64, 130, 500]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, dtype: torch.dtype) -> None:
    """A decoded number is rounded once to the rows' type, a sum once. The same bits each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    products = [coded(form, *size)[0].to(DEVICE) for size in SIZES]
    given = [torch.randn(m, k, dtype=dtype, device=DEVICE) for m in ROWS for _, k in SIZES]

    def call(given: list[Tensor]) -> list[Tensor]:
        return [products[i % len(products)](x) for i, x in enumerate(given)]

    with torch.no_grad():
        ours, report = compiled(call, minimum=1, fallback=False)
        got, again = ours(given), ours(given)
        on_one_kernel(report)
        place = torch.finfo(dtype).eps
        for i, (x, one, other) in enumerate(zip(given, got, again, strict=True)):
            product = products[i % len(products)]
            right = product(x.double())
            weight = product(torch.eye(x.shape[1], dtype=torch.float64, device=DEVICE)).t()  # decoded in float64
            norms = (x.double().square() @ weight.square().t() + 1).sqrt() + right.abs()
            assert torch.equal(one, other), (x.shape, one.shape)
            assert float(((one.double() - right).abs() / norms).max()) < 1.5 * place, (x.shape, one.shape)


@pytest.mark.parametrize("group", [32, 128])
def test_int4_weights_in_pytorchs_tiles(group: int) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    n, k, m, inner = 96, 512, 40, 8
    words = torch.randint(-(1 << 31), 1 << 31, (n // 8, k // (inner * 16), 32, inner // 2), device=DEVICE)
    packed = words.to(torch.int32)
    scales = (torch.rand(k // group, n, 2, device=DEVICE) + 0.1).bfloat16()
    codes = tinygemm.unpack(packed)
    numbers = torch.stack((codes & 15, codes >> 4), -1).flatten(1).double()
    scale, zero = (scales[..., i].double().repeat_interleave(group, 0) for i in range(2))
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    with torch.no_grad():
        ours, report = compiled(
            lambda x: torch.relu(torch.ops.aten._weight_int4pack_mm(x, packed, group, scales)),
            minimum=1,
            fallback=False,
        )
        got = ours(x)
    right = torch.relu(x.double() @ ((numbers.t() - 8) * scale + zero))
    assert float((got.double() - right).abs().max()) <= 2**-7 * float(right.abs().max())
    assert all(piece.runs_on == "ark" for graph in report.graphs for piece in graph.pieces)


@pytest.mark.parametrize("form", MODULES)
def test_a_prompt_of_a_quantized_llama_is_one_kernel(form: str) -> None:
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
        quantize(model, form)
        beside = run(model)
        call, report = compiled(model, fallback=False)
        got = run(call)
    on_one_kernel(report)
    assert f"product of {form} weights" in report.graphs[0].weights[0]
    assert float((got - beside).float().norm()) <= 3e-2 * float(beside.float().norm())
