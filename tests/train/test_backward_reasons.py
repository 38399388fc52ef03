"""What makes the host wait in the backward pass of a captured step is named: its node, and the line of the user's code.

A recorder without a GPU refuses the operator, as PyTorch's check for operators that make the host wait does on GPUs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import fake_graphs
import pytest
import torch
from support import training as small
from support.groups import ark_only
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

import ark_torch.train.graphs
from ark_torch.train import backward, capture

pytestmark = [ark_only, pytest.mark.quick]
NODE = "gelu_backward"  # an operator of a node that has no Python frames


@pytest.fixture(autouse=True)
def _recorder_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ark_torch.train.graphs, "recorder_for", ark_torch.train.graphs.recorder_for)
    yield


class _Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        assert gradient.sum().item() < 1e9
        return gradient


def _plain(model: Any, batch: Tensor) -> Tensor:
    hidden = torch.nn.functional.gelu(model(batch))
    return hidden.mean()


def _linear(model: Any, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).mean()
    return value


def _function(model: Any, batch: Tensor) -> Tensor:
    value: Tensor = _Reads.apply(model(batch).mean())
    return value


def _hook(model: Any, batch: Tensor) -> Tensor:
    value = _linear(model, batch)
    value.register_hook(lambda gradient: gradient if gradient.item() < 1e9 else None)
    return value


def _penalty(model: Any, batch: Tensor) -> Tensor:
    batch.requires_grad_()
    hidden = torch.nn.functional.gelu(model(batch))
    (gradient,) = torch.autograd.grad(hidden.sum(), batch, create_graph=True)
    return gradient.square().mean()


def _again(model: Any, batch: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(model(x))

    return checkpoint(part, batch, use_reentrant=False).mean()  # type: ignore[no-any-return]


def _line(loss: Any, number: int) -> str:
    return f" at test_backward_reasons.py:{loss.__code__.co_firstlineno + number}"


WAITS = " makes the host wait for the GPU's result, which a graph cannot: keep it out of the step"
GELU = "torch.nn.functional.gelu"
# The loss, what is refused, and the reason.
CASES: dict[str, tuple[Any, str, str]] = {
    "node": (_plain, NODE, f"GeluBackward0, the backward pass of `hidden = {GELU}(model(batch))`{_line(_plain, 1)},"),
    "checkpoint": (_again, NODE, f"GeluBackward0, the backward pass of `return {GELU}(model(x))`{_line(_again, 2)},"),
    "function": (
        _function,
        "_local_scalar_dense",
        f"`gradient.sum().item()`{_line(_Reads.backward, 2)} in the backward pass (_ReadsBackward)",
    ),
    "hook": (
        _hook,
        "_local_scalar_dense",
        f"`gradient.item()`{_line(_hook, 2)} in the backward pass (MeanBackward0)",
    ),
    "in the loss": (
        _penalty,
        NODE,
        "`torch.autograd.grad(hidden.sum(), batch, create_graph=True)`"
        f"{_line(_penalty, 3)} in the backward pass (GeluBackward0)",
    ),
}


def _reason(
    loss: Any, refuses: str, around: Callable[[], Any] = contextlib.nullcontext, error: Any = None, **options: Any
) -> str:
    """The reason after a capture that failed. The step has trained as without a capture."""
    weights = []
    batch: Any = torch.linspace(-1, 1, 8).view(2, 4)
    for warmup in (2, 100):
        fake_graphs.use(fake_graphs.FakeRecorder(refuses, error))
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, warmup=warmup, **options)
        with warnings.catch_warnings(record=True) as told, around():
            warnings.simplefilter("always")
            for _ in range(4):
                step([batch, batch] if "accumulate" in options else batch)
        assert not any("Error detected in" in str(one.message) for one in told)
        weights.append(small.weights(model))
        if warmup == 2:
            reason = step.reason
            assert [one for one in told if str(one.message) == f"ark: train.capture runs steps eagerly: {reason}."]
    assert torch.equal(*weights)
    return reason


@pytest.mark.parametrize("case", CASES)
def test_a_wait_in_the_backward_pass_names_node_and_line(case: str) -> None:
    loss, refuses, text = CASES[case]
    assert _reason(loss, refuses) == text + WAITS


def test_what_cuda_forbids_names_node_and_line_too() -> None:
    error = RuntimeError("operation not permitted when stream is capturing")
    assert _reason(_plain, NODE, error=error) == CASES["node"][2] + (
        " calls what CUDA forbids during a capture (operation not permitted when stream is capturing)"
    )


def test_later_micro_batches_keep_no_tracebacks() -> None:
    """The node is named, and its line only under the user's own anomaly mode."""
    calls = iter(range(1000))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return (_plain if next(calls) % 2 else _linear)(model, batch)

    assert _reason(loss, NODE, accumulate=2) == "GeluBackward0 in the backward pass" + WAITS
    calls = iter(range(1000))
    anomaly = lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)  # noqa: E731
    assert _reason(loss, NODE, anomaly, accumulate=2) == CASES["node"][2] + WAITS


def test_a_check_for_nan_is_named() -> None:
    reason = _reason(_linear, "_local_scalar_dense", torch.autograd.detect_anomaly)
    assert reason.startswith("torch.autograd.detect_anomaly() looks for NaN") and "check_nan=False" in reason


def test_an_error_outside_of_the_backward_pass_is_the_steps() -> None:
    reason = _reason(_linear, "aten._foreach_norm", error=RuntimeError("lost"), max_norm=1.0)
    assert reason == "the step raised RuntimeError: lost"


class _Stage(torch.nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear, self.reads = torch.nn.Linear(4, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.reads and not x.is_meta:
            assert hidden.detach().sum().item() < 1e9
        return torch.nn.functional.gelu(hidden)


IN_STAGES = {
    NODE: f"GeluBackward0, the backward pass of `return {GELU}(hidden)`{_line(_Stage.forward, 4)},",
    "_local_scalar_dense": f"`hidden.detach().sum().item()`{_line(_Stage.forward, 3)}",
}


@pytest.mark.parametrize("refuses", IN_STAGES)
def test_a_stage_of_a_pipeline_is_named_and_trains_on(refuses: str) -> None:
    """Whatever the schedule kept of the broken step, and the errors that it puts on top of a stage's own."""
    weights = []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for warmup in (2, 100):
            fake_graphs.use(fake_graphs.FakeRecorder(refuses))
            torch.manual_seed(0)
            part = _Stage(refuses != NODE)
            stage = PipelineStage(part, 0, 1, torch.device("cpu"))
            schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
            step = capture(schedule, torch.optim.SGD(part.parameters(), lr=0.1), warmup=warmup)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="ark: train.capture runs steps eagerly")
                losses = [step((torch.rand(4, 4), torch.rand(4, 4))) for _ in range(4)]
            if warmup == 2:
                assert step.reason == IN_STAGES[refuses] + WAITS
            weights.append(torch.cat([small.weights(part), torch.stack(losses)]))
            step.close()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(*weights)


def test_a_watch_restores_the_mode_and_shows_other_warnings() -> None:
    watch = backward.Watch()
    for mode in (False, True):
        with torch.autograd.set_detect_anomaly(mode, check_nan=False), pytest.warns(UserWarning, match="mine"):
            shown, filters = warnings.showwarning, list(warnings.filters)
            with watch.backward():
                assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
                warnings.warn("mine", stacklevel=1)
            assert torch.is_anomaly_enabled() == mode
            assert warnings.showwarning is shown and list(warnings.filters) == filters
