"""One training run of the demo over one backend, with its measurements.

A run creates its process group, trains the model with DistributedDataParallel and destroys the group, so that several
runs over different backends can follow each other in the same processes. All randomness comes from the seed and the
rank: two runs that differ only in the backend do the same arithmetic on the same data. Communication is timed after the
runs, where it can be separated from computation (timing.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .data import Corpus, fixed_windows, sample_windows
from .model import GPT, ModelConfig, next_byte_loss
from .timing import CommunicationTimes, time_communication


@dataclass(frozen=True)
class TrainingConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 120
    batch: int = 16  # windows per rank and step
    learning_rate: float = 4e-3
    seed: int = 1234
    evaluate_every: int = 50
    held_out_windows: int = 256
    timing_rounds: int = 20
    compression: dict[str, Any] | None = None  # settings of ark's compression.State; None: exact gradients


@dataclass(frozen=True)
class Place:
    """This rank's place: the result of torch.distributed.rendezvous, and its device."""

    store: dist.Store
    rank: int
    world: int
    device: torch.device


@dataclass
class RunResult:
    backend: str
    losses: list[float]  # training loss of each step, mean over the ranks
    held_out: list[tuple[int, float]]  # (steps done, loss on the held-out windows)
    weights: Tensor  # all parameters, flat, on the CPU
    seconds: float
    bytes_sent: int = 0  # of compressed gradients, by this rank
    bytes_exact: int = 0


Progress = Callable[[int, float, float | None], None]  # step, training loss, new held-out loss or None


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then a half cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(
    config: TrainingConfig, corpus: Corpus, backend: str, run: int, place: Place, progress: Progress
) -> tuple[RunResult, GPT]:
    """Trains over `backend`. All ranks call it together, with a different number for each run of the job."""
    device = place.device
    join_group(backend, f"run{run}", place)
    try:
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(device)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        state = compress(ddp, config.compression) if config.compression is not None else None
        optimizer = torch.optim.AdamW(
            ddp.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config.steps))
        generator = torch.Generator().manual_seed(config.seed * 1000 + place.rank)
        held_out_windows = fixed_windows(corpus.held_out, config.held_out_windows, config.model.context)

        losses = torch.zeros(config.steps)
        held_out = [(0, evaluate(model, held_out_windows, device))]
        started = time.perf_counter()
        for step in range(config.steps):
            tokens = sample_windows(corpus.train, config.batch, config.model.context, generator).to(device)
            loss = next_byte_loss(ddp, tokens)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses[step] = loss.detach()
            new_held_out = None
            if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
                new_held_out = evaluate(model, held_out_windows, device)
                held_out.append((step + 1, new_held_out))
            progress(step + 1, float(losses[step]), new_held_out)
        seconds = time.perf_counter() - started

        losses_on_device = losses.to(device)
        dist.all_reduce(losses_on_device)
        weights = torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])
    finally:
        leave_group()
    result = RunResult(
        backend=backend,
        losses=(losses_on_device.cpu() / place.world).tolist(),
        held_out=held_out,
        weights=weights,
        seconds=seconds,
    )
    if state is not None:
        result.bytes_sent, result.bytes_exact = state.bytes_sent, state.bytes_exact
    return result, model


def compress(ddp: DistributedDataParallel, settings: dict[str, Any]) -> Any:
    """Compresses gradients from here on. The hook's state counts what was sent."""
    from ark_torch.distributed import compression

    state = compression.State(module=ddp, **settings)
    ddp.register_comm_hook(state, compression.hook)
    return state


def join_group(backend: str, name: str, place: Place) -> None:
    # A separate prefix, so that an earlier group's addresses in the store are not used.
    store = dist.PrefixStore(name, place.store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world)


def leave_group() -> None:
    # Gloo's destructor joins its threads while holding Python's lock. A thread that is still dropping the last tensor
    # waits for that lock forever (seen with 2.13). Sleeping releases the lock until they are idle.
    time.sleep(0.1)
    dist.destroy_process_group()


def measure_communication(config: TrainingConfig, backends: list[str], place: Place) -> CommunicationTimes:
    """Times the backends side by side, each as a separate group in these processes."""
    join_group(backends[0], "timing", place)
    try:
        groups = {name: dist.new_group(backend=name) for name in dict.fromkeys(backends)}
        return time_communication(config.model, config.batch, groups, config.timing_rounds, place.device)
    finally:
        leave_group()


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor, device: torch.device) -> float:
    """Returns the held-out loss. Each rank evaluates its share of the windows, and an all_reduce adds the sums."""
    share = windows[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens in share.split(64):
        total[0] += next_byte_loss(model, tokens.to(device)).double() * tokens.size(0)
        total[1] += tokens.size(0)
    dist.all_reduce(total)
    return float(total[0] / total[1])
