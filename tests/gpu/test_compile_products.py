"""Products in loop kernels on a GPU, compared with float64: many rows in half types, few rows shared by products."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

pytestmark = pytest.mark.timeout(120)

# The layout of a and b; rows, columns, depth.
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
    ("linear", 2048, 2048, 768),
    ("linear", 2040, 2000, 712),
    ("linear", 1576, 2304, 768),
    ("linear", 2048, 8192, 2048),
    ("linear", 5, 8192, 1024),
    ("linear", 16, 8200, 2048),
    ("a at odd places", 9, 8192, 1024),
    ("plain", 384, 1024, 1024),
    ("plain", 100, 160, 104),
    ("plain", 70, 75, 77),
    ("plain", 2048, 2048, 776),
    ("plain", 1576, 2304, 768),
    ("both transposed", 2048, 2048, 512),
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
    """Rounded once from sums in float32, with the same bits each time."""
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


@pytest.mark.parametrize("dtype, close", [(torch.float16, 2e-3), (torch.bfloat16, 8e-3)])
def test_the_tails_of_gelu(dtype: torch.dtype, close: float) -> None:
    """A product's activation keeps its significant digits where GELU is close to 0, down to -5 (-1.4e-6)."""
    x = torch.linspace(-5, 5, 128 * 64, device="cuda").to(dtype).view(128, 64)
    eye = torch.eye(64, dtype=dtype, device="cuda")
    got, stages = with_stages(lambda x, eye: F.gelu(x @ eye), x, eye)
    assert set(stages) == {"matmul+gelu"}, stages
    want = F.gelu(x.double())
    smallest = torch.finfo(dtype).smallest_normal
    assert float(((got.double() - want).abs() / (want.abs() + smallest)).max()) < close


# The layout of b; rows, columns, depth; whether there is a bias. The depth is split, and a norm adds the parts.
DEEP = [
    ("linear", 384, 1024, 4096, True),
    ("linear", 61, 264, 8200, True),
    ("plain", 128, 256, 4160, False),
    ("linear", 16, 1024, 8200, True),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_in_parts_of_their_depth(dtype: torch.dtype) -> None:
    """As close to float64 as eager, which rounds the product too, with the same bits each time."""
    torch.manual_seed(0)
    given = [(*operands(*case[:4], dtype), torch.randn(*case[1:3], dtype=dtype, device="cuda")) for case in DEEP]

    def norms(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [
            F.layer_norm((torch.addmm(bias, a, b) if case[4] else a @ b) + x, (case[2],))
            for case, (a, b, bias, x) in zip(DEEP, given, strict=True)
        ]

    got, stages = with_stages(norms, given)
    again, _ = with_stages(norms, given)
    assert len(stages) >= 3 * len(DEEP), stages
    with torch.no_grad():
        eager = norms(given)
        exact = norms([tuple(one.double() for one in operands) for operands in given])
    for case, one, other, near, want in zip(DEEP, got, again, eager, exact, strict=True):
        assert torch.equal(one, other), case
        assert float((one - want).norm()) < 1.05 * float((near - want).norm()), case


# Rows, depth, widths; which ones have a bias.
SHARED = [
    (1, 2048, (2048, 512, 512), ()),
    (1, 1024, (1000, 1000), (0, 1)),
    (2, 5120, (640, 320, 160), (1,)),
    (4, 776, (300, 300), (1,)),
    (3, 77, (201, 201), (0,)),
    (5, 4608, (264, 528), ()),
    (8, 520, (999, 999), (0, 1)),
    (7, 100, (180, 360), (1,)),
    (12, 256, (160, 160), (0,)),
    (16, 1024, (320, 160), ()),
]


def with_stages(call: Any, *arguments: Any) -> tuple[Any, list[str]]:
    """Returns results, and the names of the plan's stages."""
    report = Report()

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, options.parse(None, {"choose": "ark"}), report)

    torch._dynamo.reset()
    with torch.no_grad():
        results = torch.compile(call, backend=run, dynamic=False)(*arguments)
    (region,) = report.regions
    return results, [stage["name"] for stage in json.loads(region.plan_json)["stages"]]


@pytest.mark.parametrize("dtype, close", [(torch.float32, 3e-6), (torch.bfloat16, 4.1e-3)])
def test_products_of_few_rows_share_them(dtype: torch.dtype, close: float) -> None:
    """The bits are those of separate products and of a separate operator after them."""
    torch.manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    weights = [
        [(drawn(n, k), drawn(n) if i in biased else None) for i, n in enumerate(widths)]
        for _, k, widths, biased in SHARED
    ]
    rows = [drawn(m, k) for m, k, _, _ in SHARED]

    def products(rows: list[list[Tensor]], weights: Any) -> list[list[Tensor]]:
        made = []
        for several, some in zip(rows, weights, strict=True):
            outs = [F.linear(x, w, bias) for x, (w, bias) in zip(several, some, strict=True)]
            if len({out.shape for out in outs}) == 1:
                outs.append(F.silu(outs[0]) * outs[1])
            made.append(outs)
        return made

    got, stages = with_stages(products, [[x] * len(some) for x, some in zip(rows, weights, strict=True)], weights)
    alone, apart = with_stages(
        products, [[x.clone() for _ in some] for x, some in zip(rows, weights, strict=True)], weights
    )
    merged = sum(", " in name for name in stages)
    assert merged == len(SHARED) and not any(", " in name for name in apart), (stages, apart)
    for case, x, some, outs, others in zip(SHARED, rows, weights, got, alone, strict=True):
        for out, other in zip(outs, others, strict=True):
            assert torch.equal(out, other), case
        for (w, bias), out in zip(some, outs, strict=False):
            want = F.linear(x.double(), w.double(), None if bias is None else bias.double())
            scale = (F.linear(x.double().square(), w.double().square()) + 1).sqrt() + want.abs()
            assert float(((out.double() - want).abs() / scale).max()) < close, case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
def test_infinite_weights_stay_in_their_columns(dtype: torch.dtype, shared: bool) -> None:
    """Neighbouring columns keep their bits.

    Where lanes load less than they hold, data beyond the depth, and columns that a warp skips, add nothing.
    """
    torch.manual_seed(0)
    rows = [torch.randn(m, k, dtype=dtype, device="cuda") for m, k, _, _ in SHARED]
    finite = [[torch.randn(n, k, dtype=dtype, device="cuda") for n in widths] for _, k, widths, _ in SHARED]
    infinite = [[weight.clone() for weight in some] for some in finite]
    for weight in (weight for some in infinite for weight in some):
        kind = torch.randint(0, 6, (len(weight),), device="cuda")
        weight[kind == 0] = float("inf")
        weight[kind == 1, -1] = float("-inf")
        weight[kind == 2, 0] = float("nan")

    xs = [[x if shared else x.clone() for _ in some] for x, some in zip(rows, finite, strict=True)]

    def products(xs: list[list[Tensor]], weights: list[list[Tensor]]) -> list[list[Tensor]]:
        return [list(map(F.linear, *several)) for several in zip(xs, weights, strict=True)]

    got, stages = with_stages(products, xs, infinite)
    apart, _ = with_stages(products, xs, finite)
    assert any(", " in name for name in stages) == shared, stages
    for case, x, some, outs, others in zip(SHARED, rows, infinite, got, apart, strict=True):
        for weight, out, other in zip(some, outs, others, strict=True):
            alike = weight.isfinite().all(1)
            assert torch.equal(out[:, alike], other[:, alike]), case
            want = F.linear(x.double(), weight.double())[:, ~alike]
            assert torch.equal(want.isnan(), out[:, ~alike].isnan()), case
            assert torch.equal(want[~want.isnan()], out[:, ~alike].double()[~want.isnan()]), case
