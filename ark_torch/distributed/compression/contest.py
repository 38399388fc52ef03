"""when="faster": times each bucket's first calls both ways; the ranks then agree on the faster way for that bucket.

A timed call sends both ways, so that both see the same data at the same moment, and returns the compressed result. The
slowest rank's best time decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
CALLS = 5  # the first call allocates and does not count


class Contest:
    """The verdict of each bucket."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        self._verdicts: dict[tuple[int, ...], bool] = {}

    def verdict(self, key: tuple[int, ...]) -> bool | None:
        """Whether compression is faster; None while measuring."""
        return self._verdicts.get(key)

    def measure(
        self, key: tuple[int, ...], compressed: Callable[[], Tensor], exact: Callable[[], object], tensor: Tensor,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, tuple[float, float] | None]:  # fmt: skip
        """Collective: the compressed result, and on the last call also the times (compressed, exact) in seconds."""
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
    """Result and seconds, from the arrival of all ranks until this rank has the result."""
    dist.all_reduce(torch.zeros(1, device=tensor.device), group=group)
    _settle(tensor)
    started = time.perf_counter()
    result = run()
    _settle(tensor)
    return result, time.perf_counter() - started


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
