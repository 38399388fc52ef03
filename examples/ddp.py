"""DistributedDataParallel over ark, compared with the same training in one process.

    python examples/ddp.py                              # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/ddp.py

Every rank trains on its share of each batch. DDP averages the gradients with all_reduce. One process that sees the
whole batch must reach the same weights, up to rounding from another order of additions.
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

STEPS, BATCH, FEATURES, CLASSES = 20, 24, 32, 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=generator)


def train(model: nn.Module, rank: int, world: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(world)[rank] for tensor in make_batch(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ark")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # plain python: start two ranks like torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return

    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if BATCH % world != 0:
        raise SystemExit(f"{world} ranks cannot share batches of {BATCH} equally; use a divisor of {BATCH}")
    model = make_model()
    train(DistributedDataParallel(model), rank, world)

    alone = make_model()
    train(alone, 0, 1)
    for (name, ours), (_, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(ours, expected, msg=lambda text, name=name: f"rank {rank}, {name}: {text}")
    print(f"rank {rank} of {world}: weights equal those of one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
