"""Training with few bits ends where exact training ends: the short form of benchmarks/compression_accuracy.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support import start
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank

from ark_torch.distributed import compression

pytestmark = [ark_only]


def _losses(rank: Rank, ways: list[dict[str, Any] | None], steps: int) -> list[float]:
    """Held-out loss at the end, by way: a GPT of a layer on this package's own source."""
    sys.path.insert(0, str(start.TESTS.parent / "examples"))
    from gpt.data import load_corpus
    from gpt.model import ModelConfig
    from gpt.training import Place, TrainingConfig, train

    torch.use_deterministic_algorithms(True)
    place = Place(rank.store("training"), rank.rank, rank.world_size, torch.device("cpu"))
    corpus = load_corpus(start.TESTS.parent / "ark_torch")
    losses = []
    for run, way in enumerate(ways):
        config = TrainingConfig(
            ModelConfig(1, 32, 2, 32), steps, 8, evaluate_every=steps, held_out_windows=64, compression=way
        )
        losses.append(train(config, corpus, "ark", run, place, lambda *_: None)[0].held_out[-1][1])
    return losses


def test_four_bits_train_as_exact_ones_do() -> None:
    """And two bits do better with error feedback than without."""
    nearest = {"bits": 2, "rounding": "nearest"}
    ways = [None, {"bits": 4}, nearest, {**nearest, "error_feedback": False}]
    exact, four, two, forgetful = run_ranks(_losses, 2, ways, 60)[0]
    assert exact < 4.0, "nothing was learnt"
    assert abs(four - exact) < 0.1, (exact, four)
    assert two < forgetful, (exact, two, forgetful)


@pytest.mark.nightly
def test_chosen_bits_are_as_good_as_the_same_bits_everywhere() -> None:
    ways = [None, {"bits": 3}, {"bits": compression.Auto(budget=3.0, steps=5)}]
    exact, same, chosen = run_ranks(_losses, 2, ways, 100)[0]
    assert abs(same - exact) < 0.2 and abs(chosen - exact) < 0.2, (exact, same, chosen)
