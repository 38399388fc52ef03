"""The captured step on GPUs: the bits of the eager loop, with every option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_gpu import run
from support import training as small
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from training_support import (
    STEPS,
    WORLDS,
    adam,
    assert_equal_runs,
    batch_of,
    begin,
    by_hand,
    captured_run,
    model_of,
    seed,
)

from ark_torch.train import capture


def _bits(rank: Rank, world: int, name: str, dropout: float) -> None:
    device = begin(rank, world)
    expected = by_hand(rank, world, name, device, dropout)
    assert_equal_runs(captured_run(rank, name, device, dropout, wrapped=world > 1), expected, "wrapped")
    if name != "vit" or world == 1:  # its running statistics differ between ranks without the wrapper
        assert_equal_runs(captured_run(rank, name, device, dropout), expected, "plain")
    if dropout:
        assert len(set(expected[0].tolist())) == STEPS


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["exact", "dropout"])
@pytest.mark.parametrize("name", small.NAMES)
def test_the_bits_of_the_eager_loop(name: str, dropout: float, world: int) -> None:
    run(_bits, world, name, dropout, world=world)


def _autocast(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return small.loss(model, batch)


def _checkpointed(model: Any, batch: Any) -> Tensor:
    inner = model.module if isinstance(model, DDP) else model
    x = inner.tokens(batch["inputs"]) + inner.positions.weight[: batch["inputs"].shape[1]]
    for block in inner.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    logits = inner.norm(x) @ inner.tokens.weight.t()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipping": ({"max_norm": 0.3}, {}),
    "accumulation": ({"parts": 3, "max_norm": 0.3}, {}),
    "scheduler": ({"scheduled": True}, {}),
    "autocast": ({"loss": _autocast, "dropout": 0.1}, {}),
    "shapes": ({"lengths": (8, 12, 16)}, {}),
    "pinned": ({}, {"host": "pinned"}),
    "pageable": ({}, {"host": "pageable"}),
}


def _with_options(rank: Rank, world: int, what: str) -> None:
    device = begin(rank, world)
    both, ours = OPTIONS[what]
    assert_equal_runs(
        captured_run(rank, "gpt2", device, **both, **ours), by_hand(rank, world, "gpt2", device, **both), what
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("what", OPTIONS)
def test_options(what: str, world: int) -> None:
    run(_with_options, world, what, world=world)


def _checkpointing(rank: Rank) -> None:
    """Recomputation in the backward pass draws the same random numbers, also in graphs."""
    device = begin(rank, 1)
    expected = by_hand(rank, 1, "gpt2", device, 0.3, loss=_checkpointed)
    assert_equal_runs(captured_run(rank, "gpt2", device, 0.3, loss=_checkpointed), expected)
    plain = by_hand(rank, 1, "gpt2", device, 0.3)
    torch.testing.assert_close(expected[0], plain[0], rtol=1e-4, atol=1e-4)


def test_activation_checkpointing() -> None:
    run(_checkpointing, world=1)


def _outer_autocast(rank: Rank) -> None:
    """A region around all steps covers only their losses, and keeps no casts of weights from one step to the next."""
    device = begin(rank, 1)
    expected = by_hand(rank, 1, "gpt2", device, loss=_autocast)
    with torch.autocast("cuda", torch.bfloat16):
        assert_equal_runs(captured_run(rank, "gpt2", device), expected)


def test_autocast_around_the_loop() -> None:
    run(_outer_autocast, world=1)


def _many(rank: Rank, world: int) -> None:
    device = begin(rank, world)
    expected = by_hand(rank, world, "gpt2", device, 0.1)
    model = model_of("gpt2", device, 0.1)
    step = capture(model, adam(model, device), small.loss, steps=4, bucket_mb=0.02)
    seed(rank.rank)
    values = []
    for at in range(0, STEPS, 4):
        values.append(step([small.batch("gpt2", number, rank.rank) for number in range(at, at + 4)]))
    assert step.captured, step.reason
    assert_equal_runs((torch.cat(values).cpu(), small.weights(model)), expected)
    step.close()


@pytest.mark.parametrize("world", WORLDS)
def test_four_steps_a_launch(world: int) -> None:
    run(_many, world, world=world)


def _scaled(rank: Rank, world: int) -> None:
    """The scale is too large at first: the device skips steps without the host."""
    device = begin(rank, world)

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return small.loss(model, batch)

    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cuda", init_scale=2.0**120, growth_interval=4, backoff_factor=2.0**-20)

    scalers = [scaler(), scaler()]
    model = model_of("bert", device)
    wrapped: nn.Module = DDP(model, device_ids=[device.index]) if world > 1 else model
    optimizer = adam(model, device, same_form=True)
    for number in range(STEPS):
        optimizer.zero_grad()
        scalers[0].scale(loss(wrapped, batch_of("bert", number, rank.rank, device))).backward()
        scalers[0].unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scalers[0].step(optimizer)
        scalers[0].update()
    ours = model_of("bert", device)
    step = capture(ours, adam(ours, device), loss, scaler=scalers[1], max_norm=0.5, bucket_mb=0.02)
    for number in range(STEPS):
        step(batch_of("bert", number, rank.rank, device))
    assert step.captured, step.reason
    assert torch.equal(small.weights(ours), small.weights(model))
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**60
    step.close()


@pytest.mark.parametrize("world", WORLDS)
def test_a_scaler(world: int) -> None:
    run(_scaled, world, world=world)


def _averaged(rank: Rank) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    device = begin(rank, 1)
    results = []
    for captured in (False, True):
        model = model_of("gpt2", device)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = adam(model, device, same_form=not captured)
        step = capture(model, optimizer, small.loss, after=average) if captured else None
        for number in range(10):
            batch = batch_of("gpt2", number, 0, device)
            if step is not None:
                step(batch)
                continue
            optimizer.zero_grad()
            small.loss(model, batch).backward()
            optimizer.step()
            average.update_parameters(model)
        assert step is None or step.captured, step and step.reason
        assert int(average.n_averaged) == 10
        results.append(small.weights(average.module))
    assert torch.equal(*results)


def test_an_averaged_model() -> None:
    run(_averaged, world=1)


def _resume(rank: Rank, world: int) -> None:
    device = begin(rank, world)

    def fresh() -> Any:
        model = model_of("gpt2", device, 0.1)
        seed(rank.rank)
        return model, adam(model, device)

    def train(steps: range, model: nn.Module, optimizer: Any) -> list[float]:
        step = capture(model, optimizer, small.loss, bucket_mb=0.02)
        losses = [step(batch_of("gpt2", number, rank.rank, device)) for number in steps]
        assert step.captured, step.reason
        step.close()
        return [loss.item() for loss in losses]

    whole = train(range(14), *fresh())
    model, optimizer = fresh()
    first = train(range(7), model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.cuda.get_rng_state()))
    model, optimizer = fresh()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.cuda.set_rng_state(saved[2])
    assert first + train(range(7, 14), model, optimizer) == whole


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_in_the_middle_gives_the_same_curve(world: int) -> None:
    run(_resume, world, world=world)


def _loads(rank: Rank) -> None:
    """A state is loaded between two calls of the same step: graphs are recorded again."""
    device = begin(rank, 1)
    model = model_of("gpt2", device)
    optimizer = adam(model, device)
    step = capture(model, optimizer, small.loss)
    for number in range(6):
        step(batch_of("gpt2", number, 0, device))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    after = [step(batch_of("gpt2", number, 0, device)).item() for number in range(6, 10)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert [step(batch_of("gpt2", number, 0, device)).item() for number in range(6, 10)] == after
    assert step.captured
    optimizer.param_groups[0]["lr"] = 0.0  # a number in place of the tensor
    before = small.weights(model)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step(batch_of("gpt2", 10, 0, device))
    assert torch.equal(small.weights(model), before)


def test_loading_and_rates_between_calls() -> None:
    run(_loads, world=1)


def _optimizers(rank: Rank) -> None:
    device = begin(rank, 1)
    cases = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
        "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
        "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
        "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
        "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
        "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
        "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    }
    for name, make in cases.items():
        losses = []
        for warmup in (3, 100):  # captured, and the same step eagerly
            model = model_of("gpt2", device)
            step = capture(model, make(model.parameters()), small.loss, warmup=warmup)
            losses.append([step(batch_of("gpt2", number, 0, device)).item() for number in range(8)])
            assert step.captured == (warmup == 3), (name, step.reason)
        assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] * 1.5, (name, losses)
    model = model_of("gpt2", device)
    step = capture(model, torch.optim.Adagrad(model.parameters(), lr=0.1), small.loss)
    with pytest.warns(UserWarning, match="Adagrad keeps state on the host"):
        step(batch_of("gpt2", 0, 0, device))


def test_optimizers() -> None:
    run(_optimizers, world=1)


def _memory(rank: Rank, world: int) -> tuple[float, float]:
    """Returns the peak MB of the eager loop and of the captured step."""
    device = begin(rank, world)

    def big() -> nn.Module:
        torch.manual_seed(0)
        layers = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]
        return nn.Sequential(*layers).to(device)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()

    x = torch.randn(4096, 2048, device=device)
    peaks = []
    for captured in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model = big()
        if captured:
            step = capture(model, adam(model, device), loss, bucket_mb=25)
            for _ in range(6):
                step(x)
            assert step.captured, step.reason
        else:
            ddp: nn.Module = model
            if world > 1:
                ddp = DDP(model, device_ids=[device.index], gradient_as_bucket_view=True)
            optimizer = adam(model, device, same_form=True)
            for _ in range(6):
                optimizer.zero_grad()
                loss(ddp, x).backward()
                optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() / 1e6)
        if captured:
            step.close()
            del step
        else:
            del optimizer, ddp
        del model
    return peaks[0], peaks[1]


@pytest.mark.parametrize("world", WORLDS)
def test_memory(world: int) -> None:
    for eager, captured in run(_memory, world, world=world):
        print(f"\npeak of {world} ranks: eager {eager:.0f} MB, captured {captured:.0f} MB: x{captured / eager:.3f}")
        assert captured <= eager * 1.05 + 3 * 4096 * 2048 * 4 / 1e6  # the batch: the given one and the fixed one
