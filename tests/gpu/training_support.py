"""Shared by the tests of the captured step: the equivalent hand-written loop, and the step's run.

The loop uses the same form of optimizer (fused, rates as tensors), and with several ranks DDP over the same group.
Operators that add gradients in no fixed order are disabled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from on_gpu import ENV, WORLD, device_of, go_on_without_the_last, start
from support import training as small
from support.failures import record
from support.launcher import Job
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.train import CapturedStep, capture

STEPS = 20
KILL_BOUND_S = 5.0
WORLDS = sorted({1, WORLD})


def exact() -> None:
    for name in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def begin(rank: Rank, world: int) -> torch.device:
    """Joins a group if there are several ranks."""
    exact()
    if world > 1:
        return start(rank)
    device = device_of(rank)
    torch.cuda.set_device(device)
    return device


def adam(model: nn.Module, device: torch.device, same_form: bool = False) -> torch.optim.Optimizer:
    if not same_form:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    rate = torch.tensor(1e-2, device=device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)


def batch_of(name: str, step: int, rank: int, device: torch.device, **options: Any) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in small.batch(name, step, rank, **options).items()}


def model_of(name: str, device: torch.device, dropout: float = 0.0) -> nn.Module:
    return small.make(name, dropout).to(device)


def seed(rank: int) -> None:
    torch.manual_seed(100 + rank)


def by_hand(
    rank: Rank, world: int, name: str, device: torch.device, dropout: float = 0.0, max_norm: float | None = None,
    parts: int = 1, loss: Any = small.loss, steps: int = STEPS, scheduled: bool = False, lengths: Any = (12,),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loop that the step replaces."""
    model = model_of(name, device, dropout)
    wrapped: nn.Module = DDP(model, device_ids=[device.index]) if world > 1 else model
    optimizer = adam(model, device, same_form=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if scheduled else None
    seed(rank.rank)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for part in range(parts):
            last = part + 1 == parts
            with wrapped.no_sync() if isinstance(wrapped, DDP) and not last else contextlib.nullcontext():
                length = lengths[step % len(lengths)]
                value = loss(wrapped, batch_of(name, step, 10 * part + rank.rank, device, length=length)) / parts
                value.backward()
                total = total + value.detach()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return torch.stack(losses).cpu(), small.weights(model)


def captured_run(
    rank: Rank, name: str, device: torch.device, dropout: float = 0.0, parts: int = 1, loss: Any = small.loss,
    steps: int = STEPS, scheduled: bool = False, lengths: Any = (12,), host: str = "", wrapped: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    model = model_of(name, device, dropout)
    subject: nn.Module = DDP(model, device_ids=[device.index]) if wrapped else model
    optimizer = adam(model, device)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if scheduled else None
    step = capture(subject, optimizer, loss, accumulate=parts, bucket_mb=0.02, **options)
    seed(rank.rank)
    losses, replays, buffer = [], 0, {}
    for number in range(steps):
        length = lengths[number % len(lengths)]
        batches = []
        for part in range(parts):
            batch = small.batch(name, number, 10 * part + rank.rank, length=length)
            if not host:
                batch = {key: value.to(device) for key, value in batch.items()}
            elif host == "pinned":  # refilled at once, because the step has read it when it returns
                for key, value in batch.items():
                    buffer.setdefault(key, torch.empty_like(value).pin_memory()).copy_(value)
                batch = buffer
            batches.append(batch)
        losses.append(step(batches if parts > 1 else batches[0]))
        replays += step.captured
        if scheduler is not None:
            scheduler.step()
    assert replays >= steps - 3 - 2 * len(lengths), (replays, step.reason)
    result = torch.stack(losses).cpu(), small.weights(model)  # read late, all at once
    step.close()
    return result


def assert_equal_runs(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str = "") -> None:
    assert torch.equal(ours[0], expected[0]), (what, "losses", (ours[0] - expected[0]).abs().max().item())
    assert torch.equal(ours[1], expected[1]), (what, "weights", (ours[1] - expected[1]).abs().max().item())


def until_a_peer_dies(rank: Rank, device: torch.device, call: Callable[[int], Any], step: CapturedStep) -> float:
    """Calls `call` with its number until a peer dies, reports "running" once it replays, and continues without the
    last.
    """
    number = 0
    try:
        while True:
            call(number)
            number += 1
            if number == 10:
                assert step.captured, step.reason
                torch.cuda.synchronize()
                rank.report("running")
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device, 1000)


def kill_the_last(body: Any, *args: Any, case: str) -> None:
    """Kills the last of the ranks that run the body. The others must name it in time, and continue."""
    victim = WORLD - 1
    with Job(body, WORLD, *args, env=ENV) as job:
        job.wait_all("running", timeout=240)
        time.sleep(0.3)
        since = job.kill(victim)
        seconds = []
        for survivor in range(victim):
            text = job.wait_event(survivor, "raised", timeout=60)
            seconds.append(time.monotonic() - since)
            assert f"rank {victim}" in text.partition("] ")[2], f"does not name rank {victim}: {text}"
        record("1", f"CUDA, killed, {case}", f"{KILL_BOUND_S} s", seconds)
        assert max(seconds) < KILL_BOUND_S
        outcomes = job.finish(60, list(range(victim)))
        assert [o.value for o in outcomes] == [sum(range(victim))] * victim, [o.describe() for o in outcomes]
