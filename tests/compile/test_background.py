"""The default mode: Inductor runs the graph while ark's regions compile, and calls decide which continues."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from ark_torch import _C
from ark_torch.compile import backend, background, build, choice, contest, inductor_fallback, progress, serving
from ark_torch.compile.report import log

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Isolates the test: its own choices, an idle machine, and no job that outlives it."""
    monkeypatch.setattr(choice, "folder", lambda: tmp_path / "choices")
    monkeypatch.setattr(contest.Load, "is_in_the_way", lambda *_: False)
    monkeypatch.setattr(serving, "_PAUSE_S", 0.0)
    yield
    wait_for(lambda: not background.active())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Gate:
    """Regions compile when the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun, self.threads = threading.Event(), threading.Event(), set()
        make_region = build.make_region

        def gated(*arguments: Any) -> Any:
            self.threads.add(threading.current_thread())
            self.begun.set()
            assert self.open.wait(120)
            return make_region(*arguments)

        monkeypatch.setattr(build, "make_region", gated)


def choices() -> list[dict[str, Any]]:
    where = choice.folder()
    assert where is not None
    return [json.loads(file.read_text()) for file in where.glob("*.json")] if where.exists() else []


def counting(state: Tensor, x: Tensor) -> Tensor:
    state.add_(1)
    return torch.sin(x * state) + torch.tanh(x)


class Called:
    """A compiled function. Every call is compared with eager PyTorch."""

    def __init__(self, function: Callable[..., Any] = counting, **options: Any) -> None:
        torch._dynamo.reset()
        self.function = function
        self.compiled = torch.compile(function, backend="ark", options=options or None)
        self.state, self.other = torch.zeros(1), torch.zeros(1)

    def __call__(self) -> None:
        x = torch.randn(64)
        torch.testing.assert_close(self.compiled(self.state, x), self.function(self.other, x))
        assert torch.equal(self.state, self.other)

    def until_decided(self) -> dict[str, Any]:
        limit = time.monotonic() + 240  # a cold cache on a busy machine
        while time.monotonic() < limit:
            self()
            if choices():
                break
            if background.active():
                time.sleep(0.01)
        (kept,) = choices()
        return kept


def test_inductor_serves_until_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, call = Gate(monkeypatch), Called()
    call()
    assert not gate.begun.is_set() and not background.active()  # a program that calls once compiles nothing else
    call()
    assert gate.begun.wait(60)
    for _ in range(20):
        call()
    assert not choices() and gate.threads and threading.main_thread() not in gate.threads
    gate.open.set()
    kept = call.until_decided()
    assert set(kept["us"]) == {"ark", "inductor", "eager"} and kept["runs_on"] in kept["us"]
    for _ in range(5):
        call()
    # The next process makes the same choice from its first call on.
    monkeypatch.setattr(serving, "Serving", lambda *_: pytest.fail("served"))
    again = Called()
    again()
    assert len(choices()) == 1


@pytest.mark.parametrize("winner", ["ark", "inductor", "eager"])
def test_the_fastest_goes_on_alone(winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slowed(contest.Contest):
        def __init__(self, contestants: Any, on_gpu: bool = False) -> None:
            def slow(run: Any) -> Any:  # by more than a busy machine makes the winner wait for its threads
                return lambda *arguments: (time.sleep(0.03), run(*arguments))[1]

            super().__init__({name: run if name == winner else slow(run) for name, run in contestants.items()}, on_gpu)

    decided: list[tuple[Any, dict[str, Any]]] = []
    decide = serving._Served._decide

    def watched(self: Any, chosen: choice.Choice) -> None:
        decided.append((self, dict(self._contestants)))
        decide(self, chosen)

    monkeypatch.setattr(serving, "Contest", Slowed)
    monkeypatch.setattr(serving._Served, "_decide", watched)
    call = Called()
    assert call.until_decided()["runs_on"] == winner
    ((served, contestants),) = decided
    assert served.run is contestants[winner] and not served._contestants and served._captured is None
    call()


@pytest.mark.nightly
def test_pieces_of_inductor_are_compiled_one_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_in: list[int] = []
    compile_piece, calls = inductor_fallback.compile_piece, [0]

    def watched(*arguments: Any) -> Any:
        assert threading.current_thread() is threading.main_thread() and torch.compiler.is_compiling()
        compiled_in.append(calls[0])
        return compile_piece(*arguments)

    monkeypatch.setattr(inductor_fallback, "compile_piece", watched)
    model = models.ResidualBlock(transposed=True).eval()
    compiled, x = torch.compile(model, backend="ark"), torch.randn(1, 8, 5, 5)
    while not choices() and calls[0] < 5000:
        calls[0] += 1
        random = torch.get_rng_state()
        torch.testing.assert_close(compiled(x), model(x))
        assert torch.equal(random, torch.get_rng_state()) and not torch.compiler.is_compiling()
        if background.active():
            time.sleep(0.01)
    assert len(compiled_in) == len(set(compiled_in)) == 2 and min(compiled_in) > 2


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, Inductor continues, and nothing is remembered."""

    def broken(*_: Any) -> Any:
        raise ArithmeticError("the planner is broken")

    monkeypatch.setattr(build, "make_region", broken)
    call = Called()
    with caplog.at_level(logging.WARNING, log.name):
        for _ in range(30):
            call()
            wait_for(lambda: not background.active())
    said = [record.getMessage() for record in caplog.records if record.name == log.name]
    assert len([line for line in said if "the planner is broken" in line]) == len(said) >= 1, said
    assert not choices()


@pytest.mark.nightly
def test_threads_that_call_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def apart(x: Tensor) -> Tensor:
        return torch.sin(x * 2) + torch.tanh(x)

    compiled = torch.compile(apart, backend="ark")
    x = torch.randn(64)
    wanted, wrong, stop = apart(x), [], threading.Event()
    compiled(x)

    def work() -> None:
        with torch.no_grad():
            while not stop.is_set() and not wrong:
                try:
                    torch.testing.assert_close(compiled(x), wanted)
                except BaseException as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1)
    wait_for(lambda: bool(wrong) or not background.active())
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not wrong, wrong
    for _ in range(5000):  # no other thread any more
        torch.testing.assert_close(compiled(x), wanted)


@pytest.mark.quick
def test_a_thread_beside_spoils_what_is_timed() -> None:
    """Calls of another thread use Inductor, and the contest ignores calls that overlapped with them."""
    inside, beside = threading.Event(), threading.Event()
    counted: list[str] = []

    def slow(x: int) -> int:
        inside.set()
        assert beside.wait(60)
        return x

    served: Any = object.__new__(serving.Serving)
    serving._Served.__init__(served, "graph", {"inductor": lambda x: -x, "ark": slow}, "name", lambda _: None, False)
    served._inductor, served._spoilt, served._disturbed = served._contestants["inductor"], 0, False
    served._contest = contest.Contest({"ark": slow})
    served._contest._next = counted.append
    served.run = served._contested
    thread = threading.Thread(target=lambda: served.run(1))
    thread.start()
    assert inside.wait(60) and served.run(2) == -2
    beside.set()
    thread.join(60)
    assert served._spoilt == 1 and not counted
    assert served.run(3) == 3 and len(counted) == 1


def test_replays_are_measured_before_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU calls decide who runs calls. What a CUDA graph captures is measured on the arguments of the next one,
    which are valid: a counter that the graph advances may be at its end after a call."""
    ways: Any = {"inductor": lambda x: -x, "ark": lambda x: x}
    told: list[choice.Choice] = []
    served: Any = object.__new__(serving.Serving)
    serving._Served.__init__(served, "graph", ways, "name", told.append, True)
    served._inductor, served._written, served._replays = ways["inductor"], [0], True
    served._contest = contest.Contest(ways)
    served.run = served._contested
    measured: list[Any] = []

    def rehearsed(chosen: choice.Choice, contestants: Any, arguments: Any, written: Any) -> choice.Choice:
        measured.append((chosen.runs_on, dict(contestants), arguments, written))
        return replace(chosen, replays_on="inductor", replay_us={"ark": 2.0, "inductor": 1.0})

    captures = [True]
    monkeypatch.setattr(serving, "rehearse_replays", rehearsed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    call = served.function()
    assert call(1) == -1 and not told  # nothing can be measured in a capture
    served._contest.choice = choice.Choice("ark", {"ark": 1.0, "inductor": 2.0})
    captures[0] = False
    assert call(2) == 2 and measured == [("ark", ways, (2,), [0])]
    assert [one.parts for one in told] == [("ark", "inductor")] and choice.recall("name") == told[0]
    captures[0] = True
    assert call(3) == -3 and len(measured) == 1


def test_a_capture_before_replays_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what calls have chosen."""
    ways: Any = {"inductor": lambda x: -x, "ark": lambda x: x}
    told: list[choice.Choice] = []
    served: Any = object.__new__(serving.Serving)
    serving._Served.__init__(served, "graph", ways, "name", told.append, True)
    served._inductor, served._contest = ways["inductor"], contest.Contest(ways)
    served._contest.choice = choice.Choice("ark", {"ark": 1.0, "inductor": 2.0})
    served.run = served._contested
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert served.function()(1) == 1 and [one.parts for one in told] == [("ark", "ark")]


def test_replays_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choice.Choice("ark", {"ark": 1.0})

    def failed(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room for copies")

    monkeypatch.setattr(contest, "_graphs", failed)
    assert contest.rehearse_replays(chosen, {}, [torch.ones(2)], [0]) is chosen


@pytest.mark.nightly
def test_reset_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwanted compilations do not start, and running ones are not waited for."""
    gate, call = Gate(monkeypatch), Called()
    call()
    call()
    assert gate.begun.wait(60)
    begun = background._jobs._running

    def other(state: Tensor, x: Tensor) -> Tensor:
        return counting(state, x) * 2

    second = Called(other)  # this resets, too
    second()
    second()
    second.compiled = None
    torch._dynamo.reset()
    gc.collect()
    gate.open.set()
    wait_for(lambda: not background.active())
    assert len(gate.threads) == 1 and not choices()
    gc.collect()
    assert begun is not None and begun() is None
    third = Called()
    third.until_decided()


@pytest.mark.nightly
def test_another_shape_is_another_graph() -> None:
    compiled = torch.compile(counting, backend="ark", dynamic=False)
    for size in (8, 16):
        state, other = torch.zeros(1), torch.zeros(1)
        for _ in range(3000):
            x = torch.randn(size)
            torch.testing.assert_close(compiled(state, x), counting(other, x))
            if len(choices()) == size // 8:
                break
            if background.active():
                time.sleep(0.01)
    assert len(choices()) == 2


def test_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks depend on each other's results, all must serve the same bits."""
    monkeypatch.setattr(backend, "_ranks", lambda: 2)
    monkeypatch.setattr(serving, "Serving", lambda *_: pytest.fail("served"))
    call = Called()
    call()
    assert len(choices()) == 1


@pytest.mark.quick
def test_a_line_for_who_waits(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.05)
    with progress.shown("compiling nothing"):
        time.sleep(0.5)
    with progress.shown("done at once"):
        pass
    time.sleep(0.2)
    assert capfd.readouterr().err.count("\n") == 1


PROGRAM = """
import os, sys, threading, time
import torch
from ark_torch.compile import background

def step(x):
    return torch.sin(x * 2) + torch.tanh(x)

compiled = torch.compile(step, backend="ark")
with torch.no_grad():
    x = torch.randn(64)
    for _ in range(3):
        compiled(x)
    assert background.active()
    {then}
"""
FORK = """
    time.sleep(float(os.environ["FORK_AFTER"]))
    pid = os.fork()
    torch.testing.assert_close(compiled(x), step(x))
    if pid == 0:
        torch._dynamo.reset()
        again = torch.compile(lambda x: step(x) - 1, backend="ark", options={"choose": "inductor"})
        torch.testing.assert_close(again(x), step(x) - 1)
        for _ in range(3):
            compiled(x)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print("both are right")
"""


def program(folder: Path, then: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the program with a C++ compiler that takes ten minutes per region, longer than the program runs.

    The folder is shared, so that only the first run compiles Inductor's kernel.
    """
    slow, new = folder / "slow-g++", folder / f"slow-g++.{os.getpid()}"
    new.write_text('#!/bin/sh\ncase "$*" in *plan.cpp*) sleep 600;; esac\nexec c++ "$@"\n')
    new.chmod(0o755)
    new.rename(slow)
    inductors = {"CXX": str(slow), "ARK_COSTS": "assumed", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    inductors["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # costs more than the single kernel
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(then=then)],
        env={**os.environ, **inductors, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("then", ["pass", "sys.exit(3)", "raise SystemExit(3)"], ids=["end", "exit", "raise"])
def test_the_program_ends_meanwhile(then: str, shared_folder: Path) -> None:
    done = program(shared_folder, f"print('called', flush=True); {then}")
    assert done.stdout == "called\n" and done.returncode == (0 if then == "pass" else 3), done.stderr
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr and "falls back" not in done.stderr


@pytest.mark.nightly
def test_the_program_forks_meanwhile(shared_folder: Path) -> None:
    done = program(shared_folder, FORK.strip(), FORK_AFTER="0.5")
    assert done.returncode == 0 and done.stdout == "both are right\n", done.stderr
    assert "Traceback" not in done.stderr


def test_stopped_compilers_are_errors() -> None:
    """They start no other compiler. Runs in a separate process, because this state lasts until its end."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch\n"
            "from ark_torch import _C\n"
            "_C.plan.stop_compilers()\n"
            "call = torch.compile(lambda x: torch.sin(x) * 2, backend='ark', "
            "options={'choose': 'ark', 'fallback': False})\n"
            "with torch.no_grad(): call(torch.ones(3))",
        ],
        env={**os.environ, "ARK_COSTS": "assumed"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "this process ends" in done.stderr, done.stderr
    assert _C.plan is not None
