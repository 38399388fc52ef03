"""What single layers send: rules, chosen bits, layers that send nothing, sparse gradients, when="faster"."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import compression as oracle
from support.compression import Heard, hooked, mean
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn

from ark_torch.distributed import compression
from ark_torch.distributed.compression import auto, loading, rules, zeros

pytestmark = [ark_only]


# -- rules


def test_the_first_rule_that_matches_counts() -> None:
    parsed = rules.parse({"head.weight": "exact", "head.*": 8, "*": compression.Rule(2, 256)}, "uniform")

    def width(name: str) -> rules.Rule | None:
        return rules.rule_for(name, 2, 10_000, parsed, 1024)

    assert width("head.weight") == compression.Rule(0)
    assert width("head.bias") == compression.Rule(8)
    assert width("body.weight") == compression.Rule(2, 256)
    assert rules.rule_for("x", 2, 1023, {}, 1024) == rules.rule_for("x", 1, 9999, {}, 1024) == compression.Rule(0)
    assert rules.rule_for("x", 2, 1024, {}, 1024) is None


def _ruled(rank: Rank) -> None:
    rank.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    wanted = {"0.weight": "exact", "1.*": 8, "2.weight": compression.Rule(2, 128)}
    ddp, state = hooked(model, bits=4, rules=wanted, error_feedback=False, rounding="nearest", skip_zeros=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank.rank))
    ddp(x).square().mean().backward()
    alone = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    alone.load_state_dict(model.state_dict())
    alone(x).square().mean().backward()
    errors = {}
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        wanted_mean = mean(theirs.grad)
        errors[name] = float((ours.grad - wanted_mean).norm() / wanted_mean.norm())
    assert errors["0.weight"] < 1e-6 and errors["0.bias"] < 1e-6 and errors["3.bias"] < 1e-6, errors
    assert 0 < errors["1.weight"] < 0.02 and 0 < errors["1.bias"] < 0.02, errors
    assert 0.02 < errors["3.weight"] < 0.2 < errors["2.weight"], errors
    table = state.describe()
    for line in ("0.weight  exact", "1.bias    8 bits, bucket 512", "2.weight  2 bits, bucket 128", "3.bias    exact"):
        assert line in table, table
    exact = 4096 * 4 + 64 * 4 * 3
    codes = (4096 + 8 * 8) + (64 + 8) + (4096 // 4 + 32 * 8) + (4096 // 2 + 8 * 8)
    assert state.bytes_sent == exact + codes and state.bytes_exact == 4 * (4096 + 64) * 4


def test_rules_by_name_and_pattern() -> None:
    run_ranks(_ruled, 2)


# -- Auto


def test_bits_by_marginal_gain_are_nearly_the_best_there_are() -> None:
    """Compares with all ways to give four layers 1 to 8 bits within the budget."""
    numels, sums = [100, 40, 300, 50], [(1.0, 5.0), (2.0, 90.0), (0.1, 20.0), (0.01, 0.5)]
    for feedback, relative in itertools.product((False, True), repeat=2):
        errors = [auto.errors_of(*pair, n, feedback, relative) for pair, n in zip(sums, numels, strict=True)]

        def error(bits: Any, errors: Any = errors) -> float:
            return sum(of_layer[b - 1] for of_layer, b in zip(errors, bits, strict=True))

        for budget in (1.5, 2.0, 2.5, 3.0, 4.2):
            allowed = budget * sum(numels)
            ways = itertools.product(range(1, 9), repeat=4)
            best = min(error(bits) for bits in ways if sum(b * n for b, n in zip(bits, numels, strict=True)) <= allowed)
            chosen = auto.allocate(errors, numels, budget, least=1)
            assert sum(b * n for b, n in zip(chosen, numels, strict=True)) <= allowed
            # At most worse than the best by the next step of the layer that did not fit.
            less = max(one[b - 1] - min(one) for one, b in zip(errors, chosen, strict=True))
            assert error(chosen) <= best + less, (budget, chosen)
    flat = auto.errors_of(0.0, 0.0, 10, False, True)
    assert auto.allocate([flat, auto.errors_of(1.0, 1.0, 10, False, True)], [10, 10], 4.0) == [2, 6]
    assert auto.allocate([auto.errors_of(1.0, 1.0, 10, True, True)] * 2, [10, 10], 8.0) == [8, 8]


def test_what_counts_is_absolute_for_sgd_and_relative_for_adam() -> None:
    """The same layer at a hundred times the scale."""
    quiet, loud = (1.0, 40.0), (1e4, 40e4)

    def chosen(relative: bool) -> list[int]:
        errors = [auto.errors_of(*sums, 10, False, relative) for sums in (quiet, loud)]
        return auto.allocate(errors, [10, 10], 4.0)

    assert chosen(True) == [4, 4] and chosen(False) == [2, 6]


def _chances(rank: Rank) -> None:
    """With stochastic rounding, the same gradients give different results in each step, with the right average."""
    rank.init()
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    ddp, _ = hooked(model, bits=4, error_feedback=False, rounding="stochastic", skip_zeros=False)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank.rank))
    came = []
    for _ in range(24):
        model.zero_grad()
        ddp(x).sum().backward()
        came.append(model.weight.grad.clone())
    alone = nn.Linear(64, 64, bias=False)
    alone(x).sum().backward()
    wanted = mean(alone.weight.grad)
    assert not torch.equal(came[0], came[1])
    one = float((came[0] - wanted).norm())
    assert float((torch.stack(came).mean(0) - wanted).norm()) < one / 2


def test_chances_differ_from_step_to_step() -> None:
    run_ranks(_chances, 2)


def _automatic(rank: Rank) -> None:
    rank.init()
    heard = Heard()
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ("loud", "quiet", "fixed")})
    ddp, state = hooked(
        nn.Sequential(model["loud"], model["quiet"], model["fixed"]),
        bits=compression.Auto(budget=4, steps=2, relative=False),
        rules={"2.weight": 8},
    )
    for step in range(3):
        ddp.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step + 10 * rank.rank))
        if rank.rank == 0:
            x = 0.1 * x  # ranks measure different values but must choose the same
        (ddp(x) * 1e2).square().mean().backward()
    bits = {layer.name: state.width(layer)[0] for layer in state.layers}
    assert bits["2.weight"] == 8 and bits["0.weight"] + bits["1.weight"] == 8, bits
    every: list[Any] = [None] * rank.world_size
    dist.all_gather_object(every, bits)
    assert every[0] == every[1]
    chosen = heard.of("bits chosen from the gradients of 2 steps")
    assert len(chosen) == (1 if rank.rank == 0 else 0)
    if chosen:
        assert f"{bits['0.weight']} bits, bucket 512" in chosen[0] and "2.weight  8 bits" in chosen[0]
    spreads = [float(auto.sums_of(layer.weight.grad, 512)[1]) for layer in (ddp.module[0], ddp.module[1])]
    assert (bits["0.weight"] > bits["1.weight"]) == (spreads[0] > spreads[1]) or bits["0.weight"] == bits["1.weight"]


def test_bits_chosen_from_gradients() -> None:
    run_ranks(_automatic, 2)


def test_spread_is_by_bucket() -> None:
    gradient = torch.cat([torch.linspace(0, 1, 128), torch.linspace(0, 3, 128), torch.tensor([5.0, 6.0])])
    energy, spread = auto.sums_of(gradient, 128).tolist()
    assert spread == pytest.approx(128 * 1 + 128 * 9 + 2 * 1)
    assert energy == pytest.approx(float(gradient.square().sum()))


# -- few bits


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_few_bits_lose_less_than_there_is_when_values_are_drawn_in(bits: int) -> None:
    """Error feedback requires this. With a range from the least to the greatest value it does not hold."""
    generator = torch.Generator().manual_seed(bits)
    values = torch.randn(8 * 512, generator=generator) * torch.rand(8 * 512, generator=generator).reciprocal().sqrt()
    values += 0.01
    residual = torch.randn(8 * 512, generator=generator) * 0.1
    full = values + residual

    def lost(ends: bool) -> float:
        left = residual.clone()
        if ends:
            got = loading.loaded(
                values, left, 2, [4 * 512 - 7, 7], [(bits, 512), (0, 512)],
                lambda given: _rows_of(given, left, bits),
            )  # fmt: skip
        else:
            left.zero_()
            got = _rows_of(full, left, bits)
        torch.testing.assert_close(got + left, full, rtol=1e-5, atol=1e-5)
        return float(left.norm() / full.norm())

    assert lost(True) < 0.85
    assert bits == 3 or lost(False) > 1.0


def _rows_of(given: Tensor, residual: Tensor, bits: int) -> Tensor:
    """The exchange of one rank: two rows of a quantised layer and an exact one."""
    sent = torch.cat([oracle.segments(row, [4 * 512 - 7, 7], [bits, 0], [512, 512], "uniform", "nearest", 0)
                      for row in given.view(2, -1)])  # fmt: skip
    residual += given - sent
    return sent


def test_a_nan_bucket_leaves_nothing_behind() -> None:
    values, residual = torch.randn(1024), torch.zeros(1024)
    values[700] = float("nan")
    got = loading.loaded(values, residual, 1, [1024], [(2, 512)], lambda given: given.clone())
    assert got[512:].isnan().all() and got[:512].isfinite().all() and residual.isfinite().all()
    assert not residual[512:].any() and residual[:512].any()


# -- layers that send nothing


class Adapted(nn.Module):
    """A frozen body with small matrices beside it, as in LoRA, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(128, 16, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(16, 128, bias=False) for _ in range(4))
        self.head = nn.Linear(128, 16)

    def forward(self, x: Tensor, adapters: bool = True) -> Tensor:
        for body, down, up in zip(self.body, self.down, self.up, strict=True):
            x = body(x) + (up(down(x)) if adapters else 0)
        return self.head(x)


def _bytes(rank: Rank) -> None:
    rank.init()

    def run(model: Adapted, steps: int = 3, adapters: bool = True) -> compression.State:
        ddp, state = hooked(model, {"find_unused_parameters": not adapters}, bits=4)
        for step in range(steps):
            ddp.zero_grad()
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step + 10 * rank.rank))
            ddp(x, adapters).square().mean().backward()
        return state

    everything = run(Adapted())
    lora = Adapted()
    lora.body.requires_grad_(False)
    small = run(lora)
    assert small.bytes_exact < 0.3 * everything.bytes_exact
    assert small.bytes_sent < 0.3 * everything.bytes_sent < 0.3 * 0.25 * everything.bytes_exact

    # Only the last layers learn, without freezing: the gradients of body and adapters are zero on all ranks.
    last = Adapted()
    for one in last.body:
        one.register_forward_hook(lambda module, inputs, output: output.detach())
    state = run(last, adapters=False)
    head = 3 * (128 * 16 // 2 + 4 * 8 + 16 * 4)
    flags = 3 * len(list(last.parameters()))
    assert head <= state.bytes_sent <= head + flags, (state.bytes_sent, head)
    assert state.bytes_exact == everything.bytes_exact


def test_frozen_and_zero_layers_send_nothing() -> None:
    run_ranks(_bytes, 2)


def test_how_often_flags_are_asked_for() -> None:
    """On the CPU in each step. On a GPU in each 64th, and in each while a layer is skipped."""
    made = (1, 2)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert all(zeros.Zeros(None).asks(made, cpu) for _ in range(3))
    sometimes = zeros.Zeros(None)
    assert [sometimes.asks(made, cuda) for _ in range(130)] == [step % 64 == 0 for step in range(130)]
    sometimes._left_out.add(made)
    assert sometimes.asks(made, cuda)
    always, never = zeros.Zeros(True), zeros.Zeros(False)
    assert all(always.asks(made, cuda) for _ in range(3)) and not any(never.asks(made, cpu) for _ in range(3))


def _zero_here(rank: Rank) -> None:
    """A layer that one rank does not use is sent. One that no rank uses keeps its residual until it is used again."""
    rank.init()
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x: Tensor, weights: tuple[float, float]) -> Tensor:
            return sum(w * layer(x) for w, layer in zip(weights, self.both, strict=True))

    ddp, state = hooked(Two(), bits=2)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank.rank))

    def step(*weights: float) -> list[Tensor]:
        ddp.zero_grad()
        ddp(x, weights).square().mean().backward()
        return [layer.weight.grad.clone() for layer in ddp.module.both]

    got = step(1.0, float(rank.rank == 0))
    assert got[0].any() and got[1].any()

    def lost() -> Tensor:
        return state.state_dict()["residuals"].get("both.1.weight", torch.zeros(64 * 64))

    kept = lost()
    assert kept.any() or rank.rank > 0
    sent = state.bytes_sent
    got = step(1.0, 0.0)
    assert not got[1].any() and torch.equal(lost(), kept)
    assert state.bytes_sent - sent < 0.6 * sent
    step(1.0, 1.0)
    assert not torch.equal(lost(), kept)


def test_layers_used_by_some_ranks_or_some_steps() -> None:
    run_ranks(_zero_here, 2)


# -- sparse gradients


def _sparse(rank: Rank) -> None:
    group = rank.init()

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(1000, 12, sparse=True)
            self.out = nn.Linear(12, 100)

        def forward(self, rows: Tensor) -> Tensor:
            return self.out(self.table(rows))

    ddp, state = hooked(Bags(), bits=8)
    alone = Bags()
    for step in range(3):
        count = [0, 1, 40][(step + rank.rank) % 3]  # each rank has another number of rows, possibly none
        rows = torch.randint(1000, (count,), generator=torch.Generator().manual_seed(step))  # ranks share rows
        rows = torch.cat([rows, rows[:5]])  # some rows occur twice
        for model in (ddp, alone):
            model.zero_grad()
            model(rows).square().sum().backward()
        wanted = mean(alone.table.weight.grad.to_dense())
        got = ddp.module.table.weight.grad
        assert got.is_sparse and got.is_coalesced()
        torch.testing.assert_close(got.to_dense(), wanted)
        every: list[Any] = [None] * rank.world_size
        dist.all_gather_object(every, got, group=group)
        assert all(torch.equal(one.values(), got.values()) for one in every)
    assert state.bytes_sent < 0.2 * 3 * 1000 * 12 * 4


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_sparse_gradients_as_index_and_value(world: int) -> None:
    run_ranks(_sparse, world)


# -- when="faster"


def _faster(rank: Rank, wins: bool) -> None:
    """With fake times: ranks agree although only one of them measures a loss of speed."""
    from unittest import mock

    from ark_torch.distributed.compression import contest

    rank.init()
    heard = Heard()
    ticks = iter(range(10**9))
    real = contest._timed

    def timed(run: Any, tensor: Tensor, of: Any) -> tuple[Any, float]:
        result, _ = real(run, tensor, of)
        compressed = next(ticks) % 2 == 0
        slow = not wins and rank.rank == 1
        return result, (3.0 if slow else 1.0) if compressed else 2.0

    torch.manual_seed(0)
    with mock.patch.object(contest, "_timed", timed):
        ddp, _ = hooked(nn.Linear(64, 64, bias=False), bits=2, when="faster")
        sums = [torch.zeros(64, 64) for _ in range(2)]
        for step in range(contest.CALLS + 3):
            ddp.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step + 10 * rank.rank))
            ddp(x).sum().backward()
            exact_mean = mean(x.sum(0).expand(64, 64))
            sums[0] += ddp.module.weight.grad
            sums[1] += exact_mean
            if step == contest.CALLS + 2:
                exact = torch.allclose(ddp.module.weight.grad, exact_mean, atol=1e-5)
                assert exact != wins, "the last step"
    if not wins:  # earlier residuals have been delivered as well
        torch.testing.assert_close(sums[0], sums[1], rtol=1e-3, atol=1e-3)
    said = heard.of("is sent exact from now on")
    assert len(said) == int(not wins and rank.rank == 0), heard.lines
    if said:
        assert "3000.00 ms compressed and 2000.00 ms exact" in said[0]


@pytest.mark.parametrize("wins", [True, False])
def test_compression_that_loses_is_left_out_and_told(wins: bool) -> None:
    run_ranks(_faster, 2, wins)
