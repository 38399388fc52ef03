"""Weight-only int8, int4 and float8: every supported form of decoding, unsupported forms, and values."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from coded import FORMS, coded, in_tiles
from torch import Tensor, nn

from ark_torch.compile import tinygemm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.quantized import quantize  # in examples/

pytestmark = pytest.mark.timeout(200)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def right_of(model: nn.Module, x: Tensor) -> Tensor:
    """Computes in float64, with unchanged codes and scales."""
    right: Tensor = model(x.double())
    return right


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


@pytest.mark.by_day("cpp-int4, zeros", "cpp-int8, scaled")
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, plan: str, compiled: Any) -> None:
    """One region, named in the report, for one and many rows of each type. Errors are like Inductor's or eager's."""
    model, told = coded(name, 37)

    def call(*rows: Tensor) -> list[Tensor]:
        return [F.relu(model(x)) for x in rows]

    rows = [torch.randn(m, 256, dtype=dtype) for dtype in DTYPES for m in (1, 3, 16, 35)]
    ours, report = compiled(call, fallback=False, minimum=1)
    got, again = ours(*rows), ours(*rows)
    theirs = [*torch.compile(call, backend="inductor", dynamic=False)(*rows[:4:3]), *call(*rows[1:3], *rows[4:])]
    theirs.insert(3, theirs.pop(1))  # Inductor's for one row and for many in bfloat16, eager's for the others
    assert len(report.regions) == 1 and not report.fallbacks
    assert report.graphs[0].weights == [f"{len(rows)} times: product of {told}"]
    for x, one, other, beside in zip(rows, got, again, theirs, strict=True):
        right = F.relu(right_of(model, x))
        assert one.dtype == x.dtype and torch.equal(one, other)
        places = 4 if x.dtype == torch.float32 else 1  # in float32 the order of a sum matters that much
        place = torch.finfo(x.dtype).eps * float(right.abs().max())
        assert one.shape == beside.shape
        assert error(one, right) <= 1.5 * error(beside, right) + places * place, (x.dtype, x.shape)


@pytest.mark.by_day("int4")
@pytest.mark.parametrize("form", ["int8", "int4", "float8"])
def test_a_quantized_llama_is_one_region(form: str, compiled: Any) -> None:
    """Decoding with every linear layer quantised: nothing falls back, and logits are close to eager's."""
    model = models.Llama(models.Config(256, 1, 4, 2, 512, 64, 32), 1, torch.bfloat16).eval()
    quantize(model, form)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    call, report = compiled(model, dynamic=False, fallback=False)
    for position in (0, 1, 7):
        ids, where = torch.randint(0, 64, (1, 1)), torch.tensor([position])
        right = exact(ids, where)
        place = torch.finfo(torch.bfloat16).eps * float(right.abs().max())
        assert error(call(ids, where), right) <= 1.5 * error(eager(ids, where), right) + place
    assert len(report.regions) == 1 and not report.fallbacks
    [line] = report.graphs[0].weights
    assert line.startswith(f"{7 + 1} times: product of {form} weights, scale a ")


def test_a_bias_behind_is_one_node(double: Any, compiled: Any) -> None:
    """Through views, also for grouped codes."""
    model, _ = coded("int4, zeros", 24)
    x, bias = torch.randn(2, 3, 256), torch.randn(24)

    def call(x: Tensor, bias: Tensor) -> Tensor:
        return model(x.view(-1, 256)).view(2, 3, 24) + bias

    ours, _ = compiled(call, fallback=False, minimum=1)
    torch.testing.assert_close(ours(x, bias), call(x, bias), rtol=1e-4, atol=1e-3)
    assert double.made[0].graph.ops() == ["dequant_matmul"]


def test_a_scale_behind_is_one_node(double: Any, compiled: Any) -> None:
    model, _ = coded("int8, no scale", 24)

    def call(x: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        product = model(x.view(-1, 256)) * scale.to(torch.bfloat16).view(24)
        return product.view(2, 3, 24) + bias, x * 2

    x, scale, bias = torch.randn(2, 3, 256, dtype=torch.bfloat16), torch.rand(24, 1), torch.randn(24).bfloat16()
    ours, report = compiled(call, fallback=False, minimum=1)
    got, right = ours(x, scale, bias)[0], model(x.double()) * scale.double().view(24) + bias.double()
    assert error(got, right) <= float(right.abs().max()) * 2**-8
    assert sorted(double.made[0].graph.ops()) == ["dequant_matmul", "mul"]
    assert report.graphs[0].weights == ["product of int8 weights, scale a channel"]


def test_what_is_read_twice_is_computed_as_it_stands(compiled: Any) -> None:
    """A product with another reader before its scale, a scale of rows, a bias that is a matrix."""
    model, _ = coded("int8, no scale", 24)
    rows, matrix, scale = torch.rand(6, 1), torch.randn(6, 24), torch.rand(24)

    def call(x: Tensor) -> list[Tensor]:
        product = model(x)
        return [product, product * scale, product * rows, product + matrix, product * scale + matrix[0] - product]

    x = torch.randn(6, 256)
    ours, _ = compiled(call, fallback=False, minimum=1)
    for got, right in zip(ours(x), call(x), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-3)


SCALES = torch.rand(24, 2, 1)  # for groups of 48
FALLS_BACK = {
    "groups of 48": (
        lambda x, w: F.linear(x, (w.view(24, 2, 48).float() * SCALES).view(24, 96)),
        torch.int8,
        "a multiple of 32",
    ),
    "codes across the depth": (lambda x, w: x @ w.view(96, 24).float(), torch.int8, "not adjacent along the depth"),
    "unsigned codes of eight bits": (lambda x, w: F.linear(x, w.float()), torch.uint8, "its codes are uint8"),
    "zeros that may wrap around": (
        lambda x, w: F.linear(x, (w - w[:, :1]).float()),
        torch.int8,
        "may wrap around",
    ),
    "half of the bits": (lambda x, w: F.linear(x, (w & 15).float()), torch.uint8, "and not both"),
    "low halves before high ones": (
        lambda x, w: F.linear(x, torch.cat((w[:, :48] & 15, w[:, :48] >> 4), 1).float()),
        torch.uint8,
        "slice",
    ),
    "a scale for each number": (
        lambda x, w: F.linear(x, w.float() * torch.arange(96.0)),
        torch.int8,
        "computed in the graph",
    ),
    "scaled twice": (lambda x, w: F.linear(x, w.float() * 2.0), torch.int8, "computed with 2"),
}


@pytest.mark.parametrize("name", FALLS_BACK)
def test_what_is_not_followed_is_right_and_told(name: str, compiled: Any) -> None:
    call, dtype, reason = FALLS_BACK[name]
    least, most = (-128, 128) if dtype == torch.int8 else (0, 256)
    w, x = torch.randint(least, most, (24, 96), dtype=dtype), torch.randn(2, 96)
    ours, report = compiled(lambda x, w: torch.tanh(call(x, w) * 2 - 1).sin().cos() + 1, minimum=2)
    right = torch.tanh(call(x, w) * 2 - 1).sin().cos() + 1
    torch.testing.assert_close(ours(x, w), right, rtol=1e-4, atol=1e-4)
    [line] = report.graphs[0].weights
    assert line.startswith("a product of coded weights is not ark's: ") and reason in line, line


def test_a_weight_that_others_read_is_computed(compiled: Any) -> None:
    model, _ = coded("int8, scaled", 24)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        weight = model.codes.to(x.dtype) * model.scales
        return F.linear(x, weight).sin().cos() + 1, weight

    x = torch.randn(2, 256)
    ours, report = compiled(call, minimum=1)
    for got, right in zip(ours(x), call(x), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    assert "others read what it decodes" in report.graphs[0].weights[0]


@pytest.mark.nightly
def test_a_piece_of_inductors_decodes_for_itself(compiled: Any) -> None:
    """A product that is too small for a region takes its decoding along."""
    model, told = coded("int4, zeros", 24)

    def call(x: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(torch.special.i0(model(x) / 1e4), dim=1) * 2 + 1).sin().cos().tanh()

    x = torch.randn(2, 256)
    ours, report = compiled(call, minimum=3)
    torch.testing.assert_close(ours(x), call(x), rtol=1e-4, atol=1e-4)
    pieces = [(piece.runs_on, piece.operators["mm"]) for piece in report.graphs[0].pieces]
    assert ("inductor", 1) in pieces and any(runs_on == "ark" for runs_on, _ in pieces)
    assert report.graphs[0].weights == [f"product of {told}"]


CAPABILITY = torch.backends.cpu.get_cpu_capability()


@pytest.mark.skipif(CAPABILITY not in ("AVX512", "AVX2"), reason="PyTorch packs in another order there")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)])
def test_what_pytorch_packs_for_cpus(dtype: torch.dtype, plan: str, compiled: Any) -> None:
    """As torchao calls it, followed by a bias. Other widths stay with PyTorch."""
    codes = torch.randint(0, 16, (192, 256), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    scales, bias = torch.rand(2, 192, 2).to(dtype), torch.randn(192).to(dtype)

    def call(*rows: Tensor) -> list[Tensor]:
        return [F.relu(torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 128, scales) + bias) for x in rows]

    rows = [torch.randn(m, 256).to(dtype) for m in (1, 3, 35)]
    ours, report = compiled(call, fallback=False, minimum=1)
    scale, zero = (scales[..., i].double().repeat_interleave(128, 0) for i in range(2))
    for x, got, theirs in zip(rows, ours(*rows), call(*rows), strict=True):
        right = F.relu(x.double() @ ((codes.t() - 8) * scale + zero) + bias.double())
        place = torch.finfo(dtype).eps * float(right.abs().max())
        assert error(got, right) <= 1.5 * error(theirs, right) + place
    assert report.graphs[0].weights == ["3 times: product of int4 weights, scale a group of 128, and a zero"]
    narrow, few = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes[:16], 2), scales[:, :16].contiguous()
    other, told = compiled(lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, narrow, 128, few).sin().cos() + 1)
    assert other(rows[0]).shape == (1, 16)
    assert "an order that ark does not know" in told.graphs[0].weights[0]


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_codes_in_tiles_are_unpacked(inner: int) -> None:
    codes = torch.randint(0, 16, (24, 256))
    rows = tinygemm.unpack(in_tiles(codes, inner))
    assert torch.equal(rows, (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8))


class Tiles(nn.Module):
    """Products of PyTorch's int4 tiles whose scales are the model's, or a view of those, or made outside it."""

    def __init__(self, scales: Tensor, given: str) -> None:
        super().__init__()
        self.register_buffer("scales", scales)
        self.given = given

    def of(self, scales: Tensor) -> Tensor:
        return {"the model's": self.scales, "a view": self.scales[:, 4:28], "made outside": scales}[self.given]

    def forward(self, packed: Tensor, scales: Tensor, bias: Tensor, *rows: Tensor) -> list[Tensor]:
        of = self.of(scales)
        results = [F.relu(torch.ops.aten._weight_int4pack_mm(x, packed, 128, of) + bias) for x in rows]
        if self.given == "made outside":
            scales.mul_(2)
        return results


@pytest.mark.parametrize("given", ["the model's", "a view", "made outside"])
def test_what_pytorch_packs_for_gpus(given: str, compiled: Any) -> None:
    """PyTorch computes it on GPUs only (tests/gpu/test_compile_scaled.py compares with it): here against float64. The
    weight is unpacked once, and again when it was written or is another, also one at the same address; so are the
    model's scales. Others are read as they are, and may be written."""
    codes = torch.randint(0, 16, (24, 256))
    packed = in_tiles(codes, 8)
    wide, bias = torch.rand(2, 32, 2).bfloat16(), torch.randn(24).bfloat16()
    model = Tiles(wide if given == "a view" else wide[:, 4:28].contiguous(), given)

    def check(packed: Tensor, codes: Tensor) -> None:
        scales = torch.rand(2, 24, 2).bfloat16()
        scale, zero = (model.of(scales)[..., i].double().repeat_interleave(128, 0) for i in range(2))
        before = scales.clone()
        for x, got in zip(rows, ours(packed, scales, bias, *rows), strict=True):
            right = F.relu(x.double() @ ((codes.t() - 8) * scale + zero) + bias.double())
            assert error(got, right) <= 2**-7 * float(right.abs().max())
        assert torch.equal(scales, before * 2 if given == "made outside" else before)

    rows = [torch.randn(m, 256).bfloat16() for m in (1, 5)]
    ours, report = compiled(model, fallback=False, minimum=1)
    check(packed, codes)
    check(packed, codes)
    other = torch.randint(0, 16, (24, 256))
    check(in_tiles(other, 8), other)
    check(in_tiles(codes, 8), codes)
    packed.copy_(in_tiles(other, 8))
    check(packed, other)
    model.scales.mul_(1.5)
    check(packed, other)
    assert report.graphs[0].weights == ["2 times: product of int4 weights, scale a group of 128, and a zero"]
