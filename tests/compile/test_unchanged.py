"""ark_torch.explain changes nothing: a model, its arguments, random numbers and torch._dynamo keep their state."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import pgo

import ark_torch
from ark_torch.compile.unchanged import Unchanged

pytestmark = pytest.mark.timeout(200)

ARK = {"choose": "ark"}


class Cache:
    """A caller's object that the model writes to."""

    def __init__(self) -> None:
        self.rows = [torch.zeros(3, 4), torch.zeros(3, 4)]
        self.seen = 0


class Restless(nn.Module):
    """Changes all that a call can change, on both sides of a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(2, 3))
        self.register_buffer("last", torch.zeros(3, 4))
        self.history: list[int] = []
        self.known = {"calls": 0}
        self.calls = 0

    def forward(self, x: Tensor, cache: Cache, write: bool = True) -> Tensor:
        self.calls += 1
        self.known["calls"] += 1
        self.history.append(self.calls)
        self.count[:, :1] += 1
        cache.rows[0].copy_(x)
        cache.seen += 1
        h = self.drop(self.norm(torch.tanh(self.linear(x)) * 2 + 1))
        torch._dynamo.graph_break()
        random.random()
        if write:
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        cache.rows.append(h)
        self.last = h + torch.rand_like(h)
        return self.last * 2 - 1


def versions(model: nn.Module) -> list[int]:
    return [tensor._version for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.by_day("True-False")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", [True, False])
def test_all_is_put_back(training: bool, mode: bool) -> None:
    model, cache, x = Restless().train(mode), Cache(), torch.randn(3, 4)
    before, arguments, last = copy.deepcopy(vars(model)), copy.deepcopy(vars(cache)), model.last
    counted, drawn, python = versions(model), torch.get_rng_state(), random.getstate()
    report = ark_torch.explain(model, x, cache, ark_options=ARK, training=training)
    assert len(report.graphs) >= 2 and not [note for note in report.notes if "wrote" in note], report
    assert model.training is mode and model.drop.training is mode and model.last is last
    assert (model.calls, model.history, model.known) == (0, [], {"calls": 0}) and vars(model).keys() == before.keys()
    for name in ("_parameters", "_buffers"):
        for key, was in before[name].items():
            assert torch.equal(getattr(model, key), was)
    for module, was in zip(model.children(), before["_modules"].values(), strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(module.state_dict().values(), was.state_dict().values(), strict=True)
        )
    assert versions(model) == counted
    assert (
        cache.seen == 0
        and len(cache.rows) == 2
        and all(torch.equal(a, b) for a, b in zip(cache.rows, arguments["rows"], strict=True))
    )
    assert torch.equal(torch.get_rng_state(), drawn) and random.getstate() == python


def test_a_gradient_of_the_users_own_survives() -> None:
    """Autograd does not count undone writes either."""
    model = nn.Linear(3, 3)
    model.register_buffer("scale", torch.ones(3))

    def step(x: Tensor) -> Tensor:
        model.scale.mul_(2)
        return model(x) * model.scale + 1

    with torch.enable_grad():
        y = (model(torch.ones(3)) * model.scale).sum()
        ark_torch.explain(step, torch.ones(3), ark_options=ARK)
        y.backward()
    assert torch.equal(model.scale, torch.ones(3)) and model.bias.grad is not None


def test_an_error_leaves_nothing_behind() -> None:
    model, cache = Restless(), Cache()
    with pytest.raises(Exception, match=r"(?i)shape|size|mat"):
        ark_torch.explain(model, torch.randn(3, 5), cache, ark_options=ARK)
    assert model.calls == 0 and cache.seen == 0 and model.training and not model.count.any()


def entries_of(function: Callable[..., Any], backend: Any) -> list[Any]:
    entries = _debug_get_cache_entry_list(function.__code__)
    return [entry for entry in entries if getattr(entry.backend, "compiler_fn", entry.backend) is backend]


@pytest.mark.nightly
@torch._dynamo.config.patch(recompile_limit=2)
def test_dynamo_forgets_it() -> None:
    """The user's own compiled function stays compiled, and explain's inputs do not make its sizes dynamic."""
    seen: list[list[Any]] = []

    def mine(graph_module: Any, inputs: Any) -> Any:
        seen.append([tuple(given.shape) for given in inputs if isinstance(given, Tensor)])
        return graph_module.forward

    def function(x: Tensor) -> Tensor:
        return torch.tanh(x) * 2 + 1

    for rows in (2, 3, 4):
        ark_torch.explain(function, torch.ones(rows, 3), ark_options=ARK)
    assert _debug_get_cache_entry_list(function.__code__) == [] and not pgo._CODE_STATE
    call = torch.compile(function, backend=mine)
    call(torch.ones(5, 3))
    assert seen == [[(5, 3)]], "static, as in a program that never asked for an explanation"
    own = entries_of(function, mine)
    assert len(ark_torch.explain(function, torch.ones(5, 3), ark_options=ARK).regions) == 1, "not answered by theirs"
    call(torch.ones(5, 3))
    assert len(seen) == 1 and len(own) == len(entries_of(function, mine)) == 1
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return  # before PyTorch 2.13 they do count, as compiling_apart says
    for rows in range(6, 12):
        assert len(ark_torch.explain(function, torch.ones(rows, 3), ark_options=ARK).regions) == 1
    call(torch.ones(7, 3))
    assert len(seen) == 2, "explanations do not count for the limit of recompilations"


def test_parameters_that_graphs_write_are_saved_and_others_are_told() -> None:
    weight = nn.Parameter(torch.ones(3))
    with Unchanged([weight]) as unchanged:
        assert not unchanged._storages, "parameters are not copied beforehand"
        assert unchanged.changed_parameters() == 0
        weight.mul_(2)
        assert unchanged.changed_parameters() == 1
