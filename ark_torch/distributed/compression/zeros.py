"""Finds layers whose gradients are zero on all ranks; these send nothing.

Ranks agree by an all-reduce of one byte per layer of a bucket. A skipped layer keeps its residual until it is used
again: nothing is lost, and DDP would ignore a result for a parameter that no rank has used. On a CUDA device the host
must wait for the flags, so they are exchanged only in every 64th call, and in every call while a layer is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

PROBE_EVERY = 64


class Zeros:
    """Decides which layers of a bucket travel. `always`: None, True or False, as State's skip_zeros."""

    def __init__(self, always: bool | None) -> None:
        self._always = always
        self._calls: dict[tuple[int, ...], int] = {}
        self._left_out: set[tuple[int, ...]] = set()

    def asks(self, key: tuple[int, ...], device: torch.device) -> bool:
        """Whether this call of the bucket `key` checks; the same on all ranks."""
        calls = self._calls.get(key, 0)
        self._calls[key] = calls + 1
        if self._always is not None:
            return self._always
        return device.type == "cpu" or calls % PROBE_EVERY == 0 or key in self._left_out

    def travelling(self, key: tuple[int, ...], pieces: Sequence[Tensor], group: dist.ProcessGroup) -> list[bool]:
        """Collective: for each layer, whether its gradient is nonzero on any rank."""
        device = pieces[0].device
        if device.type == "cpu":
            # Most nonzero layers show it in their first elements.
            flags = torch.tensor([bool(p[:64].any()) or bool(p.any()) for p in pieces], dtype=torch.uint8)
        else:
            norms = torch._foreach_norm([p if p.numel() else p.new_zeros(1) for p in pieces], float("inf"))
            flags = (torch.stack(norms) != 0).to(torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        travelling = [bool(flag) for flag in flags.tolist()]
        if all(travelling):
            self._left_out.discard(key)
        else:
            self._left_out.add(key)
        return travelling
