"""Modes `captured` and `captured_fsdp2` of benchmarks/training.py: ark_torch.train.capture over each group.

The rival is eager DistributedDataParallel, or FSDP2, over NCCL (Gloo on CPUs). `captured_NAME` is the captured step of
the same module over group NAME. `free` is the captured step of each rank alone, without communication. Only one
contender at a time holds memory, and all take turns in each round. --ablate adds the step over ark without a part:
`in_place` averages large gradients where they are, not in registered buckets, `together` updates no parameter before
all averages are there. --direct-mb changes the size from which gradients are averaged in place.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import Row
from torch import nn
from training_subject import FREE, Groups, Subject, same_gradients, timed
from training_wrapped import compressing, ddp_step, fsdp2_step, gradient_sum, shard

from ark_torch.distributed import compression
from ark_torch.train import CapturedStep, buckets, capture, optimizers

ABLATIONS: dict[str, tuple[Any, str, Any]] = {  # what replaces which part
    "in_place": (buckets, "DIRECT_OF_REGISTERED", buckets.DIRECT),
    "together": (optimizers, "is_by_parameter", lambda optimizer: False),
}


@contextlib.contextmanager
def without(part: str) -> Iterator[None]:
    if part not in ABLATIONS:
        yield
        return
    module, name, value = ABLATIONS[part]
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def captured_step(
    subject: Subject, model: nn.Module, group: Any, bucket_mb: Any, sharded: bool, bits: int | None
) -> CapturedStep:
    if sharded:
        shard(subject, model, group)
        if bits is not None:
            compression.fsdp(model, compression.State(bits=bits))
    elif bits is not None:
        model = compressing(subject, model, group, bits)

    def loss(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if sharded else subject.autocast():  # FSDP2 has its own mixed-precision policy
            value: torch.Tensor = module(tokens)
        return value

    return capture(model, subject.optimizer(model), loss, group=group, bucket_mb=bucket_mb)


def run_captured(subject: Subject, groups: Groups, mode: str, arguments: argparse.Namespace) -> list[Row]:
    rank, sharded = subject.rank, mode == "captured_fsdp2"
    rival = next(name for name in groups if name in ("nccl", "gloo"))
    alone = [dist.new_group([member], backend="ark") for member in range(rank.ranks)][rank.rank]
    if arguments.direct_mb is not None:
        buckets.DIRECT = buckets.DIRECT_OF_REGISTERED = int(arguments.direct_mb * (1 << 20))
    contenders = {rival: groups[rival]}
    contenders |= {f"captured_{name}": group for name, group in groups.items() if name != FREE}
    compressed = {f"captured_ark_{bits}_bit": bits for bits in arguments.bits}
    contenders |= dict.fromkeys(compressed, groups["ark"])
    parts = () if sharded or not arguments.ablate else tuple(ABLATIONS)
    ablated = {f"captured_ark_{part}": part for part in parts}
    contenders |= dict.fromkeys(ablated, groups["ark"])
    contenders[FREE] = alone
    model = subject.model()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, float] = {}
    sums: dict[str, torch.Tensor] = {}
    for turn in range(arguments.rounds):
        for name, group in contenders.items():
            if turn and not rank.time_for(3):
                continue
            if subject.gpu:
                torch.cuda.reset_peak_memory_stats()
            captured = None
            step: Callable[[], Any]
            if sharded and taken[FREE] + taken[rival]:  # fully_shard modifies a model permanently
                model = subject.model()
            if name == rival and sharded:
                step = fsdp2_step(subject, model, group, None)
            elif name == rival:
                step = ddp_step(subject, model, subject.optimizer(model), group, name, None)
            else:
                mb = "auto" if arguments.auto_buckets else arguments.bucket_mb
                captured = captured_step(subject, model, group, mb, sharded, compressed.get(name))
                step = lambda captured=captured: captured(subject.tokens)  # noqa: E731
            with without(ablated.get(name, "")):
                for _ in range(5):  # the warm-up, the capture, a replay
                    step()
                while captured is not None and captured._sizing is not None and captured.captured:
                    step()
                step()
                if captured is not None and subject.gpu and not captured.captured:
                    raise RuntimeError(f"{name} is not captured: {captured.reason}")
                taken[name].append(timed(subject, step, arguments.steps))
            if turn == 0 and name != FREE:
                sums[name] = gradient_sum(model)
            if subject.gpu:
                peaks[name] = torch.cuda.max_memory_allocated() / 1e9
            if captured is not None:
                captured.close()
            del step, captured
            model.zero_grad()  # gradients were views of buckets
            subject.free_memory()
    rows = []
    for name, rounds in taken.items():
        row: Row = {"contender": name, "step_ms": rank.slowest(rounds)}
        row["gradient_bytes"] = sum(p.numel() * 4 for p in model.parameters())
        if name in peaks:
            row["peak_gb"] = max(rank.share(peaks[name]))
        row |= same_gradients(rank, name, sums)
        if name in compressed:  # sums of rounded gradients mean nothing
            del row["difference"]
        rows.append(row)
    return rows
