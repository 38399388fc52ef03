"""Who runs a region: measured once, on clones of what it writes, and remembered for the next run."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from ark_torch import _C
from ark_torch.compile import choice

pytestmark = [pytest.mark.quick, pytest.mark.limit(120)]


def step(state: Tensor, x: Tensor) -> Tensor:
    state[1] = x * 2
    return torch.sin(state) + x


class Slow(reference.Region):
    def __call__(self, inputs: Any) -> list[Tensor]:
        time.sleep(0.01)
        return super().__call__(inputs)


class Quick(reference.Region):
    """Faster than anything: writes and returns what the first run wrote and returned."""

    def __call__(self, inputs: Any) -> list[Tensor]:
        if self.calls < 1:
            self.result = super().__call__(inputs)
        return self.result


def run(compiled: Any, monkeypatch: pytest.MonkeyPatch, region: type) -> tuple[Any, Tensor]:
    monkeypatch.setattr(_C, "plan", type("plan", (), {"Graph": reference.Graph, "Region": region}), raising=False)
    torch._dynamo.reset()
    call, report = compiled(step, choose="measure")
    state = torch.zeros(3, 4)
    wanted_state = state.clone()
    x = torch.randn(4)
    got, wanted = call(state, x), step(wanted_state, x)
    if region is not Quick:
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(state, wanted_state)
    return report.graphs[0].pieces[0], state


def files() -> list[Path]:
    where = choice.folder()
    assert where is not None
    return sorted(where.glob("*.json")) if where.exists() else []


def test_slower_loses_and_is_remembered(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piece, _ = run(compiled, monkeypatch, Slow)
    assert piece.runs_on == "inductor" and piece.ark_us > piece.inductor_us > 0
    (path,) = files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["runs_on"] == "inductor"
    # The next run takes the same although ark would win now, without measuring.
    monkeypatch.setattr(choice, "measure", lambda *_: pytest.fail("measured again"))
    again, _ = run(compiled, monkeypatch, Quick)
    assert (again.runs_on, again.ark_us, again.inductor_us) == ("inductor", piece.ark_us, piece.inductor_us)


def test_faster_wins_and_is_remembered(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    piece, _ = run(compiled, monkeypatch, Quick)
    assert piece.runs_on == "ark"
    monkeypatch.setattr(choice, "measure", lambda *_: pytest.fail("measured again"))
    again, _ = run(compiled, monkeypatch, Slow)
    assert again.runs_on == "ark"


def test_mutated_inputs_are_cloned(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring calls the region many times; what it counts has gone up by one."""

    def count(state: Tensor) -> Tensor:
        state.add_(1)
        return state * 2 + 1

    monkeypatch.setattr(_C, "plan", reference, raising=False)
    call, report = compiled(count, choose="measure")
    state = torch.zeros(3)
    for calls in range(1, 4):
        torch.testing.assert_close(call(state), torch.full((3,), calls * 2.0 + 1))
        assert state.tolist() == [calls] * 3
    assert report.graphs[0].pieces[0].runs_on in ("ark", "inductor")
    assert reference.Region.made[0].calls > 10


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "runs_on": "gpu", "ark_us": 1, "inductor_us": 1}', "\0" * 9]
)
def test_spoilt_files_count_as_absent(text: str) -> None:
    name = choice.key("graph", 2)
    choice.remember(name, choice.Choice("ark", 1.0, 2.0))
    assert choice.recall(name) == choice.Choice("ark", 1.0, 2.0)
    files()[0].write_text(text)
    assert choice.recall(name) is None
    choice.remember(name, choice.Choice("inductor", 2.0, 1.0))
    assert choice.recall(name) == choice.Choice("inductor", 2.0, 1.0)


def test_files_of_the_future_are_not_believed() -> None:
    name = choice.key("graph", 2)
    choice.remember(name, choice.Choice("ark"))
    data = json.loads(files()[0].read_text())
    files()[0].write_text(json.dumps({**data, "format": choice.FORMAT + 1}))
    assert choice.recall(name) is None


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "choices").write_text("in the way")
    choice.remember("name", choice.Choice("ark"))
    assert choice.recall("name") is None


def test_key_follows_all_that_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {choice.key("a", 1), choice.key("b", 1), choice.key("a", 2)}
    monkeypatch.setattr(torch, "__version__", "9.9")
    keys.add(choice.key("a", 1))
    monkeypatch.setattr(choice, "_machine", lambda: "another")
    keys.add(choice.key("a", 1))
    assert len(keys) == 5
