"""Graphs on a GPU that AOTAutograd's cache keeps: a later compilation lowers nothing, gives the same bits, and can be
captured in a CUDA graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ark_torch.compile import build

sys.path.append(str(Path(__file__).resolve().parents[1] / "compile"))

import models
import real_sizes

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoding_step(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    made: list[str] = []
    plain = build.make_region

    def make_region(lowering: Any, name: str, *rest: Any, **named: Any) -> Any:
        made.append(name)
        return plain(lowering, name, *rest, **named)

    monkeypatch.setattr(build, "make_region", make_region)
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = models.Config(256, 2, 8, 2, 512, 100, 64)
        model: Any = real_sizes.ready(models.Llama(config, 1, dtype), dtype, 0.05)
    ids, where = torch.tensor([[7]], device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def tokens(call: Callable[..., Any]) -> list[Tensor]:
        for cache in model.caches():
            cache.zero_()
        found = []
        for position in range(4):
            where.fill_(position)
            found.append(call(ids, where).clone())
        return found

    results = []
    with torch.no_grad():
        for turn in range(2):
            torch._dynamo.reset()
            counters.clear()
            step = torch.compile(model, backend="ark", options={"choose": "ark"}, dynamic=False)
            results.append(tokens(step))
            what = "autograd_cache_saved" if turn == 0 else "autograd_cache_hit"
            assert counters["aot_autograd"][what] == 1 and len(made) == 1, dict(counters["aot_autograd"])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = step(ids, where)

        def replay(*_: Tensor) -> Any:
            graph.replay()
            return static

        results.append(tokens(replay))
        torch.testing.assert_close(results[0], tokens(model), rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-3)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
