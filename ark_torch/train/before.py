"""Saves the host state that a capture changes, and restores it if the capture fails."""

from __future__ import annotations

import random
from typing import Any

import torch

from ark_torch.train.step import Step


class Before:
    """The host state of a model, its gradients, its optimizer and its scaler between two steps."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._gradients = [(p, p.grad) for _, p in step.subject.parameters()]
        if step.subject.device.type == "cuda":
            # The next step discards the gradients of the last one, so the capture may use their memory, except buckets.
            discarded = set(step.buckets.direct) if step.buckets is not None else {p for p, _ in self._gradients}
            self._gradients = [(p, None if p in discarded else g) for p, g in self._gradients]
            step.clear_gradients()
        self._random = random.getstate()
        self._generator = torch.get_rng_state()
        scaler: Any = step.scaler
        self._scaler = dict(scaler._per_optimizer_states) if scaler is not None and scaler.is_enabled() else None

    def restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        random.setstate(self._random)
        torch.set_rng_state(self._generator)

    def restore_host(self) -> None:
        if self._scaler is not None:
            states = self._step.scaler._per_optimizer_states
            states.clear()
            states.update(self._scaler)
        for name in ("grad_scale", "found_inf"):
            if hasattr(self._step.optimizer, name):
                delattr(self._step.optimizer, name)
