"""Plans with this machine's measured costs: explained, kept for the next run, without influence on any bit."""

from __future__ import annotations

import json
from typing import Any

import models
import pytest
import torch

from ark_torch.compile.report import Report

pytestmark = pytest.mark.timeout(120)


@pytest.mark.nightly
def test_other_costs_same_bits(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two workers, whose tiles and replicas follow the costs."""
    config = models.Config(dim=256, layers=1, heads=8, kv_heads=4, ffn=512)
    model = models.Llama(config).eval()
    results, reports = [], []
    for costs in ("assumed", "measured"):
        monkeypatch.setenv("ARK_COSTS", costs)
        for cache in model.caches():
            cache.zero_()
        call, report = compiled(model, threads=2)
        results.append([call(torch.tensor([[i]]), torch.tensor([i])) for i in range(3)])
        reports.append(report)
    plans = [_plan(report) for report in reports]
    assert [plan["target"]["costs"].split()[0] for plan in plans] == ["assumed", "measured"]
    assert plans[0]["estimated_us"] != plans[1]["estimated_us"]
    assert "(costs assumed)" in str(reports[0]) and "(costs measured 20" in str(reports[1])
    for assumed, measured in zip(*results, strict=True):
        assert torch.equal(assumed, measured)
    again = compiled(model, threads=2)
    again[0](torch.tensor([[1]]), torch.tensor([1]))
    assert _plan(again[1]) == plans[1], "the figures that are kept, and of equal figures the same plan"


def _plan(report: Report) -> dict[str, Any]:
    (region,) = report.regions
    return json.loads(region.plan_json)  # type: ignore[no-any-return]
