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


def agree(choice: Choice, groups: Sequence[str]) -> Choice:
    """All ranks of the groups whose collectives a region holds must run it on the same side, or they would wait for
    each other for ever. Regions hold no collectives yet, so there is nobody to ask."""
    assert not groups, groups
    return choice


def _median_us(run: Boxed, inputs: list[Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run(list(inputs))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(ark: Boxed, inductor: Boxed, inputs: list[Any], mutated: Sequence[int]) -> Choice:
    """Times both on the call's own inputs; those that the region writes are cloned first."""
    inputs = list(inputs)
    for i in mutated:
        inputs[i] = inputs[i].clone(memory_format=torch.preserve_format)
    begin = time.perf_counter()
    for run in (ark, inductor, ark, inductor):
        run(list(inputs))
    each = (time.perf_counter() - begin) / 4
    runs = max(_MIN_RUNS, min(_MAX_RUNS, int(_BUDGET_S / max(each, 1e-6))))
    # In turns, so that what else the machine does falls on both.
    rounds = [(_median_us(ark, inputs, runs), _median_us(inductor, inputs, runs)) for _ in range(3)]
    ark_us, inductor_us = (min(times) for times in zip(*rounds, strict=True))
    return Choice("ark" if ark_us <= inductor_us else "inductor", round(ark_us, 2), round(inductor_us, 2))


class Contest:
    """A region that decides at its first call, and from then on is the winner's function."""

    def __init__(
        self, name: str, ark: Boxed, inductor: Boxed, mutated: Sequence[int], told: Callable[[Choice], None]
    ) -> None:
        self._name, self._ark, self._inductor, self._mutated, self._told = name, ark, inductor, mutated, told
        self.run: Boxed = self._first

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self.run(inputs)

    def _first(self, inputs: list[Any]) -> Sequence[Any]:
        choice = recall(self._name)  # another process may have been quicker
        if choice is None:
            choice = agree(measure(self._ark, self._inductor, inputs, self._mutated), ())
            remember(self._name, choice)
        self.run = self._ark if choice.runs_on == "ark" else self._inductor
        self._told(choice)
        return self.run(inputs)
