"""Products of float8 rows with float8 weights, and of int8 weights by PyTorch's own operator.

Forms of torch._scaled_mm, torch.nn.functional.scaled_mm and torchao's dynamic quantization, forms that are not taken,
and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(200)

F8 = torch.float8_e4m3fn
DEPTH, COLUMNS = 256, 48


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


def rounded(x: Tensor) -> Tensor:
    return x.to(F8).double()


def scales(rows: int, kind: str) -> tuple[Tensor, Tensor]:
    """Of rows and of columns."""
    if kind == "rows":
        return torch.rand(rows, 1) + 0.5, torch.rand(1, COLUMNS) + 0.5
    shape = () if kind == "tensor" else (1, 1)
    return torch.rand(shape) + 0.5, torch.rand(shape) + 0.5


@pytest.mark.by_day("cpp-rows-bfloat16", "cpp-tensor-float32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda t: str(t)[6:])
@pytest.mark.parametrize("kind", ["rows", "tensor", "ones"])
def test_scaled_mm(kind: str, dtype: torch.dtype, plan: str, compiled: Any) -> None:
    """Values to within the result's rounding, with few and many rows, with and without a bias."""
    weight = torch.randn(COLUMNS, DEPTH).to(F8)
    rows = [torch.randn(m, DEPTH) * 3 for m in (1, 5, 16, 33)]
    of = [scales(len(x), kind) for x in rows]
    bias = [torch.randn(COLUMNS).to(dtype) if dtype != torch.float32 and i % 2 else None for i in range(len(rows))]

    def call(rows: list[Tensor]) -> list[Tensor]:
        return [
            F.relu(torch._scaled_mm(x.to(F8), weight.t(), a, b, bias=one, out_dtype=dtype))
            for x, (a, b), one in zip(rows, of, bias, strict=True)
        ]

    ours, report = compiled(call, fallback=False, minimum=1)
    got, again, theirs = ours(rows), ours(rows), call(rows)
    assert len(report.regions) == 1 and not report.fallbacks
    per = "channel" if kind == "rows" else "tensor"
    assert report.graphs[0].weights == [f"4 times: product of float8 rows and float8 weights, scale a {per}"]
    for x, (a, b), one, result, other, beside in zip(rows, of, bias, got, again, theirs, strict=True):
        right = F.relu(rounded(x) @ weight.double().t() * a * b + (0 if one is None else one.double()))
        assert result.dtype == dtype and torch.equal(result, other)
        place = torch.finfo(dtype).eps * float(right.abs().max())
        assert error(result, right) <= error(beside, right) + (4 if dtype == torch.float32 else 1) * place


def test_the_newer_operator(compiled: Any) -> None:
    scaled_mm = pytest.importorskip("torch.nn.functional", reason="always there").__dict__.get("scaled_mm")
    if scaled_mm is None:
        pytest.skip("this PyTorch has no torch.nn.functional.scaled_mm")
    kind = F.ScalingType.RowWise
    weight, x, (a, b) = torch.randn(COLUMNS, DEPTH).to(F8), torch.randn(5, DEPTH), scales(5, "rows")

    def call(x: Tensor) -> Tensor:
        result: Tensor = scaled_mm(x.to(F8), weight.t(), a, kind, b, kind, output_dtype=torch.bfloat16)
        return torch.tanh(result / 30)

    ours, report = compiled(call, fallback=False, minimum=1)
    right = torch.tanh(rounded(x) @ weight.double().t() * a * b / 30)
    assert error(ours(x), right) <= 2**-7
    assert report.graphs[0].weights == ["product of float8 rows and float8 weights, scale a channel"]


class Dynamic(nn.Module):
    """A linear layer as torchao 0.18 rewrites it: a scale for each row, or for all, computed in bfloat16."""

    def __init__(self, linear: nn.Linear, dims: list[int]) -> None:
        super().__init__()
        scale = linear.weight.detach().float().abs().amax(dims, keepdim=True) / 448
        self.register_buffer("codes", (linear.weight / scale).clamp(-448, 448).to(F8))
        self.register_buffer("scale", scale)
        self.bias, self.dims = linear.bias, dims

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = (rows.abs().amax(self.dims, keepdim=True) / 448).float()
        codes = (rows.float() / scale).clamp(-448.0, 448.0).to(F8)
        product = torch._scaled_mm(
            codes, self.codes.t(), scale, self.scale.t(), self.bias, out_dtype=x.dtype, use_fast_accum=True
        )
        return product.view(*x.shape[:-1], -1)


class Network(nn.Module):
    """Three layers share their rows, as queries, keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.of_rows = nn.ModuleList(nn.Linear(DEPTH, COLUMNS, bias) for bias in (True, False, True))
        self.last = nn.Linear(COLUMNS, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.of_rows)
        result: Tensor = self.last(F.silu(q) * k + v)
        return result


def dynamic(network: Network, dims: list[int]) -> Network:
    network.of_rows = nn.ModuleList(Dynamic(layer, dims) for layer in network.of_rows)  # type: ignore[arg-type]
    network.last = Dynamic(network.last, dims)  # type: ignore[assignment]
    return network


@pytest.mark.parametrize("dims", [[1], [0, 1]], ids=["rows", "tensor"])
def test_dynamic_quantization_is_one_region(dims: list[int], compiled: Any) -> None:
    """As close to the unquantized network as eager PyTorch is."""
    network = Network().bfloat16().eval()
    x = torch.randn(2, 3, DEPTH).bfloat16()
    right = network.double()(x.double())
    network = dynamic(network.bfloat16(), dims)
    ours, report = compiled(network, fallback=False)
    place = 2**-8 * float(right.abs().max())
    assert error(ours(x), right) <= 1.25 * error(network(x), right) + place
    assert len(report.regions) == 1 and not report.fallbacks
    per = "channel" if dims == [1] else "tensor"
    assert report.graphs[0].weights == [f"4 times: product of float8 rows and float8 weights, scale a {per}"]


def test_shared_rows_are_rounded_once(double: Any, compiled: Any) -> None:
    network = dynamic(Network().bfloat16().eval(), [1])
    ours, _ = compiled(network, fallback=False)
    ours(torch.randn(3, DEPTH).bfloat16())
    ops = double.made[0].graph.ops()
    assert ops.count("round_e4m3") == ops.count("amax") == 2
    assert ops.count("dequant_matmul") == 4


WEIGHT, ONE = torch.randn(COLUMNS, DEPTH).to(F8), torch.ones(())
HALVES = torch.rand(1, COLUMNS)
FALLS_BACK: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "rows that are given": (lambda x: torch._scaled_mm(x.to(F8).clone(), WEIGHT.t(), ONE, ONE), "in the graph"),
    "scales computed": (
        lambda x: torch._scaled_mm(x.to(F8), WEIGHT.t(), torch.ones(len(x), 1), HALVES.exp(), out_dtype=torch.float32),
        "its scales are computed",
    ),
    "weights computed": (
        lambda x: torch._scaled_mm(x.to(F8), WEIGHT.float().exp().to(F8).t(), ONE, ONE, out_dtype=torch.float32),
        "not given to the graph as float8",
    ),
    "rows of another float8": (
        lambda x: torch._scaled_mm(x.to(torch.float8_e5m2), WEIGHT.t(), ONE, ONE, out_dtype=torch.float32),
        "not float8_e4m3fn",
    ),
}


@pytest.mark.by_day("scales computed")
@pytest.mark.parametrize("name", FALLS_BACK)
def test_what_is_not_taken_is_right_and_told(name: str, compiled: Any) -> None:
    call, reason = FALLS_BACK[name]

    def more(x: Tensor) -> Tensor:
        return (call(x * 2 + 1).float() / 50).tanh() + 1

    x = torch.randn(3, DEPTH)
    try:
        right = more(x)
    except RuntimeError as error:
        pytest.skip(f"PyTorch itself does not compute it here: {str(error).splitlines()[0]}")
    ours, report = compiled(more, minimum=2)
    torch.testing.assert_close(ours(x), right, rtol=2e-2, atol=2e-2)
    [line] = report.graphs[0].weights
    assert line.startswith("a product of coded weights is not ark's: ") and reason in line, line


def test_rows_that_others_read_too(compiled: Any) -> None:
    """The conversion stays where it is for its other reader, and in a piece of Inductor's; the product is ark's."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = (x * 2 + 1).to(F8)
        product = torch._scaled_mm(codes, WEIGHT.t(), ONE, ONE, out_dtype=torch.float32)
        return (product / 50).sin().cos() + 1, codes

    x = torch.randn(3, DEPTH)
    ours, report = compiled(call, minimum=1)
    for got, right in zip(ours(x), call(x), strict=True):
        torch.testing.assert_close(got.float(), right.float(), rtol=1e-4, atol=1e-4)
    assert report.graphs[0].weights == ["product of float8 rows and float8 weights, scale a tensor"]
    assert ("ark", 1) in [(piece.runs_on, piece.operators.get("_scaled_mm")) for piece in report.graphs[0].pieces]


def test_a_piece_of_inductors_converts_for_itself(compiled: Any) -> None:
    def call(x: Tensor) -> Tensor:
        codes = torch.special.i0(x * 0.1).to(F8)
        product = torch._scaled_mm(codes, WEIGHT.t(), ONE, ONE, out_dtype=torch.float32)
        return (torch.special.i0(product / 1e4) + 1).sin().cos().tanh()

    x = torch.randn(3, DEPTH)
    ours, report = compiled(call, minimum=3)
    torch.testing.assert_close(ours(x), call(x), rtol=1e-4, atol=1e-4)
    first = report.graphs[0].pieces[0]
    assert (first.runs_on, first.operators["_scaled_mm"]) == ("inductor", 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_weights_in_plain_order(dtype: torch.dtype, plan: str, compiled: Any) -> None:
    """torch._weight_int8pack_mm: as its name does not say, nothing is packed."""
    codes, scale = torch.randint(-128, 128, (COLUMNS, DEPTH), dtype=torch.int8), (torch.rand(COLUMNS) + 0.1).to(dtype)

    def call(*rows: Tensor) -> list[Tensor]:
        return [F.relu(torch.ops.aten._weight_int8pack_mm(x, codes, scale)) for x in rows]

    rows = [torch.randn(m, DEPTH).to(dtype) for m in (1, 3, 35)]
    ours, report = compiled(call, fallback=False, minimum=1)
    for x, got, theirs in zip(rows, ours(*rows), call(*rows), strict=True):
        right = F.relu(x.double() @ codes.double().t() * scale.double())
        place = torch.finfo(dtype).eps * float(right.abs().max())
        assert error(got, right) <= 1.5 * error(theirs, right) + (4 if dtype == torch.float32 else 1) * place
    assert report.graphs[0].weights == ["3 times: product of int8 weights, scale a channel"]
