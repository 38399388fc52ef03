"""A model in stages, the schedules of torch.distributed.pipelining that run it, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional

WIDTH, ROWS, MICRO_BATCHES = 24, 16, 8
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def layers(count: int, device: torch.device) -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device) for _ in range(count)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, target = torch.randn(2, ROWS, WIDTH, generator=generator)
    return inputs, target


def optimizer(parts: list[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-2)


class Staged:
    """This rank's part: `schedule`, and its modules by number."""

    def __init__(self, name: str, rank: int, ranks: int, device: torch.device, group: Any = None) -> None:
        each = 1 if name in ("GPipe", "1F1B") else 2
        self.count = ranks * each
        numbers = [rank + ranks * i for i in range(each)]
        if name == "ZBVZeroBubble":  # V-shaped: the first rank also has the last stage
            numbers = [rank, self.count - 1 - rank]
        every = layers(self.count, device)
        self.own = {number: every[number] for number in numbers}
        stages = [
            pipelining.PipelineStage(part, number, self.count, device, group=group) for number, part in self.own.items()
        ]
        made = getattr(pipelining, f"Schedule{name}")
        self.schedule = made(
            stages if each > 1 else stages[0], n_microbatches=MICRO_BATCHES, loss_fn=functional.mse_loss
        )
        self.has_last = self.count - 1 in self.own
        self.has_first = 0 in self.own

    def weights(self) -> dict[int, list[Tensor]]:
        return {number: [p.detach().cpu() for p in part.parameters()] for number, part in self.own.items()}


def in_one_process(
    count: int, steps: int, device: torch.device, max_norm: float | None = None
) -> tuple[list[float], list[list[Tensor]]]:
    """Returns losses, and each layer's weights."""
    parts = layers(count, device)
    made, losses = optimizer(parts), []
    for step in range(steps):
        inputs, target = (tensor.to(device) for tensor in batch(step))
        made.zero_grad()
        each = [
            functional.mse_loss(nn.Sequential(*parts)(x), y)
            for x, y in zip(inputs.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES), strict=True)
        ]
        loss = torch.stack(each).mean()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], max_norm)
        made.step()
        losses.append(loss.item())
    return losses, [[p.detach().cpu() for p in part.parameters()] for part in parts]


def by_schedule(staged: Staged, steps: int, device: torch.device) -> None:
    """The training loop that people write."""
    made = optimizer(list(staged.own.values()))
    for step in range(steps):
        inputs, target = (tensor.to(device) for tensor in batch(step))
        made.zero_grad()
        first = (inputs,) if staged.has_first else ()
        last: dict[str, Any] = {"target": target, "losses": []} if staged.has_last else {}
        staged.schedule.step(*first, **last)
        made.step()


def check(
    run: Callable[[Any], Tensor], staged: Staged, steps: int, device: torch.device, max_norm: float | None = None
) -> None:
    """Trains with run(batch). Compares losses and weights with one process, which adds in another order."""
    losses, weights = in_one_process(staged.count, steps, device, max_norm)
    for step in range(steps):
        loss = run(batch(step))
        if staged.has_last:
            torch.testing.assert_close(loss.item(), losses[step], rtol=1e-5, atol=1e-6)
        else:
            assert loss.isnan()
    for number, part in staged.weights().items():
        torch.testing.assert_close(part, weights[number], rtol=1e-4, atol=1e-5)
