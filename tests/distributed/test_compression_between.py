"""State(where="between"): the ranks of a node add exactly, and only what travels between nodes has few bits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import training as small
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compressed_all_reduce, compression
from ark_torch.train import capture

pytestmark = [ark_only]

Placement = tuple[int, ...]
TWO: Placement = (0, 0, 1, 1)
MIXED: Placement = (0, 1, 0, 1)  # neighbours are on different nodes


def _start(rank: Rank, placement: Placement) -> None:
    os.environ["ARK_NODE"] = str(placement[rank.rank])
    rank.init()


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 70), nn.ReLU(), nn.Linear(70, 90), nn.ReLU(), nn.Linear(90, 30))


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def _gradients(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    model.zero_grad()
    model(_x(step, rank)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _steps(rank: Rank, placement: Placement, bits: int) -> tuple[int, int, list[int]]:
    """Several steps of DDP. The sums of all results approach the exact ones, and all ranks have the same bits."""
    _start(rank, placement)
    model = DDP(_net())
    state = compression.State(bits=bits, module=model, where="between", exact_below=256, rounding="nearest")
    model.register_comm_hook(state, compression.hook)
    alone, total, wanted = _net(), None, None
    for step in range(6):
        got = torch.cat([g.flatten() for g in _gradients(model, step, rank.rank)])
        every = [torch.empty_like(got) for _ in placement]
        dist.all_gather(every, got)
        assert all(torch.equal(one, got) for one in every)
        exact = torch.stack([
            torch.cat([g.flatten() for g in _gradients(alone, step, r)]) for r in range(len(placement))
        ]).mean(0)  # fmt: skip
        assert not torch.equal(got, exact)
        total = got if total is None else total + got
        wanted = exact if wanted is None else wanted + exact
    spread = float(wanted.abs().max())
    assert float((total - wanted).abs().max()) < spread * 2.0 / (1 << bits)  # error feedback: not six times as much
    held = [index for index, layer in enumerate(state.layers) if layer.residual is not None]
    return state.bytes_sent, state.bytes_exact, held


@pytest.mark.parametrize("placement", [TWO, MIXED], ids=str)
def test_steps_of_ddp(placement: Placement) -> None:
    told = run_ranks(_steps, 4, placement, 4)
    for node in (0, 1):
        first, second = (told[rank] for rank in range(4) if placement[rank] == node)
        assert not set(first[2]) & set(second[2]) and len(first[2]) + len(second[2]) == 6  # each layer on one
    elements = sum(p.numel() for p in _net().parameters())
    for sent, exact, _ in told:
        assert 0 < sent < exact / 4 and exact < 6 * 4 * elements  # of a share, between two nodes


def _as_by_hand(rank: Rank) -> None:
    """The bits of an exact sum in the node and a compressed one between them."""
    _start(rank, TWO)
    model = DDP(_net())
    state = compression.State(
        bits=8, module=model, where="between", exact_below=1, error_feedback=False, rounding="nearest", skip_zeros=False
    )
    model.register_comm_hook(state, compression.hook)
    got = _gradients(model, 0, rank.rank)
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank.rank // 2]
    rails = [dist.new_group([place, place + 2]) for place in range(2)]
    for number, gradient in enumerate(_gradients(_net(), 0, rank.rank)):
        dist.all_reduce(gradient, group=inside)
        by_place = compressed_all_reduce(gradient / 2, bits=8, op=dist.ReduceOp.AVG, group=rails[rank.rank % 2])
        if gradient.dim() > 1:  # biases are exact
            assert torch.equal(got[number], by_place), number


def test_the_bits_of_both_stages_by_hand() -> None:
    run_ranks(_as_by_hand, 4)


def _captured(rank: Rank) -> None:
    """A captured step's buckets go the same way."""
    _start(rank, TWO)
    ddp = DDP(small.make("gpt2"))
    state = compression.State(bits=8, module=ddp, where="between", exact_below=256, rounding="nearest")
    ddp.register_comm_hook(state, compression.hook)
    step = capture(ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2), small.loss, bucket_mb=0.02)
    losses = [step(small.batch("gpt2", number, rank.rank)).item() for number in range(8)]
    assert losses[-1] < losses[0] and 0 < 2 * state.bytes_sent < state.bytes_exact
    weights = small.weights(ddp.module)
    every = [torch.empty_like(weights) for _ in range(4)]
    dist.all_gather(every, weights)
    assert all(torch.equal(one, weights) for one in every)


def test_a_captured_step() -> None:
    run_ranks(_captured, 4)


def _refused(rank: Rank, placement: Placement) -> str:
    _start(rank, placement)
    model = DDP(_net())
    model.register_comm_hook(compression.State(module=model, where="between"), compression.hook)
    with pytest.raises(ValueError) as caught:
        _gradients(model, 0, rank.rank)
    return str(caught.value)


def test_nodes_of_different_sizes_are_refused() -> None:
    for rank, text in enumerate(run_ranks(_refused, 3, (0, 0, 1))):
        assert f"[rank {rank}] compression: where='between' needs as many ranks on every node" in text
        assert "there are 2 + 1: pass where='everywhere'" in text


def _one_node(rank: Rank) -> None:
    rank.init()
    with pytest.raises(ValueError, match="where"):
        compression.State(where="outside")
    model, alone = DDP(_net()), _net()
    state = compression.State(module=model, where="between")
    model.register_comm_hook(state, compression.hook)
    exact: Any = None
    for r in range(rank.world_size):
        gradients = _gradients(alone, 0, r)
        exact = gradients if exact is None else [a + b for a, b in zip(exact, gradients, strict=True)]
    for got, wanted in zip(_gradients(model, 0, rank.rank), exact, strict=True):
        torch.testing.assert_close(got, wanted / rank.world_size)


def test_on_one_node_gradients_are_exact() -> None:
    run_ranks(_one_node, 2)
