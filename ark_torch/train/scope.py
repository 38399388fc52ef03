"""Tells ark's groups that a training step is being captured, so that the dispatch of captured steps applies to it.

In a captured step a collective waits for peers beside computation, so other algorithms win there than alone
(`step_...` in the table of CUDA dispatches). All ranks of a group must choose the same one. They do if all of them
capture the step, so only groups whose ranks are all among the step's are told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ark_torch.train.agreement import ark_backend


@contextlib.contextmanager
def captures_step(group: Any, device: torch.device) -> Iterator[None]:
    """Within it, what such groups capture is part of a step of the group's ranks. None: of this process alone."""
    told = _within(group, device) if group is not None else []
    try:
        for backend in told:
            backend._captures_step = True
        yield
    finally:
        for backend in told:
            backend._captures_step = False


def _within(group: Any, device: torch.device) -> list[Any]:
    """The backends of ark's groups that have no ranks but the group's."""
    members = set(dist.get_process_group_ranks(group))
    known = [
        one for one in dist.distributed_c10d._world.pg_map if members.issuperset(dist.get_process_group_ranks(one))
    ]
    backends = [ark_backend(one, device.type) for one in known]
    return [backend for backend in backends if backend is not None]
