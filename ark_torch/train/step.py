"""A training step: what runs eagerly and what a graph captures.

zero_grad, then forward and backward for each micro-batch with gradients averaged in the last one, then clipping, the
optimizer's step, the scaler's update and the user's `after`. Nothing here waits for the device.

An autocast region around the call covers only loss(), as PyTorch advises: it would otherwise cast operators of the
backward pass too (sums of bias gradients to float32, for example). Weight casts are dropped with each forward pass: a
region spanning several steps would otherwise keep those of old weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ark_torch.train import optimizers
from ark_torch.train.backward import Watch
from ark_torch.train.buckets import Buckets
from ark_torch.train.ddp import Standby
from ark_torch.train.ema import Averaging
from ark_torch.train.models import Subject
from ark_torch.train.shards import on_shards


@dataclass
class Step:
    """One step of a model with an optimizer."""

    subject: Subject
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor] | None  # None: a pipeline's schedule has it
    max_norm: float | None = None
    scaler: Any = None
    after: Callable[[Any], Any] | None = None
    averaging: Averaging | None = None
    buckets: Buckets | None = None
    standby: Standby | None = None

    @property
    def scales(self) -> bool:
        """Whether losses are scaled."""
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def run(self, micro_batches: Sequence[Any], watch: Watch | None = None) -> Tensor:
        """Runs the step. Returns the mean loss of the micro-batches, a new detached 0-d tensor.

        watch: of the capture that the step is run in; None: it is run eagerly.
        """
        self._in_step(True)
        try:
            return self._run(micro_batches, watch)
        except BaseException:
            if self.buckets is not None:
                self.buckets.abandon()  # also within a capture: its side streams must rejoin
            raise
        finally:
            self._in_step(False)

    def _in_step(self, inside: bool) -> None:
        if self.standby is not None:
            self.standby.in_step = inside

    def _run(self, micro_batches: Sequence[Any], watch: Watch | None) -> Tensor:
        self.clear_gradients()
        self.subject.before_forward()
        total = self._gradients(micro_batches, watch)
        with self._without_autocast():
            self._update()
        if self.averaging is not None:
            (self.averaging.eager if watch is None else self.averaging.captured)(self.subject.module)
        elif self.after is not None:
            self.after(self.subject.module)
        return total

    def _gradients(self, micro_batches: Sequence[Any], watch: Watch | None) -> Tensor:
        """Runs the forward and backward passes; returns the loss."""
        forward = watch.forward if watch is not None else contextlib.nullcontext
        backward = watch.backward if watch is not None else contextlib.nullcontext
        if self.subject.pipeline is not None:
            torch.clear_autocast_cache()
            try:
                with forward(), backward():
                    return self.subject.pipeline.run(micro_batches[0], self.subject.device)
            finally:
                torch.clear_autocast_cache()
        count = len(micro_batches)
        total: Tensor | None = None
        for number, batch in enumerate(micro_batches):
            last = number == count - 1
            if self.buckets is not None:
                self.buckets.begin(last)
            with self.subject.communicates(last):
                with forward():
                    loss = self._forward(batch)
                with self._without_autocast(), backward():
                    part = loss if count == 1 else loss / count
                    scaled = part if self.scaler is None else self.scaler.scale(part)
                    scaled.backward()  # type: ignore[no-untyped-call]
            if self.buckets is not None:
                self.buckets.end(waits=not self._updates_apart())
            part = part.detach().reshape(())
            total = part.clone() if total is None else total + part
            del loss, scaled
        assert total is not None
        return total

    def _forward(self, batch: Any) -> Tensor:
        assert self.loss is not None
        torch.clear_autocast_cache()  # drops casts made before the call
        try:
            return self._checked(self.loss(self.subject.module, batch))
        finally:
            torch.clear_autocast_cache()

    def _without_autocast(self) -> torch.autocast:
        return torch.autocast(self.subject.device.type, enabled=False)

    def clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for _, parameter in self.subject.parameters():
            parameter.grad = None

    def _update(self) -> None:
        if self.max_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            parameters = [p for _, p in self.subject.parameters()]
            if self.subject.pipeline is None:
                torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)
            else:
                gradients = [p.grad for p in parameters if p.grad is not None]
                self.subject.pipeline.clip(gradients, self.max_norm, self.subject.device)
        if self.scaler is None:
            self._update_parameters()
        else:
            with on_shards(self.optimizer):
                self.scaler.step(self.optimizer)
            self.scaler.update()

    def _updates_apart(self) -> bool:
        """Whether two updates, each of some parameters, are the same as one of all."""
        return self.max_norm is None and self.scaler is None and optimizers.is_by_parameter(self.optimizer)

    def _update_parameters(self) -> None:
        """Updates parameters whose gradients are averaged first, then those whose averages are still under way."""
        late = set(self.buckets.late()) if self.buckets is not None else set()
        if not late:
            with on_shards(self.optimizer):
                self.optimizer.step()
            return
        assert self.buckets is not None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        try:
            for last in (False, True):
                if last:
                    self.buckets.finish()
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient if (parameter in late) == last else None
                with on_shards(self.optimizer):
                    self.optimizer.step()
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _checked(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor):
            has = ": return its .loss" if isinstance(getattr(loss, "loss", None), Tensor) else ""
            raise TypeError(f"ark: train.capture: loss() returned a {type(loss).__name__}, no tensor{has}.")
        if loss.numel() != 1:
            raise ValueError(
                f"ark: train.capture: loss() returned a tensor of shape {tuple(loss.shape)}: return its mean or sum."
            )
        if loss.is_complex():
            raise ValueError(
                "ark: train.capture: loss() returned a complex tensor, which has no minimum: return a real one, as by "
                ".abs() or .real."
            )
        if not loss.requires_grad:
            raise ValueError(
                "ark: train.capture: loss() returned a tensor without a graph behind it: compute it from the model "
                "that it is given, without detach() or no_grad()."
            )
        return loss
