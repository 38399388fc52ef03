"""The cost of communication: a training step over each backend, one without, and the gradients' all_reduce alone.

They take turns in the same processes, so that noise of the machine affects all equally. A turn starts after a barrier
and lasts as long as its slowest rank. benchmarks/ddp_step.py uses the same function.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .model import GPT, ModelConfig, next_byte_loss

WARM_UP = 3  # DDP rebuilds its buckets after the first step


@dataclass(frozen=True)
class StepTimes:
    """Medians in milliseconds over one backend. A spread is half the interquartile range."""

    step_ms: float  # forward and backward, including the gradients' all_reduce
    step_spread_ms: float
    exposed_ms: float  # time added to a step without communication, turn by turn: what backward does not hide
    gradient_ms: float  # all_reduce of one step's gradients alone


@dataclass(frozen=True)
class CommunicationTimes:
    backends: dict[str, StepTimes]
    local_ms: float  # a step without communication (no_sync)
    gradient_bytes: int
    rounds: int


def time_communication(
    config: ModelConfig, batch: int, groups: dict[str, dist.ProcessGroup], rounds: int, device: torch.device
) -> CommunicationTimes:
    """All ranks call it and get the same result. The default group must exist, and all groups must have all ranks."""
    torch.manual_seed(0)
    models = {
        name: DistributedDataParallel(GPT(config).to(device), process_group=group, gradient_as_bucket_view=True)
        for name, group in groups.items()
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (batch, config.context + 1), generator=generator).to(device)
    first = next(iter(models.values()))
    gradients = torch.zeros(sum(parameter.numel() for parameter in first.parameters()), device=device)

    def step(model: DistributedDataParallel, communicate: bool) -> Callable[[], object]:
        def run() -> None:
            model.zero_grad()
            with nullcontext() if communicate else model.no_sync():
                next_byte_loss(model, tokens).backward()

        return run

    actions: dict[str, Callable[[], object]] = {"local": step(first, False)}
    for name, group in groups.items():
        actions[f"step {name}"] = step(models[name], True)
        actions[f"gradients {name}"] = lambda group=group: dist.all_reduce(gradients, group=group)  # type: ignore[misc]
    names = list(actions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + WARM_UP):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            elapsed = time_between_barriers(actions[name], device)
            if number >= WARM_UP:
                times[name].append(elapsed)
    slowest = {name: slowest_rank(values, device) for name, values in times.items()}
    backends = {}
    for name in groups:
        steps = slowest[f"step {name}"]
        low, middle, high = statistics.quantiles(steps, n=4)
        exposed = statistics.median(slow - fast for slow, fast in zip(steps, slowest["local"], strict=True))
        alone = statistics.median(slowest[f"gradients {name}"])
        backends[name] = StepTimes(middle, (high - low) / 2, exposed, alone)
    local = statistics.median(slowest["local"])
    return CommunicationTimes(backends, local, gradients.numel() * gradients.element_size(), rounds)


def time_between_barriers(action: Callable[[], object], device: torch.device) -> float:
    """Returns the milliseconds that the action takes on this rank when all ranks start it together."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def slowest_rank(times: list[float], device: torch.device) -> list[float]:
    """Returns, for each turn, the time of its slowest rank."""
    slowest: Tensor = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest.tolist()]
