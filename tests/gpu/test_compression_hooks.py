"""The compression hook and fsdp() on GPUs: nothing is lost, streams are in order, NaN is reported a step later."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support.compression import Heard
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

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


def _spoil(parameter: nn.Parameter, bad: float, spoils: Callable[[], bool]) -> None:
    parameter.register_hook(lambda gradient: gradient + bad if spoils() else gradient)


def _nan(rank: Rank) -> None:
    """Told by name in the step after: a compressed layer, before DDP builds its buckets anew, and an exact one beside
    compressed ones."""
    device = start(rank)
    heard = Heard()
    step = 0
    ddp = DDP(_model(device))
    state = compression.State(module=ddp)
    ddp.register_comm_hook(state, compression.hook)
    # In several steps: each layer is told once.
    _spoil(ddp.module[4].weight, torch.nan, lambda: step in (0, 2) and rank.rank == 0)
    _spoil(ddp.module[2].bias, torch.inf, lambda: step in (3, 4) and rank.rank == rank.world_size - 1)
    told: list[int] = []
    for step in range(7):
        ddp.zero_grad()
        ddp(_batch(step, rank.rank, device)).square().mean().backward()
        torch.cuda.synchronize()
        assert bool(ddp.module[4].weight.grad.isnan().any()) == (step in (0, 2))
        assert bool(ddp.module[2].bias.grad.isfinite().all()) == (step not in (3, 4))
        told.append(len(heard.of("NaN or Inf")))
    if rank.world_size == 1:
        assert not heard.of("NaN or Inf")
        return
    assert told == [0, 1, 1, 1, 2, 2, 2], heard.lines
    assert len(heard.of("of 4.weight [129, 1024]")) == len(heard.of("of 2.bias [1024]")) == 1, heard.lines
    assert all(f"[rank {rank.rank}]" in line and "an earlier step" in line for line in heard.of("NaN or Inf"))


def test_nan_is_told_once() -> None:
    run(_nan)


def _nan_of_a_share(rank: Rank) -> None:
    """fsdp(): the rank whose share of the gradient has it tells."""
    device = start(rank)
    heard = Heard()
    model = _model(device)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    compression.fsdp(model, compression.State(module=model), parameters=None)
    for step in range(3):
        model.zero_grad()
        scale = torch.nan if step == 0 and rank.rank == 0 else 1.0
        (model(_batch(step, rank.rank, device)) * scale).square().mean().backward()
        torch.cuda.synchronize()
    told = heard.of("NaN or Inf in the gradient of an earlier step")
    assert len(told) == (3 if rank.world_size > 1 else 0), heard.lines  # one for each exchange
    assert rank.world_size == 1 or len(heard.of("of 4.weight [129, 1024]")) == 1, heard.lines


def test_nan_of_a_share_is_told() -> None:
    run(_nan_of_a_share)


class _Ops(TorchDispatchMode):
    """What PyTorch's dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _one_operator(rank: Rank) -> None:
    """In a usual step, the exchange of a bucket is all that the hook launches."""
    device = start(rank)
    ddp = DDP(_model(device))
    state = compression.State(module=ddp)
    called: list[list[str]] = []

    # DDP compares the annotations of a hook with its own.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        with _Ops() as ops:
            future = compression.hook(state, bucket)
        called.append(ops.names)
        return future

    ddp.register_comm_hook(state, hook)
    for step in range(4):
        called.clear()
        ddp.zero_grad()
        ddp(_batch(step, rank.rank, device)).square().mean().backward()
    torch.cuda.synchronize()
    usual = ["ark.compressed_all_reduce.default"] if rank.world_size > 1 else []
    assert called and all(names == usual for names in called), called


def test_a_usual_call_is_one_operator() -> None:
    run(_one_operator)


def _between_nodes(rank: Rank) -> None:
    """Exact sums in two nodes, few bits between them: nothing is lost, and all ranks have the same bits."""
    places = WORLD // 2
    os.environ["ARK_NODE"] = str(rank.rank // places)
    device = start(rank)
    model = DDP(_model(device), device_ids=[device.index])
    state = compression.State(bits=4, module=model, where="between", exact_below=256)
    model.register_comm_hook(state, compression.hook)
    got: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for step in range(4):
        model.zero_grad()
        model(_batch(step, rank.rank, device)).square().mean().backward()
        for name, gradient in _exact(step, device).items():
            mine = model.module.get_parameter(name).grad
            assert mine is not None
            every = [torch.empty_like(mine) for _ in range(WORLD)]
            dist.all_gather(every, mine)
            assert all(torch.equal(one, mine) for one in every), name
            got[name] = got.get(name, 0) + mine
            wanted[name] = wanted.get(name, 0) + gradient
    residuals = state.state_dict()["residuals"]
    for name, value in got.items():
        left = residuals.get(name, torch.zeros(value.numel())).to(device)
        dist.all_reduce(left, op=dist.ReduceOp.AVG)  # one rank of each node has an element's
        torch.testing.assert_close(value + left.view_as(value), wanted[name], rtol=1e-3, atol=1e-5, msg=name)
    assert 0 < state.bytes_sent < state.bytes_exact / 3


@pytest.mark.skipif(WORLD % 2 == 1, reason="two nodes of as many ranks")
def test_few_bits_between_nodes_alone() -> None:
    run(_between_nodes, own=True)
