"""Pipeline schedules as captured steps, compared with one process, and schedules that cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_graphs
import pytest
import torch
import torch.distributed as dist
from support import pipelines
from support.crew import crew_of
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

from ark_torch.train import capture, graphs

pytestmark = [ark_only]
STEPS = 6
CPU = torch.device("cpu")


def run(body: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    return crew_of(world, {}).run(body, *args)


def _one_process(rank: Rank, name: str, max_norm: float | None, graphed: bool) -> None:
    rank.init()
    before = graphs.recorder_for
    recorder = fake_graphs.use() if graphed else None
    try:
        staged = pipelines.Staged(name, rank.rank, rank.world_size, CPU)
        made = pipelines.optimizer(list(staged.own.values()))
        step = capture(staged.schedule, made, max_norm=max_norm)
        pipelines.check(step, staged, STEPS, CPU, max_norm)
        assert step.captured is graphed
        assert recorder is None or (recorder.counts["records"], recorder.counts["replays"]) == (1, STEPS - 3)
        step.close()
    finally:
        graphs.recorder_for = before


@pytest.mark.by_day(
    "GPipe-graphs",
    "1F1B-eager",
    "Interleaved1F1B-graphs",
    "InterleavedZeroBubble-eager",
    "ZBVZeroBubble-eager",
    "ZBVZeroBubble-graphs",
)
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", pipelines.SCHEDULES)
def test_as_in_one_process(name: str, graphed: bool) -> None:
    run(_one_process, name, None, graphed)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_clipped_to_the_norm_of_all_stages(name: str) -> None:
    run(_one_process, name, 0.05, True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", pipelines.SCHEDULES)
def test_three_ranks(name: str) -> None:
    run_ranks(_one_process, 3, name, 0.05, True)


def _bits(rank: Rank, name: str) -> None:
    """Compares the bits with those of a loop that calls schedule.step()."""
    rank.init()
    by_hand, captured = (pipelines.Staged(name, rank.rank, rank.world_size, CPU) for _ in range(2))
    pipelines.by_schedule(by_hand, STEPS, CPU)
    step = capture(captured.schedule, pipelines.optimizer(list(captured.own.values())))
    for number in range(STEPS):
        step(pipelines.batch(number))
    for number, weights in by_hand.weights().items():
        assert all(map(torch.equal, weights, captured.weights()[number]))


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_the_bits_of_a_loop(name: str) -> None:
    run(_bits, name)


class _Scaled(nn.Module):
    """A stage with a keyword argument, which the schedule passes to all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * scale[:, None]


def _keywords(rank: Rank) -> None:
    rank.init()
    torch.manual_seed(rank.rank)
    part = _Scaled()
    stage = pipelining.PipelineStage(part, rank.rank, 2, CPU)
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=functional.mse_loss)
    step = capture(schedule, torch.optim.SGD(part.parameters(), lr=0.1))
    x, scale, y = torch.randn(4, 8), torch.full((4,), 2.0), torch.randn(4, 8)
    inputs = {"x": x, "scale": scale} if rank.rank == 0 else {"scale": scale}
    losses = [step((inputs, y)).item() for _ in range(3)]
    assert rank.rank == 0 or losses[2] < losses[0]


def test_keyword_arguments() -> None:
    run(_keywords)


def _bad(rank: Rank) -> None:
    rank.init()

    def made(number: int, loss: Any = functional.mse_loss) -> Any:
        stage = pipelining.PipelineStage(nn.Linear(8, 8), rank.rank, 2, CPU)
        return pipelining.ScheduleGPipe(stage, n_microbatches=number, loss_fn=loss)

    def sgd(schedule: Any) -> Any:
        return torch.optim.SGD(schedule._stage.submod.parameters(), lr=0.1)

    schedule = made(2)
    for options, text in (
        ({"loss": lambda model, batch: None}, "loss is given beside a pipeline schedule.*leave it out"),
        ({"accumulate": 2}, "accumulate is given beside a pipeline schedule"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler is given beside"),
        ({"group": dist.group.WORLD}, "group is given beside a pipeline schedule.*leave it out"),
    ):
        with pytest.raises(ValueError, match=text):
            capture(schedule, sgd(schedule), **options)
    without = made(2, None)
    with pytest.raises(ValueError, match=r"no loss_fn.*make it with one"):
        capture(without, sgd(without))
    others = made(2 + 2 * rank.rank)
    with pytest.raises(ValueError, match="n_microbatches is 4 on rank 1 and 2 on rank 0"):
        capture(others, sgd(others))
    step = capture(schedule, sgd(schedule))
    with pytest.raises(ValueError, match=r"a batch for a pipeline schedule is \(inputs, target\)"):
        step(torch.zeros(4, 8))
    with pytest.raises(ValueError, match=rf"batch\[{rank.rank}\] is None on the rank of the"):
        step((None, None))
    assert step((torch.ones(4, 8), torch.ones(4, 8))).shape == ()


def test_bad_input() -> None:
    run(_bad)


def _in_ddp(rank: Rank) -> None:
    rank.init()
    alone = [dist.new_group([member]) for member in range(2)][rank.rank]
    part = nn.parallel.DistributedDataParallel(nn.Linear(8, 8), process_group=alone)
    stage = pipelining.PipelineStage(part, rank.rank, 2, CPU)
    schedule = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=functional.mse_loss)
    before = graphs.recorder_for
    fake_graphs.use()
    try:
        step = capture(schedule, torch.optim.SGD(part.parameters(), lr=0.1))
        with pytest.warns(UserWarning, match="a stage of the pipeline is in a DistributedDataParallel"):
            step((torch.ones(4, 8), torch.ones(4, 8)))
        assert not step.captured and "another group" in step.reason
    finally:
        graphs.recorder_for = before


def test_stages_that_communicate_by_themselves_run_as_they_are() -> None:
    run(_in_ddp)


def _together(rank: Rank) -> None:
    """Two schedules in two groups whose steps alternate in both orders, with collectives of the default group."""
    rank.init()
    before = graphs.recorder_for
    fake_graphs.use()
    try:
        groups = [dist.new_group() for _ in range(2)]
        names = ("1F1B", "Interleaved1F1B")
        staged = [
            pipelines.Staged(name, rank.rank, rank.world_size, CPU, group)
            for name, group in zip(names, groups, strict=True)
        ]
        expected = [pipelines.Staged(name, rank.rank, rank.world_size, CPU) for name in names]
        steps = [capture(one.schedule, pipelines.optimizer(list(one.own.values()))) for one in staged]
        total = torch.ones(1000)
        for number in range(STEPS):
            for step in steps if number % 2 else steps[::-1]:
                step(pipelines.batch(number))
                dist.all_reduce(total, dist.ReduceOp.AVG)
        assert all(step.captured for step in steps) and total.eq(1.0).all()
        for one, other in zip(staged, expected, strict=True):
            pipelines.by_schedule(other, STEPS, CPU)
            for number, weights in other.weights().items():
                assert all(map(torch.equal, weights, one.weights()[number]))
    finally:
        graphs.recorder_for = before


def test_two_schedules_at_once() -> None:
    run(_together)
