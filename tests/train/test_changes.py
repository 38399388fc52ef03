"""What the host changes between two calls: frozen parameters, tensors in others' places, options of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import fake_graphs
import pytest
import torch
from support import training as small
from torch import Tensor, nn

import ark_torch.train.graphs
from ark_torch.train import capture

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _recorder_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ark_torch.train.graphs, "recorder_for", ark_torch.train.graphs.recorder_for)
    yield


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _loss(model: Any, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def _x(number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def _train(change: Callable[[Any, Any], Any], captured: bool, calls: int = 10, at: int = 5) -> tuple[Any, Any, Any]:
    """Changes something before a call. Returns the model, the step and its recorder; or of a loop."""
    recorder = fake_graphs.use() if captured else None
    model = _model()
    optimizer = _adam(model)
    step = capture(model, optimizer, _loss) if captured else None
    torch.manual_seed(7)
    for number in range(calls):
        if number == at:
            change(model, optimizer)
        if step is not None:
            step(_x(number))
            if number in (at - 1, calls - 1):
                assert step.captured, step.reason
            continue
        optimizer.zero_grad()
        _loss(model, _x(number)).backward()
        optimizer.step()
    return model, step, recorder


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)


def _replace_buffer(model: Any, optimizer: Any) -> None:
    model[1].running_mean = torch.full((8,), 3.0)


def _replace_parameter(model: Any, optimizer: Any) -> None:
    """In the optimizer too."""
    old = model[0].weight
    model[0].weight = nn.Parameter(torch.full((8, 3), 0.25))
    parameters = optimizer.param_groups[0]["params"]
    parameters[[p is old for p in parameters].index(True)] = model[0].weight


def _replace_data(model: Any, optimizer: Any) -> None:
    model[3].weight.data = torch.full((1, 8), 0.5)


def _replace_module(model: Any, optimizer: Any) -> None:
    model[2] = nn.Dropout(0.5)


def _add_module(model: Any, optimizer: Any) -> None:
    """To a module that had none."""
    model[2].more = nn.Identity()


def _clear_state(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def _replace_state(model: Any, optimizer: Any) -> None:
    optimizer.state[model[0].weight]["exp_avg"] = torch.ones(8, 3)


def _load_state(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _set_p(model: Any, optimizer: Any) -> None:
    model[2].p = 0.75


def _add_group(model: Any, optimizer: Any) -> None:
    model.register_parameter("more", nn.Parameter(torch.ones(2)))
    optimizer.add_param_group({"params": [model.more]})


ANEW: dict[str, tuple[Callable[[Any, Any], None], int]] = {  # and eager calls that follow
    "frozen": (_freeze, 3),
    "parameter": (_replace_parameter, 3),
    "data": (_replace_data, 3),
    "module": (_replace_module, 3),
    "another module": (_add_module, 3),
    "group": (_add_group, 3),
    "buffer": (_replace_buffer, 1),
    "state cleared": (_clear_state, 1),
    "state replaced": (_replace_state, 1),
    "state loaded": (_load_state, 1),
    "p": (_set_p, 1),
}


@pytest.mark.parametrize("what", ANEW)
def test_graphs_are_recorded_anew(what: str) -> None:
    """Played graphs run the host's code, so that their bits would be right anyway: what counts are the recordings."""
    change, eager = ANEW[what]
    model, _, recorder = _train(change, captured=True)
    assert recorder.counts == {"warm": 3 + eager, "records": 2, "replays": 7 - eager, "resets": int(what != "p")}
    assert torch.equal(small.weights(model), small.weights(_train(change, captured=False)[0]))


def test_unfreezing() -> None:
    """Also on CPUs, where every call is eager."""
    for graphs in (True, False):
        results = []
        for captured in (True, False):
            recorder = fake_graphs.use() if graphs else None
            model = _model()
            optimizer = _adam(model)
            model[0].requires_grad_(False)
            step = capture(model, optimizer, _loss) if captured else None
            torch.manual_seed(7)
            before = model[0].weight.detach().clone()
            for number in range(12):
                if number == 6:
                    assert torch.equal(model[0].weight, before)
                    model[0].requires_grad_(True)
                if step is not None:
                    step(_x(number))
                    continue
                optimizer.zero_grad()
                _loss(model, _x(number)).backward()
                optimizer.step()
            assert not torch.equal(model[0].weight, before)
            assert step is None or step.captured == graphs, step and step.reason
            assert recorder is None or step is None or recorder.counts["records"] == 2
            results.append(small.weights(model))
        assert torch.equal(*results)
        ark_torch.train.graphs.recorder_for = lambda device: None  # type: ignore[assignment]


def test_values_that_come_back_have_their_graph() -> None:
    recorder = fake_graphs.use()
    model = _model()
    step = capture(model, _adam(model), _loss)
    captured = []
    for number, p in enumerate([0.1] * 4 + [0.5, 0.5, 0.1, 0.5]):
        model[2].p = p
        step(_x(number))
        captured.append(step.captured)
    assert captured == [False] * 3 + [True, False, True, True, True] and recorder.counts["records"] == 2
    model.eval()
    step(_x(8))
    assert not step.captured and "'training' changed from True to False" in step.reason
    model.train()
    step(_x(9))
    assert step.captured


def test_a_value_that_changes_with_every_call_is_named() -> None:
    fake_graphs.use()
    model = _model()
    step = capture(model, _adam(model), _loss)
    with pytest.warns(
        UserWarning, match=r"the model's '2\.p' changed from 0\.\d+ to 0\.\d+, and each value needs a graph"
    ):
        for number in range(8):
            model[2].p = 0.1 + number / 100
            step(_x(number))
    assert not step.captured


def test_options_of_a_scaler_tell_graphs_apart() -> None:
    recorder = fake_graphs.use()
    model = _model()
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)
    step = capture(model, _adam(model), _loss, scaler=scaler)
    for number in range(4):
        step(_x(number))
    assert step.captured
    scaler.set_growth_interval(2)
    step(_x(4))
    assert not step.captured and "the scaler's growth_interval changed from 100 to 2" in step.reason
    step(_x(5))
    assert step.captured and recorder.counts["records"] == 2


def test_a_tensor_stored_in_a_module() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x) * self.scale  # an output that it keeps
            return self.seen

    recorder = fake_graphs.use()
    model: Any = Scaled(3, 1)
    model.scale = torch.ones(())
    step = capture(model, _adam(model), _loss)
    for number in range(4):
        step(_x(number))
    assert step.captured
    model.scale = torch.full((), 2.0)
    step(_x(4))
    assert not step.captured and step.reason == "the model's 'scale' is another tensor than before"
    step(_x(5))
    assert step.captured and recorder.counts["records"] == 2


class _Scaled(nn.Linear):
    """A layer with an option that may be off."""

    def __init__(self, scale: Any) -> None:
        super().__init__(3, 1)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.scale is None else y * self.scale


OPTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a tensor is dropped": (lambda: torch.full((), 2.0), lambda: None, "the model's 'scale' is another tensor"),
    "a tensor comes": (lambda: None, lambda: torch.full((), 2.0), "'scale' changed from None to a Tensor, and"),
    "a number comes": (lambda: None, lambda: 0.5, "the model's 'scale' changed from None to 0.5, and"),
    "a number is dropped": (lambda: 0.5, lambda: None, "the model's 'scale' changed from 0.5 to None, and"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_is_switched(what: str) -> None:
    """Nothing but the model has the tensor: a graph would read memory that is freed."""
    before, after, reason = OPTIONS[what]
    recorder = fake_graphs.use()
    model = _Scaled(before())
    step = capture(model, _adam(model), _loss)
    for number in range(5):
        step(_x(number))
    assert step.captured
    model.scale = after()
    step(_x(5))
    assert not step.captured and reason in step.reason, step.reason
    step(_x(6))
    step(_x(7))
    assert step.captured and recorder.counts["records"] == 2, step.reason


def test_a_state_that_the_host_resets_before_each_call() -> None:
    class Remembers(nn.Linear):
        hidden: Any

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = super().forward(x if self.hidden is None else x + self.hidden)
            return self.hidden

    class Runs(fake_graphs.FakeRecorder):
        def record(self, body: Callable[[], Any]) -> fake_graphs.FakeRecording:
            body()  # what the host does in a capture, and not in a replay
            return super().record(lambda: None)

    recorder = fake_graphs.use(Runs())
    model = Remembers(3, 1)
    model.hidden = None
    step = capture(model, _adam(model), _loss)
    for number in range(7):
        model.hidden = None
        step(_x(number))
    assert step.captured and recorder.counts == {"warm": 3, "records": 1, "replays": 4, "resets": 0}, step.reason


def test_graphs_that_are_never_replayed_again_are_freed() -> None:
    """New attributes give all graphs other keys: those of before would count as shapes for ever."""
    recorder = fake_graphs.use()
    model: Any = _model()
    step = capture(model, _adam(model), _loss, max_shapes=2)
    for number in range(16):
        if number % 4 == 3:
            setattr(model, f"note{number}", number)
        step(_x(number))
    assert not step.captured and recorder.counts["records"] == 3 and recorder.counts["resets"] == 3
    step(_x(16))
    assert step.captured, step.reason


REPLACED: dict[str, Callable[[Any], Any]] = {
    "assign": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "attribute": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(8, 3))),
    "module": lambda model: setattr(model, "0", nn.Linear(3, 8)),
}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("how", REPLACED)
def test_parameters_that_the_optimizer_does_not_have(how: str, graphs: bool) -> None:
    if graphs:
        fake_graphs.use()
    model = _model()
    step = capture(model, _adam(model), _loss)
    for number in range(5):
        step(_x(number))
    REPLACED[how](model)
    for _ in range(2):  # and again
        with pytest.raises(RuntimeError) as caught:
            step(_x(5))
        assert str(caught.value) == (
            "ark: train.capture: parameter '0.weight' is not the tensor of capture() (assigned, or loaded with "
            "assign=True), and the optimizer updates the old one: make the optimizer anew, with the model's "
            "parameters, and call capture() again."
        )


@pytest.mark.parametrize("kind", ["compiled", "scripted part"])
def test_modules_that_are_wrapped(kind: str) -> None:
    """torch.compile's wrapper has its training mode elsewhere, and TorchScript's modules their parameters."""
    recorder = fake_graphs.use()
    model = _model().eval()
    if kind == "scripted part":
        model[3] = torch.jit.script(model[3])
    subject: Any = torch.compile(model, backend="eager") if kind == "compiled" else model
    step = capture(subject, _adam(model), _loss)
    for number in range(5):
        step(_x(number))
    assert step.captured, step.reason
    model.train()
    step(_x(5))
    assert not step.captured and "training' changed from False to True" in step.reason
    model[0].requires_grad_(False)
    for number in range(6, 11):
        step(_x(number))
    assert step.captured and recorder.counts["records"] == 2, step.reason


def test_all_frozen() -> None:
    model = _model()
    step = capture(model, _adam(model), _loss)
    step(_x(0))
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="model has no parameter that requires a gradient: nothing to train"):
        step(_x(1))
    model.requires_grad_(True)
    step(_x(1))


def test_a_slice_is_a_constant() -> None:
    recorder = fake_graphs.use()
    model = _model()
    step = capture(model, _adam(model), lambda m, b: _loss(m, b[0][b[1]]))
    for number in range(5):
        step((_x(number), slice(0, 3)))
    assert step.captured and recorder.counts["records"] == 1
    step((_x(5), slice(1, 4)))
    assert not step.captured


def test_a_constant_that_is_no_number_has_a_graph() -> None:
    recorder = fake_graphs.use()
    model = _model()
    step = capture(model, _adam(model), lambda m, b: _loss(m, b[0]) * (1.0 if b[1] != b[1] else 2.0))
    for number in range(6):
        step((_x(number), float("nan")))
    assert step.captured and recorder.counts["records"] == 1


OPTIMIZERS = ("AdamW", "Adam", "SGD", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_from_a_gpu_goes_on_on_a_cpu(name: str) -> None:
    """As saved after a capture there: capturable, fused, with a tensor as rate. Loaded before capture(), or later."""
    weights = []
    for when in ("before", "between", "never"):
        model = _model().eval()
        kind = getattr(torch.optim, name)
        optimizer = kind(model.parameters(), lr=1e-3)
        step = capture(model, optimizer, _loss)
        step(_x(0))
        state = copy.deepcopy(optimizer.state_dict())
        for group in state["param_groups"]:
            if "capturable" in group:
                group["capturable"] = True
            if name in ("AdamW", "Adam", "SGD"):
                group["fused"], group["foreach"] = True, False
            group["lr"] = torch.tensor(1e-3)
        if when == "before":
            optimizer = kind(model.parameters(), lr=1e-3)
            optimizer.load_state_dict(state)
            step = capture(model, optimizer, _loss)
        elif when == "between":
            optimizer.load_state_dict(state)
        for number in range(1, 4):
            step(_x(number))
        weights.append(small.weights(model))
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], weights[2])
