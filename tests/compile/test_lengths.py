"""Encoders with many sequence lengths: the second length makes one graph for all of them, on any backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ark_torch.compile import build, capture, inductor_fallback

pytestmark = pytest.mark.timeout(200)

LENGTHS = (17, 23, 5, 64, 33, 48, 12, 90, 77, 31, 96, 8, 55, 61, 3, 40, 19, 82, 27, 99)


class Encoder(nn.Module):
    """Two layers with attention over all positions or those of a mask, and a mean over them."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(50, dim), nn.Embedding(100, dim)
        self.inner = nn.ModuleList([nn.Linear(dim, 3 * dim) for _ in range(2)])
        self.outer = nn.ModuleList([nn.Linear(dim, dim) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        seen = None if mask is None else mask[:, None, None, :]
        for inner, outer in zip(self.inner, self.outer, strict=True):
            parts = inner(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(*parts.unbind(0), attn_mask=seen)
            x = self.norm(x + outer(attended.transpose(1, 2).flatten(2)))
        if mask is None:
            return x.mean(1)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"captured": 0, "by Inductor": 0, "regions": 0}

    def count(module: Any, name: str, what: str) -> None:
        function = getattr(module, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            counts[what] += 1
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, counted)

    count(capture, "check_static", "captured")
    count(inductor_fallback, "whole", "by Inductor")
    count(build, "make_region", "regions")
    return counts


@pytest.mark.by_day("True")
@pytest.mark.parametrize("masked", [False, True])
def test_twenty_lengths_are_two_graphs(masked: bool, compilations: dict[str, int]) -> None:
    """One graph for the first length, and one for all others.

    Without a mask argument nothing may be added to a sequence. With one, the caller's padding must not affect the
    result, whatever it contains.
    """
    model = Encoder().eval()
    compiled = torch.compile(model, backend="ark")
    for length in LENGTHS:
        ids = torch.randint(0, 50, (2, length))
        if not masked:
            torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-5)
            continue
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[1, (length + 1) // 2 :] = False
        got = compiled(ids, mask)
        torch.testing.assert_close(got, model(ids, mask), rtol=1e-4, atol=1e-5)
        other = torch.where(mask, ids, 7)
        torch.testing.assert_close(compiled(other, mask), got, rtol=0, atol=1e-6)
        short = ids[1:, : (length + 1) // 2]
        torch.testing.assert_close(got[1:], model(short), rtol=1e-4, atol=1e-5)
    # The first graph's regions are compiled only if it is called again.
    assert compilations["by Inductor"] == 2 and compilations["regions"] <= 1, compilations


@pytest.mark.changed("ark_torch/compile/capture.py", "ark_torch/compile/options.py")
def test_the_reason_is_told_and_forbidden_lengths_are_errors(compiled: Any) -> None:
    model = Encoder().eval()
    call, report = compiled(model)
    for length in (9, 14, 21):
        call(torch.randint(0, 50, (2, length)))
    assert len(report.graphs) == 2 and len(report.regions) == 1
    assert "sizes are symbolic" in report.graphs[1].whole and report.graphs[1].whole_on == "Inductor"
    torch._dynamo.reset()
    call, _ = compiled(model, fallback=False)
    call(torch.randint(0, 50, (2, 9)))
    with pytest.raises(Exception, match="dynamic=False"):
        call(torch.randint(0, 50, (2, 14)))


def test_one_kernel_a_length_when_asked_for(compiled: Any) -> None:
    """dynamic=False: a region for each length, as the error above says."""
    model = Encoder().eval()
    call, report = compiled(model, dynamic=False, fallback=False)
    for length in (9, 14, 9):
        ids = torch.randint(0, 50, (2, length))
        torch.testing.assert_close(call(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert len(report.regions) == 2
