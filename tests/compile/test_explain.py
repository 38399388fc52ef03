"""ark_torch.explain says what runs where, and leaves the model as it found it."""

from __future__ import annotations

import json
from typing import Any

import models
import pytest
import torch

import ark_torch

pytestmark = [pytest.mark.quick, pytest.mark.limit(120)]

ARK = {"choose": "ark"}


def test_one_region(plan: str) -> None:
    model = models.Llama(models.Config()).eval()
    report = ark_torch.explain(model, torch.tensor([[1]]), torch.tensor([3]), ark_options=ARK)
    (region,) = report.regions
    assert region.nodes == report.graphs[0].nodes > 80 and not report.fallbacks
    assert json.loads(region.plan_json)
    text = str(report)
    assert "graph 0: " in text and "4 inputs updated in place" in text and "ark, " in text, text


def test_reasons_have_places(plan: str) -> None:
    report = ark_torch.explain(models.ResidualBlock().eval(), torch.randn(1, 8, 5, 5), ark_options=ARK)
    assert [f.operator for f in report.fallbacks] == ["aten.convolution.default"] * 2
    text = str(report)
    assert "falls back, 2 times: aten.convolution.default: no lowering for this operator (L['self'].c1, " in text, text
    assert "models.py:" in text


def test_training_says_so() -> None:
    with torch.enable_grad():
        report = ark_torch.explain(torch.nn.Linear(3, 3), torch.ones(3), ark_options=ARK)
    assert "the whole graph runs on Inductor: it was traced with gradients on" in str(report)


def test_graph_breaks_are_named(double: Any) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        b = a * 2 + 1
        torch._dynamo.graph_break()
        return b * 3 - 1

    report = ark_torch.explain(function, torch.ones(3), ark_options=ARK)
    assert len(report.graphs) == 2 and len(report.graph_breaks) == 1
    assert "graph break: " in str(report)


def test_compiled_model_stays_compiled(double: Any) -> None:
    model = models.Decoder().eval()
    call = torch.compile(model, backend="ark", options=ARK)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    call(ids)
    before = len(double.made)
    report = ark_torch.explain(call, ids, ark_options=ARK)
    assert len(report.regions) == 1 and len(double.made) == before + 1
    call(ids)
    assert len(double.made) == before + 1
