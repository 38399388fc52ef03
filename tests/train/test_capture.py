"""On a CPU a step runs eagerly: the same bits as a hand-written loop, with every option."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import training as small
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from ark_torch.train import capture

pytestmark = pytest.mark.quick


def _both(name: str = "gpt2", **options: Any) -> tuple[nn.Module, nn.Module, Any, Any]:
    model = small.make(name, **options)
    other = copy.deepcopy(model)
    return model, other, *(torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, other))


def _same(a: nn.Module, b: nn.Module) -> None:
    assert torch.equal(small.weights(a), small.weights(b))


@pytest.mark.parametrize("name", small.NAMES)
def test_as_a_loop(name: str) -> None:
    model, other, optimizer, theirs = _both(name)
    step = capture(model, optimizer, small.loss)
    for number in range(20):
        batch = small.batch(name, number)
        value = step(batch)
        theirs.zero_grad()
        expected = small.loss(other, batch)
        expected.backward()
        theirs.step()
        assert torch.equal(value, expected) and value.dim() == 0 and not value.requires_grad
    _same(model, other)
    assert not step.captured and "CPU" in step.reason


def test_clipping_accumulation_and_a_scaler() -> None:
    model, other, optimizer, theirs = _both()
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    step = capture(model, optimizer, small.loss, max_norm=0.5, accumulate=3, scaler=scalers[0])
    for number in range(8):
        parts = [small.batch("gpt2", number, part) for part in range(3)]
        value = step(parts)
        theirs.zero_grad()
        expected = torch.zeros(())
        for part in parts:
            loss = small.loss(other, part) / 3
            scalers[1].scale(loss).backward()
            expected = expected + loss.detach()
        scalers[1].unscale_(theirs)
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        scalers[1].step(theirs)
        scalers[1].update()
        assert torch.equal(value, expected)
    _same(model, other)
    assert scalers[0].get_scale() == scalers[1].get_scale() > 2.0**10


def test_a_step_that_overflows_is_left_out_and_halves_the_scale() -> None:
    model, other, optimizer, _ = _both()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    step = capture(model, optimizer, lambda m, b: small.loss(m, b) * 1e30, scaler=scaler)
    step(small.batch("gpt2", 0))
    _same(model, other)
    assert scaler.get_scale() == 2.0**126


def test_many_steps_a_call_and_late_losses() -> None:
    model, other, optimizer, theirs = _both()
    many, one = capture(model, optimizer, small.loss, steps=4), capture(other, theirs, small.loss)
    batches = [small.batch("gpt2", number) for number in range(10)]
    values = [many(batches[at : at + 4]) for at in (0, 4, 8)]
    assert [tuple(v.shape) for v in values] == [(4,), (4,), (2,)]
    assert torch.equal(torch.cat(values), torch.stack([one(batch) for batch in batches]))
    _same(model, other)


def test_schedulers_autocast_and_checkpointing() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = model.tokens(batch["inputs"])
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            logits = model.norm(x) @ model.tokens.weight.t()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    model, other, optimizer, theirs = _both(dropout=0.3)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 6) for o in (optimizer, theirs)]
    step = capture(model, optimizer, loss)  # after a scheduler has wrapped optimizer.step
    for number in range(6):
        batch = small.batch("gpt2", number)
        torch.manual_seed(number)
        value = step(batch)
        torch.manual_seed(number)
        theirs.zero_grad()
        expected = loss(other, batch)
        expected.backward()
        theirs.step()
        assert torch.equal(value, expected)
        for scheduler in schedulers:
            scheduler.step()
    _same(model, other)


def test_an_averaged_model() -> None:
    model, other, optimizer, theirs = _both()
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, other)]
    step = capture(model, optimizer, small.loss, after=averages[0])
    seen: list[Any] = []
    plain = capture(other, theirs, small.loss, after=lambda m: (seen.append(m), averages[1].update_parameters(m)))
    for number in range(5):
        step(small.batch("gpt2", number))
        plain(small.batch("gpt2", number))
    _same(averages[0], averages[1])
    assert int(averages[0].n_averaged) == 5 and seen == [other] * 5


def test_a_model_that_returns_its_loss() -> None:
    class Output:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    model, _, optimizer, _ = _both()
    step = capture(model, optimizer, lambda m, b: Output(small.loss(m, b)).loss)
    assert step(small.batch("gpt2", 0)).item() > 0
    with pytest.raises(TypeError, match=r"loss\(\) returned a Output, no tensor: return its \.loss\."):
        capture(model, optimizer, lambda m, b: Output(small.loss(m, b)))(small.batch("gpt2", 0))  # type: ignore


class _Twice(torch.optim.SGD):
    """Evaluates the loss again, as sharpness-aware minimization does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


BAD = {
    "model": (TypeError, lambda m, o: capture("x", o, small.loss), "model is a str: pass a torch.nn.Module"),
    "frozen": (
        ValueError,
        lambda m, o: capture(nn.Linear(2, 2).requires_grad_(False), o, small.loss),
        "no parameter that requires a gradient",
    ),
    "DataParallel": (
        ValueError,
        lambda m, o: capture(nn.DataParallel(m), o, small.loss),
        "use a rank for each GPU and pass model.module",
    ),
    "meta": (
        ValueError,
        lambda m, o: capture(nn.Linear(2, 2, device="meta"), o, small.loss),
        "move it to a CPU or CUDA",
    ),
    "lazy": (
        ValueError,
        lambda m, o: capture(nn.Sequential(nn.LazyLinear(2)), o, small.loss),
        "the shape of parameter '0.weight' is not known before the model's first call: call it once",
    ),
    "optimizer": (TypeError, lambda m, o: capture(m, None, small.loss), "optimizer is a NoneType"),
    "another's parameters": (
        ValueError,
        lambda m, o: capture(copy.deepcopy(m), o, small.loss),
        "updates 28 parameters that model does not have",
    ),
    "LBFGS": (
        ValueError,
        lambda m, o: capture(m, torch.optim.LBFGS(m.parameters()), small.loss),
        "LBFGS, which evaluates the loss as often as it likes",
    ),
    "closure": (
        ValueError,
        lambda m, o: capture(m, _Twice(m.parameters(), lr=0.1), small.loss),
        r"optimizer is a _Twice, whose step\(\) needs a closure: .* use AdamW, Adam or SGD",
    ),
    "loss": (TypeError, lambda m, o: capture(m, o, None), r"pass a function loss\(model, batch\)"),
    "max_norm": (ValueError, lambda m, o: capture(m, o, small.loss, max_norm=-1.0), "max_norm is -1.0: pass a number"),
    "steps": (ValueError, lambda m, o: capture(m, o, small.loss, steps=0), "steps is 0: pass a whole number from 1 on"),
    "accumulate": (ValueError, lambda m, o: capture(m, o, small.loss, accumulate=1.5), "accumulate is 1.5"),
    "warmup": (ValueError, lambda m, o: capture(m, o, small.loss, warmup=1), "warmup is 1: pass a whole number from 2"),
    "max_shapes": (ValueError, lambda m, o: capture(m, o, small.loss, max_shapes=True), "max_shapes is True"),
    "bucket_mb": (ValueError, lambda m, o: capture(m, o, small.loss, bucket_mb=0), "bucket_mb is 0"),
    "scaler": (TypeError, lambda m, o: capture(m, o, small.loss, scaler=1.0), "scaler is a float"),
    "after": (TypeError, lambda m, o: capture(m, o, small.loss, after=3), "after is a int"),
    "group": (
        TypeError,
        lambda m, o: capture(m, o, small.loss, group="world"),
        r"pass what dist.new_group\(\) returns",
    ),
    "a list of batches": (
        ValueError,
        lambda m, o: capture(m, o, small.loss, steps=2)(small.batch("gpt2", 0)),
        "steps=2: pass a list of 1 to 2 batches",
    ),
    "micro-batches": (
        ValueError,
        lambda m, o: capture(m, o, small.loss, accumulate=2)([small.batch("gpt2", 0)]),
        r"accumulate=2: a batch is a list of so many micro-batches, and this one has 1: leave out the rest of a "
        r"dataset \(drop_last=True\), or close\(\) this step and train the rest by capture\(\.\.\., accumulate=1\)",
    ),
    "no micro-batches": (
        ValueError,
        lambda m, o: capture(m, o, small.loss, accumulate=2)(small.batch("gpt2", 0)),
        "accumulate=2: a batch is a list of so many micro-batches, and this one is a dict: pass a list",
    ),
    "complex loss": (
        ValueError,
        lambda m, o: capture(m, o, lambda m, b: small.loss(m, b) * 1j)(small.batch("gpt2", 0)),
        r"loss\(\) returned a complex tensor, which has no minimum: return a real one, as by \.abs\(\)",
    ),
    "leaf": (
        TypeError,
        lambda m, o: capture(m, o, small.loss)({"inputs": object()}),
        r"batch\['inputs'\] is a object: pass tensors, numbers, strings and None",
    ),
    "sparse": (
        TypeError,
        lambda m, o: capture(m, o, small.loss, steps=2)([{"inputs": torch.eye(2).to_sparse()}]),
        r"batch\[0\]\['inputs'\] is a sparse tensor .*: pass its indices and values",
    ),
    "shape of the loss": (
        ValueError,
        lambda m, o: capture(m, o, lambda m, b: m(b["inputs"]))(small.batch("gpt2", 0)),
        r"tensor of shape \(4, 12, 61\): return its mean or sum",
    ),
    "detached loss": (
        ValueError,
        lambda m, o: capture(m, o, lambda m, b: small.loss(m, b).detach())(small.batch("gpt2", 0)),
        "without a graph behind it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    model = small.make("gpt2")
    kind, call, text = BAD[case]
    with pytest.raises(kind, match=text) as caught:
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert str(caught.value).startswith("ark: train.capture: ") and str(caught.value).endswith(".")


def test_misuse_between_calls() -> None:
    model, _, optimizer, _ = _both()
    step = capture(model, optimizer, small.loss)
    step(small.batch("gpt2", 0))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"under torch\.no_grad"):
        step(small.batch("gpt2", 1))
    step.close()
    with pytest.raises(RuntimeError, match="the step was closed"):
        step(small.batch("gpt2", 2))


def test_an_error_in_loss_leaves_the_step_usable() -> None:
    model, _, optimizer, _ = _both()
    broken = [False]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        value = small.loss(model, batch)
        if broken[0]:
            raise KeyError("labels")
        return value

    step = capture(model, optimizer, loss)
    step(small.batch("gpt2", 0))
    broken[0] = True
    with pytest.raises(KeyError):
        step(small.batch("gpt2", 1))
    broken[0] = False
    assert step(small.batch("gpt2", 1)).isfinite()
