"""Who runs a graph: measured once, remembered, and the same from then on.

Contestants' results differ in their last bits, so the choice must not follow the clock's noise from run to run. It is
kept in the cache folder, one small file per graph, keyed by everything that could change the answer. Files appear
atomically, the first one stays, and only their owner can read them; one that does not parse is ignored. A choice made
on a busy machine applies to processes that run at that time, so that they agree; later ones choose again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ark_torch import _jit, env
from ark_torch._version import __version__
from ark_torch.compile import precision
from ark_torch.compile.report import NAMES, log

FORMAT = 2
_STARTED = time.time()
_LOCK_S = 1.0
# As tensors print their device, and as a graph's code does.
_GPU_INDEX = re.compile(r"(\bcuda):\d+|(?<=\btype='cuda'), index=\d+")


@dataclass(frozen=True)
class Choice:
    """`runs_on` is "ark", "inductor" or "eager"; `us` has each measured contestant's microseconds per call. `busy`:
    other programs used part of the machine meanwhile, or the times varied too much. On a GPU `replays_on` runs what a
    CUDA graph captures, and `replay_us` are times of a replay; "": not measured, same as without a graph."""

    runs_on: str
    us: Mapping[str, float] = field(default_factory=dict)
    busy: bool = False
    replays_on: str = ""
    replay_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, str]:
        """Who runs calls, and what a CUDA graph captures."""
        return self.runs_on, self.replays_on or self.runs_on

    @property
    def names(self) -> set[str]:
        """The contestants that are needed."""
        return set(self.parts)

    def __str__(self) -> str:
        told = _told(self.us)
        if self.replays_on:
            told += f"; replayed, {NAMES[self.replays_on]} of {_told(self.replay_us)}"
        return told


def _told(times: Mapping[str, float]) -> str:
    return ", ".join(f"{NAMES[name]} {us:.1f} us" for name, us in times.items())


def text_of(graph_module: GraphModule, example_inputs: Sequence[Any]) -> str:
    """A graph of torch._dynamo as text that is the same in every process: its code and its arguments' properties.

    Ranks hold the same graph on GPUs of their own, so a GPU's index is left out.
    """
    graphs = [one for _, one in graph_module.named_modules() if isinstance(one, GraphModule)]
    given = [
        f"{x.dtype} {list(x.shape)} {list(x.stride())} {x.device} {type(x).__name__}"
        if isinstance(x, torch.Tensor)
        else repr(x)
        for x in example_inputs
    ]
    modes = [f"{d} {torch.get_autocast_dtype(d)}" for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    if precision.tf32() and any(isinstance(x, torch.Tensor) and x.is_cuda for x in example_inputs):
        modes.append("float32 products in tf32")
    return _GPU_INDEX.sub(lambda match: match[1] or "", "\n".join([*(one.code for one in graphs), *given, *modes]))


def key(graph_text: str, threads: int, device: torch.device | None = None) -> str:
    """A hash of the graph's work, its number of threads, the machine, and the versions of what compiles it."""
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
    """The earlier choice, or None."""
    where = folder()
    if where is None:
        return None
    try:
        path = where / f"{name}.json"
        status = path.stat()
        if status.st_uid != os.getuid():
            return None
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["runs_on"] not in NAMES or data["replays_on"] not in ("", *NAMES):
            return None
        if data["busy"] and status.st_mtime < _STARTED:
            return None
        us, replay_us = (
            {one: float(time_us) for one, time_us in data[times].items() if one in NAMES}
            for times in ("us", "replay_us")
        )
        return Choice(data["runs_on"], us, bool(data["busy"]), data["replays_on"], replay_us)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(name: str, choice: Choice) -> Choice:
    """Returns the choice that holds from now on: the one that another process has written meanwhile, or `choice`. Ranks
    that compute the same must do so to the bit, so the first one decides. Without a cache folder each decides alone."""
    where = folder()
    if where is None:
        return choice
    kept = {**vars(choice), "us": dict(choice.us), "replay_us": dict(choice.replay_us)}
    data = {"format": FORMAT, "machine": _machine(), "torch": torch.__version__, "ark": __version__, **kept}
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp makes the file readable by its owner only.
        handle, temporary = tempfile.mkstemp(prefix=f".{name[:16]}", dir=where)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, indent=1)
            with _locked(where):
                if (earlier := recall(name)) is not None:
                    return earlier
                os.replace(temporary, where / f"{name}.json")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError as error:
        log.info("the choice of a graph is not kept: %s", error)
    return choice


@contextlib.contextmanager
def _locked(where: Path) -> Iterator[None]:
    """Admits one process at a time. After a long wait it continues anyway, since a stopped process may hold the
    lock."""
    handle = os.open(where / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        yield
    finally:
        os.close(handle)
