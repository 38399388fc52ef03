"""Attention that a model writes as products and a softmax, compared with float64: which forms become the operator,
which remain products, and that either way results are those of the graph."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[..., Any]
INF = float("inf")
BATCH, HEADS, ROWS, POSITIONS, SIZE = 2, 4, 24, 70, 16


def kinds(report: Any) -> list[str]:
    regions = [piece.region for graph in report.graphs for piece in graph.pieces if piece.region is not None]
    return [stage["kind"] for region in regions for stage in json.loads(region.json())["stages"]]


def operands(rows: int = ROWS, shared: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """Of one product each, with dimensions in the order batch, rows, heads."""
    q, k, v = (torch.randn(BATCH, n, h, SIZE) for n, h in ((rows, HEADS), (POSITIONS, shared), (POSITIONS, shared)))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return merged(F.softmax(q @ k.transpose(-2, -1) / math.sqrt(SIZE), -1) @ v)


def triangle(q: Tensor, k: Tensor, v: Tensor, tril: Tensor) -> Tensor:
    """As in nanoGPT."""
    scores = (q @ k.transpose(-2, -1)) * SIZE**-0.5
    return merged(F.softmax(scores.masked_fill(tril == 0, -INF), dim=-1) @ v)


def repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, rows, size = x.shape
    return x[:, :, None].expand(batch, heads, times, rows, size).reshape(batch, heads * times, rows, size)


def eager_huggingface(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """attn_implementation="eager": keys shared by two heads, numbers for a mask, a softmax in float32, dropout."""
    scores = torch.matmul(q, repeated(k, 2).transpose(2, 3)) * 0.25 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.1, False), repeated(v, 2)).transpose(1, 2).contiguous()


def t5(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)


def bloom(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor) -> Tensor:
    """One dimension of matrices, and a product that adds."""
    q, k, v = (x.reshape(BATCH * HEADS, -1, SIZE) for x in (q, k, v))
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.3)
    return torch.bmm(F.softmax(scores, dim=-1), v)


def neox(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A product that adds zeros, then a mask."""
    q, k = (x.reshape(BATCH * HEADS, -1, SIZE) for x in (q, k))
    zeros = torch.zeros(BATCH * HEADS, q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(zeros, q, k.transpose(1, 2), beta=1.0, alpha=0.3).view(BATCH, HEADS, q.shape[1], -1)
    return torch.matmul(F.softmax(scores + mask, -1), v)


def lowest(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.mT
    return F.softmax(torch.where(seen, scores, torch.finfo(torch.float32).min), -1) @ v


def by_operator(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A mask whose rows stand still: no kernel of PyTorch's takes it on a GPU, which decomposes the operator."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def seen(*shape: int) -> Tensor:
    mask = torch.rand(*shape) < 0.6
    mask[..., 0] = True
    return mask


FUSED: dict[str, tuple[Call, Callable[[], tuple[Tensor, ...]]]] = {
    "plain": (plain, operands),
    "one row": (plain, lambda: operands(1)),
    "triangle": (triangle, lambda: (*operands(), torch.tril(torch.ones(1, 1, ROWS, POSITIONS)))),
    "Hugging Face": (eager_huggingface, lambda: (*operands(shared=2), torch.randn(BATCH, 1, ROWS, POSITIONS))),
    "T5": (t5, lambda: (*operands(), torch.randn(1, HEADS, ROWS, POSITIONS))),
    "T5, one row": (t5, lambda: (*operands(1), torch.randn(1, HEADS, 1, POSITIONS))),
    "Bloom": (bloom, lambda: (*operands(), torch.randn(BATCH * HEADS, 1, POSITIONS))),
    "GPT-NeoX": (neox, lambda: (*operands(), torch.randn(BATCH, 1, ROWS, POSITIONS))),
    "lowest number": (lowest, lambda: (*operands(), seen(BATCH, 1, 1, POSITIONS))),
    "operator": (by_operator, lambda: (*operands(), seen(BATCH, 1, ROWS, POSITIONS))),
}


def compared(call: Call, given: tuple[Tensor, ...], compiled: Any, dtype: torch.dtype, **options: Any) -> list[str]:
    """Compiles, compares with float64, and returns the kinds of stages."""
    given = tuple(x.to(dtype) if x.is_floating_point() else x for x in given)
    ours, report = compiled(call, dynamic=False, minimum=1, fallback=False, **options)
    with torch.no_grad():
        got, want = ours(*given), call(*(x.double() if x.is_floating_point() else x for x in given))
    assert got.dtype == dtype and got.shape == want.shape
    assert torch.equal(got.isnan(), want.isnan())
    close = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    difference = (got.double() - want).nan_to_num()
    assert float(difference.norm() / want.nan_to_num().norm()) < close
    return kinds(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("form", FUSED)
def test_becomes_the_operator(form: str, dtype: torch.dtype, compiled: Any) -> None:
    call, make = FUSED[form]
    stages = compared(call, make(), compiled, dtype)
    assert stages.count("attention") == 1 and "matmul" not in stages, stages
    if form in ("plain", "triangle", "Hugging Face"):
        assert stages[-1] == "attention", f"the result is copied: {stages}"


def test_a_row_that_attends_to_nothing_is_nan(compiled: Any) -> None:
    """As by the softmax; by PyTorch's operator it is zero."""
    tril = torch.tril(torch.ones(1, 1, ROWS, POSITIONS))
    tril[..., 5, :] = 0
    assert "attention" in compared(triangle, (*operands(), tril), compiled, torch.float32)
    mask = seen(BATCH, 1, ROWS, POSITIONS)
    mask[:, :, 5] = False
    assert "attention" in compared(by_operator, (*operands(), mask), compiled, torch.float32)
    mask = seen(BATCH, 1, 1, POSITIONS)
    mask[0] = False  # the lowest number everywhere is no mask
    assert "attention" in compared(lowest, (*operands(), mask), compiled, torch.float32)


def test_nan_behind_a_mask(compiled: Any) -> None:
    """It reaches the result unless attention passes over it."""
    given = (*operands(), torch.tril(torch.ones(1, 1, ROWS, POSITIONS)))
    assert "attention" not in compared(triangle, given, compiled, torch.float32, nan="exact")
    assert "attention" in compared(plain, operands(), compiled, torch.float32, nan="exact")
    given[2][:, :, -1, 0] = math.nan
    compared(triangle, given, compiled, torch.float32, nan="exact")


def weights_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(q @ k.mT, -1)
    return weights @ v, weights


def scores_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return F.softmax(scores, -1) @ v, scores * 2


def scaled_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT + k[..., 0][:, :, None]) * 0.5, -1) @ v


def two_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT + k[..., 0][:, :, None] + v[..., 0][:, :, None], -1) @ v


def high_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.mT).masked_fill(k[..., 0][:, :, None] > 0, -1e4), -1) @ v


def other_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, -2) @ v


def other_width(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.mT, -1) @ v[..., :5]


@pytest.mark.parametrize(
    "call", [weights_too, scores_too, scaled_mask, two_masks, high_fill, other_dimension, other_width]
)
def test_remains_products(call: Call, compiled: Any) -> None:
    q, k, v = operands()
    if call is high_fill:
        k[0, ..., 0] = k[0, ..., 0].abs() + 1  # rows in which each position has the fill
    ours, report = compiled(call, dynamic=False, minimum=1, fallback=False)
    got, want = ours(q, k, v), call(q.double(), k.double(), v.double())
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    assert all(torch.allclose(one.double(), other, atol=1e-4, rtol=1e-4) for one, other in pairs)
    assert "attention" not in kinds(report) and "matmul" in kinds(report)


def test_few_positions_remain_products(compiled: Any) -> None:
    """On a CPU, whose kernel scores 64 at once."""
    q, k, v = (x[:, :, :20] for x in operands())
    assert "attention" not in compared(plain, (q, k, v), compiled, torch.float32)


def test_a_cache_that_is_written_between(compiled: Any) -> None:
    """Scores before the write, values after it; and a cache that is read after it alone."""

    def between(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
        weights = F.softmax(q @ cache.mT, -1)
        cache.index_copy_(2, at, new)
        return weights @ cache

    def after(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, at: Tensor, new: Tensor) -> Tensor:
        cache.index_copy_(2, at, new)
        return F.softmax(q @ cache.mT, -1) @ cache

    for call in (between, after):
        ours, report = compiled(call, dynamic=False, minimum=1, fallback=False)
        q, k, v = operands(1)
        cache, new = torch.randn(BATCH, HEADS, POSITIONS, SIZE), torch.randn(BATCH, HEADS, 1, SIZE)
        for at in (3, 69):
            mine, wide = cache.clone(), cache.double()
            position = torch.tensor([at])
            got = ours(q, k, v, mine, position, new)
            want = call(q.double(), k, v, wide, position, new.double())
            assert torch.allclose(got.double(), want, atol=1e-4) and torch.equal(mine.double(), wide)
        assert ("attention" in kinds(report)) == (call is after), kinds(report)


def same(call: Call, compiled: Any, *given: Tensor, **options: Any) -> Any:
    """Compares with eager float32, and what is written in place, too; returns the report."""
    ours, report = compiled(call, dynamic=False, minimum=1, **options)
    for _ in range(2):
        mine, theirs = ([x.clone() for x in given] for _ in range(2))
        with torch.no_grad():
            got, want = ours(*mine), call(*theirs)
        pairs = list(zip(got, want, strict=True)) if isinstance(got, tuple) else [(got, want)]
        for one, other in [*pairs, *zip(mine, theirs, strict=True)]:
            assert torch.allclose(one, other, atol=1e-4, rtol=1e-4, equal_nan=True)
    return report


def test_operands_that_another_piece_copies(compiled: Any) -> None:
    """Inductor's fft stands between the copy of the queries and their product, and the cache is written behind it."""

    def written(c: Tensor, x: Tensor, w: Tensor, v: Tensor, new: Tensor) -> Tensor:
        q = c.transpose(1, 2)
        k = (torch.fft.fft(x @ w).real.contiguous() + x).view(2, 70, 4, 16).transpose(1, 2)
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.25, -1)
        result = torch.matmul(weights, v).transpose(1, 2).reshape(2, 70, 64)
        c.copy_(torch.tanh(new) * 2)
        return result

    def made(c: Tensor, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        q = (x @ w + c.reshape(2, 70, 64)).view(2, 70, 4, 16).transpose(1, 2)
        k = (torch.fft.fft(x @ w).real.contiguous() + x).view(2, 70, 4, 16).transpose(1, 2)
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.25, -1)
        return torch.matmul(weights, v).transpose(1, 2).reshape(2, 70, 64)

    c, x, w, v = torch.randn(2, 70, 4, 16), torch.randn(2, 70, 64), torch.randn(64, 64) / 8, torch.randn(2, 4, 70, 16)
    for call, given in ((written, (c, x, w, v, torch.randn(2, 70, 4, 16))), (made, (c, x, w, v))):
        report = same(call, compiled, *given)
        assert report.regions and not any(graph.whole for graph in report.graphs)


def test_readers_of_the_result_that_look_like_a_view(compiled: Any) -> None:
    """The result is written in another order only for a view of the same elements."""
    q, k, v = (torch.randn(4, 70, 16) for _ in range(3))

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.2, -1), v)

    x = torch.randn(1, 4, 70, 16)
    for behind in (
        lambda p, x: (x + p).permute(0, 2, 1, 3).contiguous() * 2,
        lambda p, x: torch.where(x > 0, p, x).transpose(1, 2).contiguous(),
        lambda p, x: p.as_strided((1, 4, 70, 16), (0, 70 * 16, 1, 70)).permute(0, 2, 1, 3).contiguous(),
        lambda p, x: p.split(2)[1].clone(),
        lambda p, x: torch.max(p, -1).values.clone(),
        lambda p, x: p.view(x.shape).permute(0, 2, 1, 3).contiguous(),
    ):
        report = same(lambda q, k, v, x, behind=behind: behind(attended(q, k, v), x), compiled, q, k, v, x)
        assert "attention" in kinds(report) and not any(graph.whole for graph in report.graphs)


def test_a_mask_that_adds_rows(compiled: Any) -> None:
    """The queries have one row, the scores as many as the mask."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) + mask, -1), v)

    given = torch.randn(3, 1, 16), torch.randn(3, 70, 16), torch.randn(3, 70, 16), torch.randn(64, 70)
    assert "attention" not in kinds(same(call, compiled, *given, fallback=False))


@pytest.mark.parametrize("dtype, fill", [(torch.float16, -1e30), (torch.bfloat16, torch.finfo(torch.float32).min)])
def test_a_fill_that_is_infinite_in_its_type(dtype: torch.dtype, fill: float, compiled: Any) -> None:
    mask = seen(BATCH, 1, 1, POSITIONS)
    mask[0] = False

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(torch.where(mask, q @ k.mT, fill), -1) @ v

    q, k, v = (x.to(dtype) for x in operands())
    ours, _ = compiled(call, dynamic=False, minimum=1, fallback=False)
    with torch.no_grad():
        got, want = ours(q, k, v, mask), call(q, k, v, mask)
    assert want[0].isnan().all() and torch.equal(got.isnan(), want.isnan())
