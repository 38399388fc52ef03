"""Steps of decoding run on ark from the first call on, without Inductor and without a contest; nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import ark_torch
from ark_torch.compile import certain, inductor_fallback, serving

pytestmark = pytest.mark.timeout(150)
CONFIG = models.Config(dim=128, layers=1, heads=4, kv_heads=2, ffn=256, vocab=64, max_len=16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certain, "LEAST_BYTES", 300_000)  # the layer has 624 KB of weights that products read


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Inductor nor a contest may begin."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was certain")

    monkeypatch.setattr(inductor_fallback, "whole", refuse)
    monkeypatch.setattr(serving, "Serving", refuse)
    monkeypatch.setattr(serving, "Rehearsed", refuse)


def decide(compiled: Any, model: Callable[..., Any], *inputs: Tensor, **options: Any) -> str:
    """Why it was certain, in the report of a call by default options."""
    call, report = compiled(model, choose="measure", **{"wait": False, **options})
    call(*inputs)
    (graph,) = report.graphs
    return str(graph.certain)


@pytest.mark.usefixtures("alone")
def test_a_decoding_step_is_arks_from_the_first_call_on(compiled: Any) -> None:
    model = models.Llama(CONFIG).eval()
    call, report = compiled(model, choose="measure", wait=False, threads=2)
    for position in range(3):
        given = torch.tensor([[7]]), torch.tensor([position])
        kept = [cache.clone() for cache in model.caches()]
        found = call(*given)
        for cache, before in zip(model.caches(), kept, strict=True):
            cache.copy_(before)
        torch.testing.assert_close(found, model(*given), rtol=1e-4, atol=1e-5)
    (graph,) = report.graphs
    assert graph.certain and graph.choice is None and [piece.runs_on for piece in graph.pieces] == ["ark"]
    assert "ark runs it, by default without being measured: each product has one row" in str(report)


def test_explain_says_so_and_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_fallback, "whole", lambda graph, *_: graph.forward)  # Inductor takes long
    report = ark_torch.explain(Mixed().eval(), torch.randn(1, 256), ark_options={"threads": 1})
    (graph,) = report.graphs
    assert graph.choice is not None and set(graph.choice.us) == {"ark", "inductor", "eager"}
    assert "ark runs it, by default without being measured" in str(report)


class Mixed(nn.Module):
    """A product of weights, one of what is given, and a convolution, as they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.window = nn.Linear(256, 512), nn.Conv1d(4, 4, 3)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.product(x)
        return torch.relu(x) if other is None else (x @ other).tanh()


class Contest:
    """Stands for a contest: its function is the graph's own."""

    began = 0

    def __init__(self, *given: Any) -> None:
        Contest.began += 1
        self._contestants = given[2] if isinstance(given[2], dict) else given[1]

    def function(self) -> Any:
        return self._contestants["inductor"]


@pytest.mark.parametrize(
    "rows, other, options, expected",
    [
        (1, None, {"threads": 2}, True),
        (2, None, {"threads": 2}, False),
        (1, None, {"threads": 3}, False),
        (1, 1000, {"threads": 2}, False),  # reads more than weights
        (1, 10, {"threads": 2}, True),
        (1, None, {"threads": 2, "wait": True}, True),  # said, and measured all the same
    ],
)
def test_what_is_certain(
    rows: int,
    other: int | None,
    options: dict[str, Any],
    expected: bool,
    compiled: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("Serving", "Rehearsed"):
        monkeypatch.setattr(serving, name, Contest)
    monkeypatch.setattr(inductor_fallback, "whole", lambda graph, *_: graph.forward)
    inputs = [torch.randn(rows, 256)] + ([] if other is None else [torch.randn(512, other)])
    Contest.began = 0
    assert bool(decide(compiled, Mixed().eval(), *inputs, **options)) == expected
    assert Contest.began == (not expected or "wait" in options)


@pytest.mark.quick
def test_gpus_that_were_not_measured_are_not_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA H200", 1: "NVIDIA A100-SXM4-40GB"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    assert certain.was_measured(torch.device("cuda", 0), 132)
    assert not certain.was_measured(torch.device("cuda", 1), 108)
