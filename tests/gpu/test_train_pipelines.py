"""Pipeline schedules on GPUs: sends and receives in a captured step's graph, several at once, a lost peer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpu import run, start
from support import pipelines
from support.rank import Rank
from training_support import kill_the_last, until_a_peer_dies

from ark_torch.train import capture

STEPS = 8


def _one_process(rank: Rank, name: str, max_norm: float | None) -> None:
    device = start(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    staged = pipelines.Staged(name, rank.rank, rank.world_size, device)
    step = capture(staged.schedule, pipelines.optimizer(list(staged.own.values())), max_norm=max_norm)
    pipelines.check(step, staged, STEPS, device, max_norm)
    assert step.captured, step.reason
    step.close()


@pytest.mark.parametrize("name", pipelines.SCHEDULES)
def test_as_in_one_process(name: str) -> None:
    run(_one_process, name, None)


def test_clipped_to_the_norm_of_all_stages() -> None:
    run(_one_process, "1F1B", 0.05)


def _loop(rank: Rank, name: str) -> None:
    device = start(rank)
    by_hand, captured = (pipelines.Staged(name, rank.rank, rank.world_size, device) for _ in range(2))
    pipelines.by_schedule(by_hand, STEPS, device)
    step = capture(captured.schedule, pipelines.optimizer(list(captured.own.values())))
    for number in range(STEPS):
        step(pipelines.batch(number))
    assert step.captured, step.reason
    for number, weights in by_hand.weights().items():
        for one, two in zip(weights, captured.weights()[number], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)  # AdamW's forms round differently


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_the_weights_of_a_loop(name: str) -> None:
    run(_loop, name)


def _together(rank: Rank) -> None:
    """Two schedules in two groups with alternating steps, and collectives of the default group in between."""
    device = start(rank)
    groups = [dist.new_group() for _ in range(2)]
    staged = [
        pipelines.Staged(name, rank.rank, rank.world_size, device, group)
        for name, group in zip(("1F1B", "Interleaved1F1B"), groups, strict=True)
    ]
    steps = [capture(one.schedule, pipelines.optimizer(list(one.own.values()))) for one in staged]
    total = torch.ones(1 << 18, device=device)
    for number in range(20):
        for step in steps if number % 2 else steps[::-1]:
            loss = step(pipelines.batch(number))
            dist.all_reduce(total, dist.ReduceOp.AVG)
    assert all(step.captured for step in steps)
    assert loss.isnan().item() is not staged[0].has_last
    assert total.eq(1.0).all().item()


def test_two_schedules_at_once() -> None:
    run(_together)


def _endless(rank: Rank) -> float:
    device = start(rank, timeout=120)
    staged = pipelines.Staged("1F1B", rank.rank, rank.world_size, device)
    step = capture(staged.schedule, pipelines.optimizer(list(staged.own.values())))
    return until_a_peer_dies(rank, device, lambda number: step(pipelines.batch(number)), step)


def test_a_peer_killed_during_replays() -> None:
    kill_the_last(_endless, case="captured pipeline")
