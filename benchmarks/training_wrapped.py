"""Modes `ddp` and `fsdp2` of benchmarks/training.py: PyTorch's own wrappers over each contender's group.

The contender without communication is DDP with a hook that leaves buckets alone, and FSDP2 over PyTorch's fake backend.
--bits adds contenders that compress gradients over ark's group (FSDP2 also gathers parameters in 8 bits). A wrapped
model needs much memory, so there is one at a time, created anew for each contender and round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gpu_ranks import Row
from torch import nn
from training_subject import FREE, Groups, Subject, same_gradients, timed

from ark_torch.distributed import compression


def leave_alone(device, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types, not text
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
    done.set_result(bucket.buffer())
    return done


def in_ddp(subject: Subject, model: nn.Module, group: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    ids = [subject.rank.rank] if subject.gpu else None
    return DistributedDataParallel(model, device_ids=ids, process_group=group, gradient_as_bucket_view=True)


def ddp_step(
    subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any, name: str, bits: int | None
) -> Callable[[], Any]:
    wrapped = in_ddp(subject, model, group) if bits is None else compressing(subject, model, group, bits)
    if name == FREE:
        wrapped.register_comm_hook(subject.rank.device, leave_alone)

    def step() -> None:
        optimizer.zero_grad()
        with subject.autocast():
            loss = wrapped(subject.tokens)
        loss.backward()
        optimizer.step()

    return step


def compressing(subject: Subject, model: nn.Module, group: Any, bits: int) -> Any:
    """The model in DistributedDataParallel with the compression hook."""
    wrapped = in_ddp(subject, model, group)
    state = compression.State(bits=bits, rounding="nearest", module=wrapped, group=group)
    wrapped.register_comm_hook(state, compression.hook)
    return wrapped


def shard(subject: Subject, model: nn.Module, group: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(group, subject.rank.device.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp2_step(subject: Subject, model: nn.Module, group: Any, bits: int | None) -> Callable[[], Any]:
    shard(subject, model, group)
    if bits is not None:
        compression.fsdp(model, compression.State(bits=bits))
    optimizer = subject.optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        model(subject.tokens).backward()
        optimizer.step()

    return step


def gradient_sum(model: nn.Module) -> torch.Tensor:
    """Sums the gradients of every tenth parameter, each of the whole tensor."""
    sums = []
    for parameter in list(model.parameters())[::10]:
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        sums.append(whole.double().sum())
    return torch.stack(sums).cpu()


def fake_group() -> Any:
    """Returns a group whose collectives do nothing."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers it)

    return dist.new_group(backend="fake")


def run_wrapped(subject: Subject, groups: Groups, mode: str, arguments: argparse.Namespace) -> list[Row]:
    """Runs the contenders one after the other, in every round, because a wrapped model needs much memory."""
    rank = subject.rank
    compressed = {f"ark_{bits}_bit": bits for bits in arguments.bits}
    groups = groups | dict.fromkeys(compressed, groups["ark"])
    taken: dict[str, list[float]] = {name: [] for name in groups}
    sums: dict[str, torch.Tensor] = {}
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    gradient_bytes = 0
    for turn in range(arguments.rounds):
        for name, group in groups.items():
            if turn and not rank.time_for(3):
                continue
            if mode == "ddp":
                model = model or subject.model()
                optimizer = optimizer or subject.optimizer(model)
                step = ddp_step(subject, model, optimizer, group, name, compressed.get(name))
            else:
                model = subject.model()
                step = fsdp2_step(subject, model, group, compressed.get(name))
            for _ in range(3):
                step()
            taken[name].append(timed(subject, step, arguments.steps))
            if turn == 0 and name != FREE:
                sums[name] = gradient_sum(model)
            gradient_bytes = sum(p.numel() * 4 for p in model.parameters())
            del step
            if mode == "fsdp2":
                model = None
            else:
                model.zero_grad()  # gradients were views of buckets
            subject.free_memory()
    rows = []
    for name, rounds in taken.items():
        row: Row = {"contender": name, "step_ms": rank.slowest(rounds), "gradient_bytes": gradient_bytes}
        row |= same_gradients(rank, name, sums)
        if name in compressed:  # sums of rounded gradients mean nothing; compression_accuracy.py checks them
            del row["difference"]
        rows.append(row)
    return rows
