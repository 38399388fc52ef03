"""Who runs a region, ark or Inductor: measured once, remembered, and the same from then on.

Results of the two differ in their last bits, so the choice must not follow the noise of the clock from run to run: what
was measured is kept in the cache folder, one small file a region, under everything that could change the answer. Files
appear whole, the first one stays, readable by their owner alone; one that does not parse counts as absent.

A region with collectives is not measured, it runs on ark: ranks would have to measure together, and a graph may be
compiled again on one rank alone.
"""

from __future__ import annotations

import contextlib
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
_SMALL = 1 << 14  # elements


@dataclass(frozen=True)
class Choice:
    runs_on: str  # "ark" or "inductor"
    ark_us: float = 0.0
    inductor_us: float = 0.0


def key(graph_text: str, threads: int, device: torch.device | None = None) -> str:
    """A hash of the region's work, the threads it gets, the machine and the versions of what compiles it."""
    machine = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else _machine()
    parts = [f"format {FORMAT}", graph_text, f"threads {threads}", machine, __version__, torch.__version__]
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


def remember(name: str, choice: Choice) -> Choice:
    """What holds from now on: what another process has written meanwhile, or `choice`. Ranks that compute the same
    beside each other must do so to the bit, so the first one decides. Without a cache folder each is on its own."""
    where = folder()
    if where is None:
        return choice
    data = {"format": FORMAT, "machine": _machine(), "torch": torch.__version__, "ark": __version__, **vars(choice)}
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp makes the file readable by its owner alone.
        handle, temporary = tempfile.mkstemp(prefix=f".{name[:16]}", dir=where)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
            try:
                os.link(temporary, where / f"{name}.json")
            except FileExistsError:
                if (earlier := recall(name)) is not None:
                    return earlier
                os.replace(temporary, where / f"{name}.json")  # it does not parse
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        log.info("the choice of a region is not kept: %s", error)
    return choice


class _Rehearsal:
    """A call's inputs for many runs: what the region writes is a copy, in the layout that it was compiled for.

    Positions and other small state are put back before every run, or a counter would walk out of its cache; of large
    floating tensors only the values change, which nobody looks at.
    """

    def __init__(self, inputs: Sequence[Any], mutated: Sequence[int]) -> None:
        self._inputs = list(inputs)
        self._on_gpu = any(isinstance(given, torch.Tensor) and given.is_cuda for given in inputs)
        self._again: list[tuple[Any, Any]] = []
        for i in mutated:
            given = inputs[i]
            copy = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device).copy_(given)
            if not given.is_floating_point() or given.numel() <= _SMALL:
                self._again.append((copy, copy.clone()))
            self._inputs[i] = copy

    def seconds(self, run: Boxed) -> float:
        for copy, was in self._again:
            copy.copy_(was)
        if self._on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run(list(self._inputs))
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def measure(ark: Boxed, inductor: Boxed, inputs: list[Any], mutated: Sequence[int]) -> Choice:
    """Times both on the call's own inputs; those that the region writes are copied first."""
    rehearsal = _Rehearsal(inputs, mutated)
    each = sum(rehearsal.seconds(run) for run in (ark, inductor, ark, inductor)) / 4
    runs = max(_MIN_RUNS, min(_MAX_RUNS, int(_BUDGET_S / max(each, 1e-6))))

    def median_us(run: Boxed) -> float:
        return statistics.median(rehearsal.seconds(run) for _ in range(runs)) * 1e6

    # In turns, so that what else the machine does falls on both.
    rounds = [(median_us(ark), median_us(inductor)) for _ in range(3)]
    ark_us, inductor_us = (min(times) for times in zip(*rounds, strict=True))
    return Choice("ark" if ark_us <= inductor_us else "inductor", round(ark_us, 2), round(inductor_us, 2))


class Contest:
    """A region that decides at its first call, and from then on is the winner's function."""

    def __init__(
        self, name: str, ark: Boxed, inductor: Boxed, mutated: Sequence[int], told: Callable[[Choice], None]
    ) -> None:
        self._name, self._ark, self._inductor, self._mutated, self._told = name, ark, inductor, mutated, told
        self.region = ark
        self.run: Boxed = self._first

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self.run(inputs)

    def _first(self, inputs: list[Any]) -> Sequence[Any]:
        choice = recall(self._name)  # another process may have been quicker
        if choice is None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._ark(inputs)  # nothing can be timed, and the graph keeps what it captures
        if choice is None:
            try:
                choice = measure(self._ark, self._inductor, inputs, self._mutated)
            except Exception as error:  # these inputs cannot be run, which the call itself says better
                log.info("a region was not measured: %s", error)
                return self._ark(inputs)
            choice = remember(self._name, choice)
        self.run = self._ark if choice.runs_on == "ark" else self._inductor
        self._told(choice)
        return self.run(inputs)
