"""Decisions around graphs, with a recorder that needs no GPU.

When a step is recorded, what distinguishes graphs, how a failed capture is undone, and what is logged about it.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import fake_graphs
import pytest
import torch
from support import training as small
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ark_torch.train.graphs
from ark_torch.train import CapturedStep, capture
from ark_torch.train.optimizers import Rates, why_not

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _recorder_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ark_torch.train.graphs, "recorder_for", ark_torch.train.graphs.recorder_for)
    yield


def _step(recorder: fake_graphs.FakeRecorder, loss: Any = small.loss, name: str = "gpt2", **options: Any) -> Any:
    fake_graphs.use(recorder)
    model = small.make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, capture(model, optimizer, loss, **options)


def _train_plainly(name: str, steps: int, loss: Any = small.loss, **lengths: Any) -> nn.Module:
    model = small.make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        optimizer.zero_grad()
        loss(model, small.batch(name, number, **{k: v(number) for k, v in lengths.items()})).backward()
        optimizer.step()
    return model


def test_three_eager_calls_then_replays_with_the_same_bits() -> None:
    recorder = fake_graphs.FakeRecorder()
    model, _, step = _step(recorder)
    captured, kept = [], []
    for number in range(8):
        kept.append(step(small.batch("gpt2", number)))
        captured.append(step.captured)
    assert captured == [False] * 3 + [True] * 5 and step.reason == ""
    assert recorder.counts == {"warm": 3, "records": 1, "replays": 5, "resets": 0}
    assert torch.equal(small.weights(model), small.weights(_train_plainly("gpt2", 8)))
    assert len({value.item() for value in kept}) == 8  # each still belongs to its own step


def test_a_batch_may_be_filled_again_at_once() -> None:
    model, _, step = _step(fake_graphs.FakeRecorder())
    batch = small.batch("gpt2", 0)
    for number in range(8):
        for name, tensor in small.batch("gpt2", number).items():
            batch[name].copy_(tensor)
        step(batch)
        for tensor in batch.values():
            tensor.fill_(1)
    assert torch.equal(small.weights(model), small.weights(_train_plainly("gpt2", 8)))


def test_shapes_have_graphs_of_their_own_up_to_a_bound() -> None:
    recorder = fake_graphs.FakeRecorder()
    lengths = [4, 5, 6, 7]
    model, _, step = _step(recorder, max_shapes=2)
    captured = []
    with pytest.warns(UserWarning, match="more than max_shapes=2 shapes of batch") as told:
        for number in range(16):
            step(small.batch("gpt2", number, length=lengths[number % 4]))
            captured.append((step.captured, step.reason))
    assert len([w for w in told if "max_shapes" in str(w.message)]) == 1
    assert recorder.counts["records"] == 2
    assert [one for one, _ in captured[4:]] == [True, True, False, False] * 3
    assert "more than max_shapes=2" in captured[15][1] and "the first batch of this shape" in captured[3][1]
    plain = _train_plainly("gpt2", 16, length=lambda number: lengths[number % 4])
    assert torch.equal(small.weights(model), small.weights(plain))


def test_constants_options_and_modes_tell_graphs_apart() -> None:
    recorder = fake_graphs.FakeRecorder()
    _, optimizer, step = _step(recorder, lambda m, b: small.loss(m, b) * b["factor"])
    for number in range(4):
        step(small.batch("gpt2", number) | {"factor": 2})
    assert step.captured
    step(small.batch("gpt2", 4) | {"factor": 3})
    assert not step.captured and "the first batch of this shape" in step.reason
    step(small.batch("gpt2", 5) | {"factor": 3})
    assert step.captured
    optimizer.param_groups[0]["weight_decay"] = 0.5
    step(small.batch("gpt2", 6) | {"factor": 3})
    assert not step.captured
    with torch.autocast("cpu", torch.bfloat16):
        step(small.batch("gpt2", 7) | {"factor": 3})
    assert not step.captured
    assert recorder.counts["records"] == 2


class _AsksInBackward(torch.autograd.Function):
    """Records whether autocast is on in the backward pass."""

    seen: ClassVar[set[bool]] = set()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _AsksInBackward.seen.add(torch.is_autocast_enabled("cpu"))
        return gradient


@pytest.mark.parametrize("accumulate", [1, 2])
def test_autocast_around_all_calls_covers_the_loss_alone(accumulate: int) -> None:
    """Also if the model has run in the region before: old casts of weights are not reused."""
    _AsksInBackward.seen.clear()
    parts = [[small.batch("gpt2", number, part) for part in range(accumulate)] for number in range(7)]
    other = small.make("gpt2")
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    expected = []
    for batches in parts:
        theirs.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                value = small.loss(other, batch) / accumulate
            value.backward()
            total += value.detach()
        theirs.step()
        expected.append(total)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value: torch.Tensor = _AsksInBackward.apply(small.loss(model, batch))
        return value

    model, optimizer, step = _step(fake_graphs.FakeRecorder(), loss, accumulate=accumulate)
    updates: set[bool] = set()
    optimizer.register_step_pre_hook(lambda *_: updates.add(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", torch.bfloat16):
        small.loss(model, parts[0][0])
        losses = [step(batches if accumulate > 1 else batches[0]) for batches in parts]
    assert step.captured and torch.equal(torch.stack(losses), torch.stack(expected))
    assert torch.equal(small.weights(model), small.weights(other))
    assert _AsksInBackward.seen == updates == {False}


def test_many_steps_and_micro_batches_in_one_recording() -> None:
    recorder = fake_graphs.FakeRecorder()
    model, _, step = _step(recorder, steps=2, accumulate=2)
    other = small.make("gpt2")
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for call in range(6):
        batches = [[small.batch("gpt2", 10 * call + s, part) for part in range(2)] for s in range(2)]
        values = step(batches)
        for number, parts in enumerate(batches):
            theirs.zero_grad()
            total = torch.zeros(())
            for part in parts:
                value = small.loss(other, part) / 2
                value.backward()
                total += value.detach()
            theirs.step()
            assert torch.equal(values[number], total)
    assert step.captured and recorder.counts["records"] == 1 and recorder.counts["replays"] == 3
    assert torch.equal(small.weights(model), small.weights(other))


def _with_item(model: Any, batch: Any) -> torch.Tensor:
    value = small.loss(model, batch)
    if value.detach().item() > 1e9:
        raise AssertionError
    return value


ITEM_LINE = _with_item.__code__.co_firstlineno + 2


def test_an_item_names_expression_and_line() -> None:
    recorder = fake_graphs.FakeRecorder(refuses="_local_scalar_dense")
    model, optimizer, step = _step(recorder, _with_item)
    for number in range(3):
        step(small.batch("gpt2", number))
    before = (small.weights(model), [p.grad for p in model.parameters()], torch.get_rng_state(), random.getstate())
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.warns(UserWarning, match="runs steps eagerly"):
        step(small.batch("gpt2", 3))
    expression = "`value.detach().item()`" if sys.version_info >= (3, 11) else "value.detach().item()"
    assert expression in step.reason and f"at test_graphs.py:{ITEM_LINE}" in step.reason, step.reason
    assert "makes the host wait" in step.reason and not step.captured
    for number in range(4, 8):
        step(small.batch("gpt2", number))
    assert recorder.counts["records"] == 1  # not tried again
    assert torch.equal(small.weights(model), small.weights(_train_plainly("gpt2", 8)))
    assert not torch.equal(before[0], small.weights(model)) and state["state"][0]["step"] == 3


class _OnlyRecorded(fake_graphs.FakeRecorder):
    """Sets `recording` while the loss is being recorded."""

    recording = False

    def record(self, body: Any) -> fake_graphs.FakeRecording:
        self.recording = True
        try:
            body()
        finally:
            self.recording = False
        raise AssertionError("the loss did not raise")


@pytest.mark.parametrize("kind", [KeyError, RuntimeError])
def test_an_exception_of_the_users_own_is_named_as_such(kind: Any) -> None:
    """The error's text does not matter: "captur" in it does not make it CUDA's."""
    recorder = _OnlyRecorded()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = small.loss(model, batch)
        if recorder.recording:
            raise kind("only in captures")
        return value

    model, _, step = _step(recorder, loss)
    with pytest.warns(UserWarning, match="runs steps eagerly: the step itself raised"):
        for number in range(6):
            step(small.batch("gpt2", number))
    line = loss.__code__.co_firstlineno + 3
    text = {KeyError: "KeyError('only in captures')", RuntimeError: "RuntimeError(only in captures)"}[kind]
    assert step.reason == f"the step itself raised {text} at test_graphs.py:{line} while it was captured"
    assert torch.equal(small.weights(model), small.weights(_train_plainly("gpt2", 6)))


FAULTS = {
    "forward": ("aten.embedding.default", RuntimeError("lost")),
    "backward": ("aten.embedding_dense_backward", RuntimeError("operation not permitted when stream is capturing")),
    "clipping": ("aten._foreach_norm", RuntimeError("lost")),
    "memory": ("aten.gelu.default", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
}


@pytest.mark.parametrize("where", FAULTS)
def test_a_capture_that_fails_half_way_changes_nothing(where: str) -> None:
    operator, error = FAULTS[where]
    recorder = fake_graphs.FakeRecorder()
    model, optimizer, step = _step(recorder, max_norm=1.0)
    for number in range(3):
        step(small.batch("gpt2", number))
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]  # type: ignore[union-attr]
    weights, state = small.weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    seen: list[Any] = []

    def look() -> None:  # between the failed capture and the eager step
        seen.append([p.grad for p in model.parameters()])
        assert torch.equal(small.weights(model), weights)
        for number, entry in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, state[number][name]) for name, value in entry.items())

    recorder.refuses, recorder.error = operator, error
    original = step._for_good
    step._for_good = lambda read: (look(), original(read))[1]
    with pytest.warns(UserWarning, match="runs steps eagerly"):
        step(small.batch("gpt2", 3))
    for now, (before, value) in zip(seen[0], gradients, strict=True):
        assert now is before and torch.equal(now, value)
    told = {"memory": "the GPU's memory did not suffice", "backward": "calls what CUDA forbids during a capture"}
    assert told.get(where, "raised RuntimeError: lost") in step.reason, step.reason
    plain = small.make("gpt2")
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(4):
        theirs.zero_grad()
        small.loss(plain, small.batch("gpt2", number)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
    assert torch.equal(small.weights(model), small.weights(plain))


def test_an_interrupt_during_the_capture_passes_through() -> None:
    recorder = fake_graphs.FakeRecorder()
    _, _, step = _step(recorder)
    for number in range(3):
        step(small.batch("gpt2", number))
    recorder.refuses, recorder.error = "aten.gelu.default", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        step(small.batch("gpt2", 3))
    recorder.refuses = ""
    step(small.batch("gpt2", 3))
    assert step.captured


def test_random_numbers_of_the_host_are_not_captured() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return small.loss(model, batch) * (1 + random.random())

    _, _, step = _step(fake_graphs.FakeRecorder(), loss)
    with pytest.warns(UserWarning, match="draws random numbers on the host"):
        for number in range(5):
            step(small.batch("gpt2", number))
    assert not step.captured and "random" in step.reason


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = small.make("gpt2"), 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(tokens) * (1.0 if self.calls % 2 else 0.5)
        return out


def test_a_module_that_counts_its_calls_is_not_captured() -> None:
    fake_graphs.use()
    model = _Counts()
    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), small.loss)
    with pytest.warns(UserWarning, match="changes the model's 'calls' from 2 to 3"):
        for number in range(4):
            step(small.batch("gpt2", number))
    assert not step.captured


def test_dropout_goes_on_and_a_checkpoint_resumes_the_same_curve() -> None:
    def run(steps: range, model: nn.Module, optimizer: Any) -> list[float]:
        fake_graphs.use()
        step = capture(model, optimizer, small.loss)
        return [step(small.batch("gpt2", number)).item() for number in steps]

    def fresh() -> Any:
        model = small.make("gpt2", dropout=0.2)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = fresh()
    whole = run(range(12), model, optimizer)
    model, optimizer = fresh()
    first = run(range(7), model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    model, optimizer = fresh()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    assert first + run(range(7, 12), model, optimizer) == whole
    assert len(set(whole)) == 12


def test_numbers_that_change_with_each_call_are_told() -> None:
    recorder = fake_graphs.FakeRecorder()
    _, _, step = _step(recorder, max_shapes=1)
    with pytest.warns(UserWarning, match="too many shapes and constants: pad to few lengths, and pass numbers as"):
        for number in range(20):
            step(small.batch("gpt2", number) | {"number": number})
    assert not step.captured and recorder.counts["records"] == 0 and len(step._shapes) <= 8


def test_an_averaged_model_counts_on() -> None:
    averages = []
    for recorder in (fake_graphs.FakeRecorder(), None):
        model = small.make("vit")
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if recorder is not None:
            fake_graphs.use(recorder)
            step = capture(model, optimizer, small.loss, after=average)
        for number in range(8):
            if recorder is not None:
                step(small.batch("vit", number))
                assert int(average.n_averaged) == number + 1
                continue
            optimizer.zero_grad()
            small.loss(model, small.batch("vit", number)).backward()
            optimizer.step()
            average.update_parameters(model)
        averages.append(small.weights(average))
    assert torch.equal(averages[0], averages[1])


def test_rates_become_tensors_that_stay() -> None:
    """As on a GPU. A loaded state is reported, because graphs use the previous one."""
    model, optimizer, _ = _step(fake_graphs.FakeRecorder())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    small.loss(model, small.batch("gpt2", 0)).backward()
    optimizer.step()
    rates = Rates(optimizer, torch.device("cpu"))
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor) and not rates.settle()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == pytest.approx(5e-3)
    optimizer.param_groups[0]["lr"] = 0.25
    assert not rates.settle() and optimizer.param_groups[0]["lr"] is lr and lr.item() == 0.25
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert rates.settle() and optimizer.param_groups[0]["lr"] is lr
    assert optimizer.param_groups[0]["capturable"] and optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize(
    "make, text",
    [
        (torch.optim.Adagrad, "Adagrad keeps state on the host and has no capturable form"),
        (torch.optim.Adafactor, "Adafactor keeps state on the host and has no capturable form"),
        (
            lambda p: torch.optim.Muon([one for one in p if one.dim() == 2]),
            "Muon reads its rates on the host and has no",
        ),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.Adam(p, foreach=True), "a GradScaler asks the host whether Adam may step"),
        (torch.optim.RMSprop, "a GradScaler asks the host whether RMSprop may step"),
        (torch.optim.SGD, ""),
        (torch.optim.AdamW, ""),
    ],
)
def test_optimizers_that_cannot_be_captured(make: Any, text: str) -> None:
    optimizer = make(small.make("vit").parameters())
    assert text in why_not(optimizer, scaled="Scaler" in text) and bool(text) == bool(why_not(optimizer, True))


def test_close_gives_graphs_back() -> None:
    recorder = fake_graphs.FakeRecorder()
    _, _, step = _step(recorder)
    for number in range(5):
        step(small.batch("gpt2", number))
    assert isinstance(step, CapturedStep)
    step.close()
    assert recorder.counts["resets"] == 1
    with pytest.raises(RuntimeError, match="the step was closed"):
        step(small.batch("gpt2", 5))
