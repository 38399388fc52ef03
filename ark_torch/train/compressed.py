"""Compressed averages of a step's gradient buckets, by the state of a DistributedDataParallel's compression hook.

The buckets of captured steps replace DDP's reducer and its hook. What travels is the same: codes of a few bits per
element, with the state's rules and residuals. Nothing here waits for the device, so a graph can capture it: layers that
are zero everywhere travel, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ark_torch.distributed.compression import State, exchange
from ark_torch.distributed.compression.plan import plan_of_bucket


class CompressedSums:
    """Averages flat buckets with few bits per element, as `state` says."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._compresses = False
        self._each_step = (0, 0)  # bytes sent, and what exact averages would have sent

    def begin(self, device: torch.device) -> None:
        """Collective: compares the ranks' settings. Raises ValueError if they differ, or the group is not ark's."""
        self._compresses = self._state.begin(self._state.group, device)

    @contextlib.contextmanager
    def recording(self, steps: int) -> Iterator[None]:
        """While a graph of so many steps is captured: nothing is sent, so the state's counters stay."""
        state = self._state
        before = (state.bytes_sent, state.bytes_exact)
        try:
            yield
            self._each_step = ((state.bytes_sent - before[0]) // steps, (state.bytes_exact - before[1]) // steps)
        finally:
            state.bytes_sent, state.bytes_exact = before

    def count_replay(self, steps: int) -> None:
        """After a replay of so many steps: adds what it sends to the counters, and reports NaN of earlier replays."""
        self._state.watch.look(self._state.group.rank())
        self._state.bytes_sent += steps * self._each_step[0]
        self._state.bytes_exact += steps * self._each_step[1]

    def average(self, flat: Tensor, parameters: Sequence[Tensor]) -> bool:
        """Averages the bucket, which holds these parameters' gradients one after the other. Returns false, with nothing
        done, if the bucket is exact as a whole."""
        state = self._state
        if not self._compresses:
            return False
        plan = plan_of_bucket(state, parameters, flat)
        if plan.exact:
            return False
        if plan.slot is not None:
            state.watch.look(state.group.rank(), plan.slot)
        flat.copy_(exchange.all_reduce(state, flat, plan))
        return True
