"""FSDP2 (fully_shard) over ark, compared with the same training in one process.

    python examples/fsdp2.py                            # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/fsdp2.py

Every rank keeps a shard of each weight, gathers a layer when needed (all_gather) and distributes its gradients
(reduce_scatter). The gathered weights must equal those of one process that sees the whole batch.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

STEPS, BATCH, LENGTH, FEATURES, WIDTH, LAYERS = 10, 24, 8, 5, 32, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    # 63 hidden features do not divide evenly, so shards have unequal sizes.
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 63, dropout=0.0, batch_first=True) for _ in range(LAYERS))
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *layers)


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, LENGTH, FEATURES, generator=generator)
    return inputs, torch.randn(BATCH, LENGTH, WIDTH, generator=generator)


def train(model: nn.Module, rank: int, world: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = (tensor.chunk(world)[rank] for tensor in make_batch(step))
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
    if BATCH % world != 0:
        raise SystemExit(f"{world} ranks cannot share batches of {BATCH} equally; use a divisor of {BATCH}")
    mesh = init_device_mesh("cpu", (world,))
    model = make_model()
    for layer in list(model)[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the rest: the first layer
    train(model, rank, world)

    alone = make_model()
    train(alone, 0, 1)
    for (name, ours), (_, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert isinstance(ours, DTensor), f"{name} is not sharded"
        whole = ours.full_tensor()
        torch.testing.assert_close(
            whole, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"rank {rank}, {name}: {text}"
        )
    print(f"rank {rank} of {world}: gathered weights equal those of one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
