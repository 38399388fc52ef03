"""Times the ways to run a graph against each other, call by call, and picks the fastest.

A contestant gets a turn of several consecutive calls. The first ones do not count, since caches and spinning threads
are still the previous contestant's; on a CPU that is the first 20 ms, as GNU OpenMP's threads of eager PyTorch and
Inductor spin for 6 to 14 ms after their last loop and keep a core each. A round is one turn of each, back and forth; a
contestant far behind drops out. The smallest median of a turn counts. If rounds disagree, or other programs used part
of the machine, the contest is repeated a few times; its result is then marked as chosen on a busy machine. The calls
are the program's own, which any contestant may serve, or those of rehearse(), on copies of one call's arguments. Ranks
whose contestants communicate hold it in lockstep: all that the schedule follows is what they have agreed on.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ark_torch.compile.choice import Choice
from ark_torch.compile.report import log

Contestant = Callable[..., Any]
Agree = Callable[[Sequence[float]], list[float]]  # each value's maximum over the ranks
PAUSE = ""  # instead of a contestant's name: calls that are not timed, before the contest is repeated

_ROUNDS, _MOST_ROUNDS, _ATTEMPTS = 3, 6, 3
_TURN_S, _MOST_CALLS, _FEWEST_CALLS = 0.01, 100, 4
_SETTLE_S = 0.02  # until the previous contestant's OpenMP threads sleep
_SLOW_S = 0.1  # slower calls are repeated less often
_SPENT_S = 10.0  # limit for all counted calls; then the contest ends with what it knows
_LIVE_S = 2.0  # the same for replays that a call of a running program waits for
_COPIED = 0.25  # of a GPU's free memory, for copies of what such a call writes
_HOPELESS = (3.0, 1.3)  # times the best time after one round, and after more: one turn may be bad luck
_SURE = 1.1  # a contestant's median turn over its best one: more is noise
_FOREIGN = 0.15  # cores that other programs may use
_SMALL = 1 << 14  # elements


class Load:
    """How many of the cores available to this process others have used since this object was made."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._begin = self._read()

    def _read(self) -> tuple[float, float, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        busy = 0.0
        try:
            with open("/proc/stat", encoding="ascii") as file:
                lines = dict(line.split(maxsplit=1) for line in file if line.startswith("cpu"))
            for core in self._cores:
                ticks = [int(one) for one in lines[f"cpu{core}"].split()[:8]]
                # user, nice, system, idle, iowait, irq, softirq, steal
                busy += (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, LookupError):
            busy = -1.0
        return time.monotonic(), busy, own.ru_utime + own.ru_stime

    def is_in_the_way(self, threads: int) -> bool:
        """Whether other processes and `threads` of ours need more than the available cores."""
        cores = len(self._cores)
        (then, busy, own), (now, busy_now, own_now) = self._begin, self._read()
        if min(busy, busy_now) < 0:
            foreign = max(0.0, os.getloadavg()[0] - threads)
        elif now - then < 0.05:  # the counters have a resolution of 10 ms
            return False
        else:
            foreign = (busy_now - busy - (own_now - own)) / (now - then)
        return foreign > _FOREIGN and foreign + min(threads, cores) > cores


class Contest:
    """`choice` is set once decided. call() serves a call with the contestant whose turn it is."""

    def __init__(
        self,
        contestants: Mapping[str, Contestant],
        on_gpu: bool = False,
        agree: Agree = list,
        limit_s: float = _SPENT_S,
    ) -> None:
        self._contestants, self._on_gpu, self._agree, self._limit_s = dict(contestants), on_gpu, agree, limit_s
        self.choice: Choice | None = None
        self._spent = 0.0
        self._turns = self._schedule()
        self.turn = next(self._turns)

    def call(self, arguments: Sequence[Any], counts: Callable[[], bool] = lambda: True) -> Any:
        """`counts` is asked after the call. A call that does not count, or that raises, is repeated with the next
        one."""
        run = self._contestants[self.turn]
        if self._on_gpu:
            begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            begin.record()
            result = run(*arguments)
            end.record()
            mark: Any = (begin, end)
        else:
            started = time.perf_counter()
            result = run(*arguments)
            mark = time.perf_counter() - started
        if counts():
            self._next(mark)
        return result

    def go_on(self) -> None:
        """Ends a pause."""
        self._next(0.0)

    def _next(self, mark: Any) -> None:
        try:
            self.turn = self._turns.send(mark)
        except StopIteration as decided:
            self.choice = decided.value

    def _seconds(self, marks: Sequence[Any]) -> list[float]:
        if not self._on_gpu:
            return self._agree(marks)
        marks[-1][1].synchronize()
        return self._agree([begin.elapsed_time(end) * 1e-3 for begin, end in marks])

    def _schedule(self) -> Generator[str, Any, Choice]:
        decided: Choice | None = None
        for attempt in range(_ATTEMPTS):
            if attempt:
                yield PAUSE
            decided = yield from self._attempt()
            if not decided.busy or self._spent > self._limit_s:
                break
        assert decided is not None
        return decided

    def _attempt(self) -> Generator[str, Any, Choice]:
        load = Load()
        left = list(self._contestants)
        times: dict[str, list[float]] = {name: [] for name in left}
        sure = False
        for number in range(_MOST_ROUNDS):
            for name in left if number % 2 == 0 else left[::-1]:
                times[name].append((yield from self._turn_of(name, number == 0)))
            best = min(min(times[name]) for name in left)
            left = [name for name in left if min(times[name]) <= best * _HOPELESS[number > 0]]
            if number + 1 >= (_ROUNDS if best < _SLOW_S else 2):
                sure = self._rounds_agree(times, left)
                if sure or self._spent > self._limit_s:
                    break
        us = {name: round(min(measured) * 1e6, 2) for name, measured in times.items()}
        busy = not sure or self._agree([load.is_in_the_way(torch.get_num_threads())])[0] > 0
        return Choice(min(us, key=lambda name: us[name]), us, busy)

    def _turn_of(self, name: str, first: bool) -> Generator[str, Any, float]:
        """The median of a turn's calls, in seconds."""
        asleep = 0.0 if self._on_gpu else time.perf_counter() + _SETTLE_S
        for _ in range(2 if first else 1):
            yield name
        while self._agree([asleep - time.perf_counter()])[0] > 0:
            yield name
        marks = [(yield name)]
        each = self._seconds(marks)[0]
        calls = max(_FEWEST_CALLS, min(_MOST_CALLS, int(_TURN_S / max(each, 1e-7)))) if each < _SLOW_S else 2
        for _ in range(calls - 1):
            marks.append((yield name))
        seconds = self._seconds(marks)
        self._spent += sum(seconds)
        return statistics.median(seconds)

    @staticmethod
    def _rounds_agree(times: Mapping[str, list[float]], left: Sequence[str]) -> bool:
        """Whether every round has the same winner, or all times vary little."""
        rounds = zip(*(times[name] for name in left), strict=True)
        winners = {one.index(min(one)) for one in rounds}
        varied = max(statistics.median(times[name]) / min(times[name]) for name in left)
        return len(winners) == 1 or varied <= _SURE


def rehearse(
    contestants: Mapping[str, Contestant],
    arguments: Sequence[Any],
    written: Sequence[int],
    on_gpu: bool = False,
    agree: Agree = list,
) -> Choice:
    """Holds the contest on one call's arguments, and restores random number generators afterwards. On a GPU it is held
    for calls, and again for replays of CUDA graphs."""
    copies = _Copies(arguments, written)
    with torch.random.fork_rng(_gpus(arguments)):
        chosen = _held(Contest(contestants, on_gpu, agree), copies, copies.given)
        return _with_replays(chosen, contestants, copies, agree) if on_gpu else chosen


def rehearse_replays(
    chosen: Choice, contestants: Mapping[str, Contestant], arguments: Sequence[Any], written: Sequence[int]
) -> Choice:
    """Holds the contest of replays alone, for a choice that calls have made: a CUDA graph has no host between kernels,
    so that another contestant may win in it. Where that fails or takes too much memory, the choice remains."""
    copied = [arguments[i] for i in written if isinstance(arguments[i], torch.Tensor)]
    try:
        if any(x.is_cuda for x in copied):
            free, _ = torch.cuda.mem_get_info()
            if sum(x.numel() * x.element_size() for x in copied) > free * _COPIED:
                raise MemoryError("copies of what the call writes would take much of the GPU's free memory")
        with torch.random.fork_rng(_gpus(arguments)):
            return _with_replays(chosen, contestants, _Copies(arguments, written), list, _LIVE_S)
    except Exception as error:  # many types; the call itself reports better what is wrong with its arguments
        log.info("replays of CUDA graphs were not measured: %s", error)
        return chosen


def _gpus(arguments: Sequence[Any]) -> list[int]:
    return list({x.device.index for x in arguments if isinstance(x, torch.Tensor) and x.is_cuda})


def _with_replays(
    chosen: Choice,
    contestants: Mapping[str, Contestant],
    copies: _Copies,
    agree: Agree,
    limit_s: float = _SPENT_S,
) -> Choice:
    graphs = _graphs(contestants, copies.given, agree)
    if len(graphs) < 2:
        return chosen
    replayed = _held(Contest(graphs, True, agree, limit_s), copies, ())
    return replace(chosen, busy=chosen.busy or replayed.busy, replays_on=replayed.runs_on, replay_us=replayed.us)


class _Copies:
    """One call's arguments for many calls. Those that the graph writes (at positions `written`) are copies, in the
    layout that it was compiled for.

    Positions and other small state are restored before every call, or a counter would run past its cache. For large
    floating tensors only the values change, which does not matter.
    """

    def __init__(self, arguments: Sequence[Any], written: Sequence[int]) -> None:
        self.given = list(arguments)
        self._again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in written:
            one = arguments[i]
            copy = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device).copy_(one)
            if not one.is_floating_point() or one.numel() <= _SMALL:
                self._again.append((copy, copy.clone()))
            self.given[i] = copy

    def put_back(self) -> None:
        for copy, was in self._again:
            copy.copy_(was)


def _held(contest: Contest, copies: _Copies, arguments: Sequence[Any]) -> Choice:
    while contest.choice is None:
        if contest.turn == PAUSE:
            contest.go_on()
            continue
        copies.put_back()
        contest.call(arguments)
    return contest.choice


def _graphs(contestants: Mapping[str, Contestant], arguments: Sequence[Any], agree: Agree) -> dict[str, Contestant]:
    """Each contestant as the replay of a CUDA graph of one call, without those that a rank cannot capture. Meanwhile
    other threads may call what capture forbids."""
    made: dict[str, Contestant] = {}
    stream = torch.cuda.current_stream()
    for name, run in contestants.items():
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        failed = False
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                run(*arguments)
        except RuntimeError as error:
            log.debug("%s cannot be captured in a CUDA graph: %s", name, error)
            failed = True
            torch.cuda.set_stream(stream)  # a capture that does not end leaves its own behind
            _abandon(pool)
        if agree([failed]) == [0.0]:
            made[name] = graph.replay
    return made


def _abandon(pool: Any) -> None:
    """Ends allocations into the pool of a capture that did not end: else the allocator takes it to go on for good."""
    try:
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    except (AttributeError, RuntimeError) as error:  # it did end
        log.debug("nothing to end: %s", error)
