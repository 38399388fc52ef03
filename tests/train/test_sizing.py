"""The size of gradient buckets, chosen by what replays take: all ranks alike, with the bits of any other size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_graphs
import pytest
import torch
from support import training as small
from support.crew import crew_of
from support.groups import ark_only
from support.rank import Rank
from support.told import Lines

from ark_torch.train import capture, graphs, sizing

pytestmark = [ark_only]
MB = 1 << 20
SIZES = (0.05, 0.02, 0.1)
CALLS = 3 + len(SIZES) * sizing.REPLAYS + 4  # eager ones, those of each size, and some afterwards


def run(body: Callable[..., Any], *args: Any) -> list[Any]:
    return crew_of(2, {}).run(body, *args)


def _train(rank: Rank, took: dict[float, float], **options: Any) -> Any:
    """Returns the step, the weights, the recorder, and the sizes of buckets by call."""
    recorder = fake_graphs.use()
    model = small.make("gpt2")
    step = capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), small.loss, **options)
    limits = []

    class Watch:
        def __init__(self, device: Any) -> None:
            self._limit = step._step.buckets._limit  # type: ignore[union-attr]

        def mark(self) -> None:
            pass

        def milliseconds(self) -> float:
            return next(ms for mb, ms in took.items() if int(mb * MB) == self._limit)

    sizing._Stopwatch = Watch  # type: ignore[misc,assignment]
    for number in range(CALLS):
        step(small.batch("gpt2", number, rank.rank))
        limits.append(step._step.buckets._limit)  # type: ignore[union-attr]
    return step, small.weights(model), recorder, limits


def _chosen(rank: Rank, took: list[dict[float, float]], best: float) -> None:
    rank.init()
    before = graphs.recorder_for, sizing.CANDIDATES_MB, sizing._Stopwatch
    lines = Lines()
    try:
        sizing.CANDIDATES_MB = SIZES
        step, weights, recorder, limits = _train(rank, took[rank.rank])
        assert step.captured, step.reason
        assert list(dict.fromkeys(limits)) == [int(mb * MB) for mb in SIZES] and limits[-1] == int(best * MB), limits
        assert step._sizing is None
        told = lines.about("train.capture: buckets of")
        assert len(told) == (rank.rank == 0), lines.lines
        assert all(f"buckets of {best:g} MB, by measurement" in line for line in told), told
        assert recorder.counts["records"] == len(SIZES) + (best != SIZES[-1])
        assert recorder.counts["resets"] == recorder.counts["records"] - 1
        buckets = step._step.buckets
        assert sum(bucket.bytes for bucket in buckets.buckets) == 4 * weights.numel()
        step.close()
        fixed, expected, _, limits = _train(rank, {}, bucket_mb=0.03)
        assert set(limits) == {int(0.03 * MB)} and torch.equal(weights, expected)
        fixed.close()
    finally:
        graphs.recorder_for, sizing.CANDIDATES_MB, sizing._Stopwatch = before  # type: ignore[misc]


@pytest.mark.parametrize(
    "took, best",
    [
        ([{0.05: 5.0, 0.02: 4.0, 0.1: 6.0}] * 2, 0.02),
        ([{0.05: 5.0, 0.02: 4.0, 0.1: 4.5}, {0.05: 5.0, 0.02: 9.0, 0.1: 4.6}], 0.1),  # the slowest rank counts
        ([{0.05: 5.0, 0.02: 4.95, 0.1: 4.95}] * 2, 0.05),  # too little to gain
    ],
)
def test_the_fastest_size_is_chosen(took: Any, best: float) -> None:
    run(_chosen, took, best)


def _other_shapes(rank: Rank) -> None:
    """Times of batches of other shapes do not compare: the first size stays."""
    rank.init()
    before = graphs.recorder_for, sizing.CANDIDATES_MB, sizing._Stopwatch
    try:
        sizing.CANDIDATES_MB = SIZES
        fake_graphs.use()
        model = small.make("gpt2")
        step = capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), small.loss)
        for number in range(3 + 2 * sizing.REPLAYS):
            # The second size gets batches of another length only.
            length = 12 if number < 3 + sizing.REPLAYS else 10
            step(small.batch("gpt2", number, rank.rank, length=length))
        for number in range(sizing.REPLAYS + 2):
            step(small.batch("gpt2", number, rank.rank, length=10))
        assert step._sizing is None and step._step.buckets is not None
        assert step._step.buckets._limit == int(SIZES[0] * MB)
        assert step.captured, step.reason
        step.close()
    finally:
        graphs.recorder_for, sizing.CANDIDATES_MB, sizing._Stopwatch = before  # type: ignore[misc]


def test_other_shapes_do_not_compare() -> None:
    run(_other_shapes)


def _not_measured(rank: Rank) -> None:
    """On CPUs, and where everything fits two buckets."""
    rank.init()
    model = small.make("gpt2")
    step = capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), small.loss)
    assert step._sizing is None and step._step.buckets is not None
    assert step._step.buckets._limit == 50 * MB
    step.close()
    before = graphs.recorder_for
    try:
        fake_graphs.use()
        step = capture(model, torch.optim.AdamW(model.parameters(), lr=1e-2), small.loss)
        assert step._sizing is None
        step.close()
    finally:
        graphs.recorder_for = before


def test_it_is_not_measured() -> None:
    run(_not_measured)
