"""Products of quantised weights in loop kernels on a GPU, compared with float64, and a quantised Llama as one kernel.

Every form, one to sixteen rows, and odd sizes.
"""

from __future__ import annotations

import copy
import json
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
from coded import FORMS, LAYOUTS, coded, laid_out
from llama.quantized import FORMS as MODULES  # in examples/
from llama.quantized import quantize

pytestmark = pytest.mark.timeout(200)

# Columns and depth: several batches of columns, several passes, a partial last slice, no whole slice, and slices behind
# the depth.
SIZES = [(37, 256), (1000, 4096), (264, 768), (21, 2176)]
ROWS = [1, 2, 7, 8, 9, 16]


@pytest.mark.parametrize("dtype, close", [(torch.bfloat16, 4.1e-3), (torch.float16, 5.2e-4), (torch.float32, 2e-6)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, dtype: torch.dtype, close: float) -> None:
    """Sums in float32 of exact numbers, rounded once, with the same bits each time."""
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
        for i, (x, one, other) in enumerate(zip(given, got, again, strict=True)):
            product = products[i % len(products)]
            right = product(x.double())
            magnitudes = torch.eye(x.shape[1], dtype=torch.float64, device=DEVICE)
            weight = product(magnitudes).t()  # decoded in float64
            scale = (x.double().square() @ weight.square().t() + 1).sqrt() + right.abs()
            assert float(((one.double() - right).abs() / scale).max()) < close, (x.shape, one.shape)
            assert torch.equal(one, other), (x.shape, one.shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "scales, zeros",
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.int8)],
    ids=["bfloat16", "float32", "int8"],
)
@pytest.mark.parametrize("form", ["int4, zeros", "int4, behind a group of 128"])
def test_layouts_of_scales(form: str, scales: torch.dtype, zeros: torch.dtype, layout: str) -> None:
    """Scales and zeros by columns, by groups and in turns, with columns that begin at even and odd addresses, of
    products that share their rows."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = [(37, 256), (515, 4096), (131, 2176)]
    products = [laid_out(coded(form, *size)[0].to(DEVICE), layout, scales, zeros) for size in sizes]
    given = {k: [torch.randn(m, k, device=DEVICE).bfloat16() for m in (1, 7, 16)] for _, k in sizes}

    def call(given: dict[int, list[Tensor]]) -> list[list[Tensor]]:
        return [[product(x) for x in given[k]] for product, (_, k) in zip(products, sizes, strict=True)]

    with torch.no_grad():
        ours, report = compiled(call, minimum=1, fallback=False)
        got, again = ours(given), ours(given)
        on_one_kernel(report)
        for product, (_, k), ones, others in zip(products, sizes, got, again, strict=True):
            weight = product(torch.eye(k, dtype=torch.float64, device=DEVICE)).t()
            for x, one, other in zip(given[k], ones, others, strict=True):
                right = x.double() @ weight.t()
                scale = (x.double().square() @ weight.square().t() + 1).sqrt() + right.abs()
                assert float(((one.double() - right).abs() / scale).max()) < 4.1e-3, (x.shape, one.shape)
                assert torch.equal(one, other), (x.shape, one.shape)


@pytest.mark.parametrize("depth", [96, 160, 272])
@pytest.mark.parametrize("form", ["int8, scaled", "float8, scaled", "int4, channels"])
def test_odd_depths(form: str, depth: int) -> None:
    """Depths that are no multiple of a slice, or of 16 bytes of codes."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    product = coded(form, 65, depth)[0].to(DEVICE)
    x = torch.randn(3, depth, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        ours, report = compiled(product, minimum=1, fallback=False)
        got, right = ours(x), product(x.double())
    on_one_kernel(report)
    assert float((got.double() - right).abs().max() / right.abs().max()) < 4.1e-3


def test_every_code_of_float8() -> None:
    """Subnormal numbers are decoded exactly, and NaN stays NaN."""
    torch._dynamo.reset()
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    weight = torch.zeros(256, 64, device=DEVICE).to(torch.float8_e4m3fn)
    weight[:, 5] = codes
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.zeros(1, 64, dtype=dtype, device=DEVICE)
        x[0, 5] = 1
        with torch.no_grad():
            ours, report = compiled(
                lambda x, w: torch.nn.functional.linear(x, w.to(x.dtype)), minimum=1, fallback=False
            )
            torch.testing.assert_close(ours(x, weight)[0].float(), codes.float(), rtol=0, atol=0, equal_nan=True)
        on_one_kernel(report)


@pytest.mark.parametrize("form", [None, "int8", "float8"])
def test_products_stay_whole_where_inductor_adds_up(form: str | None) -> None:
    """With coordinate_descent_tuning, which torchao sets, Inductor makes a sum of a product of one row."""
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(512, 384, bias=False), torch.nn.SiLU(), torch.nn.Linear(384, 256))
    model = model.bfloat16().to(DEVICE).requires_grad_(False)
    if form is not None:
        quantize(model, form)
    x = torch.randn(1, 512, device=DEVICE).bfloat16()
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        ours, report = compiled(model, minimum=1, fallback=False)
        torch.testing.assert_close(ours(x), model(x), rtol=2e-2, atol=2e-2)
    on_one_kernel(report)
    told = [] if form is None else [f"2 times: product of {form} weights, scale a channel"]
    assert report.graphs[0].weights == told
    kinds = [stage["kind"] for stage in json.loads(report.graphs[0].pieces[0].region.json())["stages"]]
    assert kinds.count("matmul") == 2, kinds


@pytest.mark.parametrize("form", MODULES)
def test_a_quantized_llama_is_one_kernel(form: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    # With this vocabulary the last product has more columns a block than are staged at once.
    model = models.Llama(models.Config(1024, 2, 16, 4, 2816, 100000, 64), 1, torch.bfloat16).eval().to(DEVICE)
    quantize(model, form)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    with torch.no_grad():
        call, report = compiled(model, fallback=False)
        for position in range(12):
            ids = torch.randint(0, 512, (1, 1), device=DEVICE)
            where = torch.tensor([position], device=DEVICE)
            right = exact(ids, where)
            place = torch.finfo(torch.bfloat16).eps * float(right.abs().max())
            far = float((call(ids, where).double() - right).abs().max())
            assert far <= 1.5 * float((eager(ids, where).double() - right).abs().max()) + place
    on_one_kernel(report)
