"""Training over the group on GPUs: DDP and FSDP2, compared with NCCL and with one process that sees every batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from on_gpu import device_of, run, same, start
from support.rank import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers).to(device)


def _batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def _train(model: nn.Module, batches: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batches(step)).square().mean().backward()
        optimizer.step()
    return model


def _flat(model: nn.Module) -> torch.Tensor:
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in parameters])


def _ddp(rank: Rank) -> None:
    device = start(rank)
    nccl = dist.new_group(backend="nccl")
    plain = _model(device)
    results = {}
    for name, group in (("ark", None), ("nccl", nccl)):
        wrapped = DistributedDataParallel(
            copy.deepcopy(plain), device_ids=[rank.rank], process_group=group, bucket_cap_mb=0.5
        )
        results[name] = _flat(_train(wrapped, lambda step: _batch(step, rank.rank, device)))
    torch.testing.assert_close(results["ark"], results["nccl"])
    everybody = [torch.empty_like(results["ark"]) for _ in range(rank.world_size)]
    dist.all_gather(everybody, results["ark"])
    for other in everybody:
        same(other, results["ark"].cpu(), "parameters of all ranks")


def test_ddp_as_with_nccl() -> None:
    run(_ddp)


def _fsdp2(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = start(rank)
    mesh = init_device_mesh("cuda", (rank.world_size,))
    model = _model(device)
    alone = copy.deepcopy(model)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, lambda step: _batch(step, rank.rank, device))
    world = rank.world_size
    _train(alone, lambda step: torch.cat([_batch(step, r, device) for r in range(world)]))
    torch.testing.assert_close(_flat(model), _flat(alone), rtol=1e-4, atol=1e-5)


def test_fsdp2() -> None:
    run(_fsdp2, own=True)  # DTensor's caches keep meshes, whose groups end with the body


def _mixed(rank: Rank) -> None:
    """One backend per device type, as some programs name them."""
    device = start(rank, backend="cpu:gloo,cuda:ark")
    tensor, on_host = torch.ones(5, device=device), torch.ones(5)
    dist.all_reduce(tensor)
    dist.all_reduce(on_host)
    assert tensor.tolist() == on_host.tolist() == [rank.world_size] * 5
    gathered: list[Any] = [None] * rank.world_size
    dist.all_gather_object(gathered, rank.rank)
    assert gathered == list(range(rank.world_size))
    dist.barrier()


def test_gloo_for_the_cpu_and_ark_for_cuda() -> None:
    run(_mixed)


def _bound(rank: Rank) -> None:
    """device_id= binds the group to a device, and makes new_group split its parent."""
    device = start(rank, device_id=device_of(rank))
    half = dist.new_group(list(range(rank.world_size)))
    tensor = torch.ones(5, device=device)
    dist.all_reduce(tensor, group=half)
    dist.all_reduce(tensor)
    dist.barrier()
    assert tensor.tolist() == [rank.world_size**2] * 5


def test_device_id() -> None:
    run(_bound)
