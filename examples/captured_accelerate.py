"""Accelerate with captured steps, compared with the same loop as Accelerate's users write it.

    python examples/captured_accelerate.py                # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/captured_accelerate.py

ark_torch.train.capture takes what accelerator.prepare() returns. `step(batch)` replaces accelerator.backward(),
clip_grad_norm_(), optimizer.step() and zero_grad(). Loaders and schedulers remain Accelerate's.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.utils.data import DataLoader, TensorDataset

import ark_torch

ROWS, BATCH, FEATURES, CLASSES, MAX_NORM = 320, 8, 32, 10, 1.0


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def prepare(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROWS // BATCH)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=BATCH, drop_last=True)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def train_captured(accelerator: Accelerator, rank: int) -> tuple[nn.Module, list[Tensor]]:
    model, optimizer, loader, scheduler = prepare(accelerator)
    step = ark_torch.train.capture(model, optimizer, loss, max_norm=MAX_NORM)
    losses = []
    for batch in loader:
        losses.append(step(batch))
        scheduler.step()
    print(f"rank {rank}: {'one launch a step' if step.captured else f'eager, because {step.reason}'}", flush=True)
    return accelerator.unwrap_model(model), losses


def train_ordinarily(accelerator: Accelerator) -> tuple[nn.Module, list[Tensor]]:
    model, optimizer, loader, scheduler = prepare(accelerator)
    losses = []
    for batch in loader:
        value = loss(model, batch)
        accelerator.backward(value)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return accelerator.unwrap_model(model), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ark")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # plain python: start two ranks like torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return

    local = int(os.environ["LOCAL_RANK"])
    cpu = torch.cuda.device_count() <= local
    if not cpu:
        torch.cuda.set_device(local)
    dist.init_process_group(arguments.backend)  # before the first Accelerator
    rank, world = dist.get_rank(), dist.get_world_size()
    accelerator = Accelerator(cpu=cpu)
    captured, losses = train_captured(accelerator, rank)
    ordinary, expected = train_ordinarily(accelerator)
    values = torch.stack(losses)
    assert values[-5:].mean() < values[:5].mean(), values
    torch.testing.assert_close(values, torch.stack(expected), rtol=1e-3, atol=1e-4)
    for (name, ours), (_, theirs) in zip(captured.named_parameters(), ordinary.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"rank {rank}, {name}: {text}"
        )
    print(f"rank {rank} of {world}: weights equal those of Accelerate's own loop", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
