"""Tensor parallelism with DTensor over ark, compared with the same training in one process.

    python examples/tensor_parallel.py                  # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The first product of each block is split by columns, the second by rows: every rank computes a partial result, and one
all_reduce per block adds them. In the sequence-parallel block the activations in between are split as well, which
replaces the all_reduce by all_gather and reduce_scatter. All ranks see the same batch.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

STEPS, BATCH, LENGTH, WIDTH = 10, 4, 24, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return down


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def parallel_plan() -> dict[str, ParallelStyle]:
    return {
        "0.up": ColwiseParallel(),
        "0.down": RowwiseParallel(output_layouts=Shard(1)),  # reduce_scatter: split along the sequence
        "1.up": ColwiseParallel(input_layouts=Shard(1)),  # all_gather
        "1.down": RowwiseParallel(),  # all_reduce
    }


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator).unbind(0)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
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
    if LENGTH % world != 0:
        raise SystemExit(f"{world} ranks cannot share {LENGTH} positions equally; use a divisor of {LENGTH}")
    model = parallelize_module(make_model(), init_device_mesh("cpu", (world,)), parallel_plan())
    train(model)

    alone = make_model()
    train(alone)
    for (name, ours), (_, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert isinstance(ours, DTensor), f"{name} is not distributed"
        whole = ours.full_tensor()
        torch.testing.assert_close(
            whole, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"rank {rank}, {name}: {text}"
        )
    print(f"rank {rank} of {world}: gathered weights equal those of one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
