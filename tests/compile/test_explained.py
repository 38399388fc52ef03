"""ark_torch.explain says what runs where, and leaves the model unchanged."""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any

import models
import pytest
import torch

import ark_torch
from ark_torch.compile import inductor_fallback
from ark_torch.compile.report import NAMES

pytestmark = pytest.mark.timeout(120)

ARK = {"choose": "ark"}


def test_one_region(plan: str) -> None:
    model = models.Llama(models.Config()).eval()
    report = ark_torch.explain(model, torch.tensor([[1]]), torch.tensor([3]), ark_options=ARK)
    (region,) = report.regions
    assert region.nodes == report.graphs[0].nodes > 80 and not report.fallbacks
    assert json.loads(region.plan_json)
    text = str(report)
    assert "operators in 1 piece, 4 inputs updated in place\n  piece 0 runs on ark: " in text, text


def test_reasons_have_places(plan: str) -> None:
    report = ark_torch.explain(models.ResidualBlock(transposed=True).eval(), torch.randn(1, 8, 5, 5), ark_options=ARK)
    assert [f.operator for f in report.fallbacks] == ["aten.convolution.default"] * 2
    text = str(report)
    assert "falls back, 2 times: aten.convolution.default: a transposed convolution (c1, " in text, text
    assert "piece 0 runs on Inductor: 1 operator (convolution 1); 1 that ark does not run\n" in text, text
    assert "models.py:" in text


def test_log_says_where_a_kernel_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for whole in (False, False, True, True):
        torch._dynamo.reset()
        with (
            caplog.at_level("INFO", logger="ark_torch.compile"),
            torch._functorch.config.patch(enable_autograd_cache=whole),
        ):
            torch.compile(lambda a: torch.tanh(a) * 1.25 - 0.375, backend="ark", options=ARK)(torch.ones(7))
        said += [line for line in caplog.messages if "its kernel" in line or "taken whole" in line]
        caplog.clear()
    compiled, *kernels, graph = said
    planned = "test_explained.<lambda>[0/0], piece 0: planned, and its kernel "
    assert compiled.startswith(f"{planned}compiled, in "), said
    assert len(kernels) == 2 and all(line.startswith(f"{planned}taken from the cache, in ") for line in kernels), said
    assert graph == "test_explained.<lambda>[0/0] is taken whole from AOTAutograd's cache", said


def test_log_says_who_was_chosen(
    double: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_fallback, "whole", lambda graph_module, *given: graph_module.forward)
    with caplog.at_level("INFO", logger="ark_torch.compile"):
        call = torch.compile(models.Decoder().eval(), backend="ark", options={"wait": True})
        call(torch.zeros(1, 4, dtype=torch.int64))
    (line,) = [line for record in caplog.records if " runs on " in (line := record.getMessage())]
    assert re.match(r"Decoder\.forward\[0/0\] runs on (ark|Inductor|eager PyTorch): measured Inductor \d", line), line
    assert all(f"{name} " in line for name in ("ark", "Inductor", "eager PyTorch"))


@pytest.mark.nightly
def test_who_was_chosen_and_what_ark_would_run() -> None:
    """explain shows ark's regions, whatever the contest's result, and runs what was chosen before."""
    model, ids = models.Decoder().eval(), torch.zeros(1, 4, dtype=torch.int64)
    first = ark_torch.explain(model, ids)
    again = ark_torch.explain(model, ids)
    assert len(first.regions) == len(again.regions) == 1
    assert first.graphs[0].choice == again.graphs[0].choice is not None
    assert "; runs on " in str(first) and ", measured Inductor " in str(first), str(first)
    assert f"Runs on {NAMES[first.graphs[0].choice.runs_on]}: measured Inductor " in first._repr_html_()


def test_names_are_those_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    """Decorators of libraries are between a model's call and its forward."""

    def deprecated(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped_func(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapped_func

    class Tower(torch.nn.Module):
        @deprecated
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * 2 + 1

    model = Tower()
    reports = [ark_torch.explain(model, torch.ones(3), ark_options=ARK)]
    reports.append(ark_torch.explain(lambda x: torch.fft.fft(model(x)).real, torch.ones(3), ark_options=ARK))
    names = [region.region.name for report in reports for region in report.regions]
    assert [re.sub(r"\d+/\d+", "#", name) for name in names] == [
        "ark::Tower.forward[#] 0",
        "ark::test_explained.<lambda>[#] 0",
    ]
    assert re.fullmatch(r"<ark region 'ark::Tower.forward\[.+\] 0': \d+ tasks for \d+ workers, estimated [\d.]+ us>",
                        repr(reports[0].regions[0].region))  # fmt: skip


def test_inference_is_explained_unless_training_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Tanh())
    with torch.enable_grad():
        report = ark_torch.explain(model, torch.ones(3), ark_options=ARK)
        assert len(report.regions) == 1 and not report.fallbacks and model.training
        assert "note: the model is in training mode" in str(report)
        report = ark_torch.explain(model.eval(), torch.ones(3), ark_options=ARK)
        assert len(report.regions) == 1 and not report.notes
    report = ark_torch.explain(model, torch.ones(3), ark_options=ARK, training=True)
    assert "the whole graph runs on Inductor: it was traced with gradients on" in str(report)


@pytest.mark.nightly
def test_what_training_would_win_is_measured() -> None:
    """Its forward pass without gradients, by all three; gradients, buffers and parameters are as before."""
    model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.BatchNorm1d(48), torch.nn.GELU()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = ark_torch.explain(model, torch.randn(8, 24), training=True)
    [graph] = report.graphs
    assert re.fullmatch(
        r"without gradients its forward pass takes (\w+( PyTorch)? \d+\.\d us(, )?){3}: kernels of ark for it "
        r"would save (nothing|at most \d+\.\d us a step)",
        graph.forward,
    ), graph.forward
    assert f"\n  {graph.forward}" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.nightly
def test_a_forward_pass_that_ark_does_not_run_either_is_told() -> None:
    x = torch.ones(3, requires_grad=True)
    report = ark_torch.explain(torch.special.i0, x, training=True)
    assert "without gradients, too, its forward pass would run on Inductor: nothing in it" in report.graphs[0].forward


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


@pytest.mark.nightly
def test_frame_of_a_layer_on_a_gpu() -> None:
    """Compares the plan of a decoding step for 132 SMs with what a loader warp and its ring would do with it."""
    config = models.Config(dim=1024, layers=1, heads=16, kv_heads=4, ffn=2048, vocab=2000)
    model = models.Llama(config).eval()
    report = ark_torch.explain(
        model, torch.tensor([[1]]), torch.tensor([3]), ark_options={**ARK, "threads": 1}, target="sm_90a"
    )
    (region,) = report.regions
    plan = json.loads(region.target_plan)
    assert "planned" not in region.plan_json
    target, frame = plan["target"], plan["frame"]
    assert (target["name"], target["workers"], len(plan["queues"])) == ("sm_90a", 132, 132)
    # Bytes in flight are bounded, and fit in the ring.
    assert target["bytes_in_flight"] == target["in_flight"] * target["page_bytes"] == 6 * 16384
    assert target["in_flight"] <= target["pages"]
    loaded: dict[int, int] = {}
    for queue in plan["queues"]:
        place = {task: position for position, task in enumerate(queue["tasks"])}
        order = [place[load["task"]] for load in queue["loads"]]
        assert order == sorted(order)  # the loader follows the queue
        for load in queue["loads"]:
            assert 0 < load["bytes"] <= load["pages"] * target["page_bytes"]
            buffer = plan["values"][load["value"]]["buffer"]
            assert plan["buffers"][buffer]["parameter"]  # no wait guards it
            loaded[buffer] = loaded.get(buffer, 0) + load["bytes"]
    assert frame["loader"]["bytes"] == sum(queue["load_bytes"] for queue in plan["queues"]) == sum(loaded.values())
    assert frame["loader"]["order"] == "of the queue's tasks"
    # All workers together load every matrix once, and no worker carries a multiple of the others' bytes.
    matrices = {module.weight.numel() * 4 for module in model.layers.modules() if isinstance(module, torch.nn.Linear)}
    whole = [plan["buffers"][buffer]["bytes"] for buffer in loaded if plan["buffers"][buffer]["bytes"] in matrices]
    assert len(whole) == 7 and all(loaded[b] == plan["buffers"][b]["bytes"] for b in loaded if loaded[b] in matrices)
    assert frame["loader"]["most_bytes_of_a_worker"] < 2 * frame["loader"]["bytes"] / 132
    # Attention's tasks make their queries and add a position to the caches, and no worker has two of them.
    names = [stage["name"] for stage in plan["stages"]]
    assert not [name for name in names if "rotary" in name or "index_copy_" in name]
    attends = [i for i, name in enumerate(names) if name == "attention"]
    assert max(sum(plan["tasks"][task]["stage"] in attends for task in queue["tasks"]) for queue in plan["queues"]) == 1
    # Every wait names its cause, and can be satisfied.
    signals = [0] * len(plan["events"])
    for task in plan["tasks"]:
        for event in task["signals"]:
            signals[event] += 1
    waited = {event for task in plan["tasks"] for event in task["waits"]}
    assert waited and all(plan["events"][event]["of"] for event in waited)
    assert signals == [event["threshold"] for event in plan["events"]]
    kinds = [plan["events"][event]["packets"] for task in plan["tasks"] for event in task["waits"]]
    assert frame["waits"] == {"packets": kinds.count(True), "counters": kinds.count(False)} and any(kinds)
    # Results that are packets have buffers of their own.
    packets = sorted(
        (buffer["offset"], buffer["offset"] + 2 * buffer["bytes"])
        for buffer in plan["buffers"]
        if buffer.get("packets")
    )
    assert len(packets) == frame["temporaries"]["packets"]["buffers"] >= 4
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(packets))
    text = str(report)
    assert "for sm_90a: 132 workers" in text and "96 KB of a worker in flight" in text, text


def test_targets_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="target='gpu' is not known; known are cpu, sm_90a"):
        ark_torch.explain(torch.nn.Linear(3, 3), torch.ones(3), target="gpu")
    with pytest.raises(ValueError, match=r"'sm90' is not known \(did you mean 'sm_90a'\?\)"):
        ark_torch.explain(torch.nn.Linear(3, 3), torch.ones(3), target="sm90")
