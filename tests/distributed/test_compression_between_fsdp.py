"""where="between" of fully_shard: exact in a node, few bits between nodes, for gathers and scatters alike.

Exchanges are compared bit for bit with both stages by hand (support/quantizer.py), whole models with exact gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import quantizer
from support.compression import Heard
from support.groups import ark_only
from support.launcher import run_ranks
from support.quantizer import Segment, Settings
from support.rank import Rank
from test_compression_between import MASK, MIXED, ODD, TWO, UNEVEN, Placement, _same_everywhere, _start
from test_compression_fsdp import _batch, _conserved, _exact, _gradients, _sharded
from torch import Tensor

from ark_torch.distributed import compression
from ark_torch.distributed.compression import exchange
from ark_torch.distributed.compression.plan import plan_of

pytestmark = [ark_only]
SIX: Placement = (0, 0, 1, 1, 2, 2)
placements = pytest.mark.parametrize(
    "placement", [MIXED, *(pytest.param(one, marks=pytest.mark.nightly) for one in (TWO, (0, 1), SIX))],
    ids=lambda placement: "".join(map(str, placement)),
)  # fmt: skip


def _members(placement: Placement) -> list[list[int]]:
    return [[r for r, one in enumerate(placement) if one == node] for node in dict.fromkeys(placement)]


def _scattered_by_hand(
    inputs: list[Tensor], residuals: list[Tensor], placement: Placement, layers: list[Segment], settings: Settings
) -> Tensor:
    """The sum's rows, [ranks, n] in float32. Replaces residuals, as the ranks do."""
    members = _members(placement)
    given = [(x + residual).view(len(inputs), -1) for x, residual in zip(inputs, residuals, strict=True)]
    result = torch.empty_like(given[0])
    for residual in residuals:
        residual.zero_()
    for place in range(len(members[0])):
        rail, sums = [ranks[place] for ranks in members], []
        for ranks in members:
            added = given[ranks[0]][rail].clone()
            for r in ranks[1:]:
                added += given[r][rail]
            sums.append(added.view(-1))
        lost = [torch.zeros_like(one) for one in sums]
        mine = Settings(settings.format, settings.rounding, settings.seed ^ (place * ODD & MASK))
        result[rail] = quantizer.reduce_scatter(sums, lost, layers, mine, "sum").view(len(rail), -1)
        for rank, error in zip(rail, lost, strict=True):
            residuals[rank].view(len(inputs), -1)[rail] = error.view(len(rail), -1)
    return result


def _exchanges(rank: Rank, placement: Placement) -> None:
    group, world, me = _start(rank, placement), rank.world_size, rank.rank
    layers = [Segment(1203, 4, 128), Segment(33, 0, 128), Segment(640, 8, 256)]
    numels = [layer.numel for layer in layers]
    nodes = len(_members(placement))
    for rounding in ("nearest", "stochastic"):
        state = compression.State(4, 128, True, where="between", rounding=rounding, seed=3)
        known = [state.layers.named(n, f"{n}", [n * world, 1], None) for n in numels]
        known[1].rule, known[2].rule = compression.Rule(0), compression.Rule(8, 256)
        residuals = [torch.zeros(world * sum(numels)) for _ in range(world)]
        for step in range(3):
            inputs = [torch.randn(world * sum(numels), generator=torch.Generator().manual_seed(9 * step + r))
                      for r in range(world)]  # fmt: skip
            before = inputs[me].clone()
            plan = plan_of(state, known, inputs[me], numels, group)
            got = exchange.reduce_scatter(state, inputs[me], plan, "avg", group)
            settings = Settings("uniform", rounding, (3 * ODD + step + 1) & MASK)
            wanted = _scattered_by_hand(inputs, residuals, placement, layers, settings) / world
            assert torch.equal(got, wanted[me]) and torch.equal(before, inputs[me]), (rounding, step)
            held = torch.cat([layer.residual for layer in known if layer.residual is not None], 1)
            assert torch.equal(held.flatten(), residuals[me]), (rounding, step)
        assert state.bytes_exact == 3 * 4 * sum(numels) * (nodes - 1) and 2 * state.bytes_sent < state.bytes_exact
    shares = [torch.randn(sum(numels), generator=torch.Generator().manual_seed(r)) for r in range(world)]
    gathered = exchange.all_gather(state, shares[me], plan.segments, group)
    # Every rank is coded as what it is in its rail.
    rails = [[ranks[place] for ranks in _members(placement)] for place in range(world // nodes)]
    wanted = torch.empty(world, sum(numels))
    for rail in rails:
        every = quantizer.all_gather([shares[r] for r in rail], layers, Settings("uniform", "nearest"))
        wanted[rail] = every.view(nodes, -1)
    assert torch.equal(gathered.view(world, -1), wanted) and _same_everywhere(gathered)


@placements
def test_exchanges_and_residuals_are_the_oracles(placement: Placement) -> None:
    run_ranks(_exchanges, len(placement), placement)


def _model(rank: Rank, placement: Placement) -> None:
    """No gradient is lost; and with parameters in 8 bits a model's gradients are near the exact ones."""
    _start(rank, placement)
    model = _sharded()
    state = compression.State(4, 128, module=model, where="between", rules={"4.weight": 2})
    compression.fsdp(model, state, parameters=None)
    _conserved(rank, model, state, rank.world_size)
    model = _sharded()
    settings: dict[str, Any] = {"error_feedback": False, "rounding": "nearest", "where": "between"}
    state = compression.fsdp(model, compression.State(8, module=model, **settings))
    model(_batch(0, rank.rank)).square().mean().backward()
    exact = _exact(0)
    for name, got in _gradients(model).items():
        assert (got - exact[name]).norm() < 0.05 * exact[name].norm() + 1e-6, name
    assert 0.2 < state.bytes_sent / state.bytes_exact < 0.45


@placements
def test_a_model(placement: Placement) -> None:
    run_ranks(_model, len(placement), placement)


def _stays_exact(rank: Rank, placement: Placement, said: str) -> None:
    _start(rank, placement)
    heard, model = Heard(), _sharded()
    state = compression.fsdp(model, compression.State(1, module=model, where="between"))
    for step in range(2):
        model.zero_grad()
        model(_batch(step, rank.rank)).square().mean().backward()
        for name, wanted in _exact(step).items():
            torch.testing.assert_close(_gradients(model)[name], wanted, msg=name)
    assert len(heard.of(said)) == int(dist.get_rank() == 0) and state.bytes_sent == state.bytes_exact


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (UNEVEN, "nodes have unequal numbers of ranks: fsdp's exchanges are exact"),
        pytest.param((0, 0), "all ranks are on one node: gradients are sent exact", marks=pytest.mark.nightly),
    ],
)
def test_uneven_nodes_and_one_node_are_exact(placement: Placement, said: str) -> None:
    run_ranks(_stays_exact, len(placement), placement, said)
