"""fully_shard with compressed communication: few-bit parameter gathers, gradient scatters with error feedback."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compression import Heard
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ark_torch.distributed import compression
from ark_torch.distributed.compression import fsdp2

pytestmark = [ark_only]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 64), nn.ReLU(), nn.Linear(64, 37, bias=False))


def _sharded(**options: Any) -> nn.Sequential:
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 33, generator=torch.Generator().manual_seed(100 * step + rank))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def _exact(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    alone = _model()
    alone(_batch(step, dist.get_rank())).square().mean().backward()
    for parameter in alone.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return {name: parameter.grad for name, parameter in alone.named_parameters()}


def _conserved(rank: Rank, model: nn.Module, state: compression.State, world: int) -> None:
    """With exact parameters, the sum of all gradients and residuals equals the exact means."""
    sums: dict[str, list[Tensor]] = {}
    for step in range(4):
        model.zero_grad()
        model(_batch(step, rank.rank)).square().mean().backward()
        exact = _exact(step)
        for name, got in _gradients(model).items():
            pair = sums.setdefault(name, [torch.zeros_like(got), torch.zeros_like(got)])
            pair[0] += got
            pair[1] += exact[name]
    residuals = state.state_dict()["residuals"]
    assert residuals
    for name, (got, wanted) in sums.items():
        left = residuals.get(name, torch.zeros(got.numel())).clone()
        dist.all_reduce(left)
        torch.testing.assert_close(got + left.view_as(got) / world, wanted, rtol=2e-4, atol=2e-6, msg=name)
        if name in residuals:
            assert not torch.allclose(got, wanted, rtol=2e-4, atol=2e-6), f"{name} was not compressed"


def _feedback(rank: Rank) -> None:
    rank.init()
    world = rank.world_size
    for options in ({}, {"reshard_after_forward": False}):
        model = _sharded(**options)
        state = compression.State(bits=4, bucket=128, module=model, rules={"4.weight": 2})
        assert compression.fsdp(model, state, parameters=None) is state
        _conserved(rank, model, state, world)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_no_gradient_is_lost(world: int) -> None:
    """CGX has no reduce_scatter, and so cannot support FSDP."""
    run_ranks(_feedback, world)


def _parameters(rank: Rank) -> None:
    """Forward and backward use 8-bit parameters, equal on all ranks. Master weights stay exact."""
    rank.init()
    model = _sharded()
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    state = compression.fsdp(model, compression.State(bits=8, module=model, error_feedback=False, rounding="nearest"))
    seen: dict[str, Tensor] = {}
    gathered: dict[int, list[Tensor]] = {}

    all_gather = fsdp2.exchange.all_gather

    def look(layer: nn.Module, *_: Any) -> None:
        seen[layer.which] = layer.weight.detach().clone()

    def note(*arguments: Any) -> Tensor:
        result = all_gather(*arguments)
        gathered.setdefault(result.numel(), []).append(result.clone())
        return result

    for index in (0, 2, 4):
        model[index].which = f"{index}.weight"
        model[index].register_forward_pre_hook(look)  # after the hook that gathers
    with mock.patch.object(fsdp2.exchange, "all_gather", note):
        model(_batch(0, rank.rank)).square().mean().backward()
    assert len(gathered) == 3 and all(len(calls) == 2 for calls in gathered.values())
    for forward, backward in gathered.values():
        assert torch.equal(forward, backward)
        every = [torch.empty_like(forward) for _ in range(rank.world_size)]
        dist.all_gather(every, forward)
        assert all(torch.equal(one, forward) for one in every)
    for name, weight in seen.items():
        step = (before[name].max() - before[name].min()) / 255
        assert 0 < (weight - before[name]).abs().max() <= 0.51 * step, name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name])
    exact = _exact(0)
    for name, got in _gradients(model).items():
        assert (got - exact[name]).norm() < 0.05 * exact[name].norm() + 1e-6, name
    assert 0.25 < state.bytes_sent / state.bytes_exact < 0.4


def test_parameters_in_eight_bits() -> None:
    run_ranks(_parameters, 2)


def _trains(rank: Rank) -> None:
    """bfloat16 compute, gradient accumulation, frozen layers, clipping: close to exact, and the loss decreases."""
    rank.init()
    losses = {}
    for compressed in (False, True):
        model = _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        model[2].weight.requires_grad_(False)
        if compressed:
            state = compression.fsdp(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(12):
            optimizer.zero_grad()
            for part in range(2):
                model.set_requires_gradient_sync(part == 1)
                loss = (model(_batch(step % 3, rank.rank)).float() - 1).square().mean()
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        losses[compressed] = float(loss.detach())
    assert losses[True] < 0.9 and abs(losses[True] - losses[False]) < 0.1, losses
    assert state.bytes_sent < 0.5 * state.bytes_exact


def test_trains_as_exact_does() -> None:
    run_ranks(_trains, 2)


def _replicated(rank: Rank) -> None:
    """Pairs of shards, with replicas between the pairs: the shard group is a subgroup."""
    rank.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded(mesh=mesh)
    state = compression.fsdp(model, compression.State(bits=8, module=model, error_feedback=False), parameters=None)
    model(_batch(0, rank.rank)).square().mean().backward()
    assert state.group.size() == 2
    exact = _exact(0)
    for name, got in _gradients(model).items():
        assert (got - exact[name]).norm() < 0.05 * exact[name].norm() + 1e-6, name


@pytest.mark.nightly
def test_hybrid_sharding() -> None:
    run_ranks(_replicated, 4)


def _checkpoint(rank: Rank) -> Any:
    rank.init()
    model = _sharded()
    state = compression.fsdp(model, compression.State(bits=2, module=model), parameters=None)
    model(_batch(0, rank.rank)).square().mean().backward()
    return state.state_dict()


def _checkpoint_on_three(rank: Rank, saved: Any) -> None:
    rank.init()
    model = _sharded()
    state = compression.fsdp(model, compression.State(bits=2, module=model), parameters=None)
    state.load_state_dict(saved)
    model(_batch(1, rank.rank)).square().mean().backward()
    exact = _exact(1)
    residuals = state.state_dict()["residuals"]
    for name, got in _gradients(model).items():
        left = residuals.get(name, torch.zeros(got.numel())).clone()
        dist.all_reduce(left)
        kept = sum(one["residuals"].get(name, torch.zeros(got.numel())) for one in saved) / 2
        torch.testing.assert_close(got + left.view_as(got) / 3, exact[name] + kept.view_as(got), rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_residuals_go_to_another_number_of_ranks() -> None:
    run_ranks(_checkpoint_on_three, 3, run_ranks(_checkpoint, 2))


def _refused(rank: Rank) -> None:
    rank.init()
    with pytest.raises(TypeError, match="call fully_shard first"):
        compression.fsdp(_model())
    model = _sharded()
    with pytest.raises(ValueError, match="parameters is 9"):
        compression.fsdp(model, parameters=9)
    for settings in ({"bits": compression.Auto()}, {"when": "faster"}):
        with pytest.raises(ValueError, match="are for DistributedDataParallel"):
            compression.fsdp(model, compression.State(**settings))
    with pytest.raises(ValueError, match="parameters is 4: format='fp8' has 8 bits"):
        compression.fsdp(model, compression.State(bits=8, format="fp8"), parameters=4)
    compression.fsdp(model, compression.State(bits=4 + rank.rank, module=model))
    with pytest.raises(ValueError, match="bits is 4 on rank 0 and 5 on rank 1"):
        model(_batch(0, rank.rank))


def test_what_it_refuses() -> None:
    run_ranks(_refused, 2)


def _fallbacks(rank: Rank) -> None:
    """What cannot be split by layers stays exact, and is reported once."""
    rank.init()
    heard = Heard()

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = fully_shard(Half())
    state = compression.fsdp(model, compression.State(bits=2, module=model), parameters=None)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank.rank))
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
    row = x.sum(0)
    dist.all_reduce(row)
    torch.testing.assert_close(model.used.weight.grad.full_tensor(), (row / rank.world_size).expand(64, 64))
    assert state.bytes_sent == state.bytes_exact > 0
    assert len(heard.of("only some parameters of an FSDP module have gradients")) == int(rank.rank == 0)
    model = _sharded()
    state = compression.fsdp(model, compression.State(bits=2, module=model), parameters=None)
    for layer in model.modules():
        if hasattr(layer, "set_gradient_divide_factor"):
            layer.set_gradient_divide_factor(8.0)
    model(_batch(0, rank.rank)).square().mean().backward()
    for name, wanted in _exact(0).items():
        torch.testing.assert_close(_gradients(model)[name], wanted * rank.world_size / 8, msg=name)
    assert len(heard.of("set_gradient_divide_factor")) == int(rank.rank == 0)


def test_exact_where_layers_cannot_be_told() -> None:
    run_ranks(_fallbacks, 2)
