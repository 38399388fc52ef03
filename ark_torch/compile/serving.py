"""What torch._dynamo calls for a graph while it is undecided who runs it.

Serving: Inductor's function serves from the first call on. From the second call on ark's regions are compiled on
another thread. Then the contestants serve some calls in turns, each timed, and the fastest one serves all others. On a
GPU the next call first times replays of CUDA graphs, on copies of its arguments, for graphs that capture later calls;
not of graphs with tensors elsewhere, as copies from there cannot be captured.
Everything happens between two calls, on the calling thread, and never during CUDA graph capture. Concurrent calls from
other threads are served by Inductor until then, and disturb the measurements.

Rehearsed: all contestants are compiled, and the first call decides, on copies of its arguments. Ranks whose graph has
collectives meet there and decide together (meeting.py).
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ark_torch.compile import background, choice, inductor_fallback
from ark_torch.compile.capture import Captured
from ark_torch.compile.contest import PAUSE, Contest, Contestant, rehearse, rehearse_replays
from ark_torch.compile.meeting import Meeting
from ark_torch.compile.report import log

_PAUSE_S = 10.0
_MOST_SPOILT = 1000
Tell = Callable[[choice.Choice], None]


def taken(contestants: Mapping[str, Contestant], chosen: choice.Choice) -> Contestant:
    """The function for calls from now on."""
    run = contestants[chosen.runs_on]
    replayed = contestants[chosen.replays_on or chosen.runs_on]
    if replayed is run:
        return run

    def by_stream(*arguments: Any) -> Any:
        return (replayed if torch.cuda.is_current_stream_capturing() else run)(*arguments)

    return by_stream


class _Served:
    """Calls go to `run`."""

    run: Contestant

    def __init__(self, title: str, contestants: Mapping[str, Contestant], name: str, tell: Tell, on_gpu: bool) -> None:
        self._title, self._contestants, self._name = title, dict(contestants), name
        self._tell, self._on_gpu = tell, on_gpu
        self._lock = threading.Lock()

    def function(self) -> Contestant:
        def call(*arguments: Any) -> Any:
            return self.run(*arguments)

        return call

    def _captures(self) -> bool:
        """A CUDA graph keeps what it captures, and capture cannot be timed."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _decide(self, chosen: choice.Choice) -> None:
        self.run = taken(self._contestants, chosen)
        self._contestants.clear()
        self._tell(chosen)


class Rehearsed(_Served):
    """`written`: positions of the arguments that the graph writes. `meeting`: of the ranks, and `otherwise` serves
    calls that cannot be timed."""

    def __init__(
        self,
        title: str,
        contestants: Mapping[str, Contestant],
        written: Sequence[int],
        name: str,
        tell: Tell,
        on_gpu: bool,
        meeting: Meeting | None = None,
        otherwise: str = "ark",
    ) -> None:
        super().__init__(title, contestants, name, tell, on_gpu)
        self._written, self._meeting, self._otherwise = written, meeting, otherwise
        self.run = self._first

    def _first(self, *arguments: Any) -> Any:
        with self._lock:
            if self._contestants:
                if self._captures() and (self._meeting is not None or choice.recall(self._name) is None):
                    return self._contestants[self._otherwise](*arguments)
                try:
                    chosen = self._chosen(arguments)
                except Exception as error:  # these arguments cannot be run, which the call itself reports better
                    log.info("%s was not measured: %s", self._title, error)
                    return self._contestants[self._otherwise](*arguments)
                self._decide(chosen)
        return self.run(*arguments)

    def _chosen(self, arguments: Sequence[Any]) -> choice.Choice:
        known = choice.recall(self._name)  # another process may have been faster
        if self._meeting is None:
            if known is not None:
                return known
            return choice.remember(self._name, rehearse(self._contestants, arguments, self._written, self._on_gpu))
        if known is not None and not known.names <= set(self._contestants):
            known = None
        clear, names = self._meeting.hold(known, list(self._contestants), self._otherwise)
        if clear is not None:
            return clear
        taking_part = {name: self._contestants[name] for name in names}
        measured = rehearse(taking_part, arguments, self._written, self._on_gpu, self._meeting.agree)
        choice.remember(self._name, measured)
        return measured  # as all ranks, whatever this machine's folder has


class Serving(_Served):
    def __init__(
        self,
        title: str,
        captured: Captured,
        contestants: Mapping[str, Contestant],
        name: str,
        tell: Tell,
        on_gpu: bool,
    ) -> None:
        super().__init__(title, contestants, name, tell, on_gpu)
        self._captured: Captured | None = captured
        self._job: background.Job | None = background.Job(captured.compile_regions, title)
        self._inductor = self._contestants["inductor"]
        self._contest: Contest | None = None
        self._replays = on_gpu and captured.on_gpus_alone  # whether replays of CUDA graphs can be measured
        self._written: Sequence[int] = ()  # positions of the arguments that the graph writes
        self._resumes = 0.0
        self._disturbed, self._spoilt = False, 0
        self.run = self._first

    def _first(self, *arguments: Any) -> Any:
        self.run = self._waiting
        return self._inductor(*arguments)

    def _waiting(self, *arguments: Any) -> Any:
        if self._captures():
            _warn_of_capture(self._title)
        elif self._lock.acquire(blocking=False):
            try:
                if self.run == self._waiting:
                    self._advance()
            finally:
                self._lock.release()
        return self._inductor(*arguments)

    def _advance(self) -> None:
        """One step towards the contest: Inductor compiles at most one piece per call."""
        assert self._job is not None and self._captured is not None
        if self._job.state == "new":
            self._job.submit()
        elif self._job.state == "failed":
            self._stay()
        elif self._job.state == "done" and not background.active():
            try:
                with inductor_fallback.between_calls() as may_compile:
                    if not may_compile:
                        return
                    if self._captured.to_assemble():
                        self._captured.assemble_next()
                    if self._captured.to_assemble():
                        return
                    self._contestants["ark"] = self._captured.finish()
                    self._written = self._captured.written
            except Exception as error:
                log.warning("%s stays on Inductor: %s", self._title, inductor_fallback.first_line(error))
                self._stay()
                return
            self._captured = self._job = None
            if (chosen := choice.recall(self._name)) is not None:  # another process was faster
                self._decide(chosen)
            else:
                self._contest = Contest(self._contestants, self._on_gpu)
                self.run = self._contested

    def _contested(self, *arguments: Any) -> Any:
        captures = self._captures()
        if not self._lock.acquire(blocking=False):
            self._disturbed = True
            return self._inductor(*arguments)
        try:
            contest = self._contest
            if captures and (contest is None or contest.choice is None):
                _warn_of_capture(self._title)
                return self._inductor(*arguments)
            if contest is None or background.active():
                return self._inductor(*arguments)
            if contest.choice is not None and captures:
                self._decided(contest.choice)
                return self.run(*arguments)
            if contest.choice is not None:
                self._decided(rehearse_replays(contest.choice, self._contestants, arguments, self._written))
                return self.run(*arguments)
            if contest.turn == PAUSE:
                if time.monotonic() < self._resumes:
                    return self._inductor(*arguments)
                contest.go_on()
            self._disturbed = False
            result = contest.call(arguments, lambda: not self._disturbed)
            if self._disturbed:
                self._spoilt += 1
                if self._spoilt > _MOST_SPOILT:
                    log.info("%s stays on Inductor: several threads call it, and no call can be timed", self._title)
                    self._stay()
            elif contest.choice is not None and not self._replays:
                self._decided(contest.choice)
            elif contest.turn == PAUSE:
                self._resumes = time.monotonic() + _PAUSE_S
            return result
        finally:
            self._lock.release()

    def _decided(self, chosen: choice.Choice) -> None:
        self._contest = None
        self._decide(choice.remember(self._name, chosen))

    def _stay(self) -> None:
        self.run = self._inductor
        self._captured = self._job = self._contest = None
        self._contestants.clear()


@functools.cache
def _warn_of_capture(title: str) -> None:
    log.warning(
        "%s: a CUDA graph captures Inductor's kernels, before it is known whether ark's are faster; "
        'options={"wait": True} decides that in the first call.',
        title,
    )
