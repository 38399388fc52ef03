"""Lightning with captured steps: its Trainer, loaders, callbacks and precision, with one launch per step.

    python examples/captured_lightning.py                # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/captured_lightning.py

This is Lightning's "manual optimization": training_step() does the whole step, here with ark_torch.train.capture. The
strategy does not wrap the module, because the step averages gradients itself. The weights must equal those of the same
module under automatic optimization and DDPStrategy.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.utils.data import DataLoader, TensorDataset

import ark_torch

ROWS, BATCH, FEATURES, CLASSES, MAX_NORM = 320, 8, 32, 10, 1.0
Batch = list[Tensor]


def loss(network: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(network(batch[0]), batch[1])


class Ordinary(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch) -> Tensor:
        value = loss(self.network, batch)
        self.losses.append(value.detach())
        return value

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROWS // BATCH)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Captured(Ordinary):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.step: Any = None

    def training_step(self, batch: Batch) -> Tensor:
        if self.step is None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.step = ark_torch.train.capture(self.network, optimizer, loss, max_norm=MAX_NORM)
        value: Tensor = self.step(batch)
        self.losses.append(value)
        self.network.zero_grad()
        self.optimizers().step()  # updates nothing without gradients, but Lightning counts its steps by it
        self.lr_schedulers().step()
        return value


class Unwrapped(DDPStrategy):
    """Ranks, samplers and the process group as in DDPStrategy, but without DistributedDataParallel."""

    def configure_ddp(self) -> None:
        pass


def train(module: Ordinary, strategy: DDPStrategy, folder: str, **options: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=BATCH)
    cpu = torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu" if cpu else "gpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy,
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(module, loader)
    assert trainer.global_step == len(module.losses) > 0, (trainer.global_step, len(module.losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ark")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # plain python: start two ranks like torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return

    captured, ordinary = Captured(), Ordinary()
    with tempfile.TemporaryDirectory() as folder:
        train(captured, Unwrapped(process_group_backend=arguments.backend), folder)
        step, rank = captured.step, dist.get_rank()
        print(f"rank {rank}: {'one launch a step' if step.captured else f'eager, because {step.reason}'}", flush=True)
        strategy = DDPStrategy(process_group_backend=arguments.backend)
        train(ordinary, strategy, folder, gradient_clip_val=MAX_NORM)
    values, expected = (torch.stack(module.losses).cpu() for module in (captured, ordinary))
    assert values[-5:].mean() < values[:5].mean(), values
    torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-4)
    for (name, ours), (_, theirs) in zip(captured.named_parameters(), ordinary.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"rank {rank}, {name}: {text}"
        )
    print(f"rank {rank} of {dist.get_world_size()}: weights equal those of Lightning's own steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
