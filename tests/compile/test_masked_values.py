"""NaN and infinity in keys and values, at positions that attention's mask excludes and at others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

BIAS = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bias": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS),
    "boolean": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=BIAS == 0),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "products": lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4 + BIAS, -1) @ v,
}


def given(which: str, value: float, position: int) -> list[Tensor]:
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    (k if which == "key" else v)[:, :, position] = value
    return [q, k, v]


@pytest.mark.parametrize("form", FORMS)
def test_exact_is_eager(form: str, compiled: Any) -> None:
    """The rest of the graph stays on ark."""
    attend = FORMS[form]
    call, report = compiled(lambda q, k, v: attend(q * 2, k, v).relu() + 1, nan="exact")
    for which in ("key", "value"):
        for value in (float("nan"), float("inf")):
            x = given(which, value, 7)
            torch.testing.assert_close(
                call(*x), attend(x[0] * 2, *x[1:]).relu() + 1, equal_nan=True, rtol=1e-5, atol=1e-5
            )
    pieces = [piece.runs_on for piece in report.graphs[0].pieces]
    assert "ark" in pieces and (pieces == ["ark"]) == (form == "products")


@pytest.mark.parametrize("form", FORMS)
def test_positions_in_use_hide_nothing(form: str, compiled: Any) -> None:
    """Position 3 counts for the queries from it on. Their results are NaN, as in eager PyTorch."""
    attend = FORMS[form]
    call, report = compiled(lambda q, k, v: attend(q, k, v) + 0)
    for which in ("key", "value"):
        x = given(which, float("nan"), 3)
        assert call(*x)[:, :, 3:].isnan().all() and attend(*x)[:, :, 3:].isnan().all()
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"]


def test_attention_without_a_mask_needs_no_exactness(compiled: Any) -> None:
    call, report = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 0, nan="exact")
    call(*given("key", 1.0, 0))
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"]
