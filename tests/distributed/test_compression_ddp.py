"""The compression hook under DistributedDataParallel, in all of DDP's modes.

For any number of bits, the sum of all steps' results and the remaining residuals equals the exact means, so nothing is
lost, and all ranks get the same bits.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import compression as oracle
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compression

pytestmark = [ark_only]


class Net(nn.Module):
    """Odd sizes, an empty and a one-element parameter, and two branches, of which a step uses one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.into = nn.Linear(37, 65)
        self.left, self.right = nn.Linear(65, 33), nn.Linear(65, 33)
        self.scale = nn.Parameter(torch.ones(1))
        self.nothing = nn.Parameter(torch.ones(0, 3))
        self.out = nn.Linear(33, 41, bias=False)

    def forward(self, x: Tensor, branch: str = "left") -> Tensor:
        hidden = self.into(x).relu()
        both = self.left(hidden) + self.right(hidden) if branch == "both" else getattr(self, branch)(hidden)
        return self.out(both.relu() * self.scale + self.nothing.sum())


def _batch(step: int, rank: int, part: int = 0) -> Tensor:
    return torch.randn(6, 37, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + part))


def _backward(model: nn.Module, step: int, rank: int, branch: str, part: int = 0) -> None:
    model(_batch(step, rank, part), branch).square().mean().backward()


def _exact(step: int, group: Any, branch: str, parts: int) -> dict[str, Tensor]:
    """Returns the mean gradients of a step."""
    alone = Net()
    for part in range(parts):
        _backward(alone, step, dist.get_rank(group), branch, part)
    means = {}
    for name, parameter in alone.named_parameters():
        means[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(means[name], group=group)
        means[name] /= dist.get_world_size(group)
    return means


def _same_everywhere(tensor: Tensor, group: Any) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor.contiguous(), group=group)
    return all(torch.equal(one, tensor) for one in every)


def _mean_residual(state: compression.State, name: str, like: Tensor, group: Any) -> Tensor:
    found = state.state_dict()["residuals"].get(name)
    total = torch.zeros(like.numel()) if found is None else found.clone()
    dist.all_reduce(total, group=group)
    return (total / dist.get_world_size(group)).view_as(like)


def _conserved(
    group: Any, what: str, options: dict[str, Any], settings: dict[str, Any], parts: int = 1, branches: Any = ("both",)
) -> compression.State:
    me = dist.get_rank(group)
    ddp = DDP(Net(), process_group=group, **options)
    state = compression.State(module=ddp, **settings)
    ddp.register_comm_hook(state, compression.hook)
    sums = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in ddp.module.named_parameters()}
    for step in range(4):
        branch = branches[step % len(branches)]
        ddp.zero_grad()
        for part in range(parts):
            with ddp.no_sync() if part + 1 < parts else contextlib.nullcontext():
                _backward(ddp, step, me, branch, part)
        means = _exact(step, group, branch, parts)
        for name, parameter in ddp.module.named_parameters():
            got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert _same_everywhere(got, group), (what, name, step)
            sums[name][0].add_(got)
            sums[name][1].add_(means[name])
    for name, (got, wanted) in sums.items():
        left = _mean_residual(state, name, got, group) if settings.get("error_feedback", True) else 0
        text = f"{what}: {name}"
        torch.testing.assert_close(got + left, wanted, rtol=2e-4, atol=2e-6, msg=lambda m, text=text: f"{text}: {m}")
    return state


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "views": ({"gradient_as_bucket_view": True}, {}),
    "many buckets, rebuilt": ({"bucket_cap_mb": 0.005}, {}),
    "static graph": ({"static_graph": True}, {}),
    "no_sync": ({}, {"parts": 2}),
    "no_sync, views": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005}, {"parts": 2}),
    "unused": ({"find_unused_parameters": True}, {"branches": ("left", "right", "both")}),
    "unused, views": (
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
        {"branches": ("left", "right", "left")},
    ),
}


GATE = ("many buckets, rebuilt", "static graph", "no_sync, views", "unused, views")


def _ways(rank: Rank, ways: tuple[str, ...]) -> None:
    group = rank.init()
    for what in ways:
        options, more = WAYS[what]
        state = _conserved(group, what, options, {"bits": 4, "bucket": 128}, **more)
        assert 0 < state.bytes_sent < 0.45 * state.bytes_exact, (what, state.bytes_sent, state.bytes_exact)


def _settings(rank: Rank) -> None:
    group = rank.init()
    for settings in (
        {"bits": 2},
        {"bits": 8, "error_feedback": True},
        {"bits": 3, "rounding": "stochastic", "seed": 5},
    ):
        _conserved(group, str(settings), {}, settings)
    _conserved(group, "fp8", {}, {"bits": 8, "format": "fp8", "error_feedback": True})
    _conserved(group, "everything", {}, {"bits": 4, "exact_below": 0, "rules": {"*": 4}})


def test_nothing_is_lost_in_ddps_ways() -> None:
    run_ranks(_ways, 2, GATE)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_lost_in_any_way_of_ddp(world: int) -> None:
    run_ranks(_ways, world, tuple(WAYS))


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_nothing_is_lost_at_any_bits(world: int) -> None:
    run_ranks(_settings, world)


@pytest.mark.nightly
def test_nothing_is_lost_carried_by_gloo() -> None:
    run_ranks(_ways, 2, GATE, env={"ARK_SHARED_MEMORY": "off"})


def _as_oracle(rank: Rank) -> None:
    """With nearest rounding, step by step. The oracle's residuals are those of the last step."""
    rank.init()
    for bits, bucket, feedback in ((4, 128, True), (8, 512, True), (2, 128, False)):
        torch.manual_seed(0)
        weight = nn.Linear(130, 70, bias=False)
        ddp, state = oracle.hooked(
            weight, bits=bits, bucket=bucket, error_feedback=feedback, rounding="nearest", skip_zeros=False
        )
        step = 0.0
        for number in range(3):
            x = torch.randn(4, 130, generator=torch.Generator().manual_seed(10 * number + rank.rank))
            ddp.zero_grad()
            before = state.state_dict()["residuals"].get("weight", torch.zeros(70 * 130))
            ddp(x).square().sum().backward()
            alone = nn.Linear(130, 70, bias=False)
            alone.load_state_dict(weight.state_dict())
            alone(x).square().sum().backward()
            given = alone.weight.grad.flatten()
            residual = before.clone() if feedback else None
            wanted = oracle.compressed_all_reduce(
                given, residual, [9100], [bits], [bucket], "uniform", "nearest", 0, "avg", state.group.group_name
            )
            got = ddp.module.weight.grad.flatten()
            # A value between two codes may be rounded differently if the last bit of a sum differs.
            step = float((wanted.max() - wanted.min()) / (2**bits - 1))
            apart = (got - wanted).abs()
            assert (apart > 1e-4 * step).float().mean() < 0.01 and apart.max() < 1.5 * step, (bits, number)
        assert step > 0


def test_results_are_the_oracles() -> None:
    run_ranks(_as_oracle, 2)


def _subgroups(rank: Rank) -> None:
    """Ranks 1 and 2 of three train in their own group. The other rank does nothing."""
    rank.init()
    group = dist.new_group([1, 2])
    if rank.rank == 0:
        with pytest.raises(ValueError, match="not a member"):
            compression.State(group=group)
        return
    state = _conserved(group, "subgroup", {}, {})
    assert state.group is group
    with pytest.raises(ValueError, match="another group than the module's"):
        compression.State(group=dist.group.WORLD, module=DDP(Net(), process_group=group))


def test_subgroups() -> None:
    """CGX always reduces over the world."""
    run_ranks(_subgroups, 3)


def _one(rank: Rank) -> None:
    rank.init()
    ddp, alone = DDP(Net()), Net()
    state = compression.State(bits=1, module=ddp)
    ddp.register_comm_hook(state, compression.hook)
    for model in (ddp, alone):
        _backward(model, 0, 0, "both")
    for ours, wanted in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, wanted.grad)
    assert state.bytes_sent == state.bytes_exact == 0


def test_one_rank_is_exact() -> None:
    run_ranks(_one, 1)


def _dtypes(rank: Rank) -> None:
    group = rank.init()
    for dtype, close in ((torch.bfloat16, 0.1), (torch.float16, 0.1), (torch.float64, 1e-12)):
        torch.manual_seed(3)
        ddp, alone = (nn.Linear(64, 64, bias=False).to(dtype) for _ in range(2))
        alone.load_state_dict(ddp.state_dict())
        ddp = DDP(ddp)
        state = compression.State(bits=8, module=ddp)
        ddp.register_comm_hook(state, compression.hook)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank.rank)).to(dtype)
        for model in (ddp, alone):
            model(x).square().sum().backward()
        wanted = alone.weight.grad.double()
        dist.all_reduce(wanted, group=group)
        wanted /= rank.world_size
        got = ddp.module.weight.grad
        assert got.dtype == dtype and _same_everywhere(got, group)
        assert (got.double() - wanted).norm() < close * wanted.norm(), dtype
        assert (state.bytes_sent < state.bytes_exact) == (dtype != torch.float64)


def test_bfloat16_and_float16_and_float64_exact() -> None:
    """CGX has no bfloat16."""
    run_ranks(_dtypes, 2)


def _join(rank: Rank) -> None:
    """Rank 0 has fewer batches. While the others continue, it sends zeros and its old residuals."""
    group = rank.init()
    ddp = DDP(Net())
    state = compression.State(bits=4, module=ddp)
    ddp.register_comm_hook(state, compression.hook)
    with ddp.join():
        for step in range(3 + 2 * rank.rank):
            ddp.zero_grad()
            _backward(ddp, step, rank.rank, "both")
    assert state.step == 5
    residual = state.layers.state_dict()["into.weight"]
    assert residual.norm() > 0
    for one in ddp.parameters():
        assert one.grad.isfinite().all()
    assert rank.rank == 0 or _last_mean(ddp, group)


def _last_mean(ddp: DDP, group: Any) -> bool:
    alone = Net()
    _backward(alone, 4, 1, "both")
    wanted = alone.into.weight.grad / 2  # rank 0 had no batch
    got = ddp.module.into.weight.grad
    return bool((got - wanted).norm() < 0.5 * wanted.norm())


def test_join() -> None:
    run_ranks(_join, 2)


def _large(rank: Rank) -> None:
    """A layer larger than DDP's buckets and than any piece in which the group moves bytes."""
    group = rank.init()
    ddp = DDP(nn.Linear(2048, 3001, bias=False), bucket_cap_mb=1)
    state = compression.State(bits=8, module=ddp, rounding="nearest")
    ddp.register_comm_hook(state, compression.hook)
    x = torch.randn(2, 2048, generator=torch.Generator().manual_seed(rank.rank))
    ddp(x).sum().backward()
    row = x.sum(0)
    dist.all_reduce(row, group=group)
    wanted = (row / rank.world_size).expand(3001, 2048)
    got = ddp.module.weight.grad
    step = (row.max() - row.min()) / rank.world_size / 255
    assert (got - wanted).abs().max() < 2.5 * step, "an element was not reduced"


def test_a_layer_larger_than_a_bucket_is_reduced_whole() -> None:
    """CGX does not reduce what exceeds its fusion buffer."""
    run_ranks(_large, 2)


def _plain_stays_exact(rank: Rank) -> None:
    """A plain all_reduce on the same group as a hook."""
    group = rank.init()
    before, after = (torch.randn(5000, generator=torch.Generator().manual_seed(rank.rank)) for _ in range(2))
    dist.all_reduce(before)
    _conserved(group, "plain", {}, {"bits": 1})
    dist.all_reduce(after)
    assert torch.equal(before, after)
    ddp = DDP(Net())
    _backward(ddp, 0, rank.rank, "both")
    means = _exact(0, group, "both", 1)
    for name, parameter in ddp.module.named_parameters():
        torch.testing.assert_close(parameter.grad, means[name], rtol=1e-6, atol=1e-7)


def test_a_plain_all_reduce_stays_exact() -> None:
    """CGX compresses every all-reduce of its group."""
    run_ranks(_plain_stays_exact, 2)


def _pytorchs_hooks(rank: Rank) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    group = rank.init()

    def backward(model: nn.Module) -> None:
        x = torch.randn(4, 37, generator=torch.Generator().manual_seed(rank.rank))
        model(x).square().mean().backward()

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(37, 65), nn.ReLU(), nn.Linear(65, 33))

    alone = make()
    backward(alone)
    means = [parameter.grad for parameter in alone.parameters()]
    for mean in means:
        dist.all_reduce(mean)
        mean.div_(rank.world_size)
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)

    # Without NCCL, DDP refuses the bfloat16 hook by its name.
    def bf16(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    for hook, state, close in (
        (default_hooks.fp16_compress_hook, None, 2e-3),
        (bf16, None, 2e-2),
        (powerSGD_hook.powerSGD_hook, power, 0.1),
    ):
        ddp = DDP(make())
        ddp.register_comm_hook(state, hook)
        for _ in range(8 if state is power else 1):
            ddp.zero_grad()
            backward(ddp)
        for mean, parameter in zip(means, ddp.parameters(), strict=True):
            assert _same_everywhere(parameter.grad, group)
            assert (parameter.grad - mean).norm() <= close * mean.norm() + 1e-7, hook


def test_pytorchs_own_hooks() -> None:
    run_ranks(_pytorchs_hooks, 2)
