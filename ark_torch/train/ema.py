"""Updates an averaged model within a captured step, although torch.optim.swa_utils.AveragedModel counts on the host.

update_parameters() checks the counter for the first update and copies it to the device; a graph can hold neither. A
capture passes the same functions a device tensor as counter, which the graph increments. Each replay advances the
host's counter too, so that checkpoints are the same.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel


class Averaging:
    """The `after=` argument, if it is an AveragedModel."""

    def __init__(self, averaged: AveragedModel) -> None:
        self._averaged = averaged
        self._count: Tensor | None = None  # the graph's counter
        self._expected = 0  # its value after all launched work

    def eager(self, model: nn.Module) -> None:
        self._averaged.update_parameters(model)

    @property
    def module(self) -> nn.Module:
        """The averaged weights."""
        module: nn.Module = self._averaged.module
        return module

    @property
    def times(self) -> int:
        return int(self._averaged.n_averaged)

    def why_not(self) -> str:
        if self._averaged.n_averaged.device.type != "cpu":
            return "the AveragedModel counts on the GPU, and asks its counter at each step: make it without device="
        return ""

    @torch.no_grad()
    def captured(self, model: nn.Module) -> None:
        """update_parameters() from the second update on."""
        averaged: Any = self._averaged
        count = self._counter(next(model.parameters()).device)
        both = itertools.chain if averaged.use_buffers else (lambda parameters, buffers: parameters)
        ours = [p.detach() for p in both(averaged.module.parameters(), averaged.module.buffers())]
        theirs = [p.detach() for p in both(model.parameters(), model.buffers())]
        if averaged.multi_avg_fn is not None:
            for dtype in dict.fromkeys(p.dtype for p in ours):
                of_dtype = [(a, b.to(a.device)) for a, b in zip(ours, theirs, strict=True) if a.dtype == dtype]
                averaged.multi_avg_fn([a for a, _ in of_dtype], [b for _, b in of_dtype], count)
        else:
            function = averaged.avg_fn or swa_utils.get_swa_avg_fn()  # type: ignore[no-untyped-call]
            for a, b in zip(ours, theirs, strict=True):
                a.copy_(function(a, b.to(a.device), count))
        if not averaged.use_buffers:
            for a, b in zip(averaged.module.buffers(), model.buffers(), strict=True):
                a.detach().copy_(b.detach())
        count += 1

    def before_replay(self, steps: int) -> None:
        """Advances the host's counter; if a checkpoint has set it since, updates the graph's."""
        now = self.times
        if now != self._expected and self._count is not None:
            self._count.fill_(now)
        self._expected = now + steps
        self._averaged.n_averaged.fill_(self._expected)

    def prepare(self, device: torch.device) -> None:
        """Creates the counter before a capture, which executes nothing."""
        self._counter(device)

    def _counter(self, device: torch.device) -> Tensor:
        if self._count is None:
            self._expected = self.times
            self._count = torch.tensor(self._expected, dtype=torch.long, device=device)
        return self._count
