"""One training run of the demo over one backend, and what it measures about itself.

A run makes its process group, trains the model with DistributedDataParallel and destroys the group again, so that
several runs over different backends can follow one another in the same processes and be compared. All randomness
comes from the seed and the rank: two runs that differ in the backend alone do the same arithmetic on the same data.
Communication is timed after the training, between barriers, where it can be told apart from the computation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .data import Corpus, fixed_windows, sample_windows
from .model import GPT, ModelConfig, next_byte_loss


@dataclass(frozen=True)
class TrainingConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 300
    batch: int = 16  # windows a rank and step
    learning_rate: float = 4e-3
    seed: int = 1234
    evaluate_every: int = 50
    held_out_windows: int = 256
    timing_rounds: int = 15


@dataclass(frozen=True)
class Place:
    """Where this rank stands: what torch.distributed.rendezvous returned, and its device."""

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
    step_ms: float  # forward and backward with the gradients' all_reduce, median
    local_step_ms: float  # the same without communication (no_sync), median
    exposed_ms: float  # the median difference of the two, round by round: communication that backward does not hide
    gradient_ms: float  # all_reduce of one step's gradients with nothing beside it, median
    gradient_bytes: int


Progress = Callable[[int, float, float | None], None]  # step, training loss, held-out loss when it is new


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth, then half a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def train(
    config: TrainingConfig, corpus: Corpus, backend: str, run: int, place: Place, progress: Progress
) -> tuple[RunResult, GPT]:
    """Trains over `backend`; all ranks call it together, with another number for each run of the job."""
    device = place.device
    # A prefix of its own: what an earlier group left in the store must not be taken for this one's addresses.
    store = dist.PrefixStore(f"run{run}", place.store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world)
    try:
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(device)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
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
        step_ms, local_step_ms, exposed_ms = time_steps(config, ddp, corpus, generator, device)
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        alone = [time_between_barriers(lambda: dist.all_reduce(gradients), device) for _ in range(config.timing_rounds)]
        gradient_ms = statistics.median(slowest_rank(alone, device))
        # Gloo's destructor joins its threads while Python's lock is held; one that is still dropping the last tensor
        # waits for that lock, for ever (seen with 2.13). Sleeping gives the lock away until they are idle.
        time.sleep(0.1)
    finally:
        dist.destroy_process_group()
    result = RunResult(
        backend=backend,
        losses=(losses_on_device.cpu() / place.world).tolist(),
        held_out=held_out,
        weights=weights,
        seconds=seconds,
        step_ms=step_ms,
        local_step_ms=local_step_ms,
        exposed_ms=exposed_ms,
        gradient_ms=gradient_ms,
        gradient_bytes=gradients.numel() * gradients.element_size(),
    )
    return result, model


@torch.no_grad()
def evaluate(model: GPT, windows: Tensor, device: torch.device) -> float:
    """Held-out loss; each rank takes its share of the windows and the sums meet in an all_reduce."""
    share = windows[dist.get_rank() :: dist.get_world_size()]
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for tokens in share.split(64):
        total[0] += next_byte_loss(model, tokens.to(device)).double() * tokens.size(0)
        total[1] += tokens.size(0)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def time_steps(
    config: TrainingConfig,
    ddp: DistributedDataParallel,
    corpus: Corpus,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[float, float, float]:
    """Median milliseconds of forward plus backward, with and without communication, taken in turns; and how much
    longer the one took than the other."""
    tokens = sample_windows(corpus.train, config.batch, config.model.context, generator).to(device)

    def step() -> None:
        ddp.zero_grad()
        next_byte_loss(ddp, tokens).backward()

    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(config.timing_rounds):
        for synchronised in (False, True):
            with nullcontext() if synchronised else ddp.no_sync():
                times[synchronised].append(time_between_barriers(step, device))
    with_it, without_it = slowest_rank(times[True], device), slowest_rank(times[False], device)
    differences = [slow - fast for slow, fast in zip(with_it, without_it, strict=True)]
    return statistics.median(with_it), statistics.median(without_it), statistics.median(differences)


def time_between_barriers(action: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that the action takes on this rank when all ranks start it together."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def slowest_rank(times: list[float], device: torch.device) -> list[float]:
    """Each round counts as long as its slowest rank took."""
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return list(slowest.tolist())
