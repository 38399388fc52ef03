"""The compression hook and fsdp() on GPUs: nothing is lost, streams are in order, NaN is reported a step later."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from on_gpu import run, start
from support.compression import Heard
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compression


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(257, 1025), nn.ReLU(), nn.Linear(1025, 1024), nn.ReLU(), nn.Linear(1024, 129, bias=False))
    return nn.Sequential(*layers).to(device)


def _batch(step: int, rank: int, device: torch.device) -> Tensor:
    return torch.randn(16, 257, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def _exact(step: int, device: torch.device) -> dict[str, Tensor]:
    alone = _model(device)
    alone(_batch(step, dist.get_rank(), device)).square().mean().backward()
    for parameter in alone.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    return {name: parameter.grad for name, parameter in alone.named_parameters()}


def _conserved(what: str, model: nn.Module, state: compression.State, device: torch.device) -> None:
    sums: dict[str, list[Any]] = {}
    for step in range(4):
        model.zero_grad()
        model(_batch(step, dist.get_rank(), device)).square().mean().backward()
        exact = _exact(step, device)
        for name, parameter in model.named_parameters():
            # Read at once: DDP's stream must wait for the hook's.
            got = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            pair = sums.setdefault(name.removeprefix("module."), [0, 0])
            pair[0], pair[1] = pair[0] + got, pair[1] + exact[name.removeprefix("module.")]
    residuals = state.state_dict()["residuals"]
    assert residuals or dist.get_world_size() == 1, what
    for name, (got, wanted) in sums.items():
        left = residuals.get(name, torch.zeros(got.numel())).to(device)
        dist.all_reduce(left, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(got + left.view_as(got), wanted, rtol=1e-3, atol=1e-5, msg=f"{what}: {name}")


def _nothing_is_lost(rank: Rank) -> None:
    device = start(rank)
    for options in ({}, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}):
        for settings in ({"bits": 4}, {"bits": 2, "skip_zeros": True}, {"bits": 4, "when": "faster"}):
            ddp = DDP(_model(device), **options)
            state = compression.State(module=ddp, **settings)
            ddp.register_comm_hook(state, compression.hook)
            _conserved(f"{options} {settings}", ddp, state, device)
    for parameters in (None, 8):
        model = _model(device)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        state = compression.fsdp(model, compression.State(bits=4, module=model), parameters=parameters)
        if parameters is None:
            _conserved("fsdp", model, state, device)
        else:
            model(_batch(0, rank.rank, device)).square().mean().backward()
            for name, wanted in _exact(0, device).items():
                got = model.get_parameter(name).grad.full_tensor()
                assert (got - wanted).norm() < 0.5 * wanted.norm() + 1e-6, name


def test_nothing_is_lost() -> None:
    run(_nothing_is_lost)


def _nan(rank: Rank) -> None:
    device = start(rank)
    heard = Heard()
    ddp = DDP(_model(device))
    state = compression.State(module=ddp)
    ddp.register_comm_hook(state, compression.hook)
    for step in range(3):
        ddp.zero_grad()
        scale = float("nan") if step == 0 and rank.rank == 0 else 1.0
        (ddp(_batch(step, rank.rank, device)) * scale).square().mean().backward()
        torch.cuda.synchronize()
        assert bool(ddp.module[4].weight.grad.isnan().any()) == (step == 0)
    assert len(heard.of("of 4.weight [129, 1024]")) == int(rank.world_size > 1), heard.lines


def test_nan_is_told_once() -> None:
    run(_nan)
