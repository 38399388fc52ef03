"""The entry point `capture(model, optimizer, loss)`, with its checks of arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ark_torch.train import fsdp, models, optimizers
from ark_torch.train.captured import CapturedStep
from ark_torch.train.ema import Averaging
from ark_torch.train.step import Step

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def capture(
    model: nn.Module | PipelineScheduleSingle | PipelineScheduleMulti,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    max_norm: float | None = None,
    steps: int = 1,
    accumulate: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    after: Callable[[nn.Module], Any] | AveragedModel | None = None,
    group: Any = None,
    warmup: int = 3,
    max_shapes: int = 8,
    bucket_mb: float | Literal["auto"] = "auto",
    registered: bool = True,
) -> CapturedStep:
    """A training step in a single launch by the host: `step = capture(model, optimizer, loss)`, then `step(batch)`.

    A step is zero_grad, forward, backward, averaging of gradients over the group, clipping, optimizer.step() and the
    scaler's update. The first `warmup` calls are eager steps; later ones replay a CUDA graph of the same work. On CPUs
    every call is eager. Every call trains: weights are the same as in an ordinary loop, bit for bit if ark carries the
    gradients and the number of ranks is a power of two (DistributedDataParallel divides before it adds).

    capture() is collective over the group, like DistributedDataParallel's constructor: it compares what the ranks
    train (parameters, options, the optimizer's groups and rates), and gives a plain module the weights and buffers of
    the group's first rank. So does the next call after parameters were frozen, unfrozen or replaced on some rank: it
    begins anew on all ranks, or raises on all.

    Args:
        model: a module on one device. Plain, or in a DistributedDataParallel: gradients are averaged in buckets of this
            package, and the wrapper stays usable. With fully_shard, or of DTensors: it communicates by itself
            (gradients of DTensors are averaged over the `group` argument, which holds the data-parallel ranks). Or a
            schedule of torch.distributed.pipelining (GPipe, 1F1B, interleaved, zero-bubble) with a loss_fn: a batch is
            then (inputs, target) on every rank, the loss is NaN on ranks without the last stage, max_norm applies to
            all stages together, and optimizer has the parameters of this rank's stages.
            `ark_torch.nn.ShardedEmbeddingBags` in a plain module average their own gradients; on CUDA devices they need
            max_values=.
        optimizer: an optimizer of torch.optim. On a CUDA device it is made capturable, fused if its class supports
            that, and its learning rates become device tensors, which schedulers fill in place between calls.
        loss: `loss(model, batch)` returns a one-element tensor. It calls the model that it is given, does not make the
            host wait (`.item()`, `print(tensor)`, `if tensor:`), and runs the same operators in each call. None for a
            schedule, which has its own. It may ask for gradients with respect to tensors of the batch
            (`x.requires_grad_()`, or a batch tensor that requires them): it is given leaves of its own, so read them in
            loss(), as by torch.autograd.grad(). The `.grad` of the caller's tensors stays as it is, and no gradient
            flows back to what made them.
        max_norm: maximum norm of all gradients together, to which they are clipped; None: no clipping.
        steps: if more than 1, a call takes a list of up to this many batches and runs as many steps in one launch.
        accumulate: if more than 1, a batch is a list of this many micro-batches; the loss is their mean, and gradients
            are averaged over ranks with the last one.
        scaler: a torch.amp.GradScaler; on a CUDA device only for optimizers with a fused form (Adam, AdamW, SGD).
        after: called as `after(model)` at the end of each step, within the graph; or an AveragedModel to update.
        group: the group over which gradients are averaged; None: the default group, if there is one. A group of this
            rank alone averages nothing.
        warmup: number of eager calls before the first capture, at least 2; each further batch shape gets one.
        max_shapes: maximum number of batch shapes with a graph; others run eagerly, with a warning.
        bucket_mb: bucket size in MB of gradients. "auto": the fastest of 25, 50 and 100 MB, which the first replays are
            for; 50 MB on CPUs, for compressed gradients, and where few gradients are small.
        registered: whether buckets use memory that the group's ranks map, if ark carries CUDA tensors.

    Returns:
        A CapturedStep. `step(batch)` returns the loss as a new 0-d tensor on the model's device (with steps > 1 of
        shape (batches,)), which may be read at any later time; nothing waits for the device until then.

    Raises:
        TypeError, ValueError: an argument that cannot be trained, or ranks that differ; the message names what and
            where.
        RuntimeError: in a call, what changed since capture() so that the step cannot go on; the message names it.

    Example:
        >>> step = ark_torch.train.capture(model, optimizer, lambda model, batch: model(**batch).loss, max_norm=1.0)
        >>> for batch in loader:
        ...     loss = step(batch)
        ...     scheduler.step()
        >>> print(loss.item(), step.captured, step.reason)
    """
    of_pipeline = _is_schedule(model)
    _check(loss, max_norm, steps, accumulate, scaler, after, warmup, max_shapes, bucket_mb, of_pipeline)
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):  # Accelerate's wrapper, whose step() does things that a graph cannot
        optimizer = inner
    if of_pipeline:
        from ark_torch.train import pipeline

        subject = pipeline.take_apart(model, group)
    else:
        subject = models.take_apart(model, group)
    fsdp.reshard(subject.sharded)  # the optimizer has the shards
    models.check_apart(subject, max_norm is not None, scaler is not None and scaler.is_enabled())
    optimizers.check(optimizer, list(subject.module.parameters()))
    averaging = Averaging(after) if isinstance(after, AveragedModel) else None
    step = Step(subject, optimizer, loss, max_norm, scaler, None if averaging else after, averaging)
    mb = None if bucket_mb == "auto" else float(bucket_mb)
    return CapturedStep(step, steps, accumulate, warmup, max_shapes, mb, registered)


def _is_schedule(model: Any) -> bool:
    """Avoids the half-second import: if the model is a schedule, its module is already loaded."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    return schedules is not None and isinstance(model, schedules._PipelineSchedule)


def _check(
    loss: Any,
    max_norm: Any,
    steps: Any,
    accumulate: Any,
    scaler: Any,
    after: Any,
    warmup: Any,
    max_shapes: Any,
    mb: Any,
    of_pipeline: bool,
) -> None:
    for name, value, least in (
        ("steps", steps, 1), ("accumulate", accumulate, 1), ("warmup", warmup, 2), ("max_shapes", max_shapes, 1),
    ):  # fmt: skip
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"ark: train.capture: {name} is {value!r}: pass a whole number from {least} on.")
    for name, value in (("max_norm", max_norm), ("bucket_mb", mb)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        unset = "auto" if name == "bucket_mb" else None
        if not (value is unset or value == unset) and not (number and 0 < value < float("inf")):
            raise ValueError(f"ark: train.capture: {name} is {value!r}: pass a number above 0, or {unset!r}.")
    if of_pipeline:
        beside = {"loss": loss is not None, "accumulate": accumulate != 1, "scaler": scaler is not None}
        for name in (name for name, given in beside.items() if given):
            raise ValueError(
                f"ark: train.capture: {name} is given beside a pipeline schedule, which computes the loss and splits "
                "batches by itself: leave it out."
            )
    elif not callable(loss):
        raise TypeError(f"ark: train.capture: loss is a {type(loss).__name__}: pass a function loss(model, batch).")
    if after is not None and not callable(after):
        raise TypeError(f"ark: train.capture: after is a {type(after).__name__}: pass a function or an AveragedModel.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"ark: train.capture: scaler is a {type(scaler).__name__}: pass a torch.amp.GradScaler.")
