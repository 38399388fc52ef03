"""ARK_TRACE: the timeline of regions, task by task, written by C++ (csrc/compiler/inspect/trace.hpp).

The variable is read whenever a region is compiled. With several ranks each writes its own file, with its rank before
the suffix; `ark trace` merges them.
"""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path

from ark_torch import env
from ark_torch.compile.report import log


def file_of(path: str, rank: int, ranks: int) -> str:
    """The file of a rank: with several ranks, rank 3 writes trace.rank3.json instead of trace.json."""
    if ranks < 2:
        return path
    name = Path(path)
    return str(name.with_name(f"{name.stem}.rank{rank}{name.suffix or '.json'}"))


def rank_and_ranks() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


_in_force: tuple[str, int, int, int] = ("", 0, 0, 1)


def configure(settings: env.Settings | None = None) -> None:
    """Starts, changes or ends the trace as the environment says. Reports a file that cannot be opened, once."""
    from ark_torch import _C

    global _in_force
    settings = settings or env.read()
    rank, ranks = rank_and_ranks() if settings.trace else (0, 1)
    path = os.path.abspath(file_of(settings.trace, rank, ranks)) if settings.trace else ""
    wanted = (path, settings.trace_mb << 20 if path else 0, rank, ranks)
    if wanted == _in_force:
        return
    _in_force = wanted
    try:
        _C.plan.trace(*wanted, log.warning)
    except RuntimeError as error:
        log.warning("%s", error)
        return
    if path:
        _flush_at_exit()
        log.info("tasks are traced to %s", _C.plan.trace_path())


@functools.cache
def _flush_at_exit() -> None:
    from ark_torch import _C

    atexit.register(_C.plan.flush_trace)
