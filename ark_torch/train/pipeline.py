"""Runs a schedule of torch.distributed.pipelining in train.capture: forward and backward passes of all micro-batches of
this rank's stages, with the sends and receives between stages.

The schedule computes the loss and divides gradients by the number of micro-batches. A batch is (inputs, target) on
every rank; parts that a rank's stages do not read are ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ark_torch.train.models import Subject, device_of, of_several


class Pipeline:
    """A schedule and this rank's stages."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self.stages: list[Any] = list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]
        self.group: Any = self.stages[0].group or dist.group.WORLD
        self._first = any(stage.is_first for stage in self.stages)
        self._last = any(stage.is_last for stage in self.stages)
        can_drop = "return_outputs" in inspect.signature(schedule.step).parameters
        self._options: dict[str, Any] = {"return_outputs": False} if can_drop else {}

    def facts(self) -> dict[str, str]:
        """Facts that must be equal on all ranks."""
        return {
            "the schedule": type(self._schedule).__name__,
            "n_microbatches": str(self._schedule._n_microbatches),
            "the number of stages": str(self.stages[0].num_stages),
        }

    def run(self, batch: Any, device: torch.device) -> Tensor:
        """Runs one step. Returns the mean of the micro-batches' losses; NaN on ranks without the last stage."""
        inputs, target = self._split(batch)
        positional: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        if isinstance(inputs, Mapping):
            keywords = dict(inputs)
        elif self._first:
            positional = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        if not self._last:
            self._schedule.step(*positional, **keywords, **self._options)
            return torch.full((), float("nan"), device=device)
        losses: list[Tensor] = []
        self._schedule.step(*positional, target=target, losses=losses, **keywords, **self._options)
        return torch.stack([loss.detach().reshape(()) for loss in losses]).mean()

    def reset(self) -> None:
        """After an error within a step: drops what the schedule kept of it, which the next step would go on with."""
        self._schedule._internal_losses.clear()
        for stage in self.stages:
            stage.clear_runtime_states()
            for kept in ("bwd_cache", "backward_state", "dw_runner"):
                getattr(stage, kept, {}).clear()

    def clip(self, gradients: list[Tensor], max_norm: float, device: torch.device) -> None:
        """Clips by the norm of all stages' gradients together."""
        own = torch.nn.utils.get_total_norm(gradients).to(device, torch.float32)
        total = own.square()
        dist.all_reduce(total, group=self.group)
        factor = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0)  # as in clip_grad_norm_
        torch._foreach_mul_(gradients, factor)

    def _split(self, batch: Any) -> tuple[Any, Any]:
        if batch is None and not (self._first or self._last):
            return (), None
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(
                "ark: train.capture: a batch for a pipeline schedule is (inputs, target): inputs a tensor or a tuple "
                "for the first stage, or a dict of keyword arguments for all; target for the last stage."
            )
        if self._first and batch[0] is None:
            raise ValueError("ark: train.capture: batch[0] is None on the rank of the first stage: pass its inputs.")
        if self._last and batch[1] is None:
            raise ValueError("ark: train.capture: batch[1] is None on the rank of the last stage: pass the target.")
        return batch[0], batch[1]


def take_apart(schedule: Any, group: Any) -> Subject:
    """Raises ValueError for a schedule that cannot be trained."""
    if group is not None:
        raise ValueError(
            "ark: train.capture: group is given beside a pipeline schedule, whose ranks are those of its stages' "
            "group: leave it out."
        )
    if schedule._loss_fn is None:
        raise ValueError("ark: train.capture: the schedule has no loss_fn, so no backward pass: make it with one.")
    pipeline = Pipeline(schedule)
    module = nn.ModuleList(stage.submod for stage in pipeline.stages)
    subject = Subject(module, device_of(module), pipeline.group, pipeline=pipeline)
    for part in module.modules():
        if isinstance(part, (nn.parallel.DistributedDataParallel, dist.fsdp.FSDPModule)):
            name = "DistributedDataParallel" if isinstance(part, nn.parallel.DistributedDataParallel) else "FSDP2"
            subject.reason = f"a stage of the pipeline is in a {name}, which communicates in another group"
    if any(isinstance(p, DTensor) for p in module.parameters()):
        subject.reason = subject.reason or "a stage of the pipeline has DTensors, which communicate in another group"
    return of_several(subject)
