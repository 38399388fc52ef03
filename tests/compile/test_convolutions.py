"""Convolutions in CPU regions: values and strides of every form, and what is left to Inductor, with the reason."""

from __future__ import annotations

import copy
from typing import Any

import exactness
import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ark_torch.compile.operators import convolutions

pytestmark = pytest.mark.timeout(240)

# in channels, out channels, kernel, stride, padding, dilation, groups, bias
FORMS: dict[str, tuple[int, int, int, int, Any, int, int, bool]] = {
    "padded": (6, 8, 3, 1, 1, 1, 1, True),
    "strided, dilated, grouped": (6, 8, 3, 2, 0, 2, 2, False),
    "depthwise": (6, 6, 3, 1, 1, 1, 6, True),
    "depthwise, several a channel": (6, 12, 5, 2, 2, 1, 6, False),
    "windows of one": (6, 40, 1, 1, 0, 1, 1, True),
    "windows of one, apart": (6, 8, 1, 2, 1, 1, 1, True),
    "patches": (4, 4, 4, 4, 0, 1, 1, True),
    "one channel": (1, 1, 3, 1, 1, 1, 1, True),
    "one channel in": (1, 5, 3, 1, 0, 1, 1, False),
    "same": (6, 6, 4, 1, "same", 1, 3, True),
}
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
# The night adds another dimension, three samples and the other layout.
BY_DAY = [f"{form}-{shape}" for form in ("padded", "depthwise", "patches") for shape in ("1d", "2d-last")]
SHAPES = {"1d": (1, 2, False), "2d": (2, 1, False), "2d-last": (2, 3, True), "3d": (3, 1, False)}


def made(form: str, shape: str, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Tensor]]:
    of, to, kernel, stride, padding, dilation, groups, biased = FORMS[form]
    dims, samples, last = SHAPES[shape]
    x = torch.randn(samples, of, *(13, 11, 9)[:dims])
    weight = torch.randn(to, of // groups, *[kernel] * dims)
    if last:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    given = [x, weight, *([torch.randn(to)] if biased else [])]

    def run(x: Tensor, *more: Tensor) -> Tensor:
        return CONVOLUTIONS[dims](x, *more, stride=stride, padding=padding, dilation=dilation, groups=groups)

    return run, [t.to(dtype) for t in given]


@pytest.mark.by_day(*BY_DAY)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, shape: str, compiled: Any) -> None:
    run, given = made(form, shape)
    call, report = compiled(run, fallback=False, minimum=1)
    got, right = call(*given), run(*given)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    assert got.stride() == right.stride()
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"]


@pytest.mark.by_day("bfloat16-padded")
@pytest.mark.parametrize("form", ["padded", "depthwise"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_types_add_up_in_float32(name: str, form: str, compiled: Any) -> None:
    """As close to float64 as eager PyTorch, up to one rounding of the result."""
    dtype = getattr(torch, name)
    run, given = made(form, "2d", dtype)
    call, _ = compiled(run, fallback=False, minimum=1)
    exact = run(*(t.double() for t in given))
    error = (call(*given).double() - exact).abs().max()
    assert error <= (run(*given).double() - exact).abs().max() * 1.5 + torch.finfo(dtype).eps * exact.abs().max() / 2


@pytest.mark.nightly
def test_residual_block(compiled: Any) -> None:
    """It becomes one region, as accurate as Inductor's."""
    model = models.ResidualBlock(16).eval()
    x = torch.randn(2, 16, 9, 9)
    report = exactness.check(model, lambda call, dtype: [call(x.to(dtype))], compiled)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"] and not report.fallbacks


def test_a_weight_that_lies_otherwise(compiled: Any) -> None:
    """Input and weight each have the other's layout. The product's depth must still have a single order."""
    x = torch.randn(2, 6, 9, 7).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(3, 3, 8, 6).permute(2, 3, 0, 1)
    call, _ = compiled(lambda x, w: F.conv2d(x, w, padding=(1, 0)) * 2 + 1, fallback=False)
    torch.testing.assert_close(call(x, weight), F.conv2d(x, weight, padding=(1, 0)) * 2 + 1, rtol=1e-5, atol=1e-5)
    call, _ = compiled(lambda x, w: F.conv2d(x, w[..., ::2, :], stride=(2, 1)) * 2 + 1, fallback=False)
    right = F.conv2d(x, weight[..., ::2, :], stride=(2, 1)) * 2 + 1
    torch.testing.assert_close(call(x, weight), right, rtol=1e-5, atol=1e-5)


LARGE = {
    "a product": (lambda x: F.conv2d(x, torch.ones(64, 32, 3, 3), padding=1), (1, 32, 32, 32), "8 million"),
    "depthwise": (lambda x: F.conv2d(x, torch.ones(32, 1, 5, 5), groups=32), (1, 32, 99, 99), "channels stay apart"),
    "few numbers a window": (lambda x: F.conv1d(x, torch.ones(64, 1, 10), stride=5), (1, 1, 4000), "windows of 10"),
}


@pytest.mark.by_day("depthwise")
@pytest.mark.parametrize("name", LARGE)
def test_what_onednn_does_faster_is_left_to_it(name: str, compiled: Any) -> None:
    """This is the default, and explain says so. If a region must be whole, ark still computes it."""
    run, shape, said = LARGE[name]
    x = torch.randn(shape)

    def model(x: Tensor) -> Tensor:
        return run(x.sin() * 2).tanh() + 1

    right = model(x)
    call, report = compiled(model)
    torch.testing.assert_close(call(x), right, rtol=1e-4, atol=1e-4)
    (fallback,) = report.fallbacks
    assert fallback.operator == "aten.convolution.default"
    assert convolutions.FASTER in fallback.reason and said in fallback.reason, fallback.reason
    assert convolutions.FASTER in str(report)
    torch._dynamo.reset()
    call, report = compiled(model, fallback=False)
    torch.testing.assert_close(call(x), right, rtol=1e-4, atol=1e-4)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"]


def test_a_long_window_of_single_channels(compiled: Any) -> None:
    """Too many terms for one expression: a product for each channel."""
    x, weight = torch.randn(2, 4, 50), torch.randn(4, 1, 90)
    call, _ = compiled(lambda x, w: F.conv1d(x, w, padding=60, groups=4), fallback=False, minimum=1)
    torch.testing.assert_close(call(x, weight), F.conv1d(x, weight, padding=60, groups=4), rtol=1e-4, atol=1e-4)


def test_what_is_not_lowered_says_so(compiled: Any) -> None:
    def run(x: Tensor) -> Tensor:
        return F.conv_transpose1d(x.sin() * 2, torch.ones(4, 4, 3)) + 1

    x = torch.randn(1, 4, 9)
    call, report = compiled(run)
    torch.testing.assert_close(call(x), run(x), rtol=1e-4, atol=1e-4)
    assert any("transposed" in str(f) for f in report.fallbacks), report


def test_wrong_shapes_are_eagers_errors(compiled: Any) -> None:
    model = nn.Conv1d(4, 4, 3).eval()
    call, _ = compiled(model)
    for x in (torch.randn(1, 5, 9), torch.randn(1, 4, 2)):
        with pytest.raises(RuntimeError) as eager:
            copy.deepcopy(model)(x)
        with pytest.raises(Exception) as ours:
            call(x)
        assert str(eager.value).split("[")[0].strip() in str(ours.value)
