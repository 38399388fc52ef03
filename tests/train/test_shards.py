"""Fused SGD of DTensors in captured steps, on CPU ranks: the values of its form for a tensor at a time."""

from __future__ import annotations

import torch
from support import training as small
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from ark_torch.train import capture, optimizers
from ark_torch.train.shards import on_shards

pytestmark = [ark_only]


def _fused_sgd(rank: Rank) -> None:
    """DTensor knows no fused SGD, in which the rate is a tensor on a GPU: whole layers, momenta and an overflow."""
    rank.init()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for momentum, scaled in ((0.0, False), (0.9, False), (0.9, True)):
        results = []
        for fused in (False, True):
            model = small.make("gpt2")
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, nesterov=momentum > 0)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
            step = capture(model, optimizer, small.loss, scaler=scaler)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for number in range(4):
                if fused:
                    optimizers.Rates(optimizer, torch.device("cpu"))
                before = [p._version for p in model.parameters()]
                step(small.batch("gpt2", number, rank.rank))
                assert all(p._version > version for p, version in zip(model.parameters(), before, strict=True))
                scheduler.step()
            assert all(isinstance(kept, DTensor) for one in optimizer.state.values() for kept in one.values())
            assert fused == isinstance(optimizer.param_groups[0]["lr"], Tensor)
            results.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_fused_sgd_of_shards() -> None:
    run_ranks(_fused_sgd, 2)


def _partial(rank: Rank) -> None:
    """A gradient that is a sum over ranks, of a parameter that all have, is added up first; momenta stay whole."""
    rank.init()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Replicate()]))
    alone = nn.Parameter(torch.ones(6))
    sharded, whole = (torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True) for p in (weight, alone))
    for number in range(3):
        mine = torch.arange(6.0) + rank.rank + number
        weight.grad = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
        alone.grad = 2 * (torch.arange(6.0) + number) + 1
        with on_shards(sharded):
            sharded.step()
        whole.step()
    torch.testing.assert_close(weight.to_local(), alone)
    assert sharded.state[weight]["momentum_buffer"].placements == (Replicate(),)


def test_partial_gradients() -> None:
    run_ranks(_partial, 2)


def _adams(rank: Rank) -> None:
    """DTensor knows their fused forms, with a rate of either kind."""
    rank.init()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for rate in (0.1, torch.tensor(0.1)):
            weight = nn.Parameter(distribute_tensor(torch.ones(6), mesh, [Replicate()]))
            weight.grad = distribute_tensor(torch.ones(6), mesh, [Replicate()])
            kind([weight], lr=rate, fused=True).step()
            assert (weight.to_local() < 1).all()


def test_fused_adam_needs_no_help() -> None:
    run_ranks(_adams, 2)
