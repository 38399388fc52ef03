"""The explain tool: its output, its files and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ark_torch.tools import explain

MODEL = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).requires_grad_(False), (torch.randn(3, 8),)

def trained():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1)), (torch.randn(3, 8),)

def partly():
    return (lambda x: torch.fft.fft(torch.tanh(x) * 2 + 1).real + 1), (torch.randn(4, 4),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ARK_COSTS", "assumed")
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def test_plan_source_and_drawing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([f"{model}:small", "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "layer_norm" in shown and "linear" in shown and "temporaries:" in shown
    assert "costs, assumed: of one worker 20.0 GFLOP/s in products, 20.0 elsewhere, 5.0 GB/s" in shown
    (plan,) = (tmp_path / "out").glob("*.json")
    assert {stage["kind"] for stage in json.loads(plan.read_text())["stages"]} == {"matmul", "rows"}
    drawing = plan.with_suffix(".svg").read_text()
    assert drawing.startswith("<svg") and drawing.count("<title>") == len(json.loads(plan.read_text())["tasks"])
    assert "matmul" in plan.with_suffix(".cpp").read_text()


def test_another_target(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([f"{model}:small", "--target", "sm_90a", "--output", str(tmp_path / "out")]) == 0
    assert "planned for sm_90a: 132 workers" in capsys.readouterr().out
    (plan,) = (tmp_path / "out").glob("*.sm_90a.json")
    assert json.loads(plan.read_text())["frame"]["loader"]["bytes_in_flight"] == 6 * 16384
    assert explain.main([f"{model}:small", "--target", "abacus"]) == 2
    assert "known are cpu, sm_90a" in capsys.readouterr().err


def test_what_falls_back_is_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([f"{model}:partly"]) == 1
    shown = capsys.readouterr().out
    assert "falls back" in shown and "fft" in shown


def test_a_page(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert explain.main([f"{model}:partly", "--html", str(page)]) == 1
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "fft" in text and 'class="timeline"' in text


@pytest.mark.nightly
def test_training_is_asked_for(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([f"{model}:trained"]) == 0
    assert "note: the model is in training mode" in capsys.readouterr().out
    assert explain.main([f"{model}:trained", "--training"]) == 1
    assert "traced with gradients on" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["nothing", "no_such_module:f", "{model}:absent"])
def test_no_model(model: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([text.format(model=model)]) == 2
    assert "explain:" in capsys.readouterr().err
