"""Checks before gradients are exchanged: the group must be ark's, and all ranks must have the same settings.

Settings travel as JSON text in a tensor. Ranks compare them once per group; all ranks report a difference.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("ark_torch")


def why_exact(group: dist.ProcessGroup, device: torch.device) -> str:
    """Why an ark group's gradients cannot be compressed; "" if they can.

    Raises ValueError, naming the backend, if the group is not ark's.
    """
    from ark_torch import _C, env

    backend: Any = group._get_backend(device)
    if isinstance(backend, _C.ProcessGroupArk):
        return ""
    if isinstance(getattr(backend, "wrapped_pg", None), _C.ProcessGroupArk):
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL hides ark's group from its operators"
    if env.read().disable:
        return "ARK_DISABLE is set"
    raise ValueError(
        f"ark: [rank {group.rank()}] compression: the group's {device.type} tensors are carried by {backend.name()!r}: "
        "make the group with backend 'ark', or register no compression hook."
    )


def member(group: Any) -> dist.ProcessGroup:
    """The given group; None means the default group. Raises ValueError if it does not exist or lacks this rank."""
    if group is None and not dist.is_initialized():
        raise ValueError('ark: compression needs a process group: call init_process_group("ark") first.')
    group = group or dist.distributed_c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("ark: compression: this process is not a member of the group: pass one that it is in.")
    return group


def gather_text(group: dist.ProcessGroup, text: str, device: torch.device) -> list[str]:
    """Collective: the texts of all ranks, in rank order."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    texts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [bytes(one[:n].tolist()).decode() for one, n in zip(texts, lengths, strict=True)]


def compare_settings(group: dist.ProcessGroup, settings: dict[str, Any], device: torch.device) -> None:
    """Collective: if settings differ, raises ValueError on every rank, with both values."""
    told = [json.loads(one) for one in gather_text(group, json.dumps(settings), device)]
    for rank, theirs in enumerate(told):
        for key in settings:
            if theirs.get(key) != told[0].get(key):
                raise ValueError(
                    f"ark: [rank {group.rank()}] compression: {key} is {told[0].get(key)!r} on rank 0 and "
                    f"{theirs.get(key)!r} on rank {rank}: pass the same on all ranks."
                )
