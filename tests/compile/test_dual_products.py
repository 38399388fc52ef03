"""Gates of many rows, act(x @ w1) * (x @ w3): right on the CPU, and for GPUs, without a GPU, one stage that compiles.

tests/gpu/test_compile_dual.py tests what GPUs compute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from cuda_sources import Sources, needs_nvrtc
from torch import Tensor

pytestmark = pytest.mark.timeout(200)

# Rows and columns that have each kind of tile on sm_90a, with this depth.
SIZES = [(17, 77), (17, 8192), (77, 2304), (200, 2304), (2040, 1000), (1576, 2304), (128, 16896)]
DEPTH = 256
TILES = {"64, 32", "64, 64", "128, 32", "128, 64"}
LARGE_TILES = {"128, 128", "256, 64"}


def gates(act: Callable[[Tensor], Tensor], layout: str, biased: bool) -> Callable[..., list[Tensor]]:
    """Returns a function of rows, matrices and biases that makes a gate for each."""

    def matrix(weight: Tensor) -> Tensor:
        return weight.t() if layout == "linear" else weight

    def made(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
        results = []
        for x, w1, w3, b1, b3 in given:
            one = torch.addmm(b1, x, matrix(w1)) if biased else x @ matrix(w1)
            other = torch.addmm(b3, x, matrix(w3)) if biased else x @ matrix(w3)
            results.append(act(one) * other)
        return results

    return made


def operands(m: int, n: int, k: int, layout: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shape = (n, k) if layout == "linear" else (k, n)
    rows = torch.randn(k, m, dtype=dtype).t() if layout == "both across" else torch.randn(m, k, dtype=dtype)
    return (rows, *(torch.randn(*shape, dtype=dtype) for _ in range(2)), *(torch.randn(n, dtype=dtype) for _ in "13"))


@pytest.mark.parametrize("act, biased", [(F.silu, False), (F.gelu, True)], ids=["silu", "gelu-biased"])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
def test_on_the_cpu(compiled: Any, dtype: torch.dtype, close: float, act: Any, biased: bool) -> None:
    """Which has no such stage: products and the pass behind them."""
    given = [operands(m, n, k, "linear", dtype) for m, n, k in [(17, 77, 64), (130, 150, 100), (300, 64, 128)]]
    call, report = compiled(gates(act, "linear", biased), dynamic=False, minimum=1, fallback=False)
    with torch.no_grad():
        got = call(given)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"]
    want = gates(act, "linear", biased)([tuple(one.double() for one in operands) for operands in given])
    for one, exact in zip(got, want, strict=True):
        assert float((one - exact).norm() / exact.norm()) < close


@needs_nvrtc
@pytest.mark.by_day("sm_90a-linear-silu-False-bfloat16")
@pytest.mark.parametrize(
    "layout, act, biased, dtype",
    [
        ("linear", F.silu, False, torch.bfloat16),
        ("linear", F.gelu, True, torch.float16),
        ("plain", F.silu, True, torch.bfloat16),
        ("plain", F.gelu, False, torch.float16),
        ("both across", F.silu, False, torch.float16),
        ("both across", F.gelu, True, torch.bfloat16),
    ],
    ids=lambda one: getattr(one, "__name__", str(one).removeprefix("torch.")),
)
def test_every_tile(sources: Sources, compiled: Any, layout: str, act: Any, biased: bool, dtype: torch.dtype) -> None:
    """Also where operands are not aligned."""
    call, _ = compiled(gates(act, layout, biased), dynamic=False, minimum=1, fallback=False)
    call([operands(m, n, DEPTH, layout, dtype) for m, n in SIZES])
    [source] = sources.found
    tiles = set(re.findall(r"dual_product<s, (\d+, \d+)>", source))
    assert tiles == (TILES | LARGE_TILES if sources.arch == "sm_90a" else TILES), tiles
    if sources.arch == "sm_90a":
        assert all(", " in name for name in sources.stages()), sources.stages()
    sources.check(misaligned=True)


@pytest.mark.nightly
@needs_nvrtc
def test_llama_prompt(sources: Sources, compiled: Any) -> None:
    """The gate of each layer has no pass of its own, and nothing else of the prompt changes."""
    config = models.Config(256, 2, 4, 2, 1024, 64, 256)
    call, _ = compiled(models.Llama(config, 1, torch.bfloat16).eval(), dynamic=False, fallback=False)
    call(torch.randint(0, 64, (1, 100)), torch.arange(100))
    assert "dual_product<" in sources.found[-1]
    if sources.arch == "sm_90a":
        stages = sources.stages()
        assert "matmul, matmul+swiglu" in stages and "swiglu" not in stages, stages
    sources.check()


@needs_nvrtc
def test_float32_and_odd_layouts(sources: Sources, compiled: Any) -> None:
    """What warp groups cannot read goes to the other kinds of tiles: float32, odd depths, every other column."""
    shapes = [(300, 1100, 64, torch.float32), (130, 150, 100, torch.bfloat16), (257, 77, 333, torch.float16)]
    given = [operands(m, n, k, "linear", dtype) for m, n, k, dtype in shapes]
    x, w1, w3, b1, b3 = operands(64, 128, 128, "linear", torch.bfloat16)
    given.append((x[:, ::2], w1[:, ::2], w3[:, ::2], b1, b3))
    compiled(gates(F.silu, "linear", True), dynamic=False, minimum=1, fallback=False)[0](given)
    [source] = sources.found
    assert source.count("dual_product<") >= len(given)
    sources.check()


@needs_nvrtc
def test_what_is_read_elsewhere_or_has_few_rows_stays_apart(sources: Sources, compiled: Any) -> None:
    def seen(x: Tensor, w1: Tensor, w3: Tensor) -> tuple[Tensor, Tensor]:
        one, other = F.linear(x, w1), F.linear(x, w3)
        return F.silu(one) * other, other

    x, w1, w3, *_ = operands(64, 256, 128, "linear", torch.bfloat16)
    compiled(seen, dynamic=False, minimum=1, fallback=False)[0](x, w1, w3)
    assert "dual_product<" not in sources.found[-1]
    compiled(lambda x, *w: seen(x, *w)[0], dynamic=False, minimum=1, fallback=False)[0](x[:16], w1, w3)
    assert "dual_product<" not in sources.found[-1]
    sources.check()
