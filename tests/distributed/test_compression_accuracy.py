"""Training with few bits converges like exact training: the short form of benchmarks/compression_accuracy.py."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support import start
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compression

pytestmark = [ark_only]


def _losses(rank: Rank, ways: list[dict[str, Any] | None], steps: int) -> list[float]:
    """Returns the final held-out loss for each way: a one-layer GPT on this package's own source."""
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


def _least_squares(rank: Rank, settings: dict[str, Any] | None) -> Tensor:
    """Returns weights after SGD on noisy targets, where ranks' gradients do not vanish when their mean does."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 64, generator=generator)
    targets = inputs @ torch.randn(64, 32, generator=generator) + 3 * torch.randn(256, 32, generator=generator)
    inputs, targets = (part[rank.rank :: rank.world_size] for part in (inputs, targets))
    ddp = DDP(nn.Linear(64, 32, bias=False))
    nn.init.zeros_(ddp.module.weight)
    if settings is not None:
        ddp.register_comm_hook(compression.State(module=ddp, **settings), compression.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for _ in range(150):
        optimizer.zero_grad()
        (ddp(inputs) - targets).square().sum(1).mean().div(2).backward()
        optimizer.step()
    return ddp.module.weight.detach()


def _sgd(rank: Rank) -> list[float]:
    rank.init()
    exact = _least_squares(rank, None)
    apart = []
    for bits in (2, 1):
        for on in (True, False):
            got = _least_squares(rank, {"bits": bits, "rounding": "nearest", "error_feedback": on})
            apart.append(float((got - exact).norm() / exact.norm()))
    return apart


def test_sgd_arrives_with_feedback_alone() -> None:
    """Without feedback, what is rounded away at each step is lost forever."""
    two, two_forgetful, one, one_forgetful = run_ranks(_sgd, 2)[0]
    assert two < 0.1 and two < 0.5 * two_forgetful, (two, two_forgetful)
    assert one < 0.2 and one < 0.5 * one_forgetful, (one, one_forgetful)


def test_four_bits_train_as_exact_ones_do() -> None:
    exact, four, eight = run_ranks(_losses, 2, [None, {"bits": 4}, {"bits": 8}], 60)[0]
    assert exact < 4.0, "nothing was learnt"
    assert abs(four - exact) < 0.1 and abs(eight - exact) < 0.05, (exact, four, eight)
    assert four != exact != eight, "nothing was compressed"


def _digits(rank: Rank, ways: list[dict[str, Any] | None], steps: int) -> list[tuple[float, float]]:
    """Returns, for each way, the final accuracy on the test images, and the part of the exact bytes that was sent."""
    sys.path.insert(0, str(start.TESTS.parent / "benchmarks"))
    import digits

    rank.init()
    torch.use_deterministic_algorithms(True)
    found = []
    for settings in ways:

        def compress(ddp: DDP, settings: dict[str, Any] | None = settings) -> compression.State | None:
            if settings is None:
                return None
            state = compression.State(module=ddp, **settings)
            ddp.register_comm_hook(state, compression.hook)
            return state

        curve, state = digits.train(
            steps, 0, rank.rank, rank.world_size, compress, evaluate_every=steps, layers=1, learning_rate=1e-2
        )
        found.append((curve[-1][1], state.bytes_sent / state.bytes_exact if state else 1.0))
    return found


@pytest.mark.nightly
def test_a_vision_transformer_learns_digits_as_with_exact_gradients() -> None:
    (exact, _), (eight, sent_eight), (four, sent_four) = run_ranks(_digits, 2, [None, {"bits": 8}, {"bits": 4}], 100)[0]
    assert exact > 0.6, (exact, "nothing was learnt")
    assert abs(eight - exact) < 0.1 and abs(four - exact) < 0.1, (exact, eight, four)
    assert sent_four < sent_eight < 0.6, "nothing was compressed"


@pytest.mark.nightly
def test_chosen_bits_are_as_good_as_the_same_bits_everywhere() -> None:
    ways = [None, {"bits": 3}, {"bits": compression.Auto(budget=3.0, steps=5)}]
    exact, same, chosen = run_ranks(_losses, 2, ways, 100)[0]
    assert abs(same - exact) < 0.2 and abs(chosen - exact) < 0.2, (exact, same, chosen)
