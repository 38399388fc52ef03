"""Which backend runs a graph: measured once, on copies of what it writes, and remembered for the next run."""

from __future__ import annotations

import functools
import itertools
import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ark_torch import _C
from ark_torch.compile import backend, choice, contest, inductor_fallback, options, serving
from ark_torch.compile.contest import Contest

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


def step(state: Tensor, x: Tensor) -> Tensor:
    state[1] = x * 2
    return torch.sin(state) + x


class Slow(reference.Region):
    def __call__(self, inputs: Any) -> list[Tensor]:
        time.sleep(0.01)
        return super().__call__(inputs)


class Quick(reference.Region):
    """Faster than any other: replays what the first run wrote and returned."""

    def __call__(self, inputs: Any) -> list[Tensor]:
        if self.calls < 1:
            self.result = super().__call__(inputs)
        return self.result


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignores other load on the machine."""
    monkeypatch.setattr(contest.Load, "is_in_the_way", lambda *_: False)


def run(compiled: Any, monkeypatch: pytest.MonkeyPatch, region: type) -> tuple[choice.Choice, Tensor]:
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
    return report.graphs[0].choice, state


def files() -> list[Path]:
    where = choice.folder()
    assert where is not None
    return sorted(where.glob("*.json")) if where.exists() else []


class SlowRivals(Contest):
    """All contestants but ark take longer than the double of ark's kernels."""

    def __init__(self, contestants: Any, on_gpu: bool = False, agree: contest.Agree = list) -> None:
        def slow(run: Any) -> Any:
            return lambda *arguments: (time.sleep(0.005), run(*arguments))[1]

        slowed = {name: run if name == "ark" else slow(run) for name, run in contestants.items()}
        super().__init__(slowed, on_gpu, agree)


def test_slower_loses_and_is_remembered(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, _ = run(compiled, monkeypatch, Slow)
    assert chosen.runs_on in ("inductor", "eager") and chosen.us["ark"] > 1e4 > chosen.us[chosen.runs_on] > 0
    (path,) = files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["runs_on"] == chosen.runs_on
    # The next run makes the same choice without measuring, although ark would win now.
    monkeypatch.setattr(contest, "Contest", lambda *_: pytest.fail("measured again"))
    again, _ = run(compiled, monkeypatch, Quick)
    assert again == chosen


def test_faster_wins_and_is_remembered(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "Contest", SlowRivals)
    chosen, _ = run(compiled, monkeypatch, Quick)
    assert chosen.runs_on == "ark"
    monkeypatch.setattr(contest, "Contest", lambda *_: pytest.fail("measured again"))
    again, _ = run(compiled, monkeypatch, Slow)
    assert again.runs_on == "ark"


@pytest.mark.parametrize("winner", ["inductor", "eager"])
def test_what_was_chosen_is_all_that_is_made(winner: str, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo gets Inductor's function or the graph's own, without any wrapper of ours."""
    given: list[Any] = []
    monkeypatch.setattr(choice, "recall", lambda name: choice.Choice(winner))
    monkeypatch.setattr(backend, "Captured", lambda *_: pytest.fail("captured"))
    whole = inductor_fallback.whole

    def watched(*arguments: Any) -> Any:
        made = whole(*arguments)
        given.append(made)
        return made

    monkeypatch.setattr(inductor_fallback, "whole", watched)
    chosen = options.parse(None, None)
    made: list[Any] = []

    def compile_graph(graph_module: Any, example_inputs: Any) -> Any:
        made.append((graph_module, backend.compile_graph(graph_module, example_inputs, chosen)))
        return made[-1][1]

    x, state = torch.randn(4), torch.zeros(3, 4)
    torch.testing.assert_close(torch.compile(step, backend=compile_graph)(state, x), step(torch.zeros(3, 4), x))
    ((graph_module, function),) = made
    if winner == "eager":
        assert function == graph_module.forward and not given
    else:
        assert [function] == given


def test_mutated_inputs_are_cloned(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring calls the graph many times, but its counter increases by one and no random number is used up."""

    def count(state: Tensor) -> Tensor:
        state.add_(1)
        return state * 2 + 1

    monkeypatch.setattr(_C, "plan", reference, raising=False)
    call, report = compiled(count, choose="measure")
    state = torch.zeros(3)
    random = torch.get_rng_state()
    for calls in range(1, 4):
        torch.testing.assert_close(call(state), torch.full((3,), calls * 2.0 + 1))
        assert state.tolist() == [calls] * 3
    assert set(report.graphs[0].choice.us) == {"ark", "inductor", "eager"}
    assert reference.Region.made[0].calls > 10
    assert torch.equal(random, torch.get_rng_state())


class Simulated:
    """A clock, and contestants that take the given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: dict[str, Callable[[int], float]]) -> None:
        self.now, self.order, self.takes = 0.0, "", takes
        monkeypatch.setattr(contest.time, "perf_counter", lambda: self.now)
        self.contest = contest.Contest({name: functools.partial(self._run, name) for name in takes})
        self.pauses = 0

    def _run(self, name: str) -> None:
        self.now += self.takes[name](len(self.order))
        self.order += name[0]

    def decide(self) -> choice.Choice:
        while self.contest.choice is None:
            if self.contest.turn == contest.PAUSE:
                self.pauses += 1
                self.contest.go_on()
            else:
                self.contest.call(())
        return self.contest.choice


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several calls in a row, rounds back and forth. A hopeless contestant runs only in the first round."""
    held = Simulated(monkeypatch, {"ark": lambda _: 2e-3, "inductor": lambda _: 2.2e-3, "eager": lambda _: 4e-3})
    assert held.decide() == choice.Choice("ark", {"ark": 2000.0, "inductor": 2200.0, "eager": 4000.0})
    turns = ["".join(calls) for _, calls in itertools.groupby(held.order)]
    assert [turn[0] for turn in turns] == list("aieiai") and min(map(len, turns)) >= 5
    assert held.pauses == 0


def test_the_first_calls_of_a_turn_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One contestant is slow only right after another one, and one is always a little slower."""

    def cold(name: str) -> Callable[[int], float]:
        return lambda calls: 1e-3 if held.order.endswith(name) else 9e-3

    held = Simulated(monkeypatch, {"ark": cold("a"), "inductor": lambda _: 1.1e-3})
    assert held.decide().runs_on == "ark"


def test_threads_that_spin_after_another_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 14 ms after Inductor's turn, OpenMP's threads occupy a core, and ark takes 1.5 times as long."""
    inductor_ended = 0.0

    def inductor(_: int) -> float:
        nonlocal inductor_ended
        inductor_ended = held.now + 1.1e-3
        return 1.1e-3

    held = Simulated(
        monkeypatch, {"ark": lambda _: 1.5e-3 if held.now - inductor_ended < 0.014 else 1e-3, "inductor": inductor}
    )
    assert held.decide() == choice.Choice("ark", {"ark": 1000.0, "inductor": 1100.0})


def test_times_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """No contestant is first in all rounds: the contest is repeated, and then reported as unsure."""
    turns = {"ark": itertools.cycle((1e-3, 1.3e-3)), "inductor": itertools.cycle((1.3e-3, 1e-3))}

    def turn_of(self: Any, name: str, first: bool) -> Any:
        yield name
        return next(turns[name])

    monkeypatch.setattr(contest.Contest, "_turn_of", turn_of)
    held = Simulated(monkeypatch, {name: lambda _: 1e-3 for name in turns})
    assert held.decide().busy and held.pauses == 2


def test_slow_graphs_are_called_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if noisy: a program with steps of seconds must not wait for minutes."""
    ways = {"ark": itertools.cycle((3.0, 2.0, 2.0, 3.0, 3.0)), "inductor": itertools.cycle((2.0, 3.0, 3.0, 2.0, 2.5))}
    held = Simulated(monkeypatch, {name: lambda _, of=of: next(of) for name, of in ways.items()})
    held.decide()
    assert len(held.order) <= 20


def test_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest.Load, "is_in_the_way", lambda *_: True)
    held = Simulated(monkeypatch, {"ark": lambda _: 1e-3, "inductor": lambda _: 2e-3})
    assert held.decide() == choice.Choice("ark", {"ark": 1000.0, "inductor": 2000.0}, busy=True)
    assert held.pauses == 2


def test_other_processes_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of our threads want two cores, and other processes take half. Cores that the process may not use are always
    busy.
    """
    monkeypatch.undo()
    stat_file = tmp_path / "stat"
    own = [10.0]
    monkeypatch.setattr(contest, "open", lambda *_, **__: stat_file.open(), raising=False)
    monkeypatch.setattr(contest.os, "sched_getaffinity", lambda _: {1, 10})
    monkeypatch.setattr(contest.time, "monotonic", lambda: own[0])
    usage = type("usage", (), {"ru_stime": 0.0, "ru_utime": property(lambda _: own[0])})
    monkeypatch.setattr(contest.resource, "getrusage", lambda _: usage())

    def write(busy: float) -> None:
        user = {"": 300 * busy, "0": 100 * busy, "1": 60 * busy, "10": 40 * busy, "11": 100 * busy}
        rows = (f"cpu{core} {int(ticks)} 0 0 500 0 0 0 0 0 0\n" for core, ticks in user.items())
        stat_file.write_text("".join(rows) + "intr 1 2 3\n")

    for foreign, threads, seen in ((0.5, 2, True), (0.1, 2, False), (0.5, 1, False), (1.5, 1, True)):
        write(own[0])
        load = contest.Load()
        before, own[0] = own[0], own[0] + 1.0
        write(before + 1.0 + foreign)
        assert load.is_in_the_way(threads) is seen, (foreign, threads)
        own[0] = before


def test_a_choice_under_load_is_made_again_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    name = choice.key("graph", 2)
    first, second = choice.Choice("ark", {"ark": 1.0}, busy=True), choice.Choice("eager", {"eager": 1.0})
    assert choice.remember(name, first) == first
    # Running processes agree.
    assert choice.recall(name) == first and choice.remember(name, second) == first
    monkeypatch.setattr(choice, "_STARTED", time.time() + 1)
    assert choice.recall(name) is None
    assert choice.remember(name, second) == second and choice.recall(name) == second


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 2, "runs_on": "gpu", "us": {}, "busy": false, "replays_on": "", "replay_us": {}}',
        '{"format": 2, "runs_on": "ark", "us": {}, "busy": false, "replays_on": "gpu", "replay_us": {}}',
        '{"format": 2, "runs_on": "ark", "us": [], "busy": false, "replays_on": "", "replay_us": {}}',
        "\0" * 9,
    ],
)
def test_spoilt_files_count_as_absent(text: str) -> None:
    name = choice.key("graph", 2)
    choice.remember(name, choice.Choice("ark", {"ark": 1.0, "eager": 2.0}))
    assert choice.recall(name) == choice.Choice("ark", {"ark": 1.0, "eager": 2.0})
    files()[0].write_text(text)
    assert choice.recall(name) is None
    choice.remember(name, choice.Choice("inductor", {"inductor": 1.0}))
    assert choice.recall(name) == choice.Choice("inductor", {"inductor": 1.0})


def test_what_a_cuda_graph_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and replays may have different winners."""
    contestants = {name: lambda name=name: name for name in ("ark", "inductor", "eager")}
    same = choice.Choice("ark", {"ark": 1.0}, replays_on="ark", replay_us={"ark": 1.0})
    assert serving.taken(contestants, same) is contestants["ark"] and same.names == {"ark"}
    other = choice.Choice("inductor", replays_on="ark", replay_us={"ark": 1.0})
    assert choice.remember("name", other) == other == choice.recall("name") and other.names == {"inductor", "ark"}
    run = serving.taken(contestants, other)
    for captures, name in ((False, "inductor"), (True, "ark")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        assert run() == name


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


def test_ranks_with_gpus_of_their_own_have_one_text() -> None:
    """No GPU is needed: the tensors are fake, and the device is in the code as well."""
    texts = []
    for index in range(2):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        made = graph.call_function(torch.zeros, (2,), {"device": torch.device("cuda", index)})
        graph.output(graph.call_function(torch.add, (x, made)))
        with FakeTensorMode():
            given = torch.empty(2, device=f"cuda:{index}")
            texts.append(choice.text_of(torch.fx.GraphModule(torch.nn.Module(), graph), [given]))
    assert texts[0] == texts[1] and "device(type='cuda')" in texts[0]
