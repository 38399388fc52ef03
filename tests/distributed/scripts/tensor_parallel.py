"""Compares DTensor's redistributions and a tensor-parallel block with one process."""

from __future__ import annotations

import itertools

import common
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def redistributions(world: int) -> None:
    mesh = init_device_mesh(common.KIND, (world,))
    torch.manual_seed(5)
    whole = torch.randn(10, 12).to(common.DEVICE)  # dimensions that are not divisible by the number of ranks
    places = [Replicate(), Shard(0), Shard(1)]
    for before, after in itertools.product(places, places):
        moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
        assert torch.equal(moved.full_tensor(), whole), (before, after)
    for after in places:
        summed = DTensor.from_local(whole, mesh, [Partial()]).redistribute(mesh, [after])
        torch.testing.assert_close(summed.full_tensor(), whole * world)
    product = distribute_tensor(whole, mesh, [Shard(1)]) @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.t())
    assert distribute_tensor(whole, mesh, [Shard(0)]).max().full_tensor() == whole.max()


def main() -> None:
    rank, world = common.start()
    redistributions(world)
    mesh = init_device_mesh(common.KIND, (world,))
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(9)).to(common.DEVICE)
    alone = Block().to(common.DEVICE)
    alone(x).square().mean().backward()
    plans = (
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
        {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    for plan in plans:
        model = parallelize_module(Block().to(common.DEVICE), mesh, plan)
        out = model(x.chunk(world, 1)[rank] if "norm" in plan else x)
        torch.testing.assert_close(out, alone(x))
        out.square().mean().backward()
        for (name, one), two in zip(model.named_parameters(), alone.parameters(), strict=True):
            grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            torch.testing.assert_close(grad, two.grad, msg=lambda m, n=name: f"{n}: {m}")
    head = parallelize_module(nn.Linear(16, 8 * world).to(common.DEVICE), mesh, ColwiseParallel(use_local_output=False))
    target = torch.arange(32, device=common.DEVICE) % (8 * world)
    with loss_parallel():
        loss = nn.functional.cross_entropy(head(x.view(32, 16)), target)
        loss.backward()
    weight, bias = (p.full_tensor().detach() for p in head.parameters())
    want = nn.functional.cross_entropy(nn.functional.linear(x.view(32, 16), weight, bias), target)
    torch.testing.assert_close(loss.full_tensor() if isinstance(loss, DTensor) else loss, want)
    common.finish()


if __name__ == "__main__":
    main()
