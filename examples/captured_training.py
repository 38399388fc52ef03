"""A captured training step over ark, compared with DistributedDataParallel and with one process.

    python examples/captured_training.py                # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/captured_training.py

ark_torch.train.capture covers zero_grad, forward, backward, gradient averaging, clipping and the optimizer's step. On a
GPU, one launch runs all of it from the fourth step on. The weights must equal those of an ordinary loop over
DistributedDataParallel, and up to rounding those of one process that sees the whole batch.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

import ark_torch

STEPS, BATCH, FEATURES, CLASSES, MAX_NORM = 20, 24, 32, 10, 1.0
Batch = tuple[Tensor, Tensor]


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(device)


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def make_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_captured(model: nn.Module, rank: int, world: int) -> list[float]:
    optimizer, scheduler = make_optimizer(model)
    step = ark_torch.train.capture(model, optimizer, loss, max_norm=MAX_NORM)
    losses = []
    for number in range(STEPS):
        inputs, targets = make_batch(number)  # on the host: the step copies them to the device
        losses.append(step((inputs.chunk(world)[rank], targets.chunk(world)[rank])))
        scheduler.step()
    print(f"rank {rank}: {'one launch a step' if step.captured else f'eager, because {step.reason}'}", flush=True)
    return [one.item() for one in losses]  # the first wait for the device


def train_eagerly(model: nn.Module, rank: int, world: int, device: torch.device) -> list[float]:
    optimizer, scheduler = make_optimizer(model)
    losses = []
    for number in range(STEPS):
        inputs, targets = (tensor.chunk(world)[rank].to(device) for tensor in make_batch(number))
        optimizer.zero_grad()
        value = loss(model, (inputs, targets))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ark")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # plain python: start two ranks like torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return

    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if BATCH % world != 0:
        raise SystemExit(f"{world} ranks cannot share batches of {BATCH} equally; use a divisor of {BATCH}")
    captured, wrapped, alone = (make_model(device) for _ in range(3))
    losses = train_captured(captured, rank, world)
    expected = train_eagerly(DistributedDataParallel(wrapped), rank, world, device)
    train_eagerly(alone, 0, 1, device)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    for reference in (wrapped, alone):
        for (name, ours), (_, theirs) in zip(captured.named_parameters(), reference.named_parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"rank {rank}, {name}: {text}")
    print(f"rank {rank} of {world}: weights equal those of DDP and of one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
