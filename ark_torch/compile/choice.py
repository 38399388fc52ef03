"""Who runs a region, ark or Inductor: measured once, remembered, and the same from then on.

Results of the two differ in their last bits, so the choice must not follow the noise of the clock from run to run: what
was measured is kept in the cache folder, one small file a region, under everything that could change the answer. Files
are made by rename, readable by their owner alone; one that does not parse counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ark_torch import _jit, env
from ark_torch._version import __version__
from ark_torch.compile.report import log

Boxed = Callable[[list[Any]], Sequence[Any]]
FORMAT = 1
_MIN_RUNS, _MAX_RUNS, _BUDGET_S = 5, 100, 0.1


@dataclass(frozen=True)
class Choice:
    runs_on: str  # "ark" or "inductor"
    ark_us: float = 0.0
    inductor_us: float = 0.0


def key(graph_text: str, threads: int) -> str:
    """A hash of the region's work, the threads it gets, the machine and the versions of what compiles it."""
    parts = [f"format {FORMAT}", graph_text, f"threads {threads}", _machine(), __version__, torch.__version__]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _machine() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line for line in file if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{platform.machine()} {model.strip()} {os.cpu_count()} {sys.platform}"


def folder() -> Path | None:
    cache = env.read().cache or _jit.default_cache()
    return Path(cache) / "choices" if cache else None


def recall(name: str) -> Choice | None:
    """What was chosen before, or None."""
    where = folder()
    if where is None:
        return None
    try:
        path = where / f"{name}.json"
        if path.stat().st_uid != os.getuid():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["runs_on"] not in ("ark", "inductor"):
            return None
        return Choice(data["runs_on"], float(data["ark_us"]), float(data["inductor_us"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(name: str, choice: Choice) -> None:
    """Best effort: without a cache folder every run measures for itself."""
    where = folder()
    if where is None:
        return
    data = {"format": FORMAT, "machine": _machine(), "torch": torch.__version__, "ark": __version__, **vars(choice)}
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp makes the file readable by its owner alone.
        handle, temporary = tempfile.mkstemp(prefix=f".{name[:16]}", dir=where)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
            os.replace(temporary, where / f"{name}.json")
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        log.info("the choice of a region is not kept: %s", error)


class Votes:
    """What the ranks of the groups whose collectives a region holds decide together.

    They must run it on the same side, with the same number of collectives before that: an answer of one rank alone
    (from its cache, or by its clock) would make the others wait for ever.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups

    def largest(self, *numbers: float) -> list[float]:
        """Each number's largest over all ranks; several groups may overlap, as in a mesh of devices."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp(torch.distributed.ReduceOp.MAX)
        for _ in self._groups:
            for group in self._groups:
                group.allreduce([tensor], options).wait()
        return [float(number) for number in tensor]

    def recalled(self, own: Choice | None) -> Choice | None:
        """The choice that all ranks remember, or None."""
        unknown, ark, inductor = self.largest(
            own is None, own is not None and own.runs_on == "ark", own is not None and own.runs_on == "inductor"
        )
        return own if not unknown and ark + inductor == 1 else None


class Absent:
    """On a rank that could not compile a region: takes part in the votes of the others, once."""

    def __init__(self, run: Boxed, groups: Sequence[Any]) -> None:
        self._run, self._votes = run, Votes(groups)
        self._voted = False

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        if not self._voted:
            self._voted = True
            self._votes.largest(1.0)
            self._votes.recalled(Choice("inductor"))
        return self._run(inputs)


def _median_us(run: Boxed, inputs: list[Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run(list(inputs))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(
    ark: Boxed, inductor: Boxed, inputs: list[Any], mutated: Sequence[int], votes: Votes | None = None
) -> Choice:
    """Times both on the call's own inputs; those that the region writes are cloned first."""
    inputs = list(inputs)
    for i in mutated:
        inputs[i] = inputs[i].clone(memory_format=torch.preserve_format)
    begin = time.perf_counter()
    for run in (ark, inductor, ark, inductor):
        run(list(inputs))
    each = (time.perf_counter() - begin) / 4
    if votes is not None:
        (each,) = votes.largest(each)  # the same number of runs everywhere
    runs = max(_MIN_RUNS, min(_MAX_RUNS, int(_BUDGET_S / max(each, 1e-6))))
    # In turns, so that what else the machine does falls on both.
    rounds = [(_median_us(ark, inputs, runs), _median_us(inductor, inputs, runs)) for _ in range(3)]
    ark_us, inductor_us = (min(times) for times in zip(*rounds, strict=True))
    if votes is not None:
        ark_us, inductor_us = votes.largest(ark_us, inductor_us)
    return Choice("ark" if ark_us <= inductor_us else "inductor", round(ark_us, 2), round(inductor_us, 2))


class Contest:
    """A region that decides at its first call, and from then on is the winner's function."""

    def __init__(
        self,
        name: str,
        ark: Boxed,
        inductor: Boxed,
        mutated: Sequence[int],
        told: Callable[[Choice], None],
        groups: Sequence[Any] = (),
    ) -> None:
        self._name, self._ark, self._inductor, self._mutated, self._told = name, ark, inductor, mutated, told
        self._votes = Votes(groups) if groups else None
        self.run: Boxed = self._first

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self.run(inputs)

    def _first(self, inputs: list[Any]) -> Sequence[Any]:
        choice = self._decide(inputs)
        self.run = self._ark if choice.runs_on == "ark" else self._inductor
        self._told(choice)
        return self.run(inputs)

    def _decide(self, inputs: list[Any]) -> Choice:
        choice = recall(self._name)  # another process may have been quicker
        if self._votes is not None:
            (absent,) = self._votes.largest(0.0)
            choice = self._votes.recalled(choice)
            if absent:
                return Choice("inductor")  # some rank cannot run it, for reasons of its own: nothing to remember
        if choice is None:
            choice = measure(self._ark, self._inductor, inputs, self._mutated, self._votes)
            remember(self._name, choice)
        return choice
