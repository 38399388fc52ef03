"""when="faster": each bucket's first calls are timed both ways, and ranks agree on the way that it goes from then on.

A call that is timed sends both ways, so that both see the same bytes at the same moment; its result is the compressed
one. What counts is the slowest rank's best time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
CALLS = 5  # the first one, which allocates, does not count


class Contest:
    """Verdicts by bucket."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        self._verdicts: dict[tuple[int, ...], bool] = {}

    def verdict(self, key: tuple[int, ...]) -> bool | None:
        """Whether compressed is faster; None while that is measured."""
        return self._verdicts.get(key)

    def measure(
        self, key: tuple[int, ...], compressed: Callable[[], Tensor], exact: Callable[[], object], tensor: Tensor,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, tuple[float, float] | None]:  # fmt: skip
        """Collective: the compressed result; with the last call the times (compressed, exact) in seconds, too."""
        result, shorter = _timed(compressed, tensor, group)
        _, longer = _timed(exact, tensor, group)
        times = self._times.setdefault(key, [])
        times.append((shorter, longer))
        if len(times) < CALLS:
            return result, None
        best = torch.tensor([min(column) for column in zip(*times[1:], strict=True)], device=tensor.device)
        dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
        of_compressed, of_exact = best.tolist()
        self._verdicts[key] = of_compressed < of_exact
        return result, (of_compressed, of_exact)


def _timed(run: Callable[[], T], tensor: Tensor, group: dist.ProcessGroup) -> tuple[T, float]:
    """From when all ranks are there until this one has the result."""
    dist.all_reduce(torch.zeros(1, device=tensor.device), group=group)
    _settle(tensor)
    started = time.perf_counter()
    result = run()
    _settle(tensor)
    return result, time.perf_counter() - started


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
