"""Compares DistributedDataParallel with one process: plain, many buckets, unused parameters, accumulation, hooks."""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4


def train(model: DDP, rank: int, world: int, accumulate: bool = False, steps: int = STEPS) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, y = (common.mine(t, rank, world) for t in common.batch(step))
        optimizer.zero_grad()
        if accumulate:
            half = x.shape[0] // 2
            with model.no_sync():
                (nn.functional.mse_loss(model(x[:half]), y[:half]) / 2).backward()
            (nn.functional.mse_loss(model(x[half:]), y[half:]) / 2).backward()
        else:
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(nn.functional.mse_loss(model(x), y).item() for x, y in (common.batch(s) for s in range(STEPS)))


class Branches(nn.Module):
    """Uses one branch per step. The other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, which: bool) -> torch.Tensor:
        return self.one(x) if which else self.two(x)


def main() -> None:
    rank, world = common.start()
    alone = common.train_alone(STEPS)
    for options in ({}, {"bucket_cap_mb": 0.001}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        model = DDP(common.make_model(), **options)
        train(model, rank, world)
        common.assert_same_weights(model.module.state_dict(), alone)
    model = DDP(common.make_model())
    train(model, rank, world, accumulate=True)
    common.assert_same_weights(model.module.state_dict(), alone)

    model = DDP(Branches().to(common.DEVICE), find_unused_parameters=True)
    for step in range(4):
        x, y = (common.mine(t, rank, world) for t in common.batch(step))
        nn.functional.mse_loss(model(x, step % 2 == 0), y).backward()
    whole = Branches().to(common.DEVICE)
    for step in range(4):
        x, y = common.batch(step)
        nn.functional.mse_loss(whole(x, step % 2 == 0), y).backward()
    for one, two in zip(model.module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)

    before = loss_of(common.make_model())
    for hook in (default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        model = DDP(common.make_model())
        model.register_comm_hook(None, hook)
        train(model, rank, world)
        common.assert_same_weights(model.module.state_dict(), alone, tolerance=2e-3)
    for attempt in range(6):  # PowerSGD's callbacks run collectives and wait for them
        # One bucket. With several, the callbacks of one and the main thread's next bucket race for the group, and ranks
        # issue in different orders. This happens over any CPU backend (ark reports "ranks disagree").
        model = DDP(common.make_model(128))
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=4 if attempt % 2 else 1,
            start_powerSGD_iter=2,
            min_compression_rate=0.5,
        )
        model.register_comm_hook(state, powersgd.powerSGD_hook)
        train(model, rank, world, steps=12)
        assert loss_of(model.module) < before, "PowerSGD trains"
        everyone: list[float] = [0.0] * world
        dist.all_gather_object(everyone, model.module[0].weight.sum().item())
        assert len(set(everyone)) == 1, f"the replicas differ: {everyone}"
    common.finish()


if __name__ == "__main__":
    main()
