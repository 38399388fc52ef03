"""Steps that a graph would repeat wrongly, or not at all: they run eagerly, and the reason names what is in the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import fake_graphs
import pytest
import torch
from support import training as small
from support.groups import ark_only
from torch import Tensor, nn

import ark_torch.train.graphs
from ark_torch.train import capture

pytestmark = [ark_only, pytest.mark.quick]


@pytest.fixture(autouse=True)
def _recorder_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ark_torch.train.graphs, "recorder_for", ark_torch.train.graphs.recorder_for)
    yield


def _reads(model: Any, *arguments: Any) -> None:
    assert model.norm.weight.detach().sum().item() < 1e9


READS = _reads.__code__.co_firstlineno + 1
HOOKS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "forward": lambda model, optimizer, hook: model.norm.register_forward_hook(hook),
    "backward": lambda model, optimizer, hook: model.norm.register_full_backward_hook(hook),
    "gradient": lambda model, optimizer, hook: model.norm.weight.register_hook(hook),
    "accumulated": lambda model, optimizer, hook: model.norm.weight.register_post_accumulate_grad_hook(hook),
    "optimizer": lambda model, optimizer, hook: optimizer.register_step_pre_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_makes_the_host_wait(kind: str) -> None:
    fake_graphs.use(fake_graphs.FakeRecorder(refuses="_local_scalar_dense"))
    results = []
    for captured in (True, False):
        model = small.make("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        HOOKS[kind](model, optimizer, lambda *arguments, model=model: _reads(model, *arguments))
        step = capture(model, optimizer, small.loss, warmup=3 if captured else 100)
        if captured:
            with pytest.warns(UserWarning, match="makes the host wait for the GPU's result"):
                losses = [step(small.batch("gpt2", number)).item() for number in range(6)]
            assert f".item()` at test_host_state.py:{READS} " in step.reason and not step.captured, step.reason
        else:
            losses = [step(small.batch("gpt2", number)).item() for number in range(6)]
        results.append((losses, small.weights(model)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


class _Stateful(nn.Module):
    """Changes something of its own in every forward pass."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = small.make("gpt2"), what
        self.seen: list[int] = []
        self.counts = {"calls": 0, "nested": [0, (0, 1)]}
        self.ring: deque[int] = deque(maxlen=4)
        self.kinds: set[int] = set()
        self.pair = (0, "even")
        self.register_buffer("mean", torch.ones(()))
        self.outputs: list[Any] = []
        self.last: Any = None

    def forward(self, tokens: Tensor) -> Tensor:
        number = self.counts["calls"] if self.what == "dict" else len(self.seen)
        if self.what == "list":
            self.seen.append(number)
        elif self.what == "dict":
            self.counts["calls"] += 1  # type: ignore[operator]
        elif self.what == "nested":
            self.counts["nested"][0] += 1  # type: ignore[index]
        elif self.what == "deque":
            self.ring.append(self.ring[-1] + 1 if self.ring else 0)
        elif self.what == "set":
            self.kinds.add(len(self.kinds))
        elif self.what == "tuple":
            self.pair = (self.pair[0] + 1, "even")
        elif self.what == "buffer":
            self.mean = 0.9 * self.mean + 0.1
        out: Tensor = self.inner(tokens) * self.mean
        self.outputs, self.last = [out], out  # what many modules keep: no reason against a capture
        return out


CHANGES = {
    "list": "'seen' from a list of 2 to a list of 3",
    "dict": r"'counts' \(a dict of 2\)",
    "nested": r"'counts' \(a dict of 2\)",
    "deque": "'ring' from a deque of 2 to a deque of 3",
    "set": "'kinds' from a set of 2 to a set of 3",
    "tuple": r"'pair' from \(2, 'even'\) to \(3, 'even'\)",
    "buffer": "",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_module_that_changes_what_it_holds(what: str) -> None:
    recorder = fake_graphs.use()
    model = _Stateful(what)
    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), small.loss)
    text = f"the step changes the model's {CHANGES[what]}, which a graph would not"
    if what == "buffer":
        text = r"the step puts another tensor in the place of the model's buffer 'mean', .* fill it in place"
    with pytest.warns(UserWarning, match=text):
        for number in range(6):
            step(small.batch("gpt2", number))
    assert not step.captured and recorder.counts["records"] == 0


def test_a_module_that_keeps_its_outputs() -> None:
    fake_graphs.use()
    model = _Stateful("nothing")
    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), small.loss)
    for number in range(8):
        step(small.batch("gpt2", number))
        assert step.captured == (number >= 3), step.reason
        model.last = torch.ones(())  # as an evaluation does


def test_a_cache_for_each_shape() -> None:
    """It is filled in the first call of a shape, and then stays: one more eager call shows that."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small.make("gpt2")
            self.factors: dict[int, Tensor] = {}

        def forward(self, tokens: Tensor) -> Tensor:
            if tokens.shape[1] not in self.factors:
                self.factors[tokens.shape[1]] = torch.full((), tokens.shape[1] / 10)
            out: Tensor = self.inner(tokens) * self.factors[tokens.shape[1]]
            return out

    recorder = fake_graphs.use()
    model = Cached()
    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), small.loss)
    captured = []
    for number, length in enumerate([8] * 4 + [12] * 3 + [8]):
        step(small.batch("gpt2", number, length=length))
        captured.append(step.captured)
    assert captured == [False] * 3 + [True] + [False] * 2 + [True] * 2 and recorder.counts["records"] == 2


class _Replacing(torch.optim.SGD):
    """Averages weights in new tensors."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = 0.9 * self.state[p].get("mean", torch.zeros_like(p)) + 0.1 * p.detach()
        return value


def test_an_optimizer_that_replaces_its_state() -> None:
    fake_graphs.use()
    model = small.make("gpt2")
    step = capture(model, _Replacing(model.parameters(), lr=0.1), small.loss)
    with pytest.warns(UserWarning, match=r"_Replacing puts another tensor in the place of its state\[0\]\['mean'\]"):
        for number in range(5):
            step(small.batch("gpt2", number))
    assert not step.captured


class _Counting(torch.optim.SGD):
    """Keeps a number on the host: in an attribute, a group or a parameter's state."""

    def __init__(self, parameters: Any, where: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.where, self.count = where, 0
        self.param_groups[0]["count"] = 0

    def step(self, closure: Any = None) -> Any:
        first = self.state[self.param_groups[0]["params"][0]]
        if self.where == "attribute":
            self.count += 1
        elif self.where == "group":
            self.param_groups[0]["count"] += 1
        else:
            first["count"] = first.get("count", 0) + 1
        return super().step(closure)


NAMED = {"attribute": "'count'", "group": r"param_groups\[0\]\['count'\]", "state": r"state\[0\]\['count'\]"}


@pytest.mark.parametrize("where", NAMED)
def test_an_optimizer_that_counts_on_the_host(where: str) -> None:
    recorder = fake_graphs.use()
    model = small.make("gpt2")
    step = capture(model, _Counting(model.parameters(), where), small.loss)
    with pytest.warns(UserWarning, match=f"_Counting changes its {NAMED[where]} from 2 to 3 on the host"):
        for number in range(5):
            step(small.batch("gpt2", number))
    assert not step.captured and recorder.counts["records"] == 0


def test_an_option_that_changes_with_every_call_is_named() -> None:
    """As OneCycleLR does with betas. A single change is nothing to warn of."""
    recorder = fake_graphs.use()
    model = small.make("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = capture(model, optimizer, small.loss)
    for number in range(6):
        if number == 4:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        step(small.batch("gpt2", number))
    assert step.captured and recorder.counts["records"] == 2
    with pytest.warns(UserWarning, match=r"betas changed from \(0\.92, 0\.999\) to \(0\.93, 0\.999\)") as told:
        for number in range(6):
            optimizer.param_groups[0]["betas"] = (0.91 + number / 100, 0.999)
            step(small.batch("gpt2", number))
    assert len(told) == 1 and not step.captured
    assert "each value needs a graph of its own: keep it, as with cycle_momentum=False" in step.reason
    step(small.batch("gpt2", 6))
    step(small.batch("gpt2", 7))
    assert step.captured


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_faces_models(name: str) -> None:
    """They are captured unchanged, with the bits of the loop."""
    import transformers

    sizes = {"vocab_size": small.TOKENS, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    without = {"bos_token_id": 0, "eos_token_id": 0}
    make: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=32, **sizes, **without)),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(intermediate_size=64, max_position_embeddings=32, **sizes, **without)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=64, **sizes)),
    }

    def batch(number: int) -> dict[str, torch.Tensor]:
        one = small.batch("gpt2", number)
        return {"input_ids": one["inputs"], "labels": one["labels"], "attention_mask": torch.ones_like(one["inputs"])}

    fake_graphs.use()
    weights = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = make[name]().train()  # with its dropout
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = capture(model, optimizer, lambda model, batch: model(**batch).loss) if captured else None
        for number in range(6):
            if step is not None:
                step(batch(number))
                continue
            optimizer.zero_grad()
            model(**batch(number)).loss.backward()
            optimizer.step()
        assert step is None or step.captured, step and step.reason
        weights.append(small.weights(model))
    assert torch.equal(*weights)
