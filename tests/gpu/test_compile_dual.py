"""Dual products in loop kernels on a GPU, act(x @ w1) * (x @ w3) of many rows, compared with float64."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compile_support import compiled, on_one_kernel
from torch import Tensor

pytestmark = pytest.mark.timeout(120)

# The layout of rows and matrices; rows, columns, depth. On Hopper these have every shape of tile: 64 x 32, 64 x 64,
# 128 x 32, 128 x 64, 128 x 128 and 256 x 64, each with whole tiles and with odd edges.
CASES = [
    ("linear", 17, 77, 256),
    ("linear", 12, 8200, 1024),
    ("linear", 64, 512, 256),
    ("linear", 33, 8192, 256),
    ("linear", 17, 8200, 264),
    ("linear", 128, 2304, 256),
    ("linear", 77, 2310, 520),
    ("linear", 257, 2304, 256),
    ("linear", 200, 2344, 328),
    ("linear", 2048, 8192, 2048),
    ("linear", 2040, 1000, 256),
    ("linear", 200, 8197, 512),
    ("linear", 1576, 2304, 256),
    ("linear", 257, 4100, 520),
    ("linear", 384, 14336, 64),
    ("linear", 130, 150, 100),
    ("linear", 257, 77, 333),
    ("plain", 100, 160, 104),
    ("plain", 2048, 2048, 776),
    ("plain", 1576, 2304, 256),
    ("plain", 77, 2310, 264),
    ("plain", 70, 75, 77),
    ("rows across", 128, 264, 104),
    ("both across", 2048, 2048, 512),
    ("both across", 136, 168, 192),
    ("rows at odd places", 200, 200, 128),
    ("matrices at odd places", 300, 1000, 128),
    ("every other", 64, 72, 64),
]


def operands(layout: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows, both matrices [k, n], and biases. The products' elements are about 1."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device="cuda")

    def matrix() -> Tensor:
        if layout in ("plain", "both across"):
            return drawn(k, n).div_(k**0.5)
        if layout == "matrices at odd places":
            return drawn(n * k + 1).div_(k**0.5)[1:].view(n, k).t()
        if layout == "every other":
            return drawn(n, 2 * k).div_(k**0.5)[:, ::2].t()
        return drawn(n, k).div_(k**0.5).t()

    def rows() -> Tensor:
        if layout in ("rows across", "both across"):
            return drawn(k, m).t()
        if layout == "rows at odd places":
            return drawn(m, k + 5)[:, 3 : 3 + k]
        return drawn(m, 2 * k)[:, ::2] if layout == "every other" else drawn(m, k)

    return rows(), matrix(), matrix(), drawn(n), drawn(n)


def gate(act: Callable[[Tensor], Tensor], x: Tensor, w1: Tensor, w3: Tensor, *biases: Tensor) -> Tensor:
    if not biases:
        return act(x @ w1) * (x @ w3)
    return act(torch.addmm(biases[0], x, w1)) * torch.addmm(biases[1], x, w3)


def poison() -> None:
    """Results get memory with NaN."""
    torch.full((1 << 26,), float("nan"), device="cuda")


@pytest.mark.parametrize(
    "dtype, close", [(torch.float16, 5.2e-4), (torch.bfloat16, 4.1e-3), (torch.float32, 3e-6)], ids=str
)
@pytest.mark.parametrize("act, biased", [(F.silu, False), (F.gelu, True)], ids=["silu", "gelu-biased"])
def test_gates_of_many_rows(act: Callable[[Tensor], Tensor], biased: bool, dtype: torch.dtype, close: float) -> None:
    """Each element is as close as its two products, rounded once, and its own rounding allow; the same bits again."""
    torch.manual_seed(0)
    fused = 0
    for case in CASES:
        torch._dynamo.reset()
        narrow = operands(*case, dtype)[: 5 if biased else 3]
        call, report = compiled(lambda *given: gate(act, *given))
        with torch.no_grad():
            poison()
            got, again = call(*narrow), call(*narrow)
        on_one_kernel(report)
        names = [stage["name"] for stage in json.loads(report.regions[0].plan_json)["stages"]]
        fused += all(", " in name for name in names)
        x, w1, w3, *biases = (each.double() for each in narrow)
        u, v = (F.linear(x, w.t(), *biases[i : i + 1]) for i, w in enumerate((w1, w3)))
        of_u, of_v = ((x.square() @ w.square() + 1).sqrt() + y.abs() for w, y in ((w1, u), (w3, v)))
        want = act(u) * v
        scale = 1.2 * of_u * v.abs() + act(u).abs() * of_v + want.abs() + of_u * of_v * close
        assert float(((got.double() - want).abs() / scale).max()) < close, case
        assert torch.equal(got, again), case
    assert fused == len(CASES) if dtype != torch.float32 else fused > 0  # in float32 some sizes are faster apart


def test_a_llama_block() -> None:
    """Rows of a batch, a gate inside a whole feed-forward network with a residual and a norm."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    dtype, dim, hidden = torch.bfloat16, 512, 1408
    weights = [torch.randn(n, k, dtype=dtype, device="cuda") / k**0.5 for n, k in [(hidden, dim)] * 2 + [(dim, hidden)]]
    x = torch.randn(2, 150, dim, dtype=dtype, device="cuda")

    def block(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        y = F.rms_norm(x, (dim,), eps=1e-6)
        return x + F.linear(F.silu(F.linear(y, w1)) * F.linear(y, w3), w2)

    call, report = compiled(block)
    with torch.no_grad():
        poison()
        got = call(x, *weights)
        eager = block(x, *weights)
    on_one_kernel(report)
    stages = [stage["name"] for stage in json.loads(report.regions[0].plan_json)["stages"]]
    assert "matmul, matmul+swiglu" in stages and "swiglu" not in stages, stages
    want = block(x.double(), *(one.double() for one in weights))
    assert float((got - want).norm()) < 1.1 * float((eager - want).norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_infinite_weights_stay_in_their_columns(dtype: torch.dtype) -> None:
    """What a tile has beside its columns, and one matrix beside the other, does not reach other columns."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    for m, n, k in [(70, 75, 72), (200, 2344, 328), (2040, 1000, 256), (257, 4100, 520)]:
        x, w1, w3, *_ = operands("linear", m, n, k, dtype)
        odd1, odd3 = w1.clone(), w3.clone()
        which = torch.randint(0, 8, (n,), device="cuda")
        odd1[-1, which == 0] = float("inf")
        odd3[0, which == 1] = float("nan")
        call, report = compiled(lambda x, w1, w3: gate(F.silu, x, w1, w3))
        with torch.no_grad():
            poison()
            got, plain = call(x, odd1, odd3), call(x, w1, w3)
        on_one_kernel(report)
        assert torch.equal(got[:, which > 1], plain[:, which > 1]), (m, n, k)
        assert not bool(got[:, which == 1].isfinite().any()), (m, n, k)
        assert bool(plain.isfinite().all()), (m, n, k)
