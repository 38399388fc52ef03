"""Cache policies of compiled regions on a GPU: cache hints must not change the bits of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_support import DEVICE, compiled, on_one_kernel
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compile"))

import models
import recommender

from ark_torch.compile import costs

pytestmark = [pytest.mark.timeout(300)]

STATIC = ("none", "all-first", "all-last")
# Settings of the cost model (CacheCosts in csrc/compiler/schedule/plan.hpp): each constant that changes a choice.
MEASURED: tuple[dict[str, Any], ...] = (
    {},
    {"kept_bytes": 20 << 20, "reused_last": True, "states_first": True},
    {"plain_where_near": True},
)


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [one for part in result for one in flat(part)]


def bits(result: Any) -> list[Tensor]:
    return [one.contiguous().view(torch.uint8).clone() for one in flat(result)]


def check(model: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run(call)` returns a call's results, from the same state each time. Also checks a graph's replays."""
    wanted = None
    with torch.no_grad():
        for cache, measured in [(one, {}) for one in STATIC] + [("auto", one) for one in MEASURED]:
            monkeypatch.setattr(costs, "of_caches", lambda measured=measured: measured)
            torch._dynamo.reset()
            call, report = compiled(model, cache=cache, fallback=False)
            found = bits(run(call))
            on_one_kernel(report)
            wanted = wanted or found
            assert all(map(torch.equal, found, wanted)), f"{cache}, {measured}: other bits"
            for _ in range(3):
                assert all(map(torch.equal, bits(run(call)), wanted)), f"{cache}, {measured}: not the same again"


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding(batch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights larger than the L2 cache, and key and value caches that each step extends."""
    config = models.Config(1024, 4, 16, 4, 4096, 4000, 256)
    with DEVICE:
        model = models.Llama(config, batch, dtype).eval()
        tokens = torch.randint(0, config.vocab, (5, batch, 1))
    before = [torch.randn_like(cache) for cache in model.caches()]

    def run(call: Any) -> list[Tensor]:
        for cache, held in zip(model.caches(), before, strict=True):
            cache.copy_(held)
        steps = [call(tokens[i], torch.arange(100 + i, 101 + i, device=DEVICE)).clone() for i in range(5)]
        return steps + [cache.clone() for cache in model.caches()]

    check(model, run, monkeypatch)


@pytest.mark.parametrize("tokens", [1, 12])
def test_experts(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with DEVICE:
        model = models.Experts(dim=512, hidden=1024).to(torch.bfloat16).eval()
        x = torch.randn(tokens, 512, dtype=torch.bfloat16)
    check(model, lambda call: call(x), monkeypatch)


def test_recommender(monkeypatch: pytest.MonkeyPatch) -> None:
    with DEVICE:
        model = recommender.Dlrm(dim=64, rows=5000).eval()
        indices = [torch.randint(0, 5000, (300,)) for _ in range(8)]
        offsets = [torch.arange(0, 300, 3) for _ in range(8)]
        dense = torch.randn(100, 13)
    check(model, lambda call: call(dense, indices, offsets), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40, 100), (7, 1024), (300, 4097), (3, 33)])
def test_rows_lookups_and_all_types(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs, single elements, tails and unaligned rows; booleans and integers."""
    torch.manual_seed(0)
    rows, columns = shape
    with DEVICE:
        x, index = torch.randn(rows, columns + 1, dtype=dtype), torch.randint(0, rows, (11,))

    def call(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        y = x[:, 1:]  # not aligned to 16 bytes
        seen = F.embedding(index, x)
        return (
            F.layer_norm(y, (columns,)) * 2 + y,
            torch.softmax(x, -1),
            seen * 3,
            (y > 0) & (y < 1),
            index * 2 + 1,
            (index * 2).to(torch.int32),
            y.sum(-1),
        )

    check(call, lambda compiled_call: compiled_call(x, index), monkeypatch)
