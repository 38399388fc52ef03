"""Chooses the size of gradient buckets by measurement: small ones begin sooner, large ones take less time each.

After the first capture, calls replay graphs with buckets of each candidate size in turn. Every replay is a step of the
training like any other, with the same bits. The slowest rank's time counts, so that all ranks choose alike.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ark_torch.train import buckets
from ark_torch.train.agreement import Agreement
from ark_torch.train.models import Subject

log = logging.getLogger("ark_torch")

MB = 1 << 20
CANDIDATES_MB = (50.0, 25.0, 100.0)  # the first one stays unless another gains
GAIN = 0.98  # of the first one's time, that another must need at most
REPLAYS = 6  # of a candidate; the first one is not counted


class _Stopwatch:
    """Time between two places in the device's work, or on the host for devices without streams."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._times: list[Any] = []

    def mark(self) -> None:
        if self._on_device:
            self._times.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._times[-1].record()
        else:
            self._times.append(time.perf_counter())

    def milliseconds(self) -> float:
        """Waits for the second mark."""
        start, end = self._times
        if not self._on_device:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))


class Sizing:
    """The candidates, and what they took."""

    def __init__(self, agreement: Agreement, device: torch.device) -> None:
        self._agreement, self._device = agreement, device
        self._taken: dict[float, float] = {}  # MB -> ms
        self._samples: list[tuple[Any, int, _Stopwatch]] = []
        self._kind: Any = None  # of calls whose times are compared
        self.mb = CANDIDATES_MB[0]
        self.done = False

    def replay(self, kind: Any, steps: int, replay: Callable[[], None]) -> None:
        """Calls replay(), a call of so many steps on batches of this kind, and takes its time."""
        watch = _Stopwatch(self._device)
        watch.mark()
        replay()
        watch.mark()
        self._samples.append((kind, steps, watch))

    def is_over(self) -> bool:
        """Whether the candidate has had its replays. Ranks agree, because they replay in the same calls."""
        return len(self._samples) >= REPLAYS

    def next(self) -> None:
        """Collective: notes the candidate's time, and goes on to the next one or, when done, to the fastest."""
        counted = self._samples[1:]
        if self._kind is None:
            self._kind = counted[0][0]
        own = [watch.milliseconds() / steps for kind, steps, watch in counted if kind == self._kind]
        nanoseconds = self._agreement.everyone(round(statistics.median(own) * 1e6) if own else -1)
        self._samples.clear()
        if -1 in nanoseconds:  # batches of other shapes: times do not compare
            self.mb, self.done = CANDIDATES_MB[0], True
            return
        self._taken[self.mb] = max(nanoseconds) / 1e6
        left = [mb for mb in CANDIDATES_MB if mb not in self._taken]
        if left:
            self.mb = left[0]
            return
        self.done = True
        first = CANDIDATES_MB[0]
        fastest = min(self._taken, key=lambda mb: self._taken[mb])
        self.mb = fastest if self._taken[fastest] <= GAIN * self._taken[first] else first
        if self._agreement.rank == 0:
            shown = ", ".join(f"{mb:g} MB {ms:.2f} ms" for mb, ms in self._taken.items())
            log.info("train.capture: buckets of %g MB, by measurement (a step by buckets of %s)", self.mb, shown)


def sizing_for(subject: Subject, agreement: Agreement, device: torch.device, wants_registered: bool) -> Sizing | None:
    """None where sizes cannot matter, or would change bits: too few bytes in buckets, or compressed ones."""
    direct = buckets.direct_from(subject.group, device, wants_registered, buckets.DIRECT)
    in_buckets = sum(p.nbytes for _, p in subject.averaged() if p.nbytes < direct)
    if subject.compression is not None or in_buckets < 2 * min(CANDIDATES_MB) * MB:
        return None
    return Sizing(agreement, device)
