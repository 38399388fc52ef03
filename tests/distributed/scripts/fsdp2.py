"""Compares fully_shard with one process: plain, no resharding, mixed precision, gradient clipping, a 2-D mesh."""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

STEPS = 4


def sharded(**options: object) -> nn.Module:
    model = common.make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def train(model: nn.Module, rank: int, world: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = (common.mine(t, rank, world) for t in common.batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x).float(), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train_alone() -> nn.Module:
    model = common.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = common.batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}


def main() -> None:
    rank, world = common.start()
    alone = train_alone()
    meshes = [init_device_mesh(common.KIND, (world,))]
    if world == 4:
        meshes.append(init_device_mesh(common.KIND, (2, 2), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        for options in ({}, {"reshard_after_forward": False}):
            model = sharded(mesh=mesh, **options)
            train(model, rank, world)
            common.assert_same_weights(full(model), alone, tolerance=2e-4)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(mesh=mesh, mp_policy=policy)
        train(model, rank, world)
        common.assert_same_weights(full(model), alone, tolerance=5e-2)
        model = sharded(mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        train(model, rank, world)
        common.assert_same_weights(full(model), alone, tolerance=5e-2)
    common.finish()


if __name__ == "__main__":
    main()
