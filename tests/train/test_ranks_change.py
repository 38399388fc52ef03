"""Ranks that change what they train between two calls, alike or one alone, and ranks with other rates or options."""

from __future__ import annotations

import copy
from typing import Any

import fake_graphs
import pytest
import torch
import torch.distributed as dist
from support import training as small
from support.crew import crew_of
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.train import capture, captured, graphs

pytestmark = [ark_only]

_REAL = graphs.recorder_for


def _play(graph: bool) -> None:
    """Graphs are played, or there are none, whatever tests before on the same ranks have left."""
    if graph:
        fake_graphs.use()
    else:
        graphs.recorder_for = lambda device: None  # type: ignore[assignment]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _same_everywhere(values: Tensor) -> bool:
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return all(torch.equal(one, values) for one in every)


def _set_trained(model: Any, number: int) -> bool:
    """The second block is frozen for the first calls, and the first one for the last. Whether this call changes it."""
    changes = {0: (1, False), 5: (1, True), 11: (0, False)}
    if number in changes:
        block, trained = changes[number]
        model.blocks[block].requires_grad_(trained)
    return number in changes


def _by_ddp(rank: Rank) -> Tensor:
    """The loop: the wrapper is made anew at each change, since it looks at requires_grad once."""
    model = small.make("gpt2")
    optimizer = _adam(model)
    ddp = None
    for number in range(16):
        if _set_trained(model, number) or ddp is None:
            ddp = DDP(model)
        optimizer.zero_grad()
        small.loss(ddp, small.batch("gpt2", number, rank.rank)).backward()
        optimizer.step()
    return small.weights(model)


def _unfreezes(rank: Rank, wrapped: bool, graph: bool) -> list[bool]:
    rank.init()
    expected = _by_ddp(rank)
    _play(graph)
    model = small.make("gpt2")
    _set_trained(model, 0)
    ddp = DDP(model) if wrapped else None
    step = capture(ddp or model, _adam(model), small.loss, bucket_mb=0.02)
    captured = []
    for number in range(16):
        if number:
            _set_trained(model, number)
        step(small.batch("gpt2", number, rank.rank))
        captured.append(step.captured)
    graphs.recorder_for = _REAL
    assert torch.equal(small.weights(model), expected), (small.weights(model) - expected).abs().max()
    if ddp is not None:  # the wrapper averages what is trained now
        model.zero_grad()
        small.loss(ddp, small.batch("gpt2", 0, rank.rank)).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert _same_everywhere(torch.cat([p.grad.reshape(-1) for p in trained]))  # type: ignore[union-attr]
    step.close()
    return captured


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_unfreezing_has_the_bits_of_ddp(wrapped: bool, graph: bool) -> None:
    replays = ([False] * 3 + [True] * 2) + ([False] * 3 + [True] * 3) + ([False] * 3 + [True] * 2)
    assert crew_of(2, {}).run(_unfreezes, wrapped, graph) == [replays if graph else [False] * 16] * 2


def _unfreezes_shards(rank: Rank, graph: bool) -> int:
    from torch.distributed.fsdp import fully_shard

    rank.init()
    weights = []
    recorder = fake_graphs.use() if graph else None
    for stepped in (False, True):
        model = small.make("gpt2")
        _set_trained(model, 0)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
        optimizer = _adam(model)
        step = capture(model, optimizer, small.loss) if stepped else None
        for number in range(16):
            if number:
                _set_trained(model, number)
            batch = small.batch("gpt2", number, rank.rank)
            if step is not None:
                step(batch)
                continue
            optimizer.zero_grad()
            small.loss(model, batch).backward()
            optimizer.step()
        assert step is None or step.captured == graph, step.reason
        weights.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*weights)
    return recorder.counts["records"] if recorder is not None else 0


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
def test_unfreezing_with_fully_shard(graph: bool) -> None:
    assert run_ranks(_unfreezes_shards, 2, graph) == [3 * graph] * 2  # DTensor's caches keep meshes


def _evaluates(rank: Rank) -> None:
    """FSDP2 leaves the root's parameters gathered after a forward pass without gradients. A graph would not gather
    them again, and not free them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rank.init()
    fake_graphs.use()
    model = small.make("gpt2")
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    gathered = []

    def look(*_: Any) -> None:
        gathered.append(not isinstance(model.norm.weight, DTensor))  # type: ignore[union-attr]

    model.register_forward_pre_hook(look, prepend=True)
    optimizer = _adam(model)
    with torch.no_grad():  # before the capture, too
        small.loss(model, small.batch("gpt2", 0))
    step = capture(model, optimizer, small.loss)
    for number in range(6):
        with torch.no_grad():
            small.loss(model, small.batch("gpt2", number))
        assert not isinstance(model.norm.weight, DTensor)  # type: ignore[union-attr]
        gathered.clear()
        step(small.batch("gpt2", number, rank.rank))
        assert gathered == [False], number
    assert step.captured, step.reason


def test_an_evaluation_between_steps_with_fully_shard() -> None:
    run_ranks(_evaluates, 2)


def _one_alone(rank: Rank, what: str, graph: bool) -> str:
    """Rank 1 changes something, and rank 0 does not. Then both do, or rank 1 takes it back, and training goes on."""
    rank.init()
    _play(graph)
    model: Any = small.make("gpt2")
    optimizer = _adam(model)
    step = capture(model, optimizer, small.loss)
    for number in range(5):
        step(small.batch("gpt2", number, rank.rank))
    old = model.norm.weight
    if rank.rank == 1:
        if what == "frozen":
            old.requires_grad_(False)
        else:
            model.norm.weight = nn.Parameter(copy.deepcopy(old.detach()))
    with pytest.raises((ValueError, RuntimeError)) as caught:
        step(small.batch("gpt2", 5, rank.rank))
    if what == "frozen":
        old.requires_grad_(False)
    elif rank.rank == 1:
        model.norm.weight = old
    for number in range(5, 10):
        step(small.batch("gpt2", number, rank.rank))
    assert step.captured == graph and _same_everywhere(small.weights(model))
    graphs.recorder_for = _REAL
    return str(caught.value)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
def test_a_parameter_that_one_rank_freezes(graph: bool) -> None:
    for rank, text in enumerate(crew_of(2, {}).run(_one_alone, "frozen", graph)):
        told = "the number of trained parameters is 27 on rank 1 and 28 on rank 0"
        assert text.startswith(f"ark: [rank {rank}] train.capture: {told}"), text


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
def test_a_parameter_that_one_rank_replaces(graph: bool) -> None:
    texts = crew_of(2, {}).run(_one_alone, "replaced", graph)
    own = "parameter 'norm.weight' is not the tensor of capture()"
    assert texts[1].startswith(f"ark: train.capture: {own}"), texts
    assert texts[0].startswith(f"ark: train.capture: on rank 1: {own}"), texts


def _state_of_one(rank: Rank) -> list[bool]:
    """Rank 1 alone loads a state: all ranks record anew, in the same calls."""
    rank.init()
    fake_graphs.use()
    model = small.make("gpt2")
    optimizer = _adam(model)
    step = capture(model, optimizer, small.loss)
    captured = []
    for number in range(8):
        if number == 5 and rank.rank == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(small.batch("gpt2", number, rank.rank))
        captured.append(step.captured)
        if number == 5:
            told = ["another rank's tensors are others than before", "the optimizer's state was replaced"]
            assert step.reason == told[rank.rank]
    graphs.recorder_for = _REAL
    assert _same_everywhere(small.weights(model))
    return captured


def test_a_state_that_one_rank_loads() -> None:
    assert crew_of(2, {}).run(_state_of_one) == [[False] * 3 + [True] * 2 + [False] + [True] * 2] * 2


def _replaced_by_both(rank: Rank) -> None:
    """Other values on each rank, in the optimizer too: rank 0's are trained, as after capture()."""
    rank.init()
    model: Any = small.make("gpt2")
    optimizer = _adam(model)
    step = capture(DDP(model), optimizer, small.loss)
    step(small.batch("gpt2", 0, rank.rank))
    old = model.norm.weight
    model.norm.weight = nn.Parameter(torch.full_like(old, 1.0 + rank.rank))
    parameters = optimizer.param_groups[0]["params"]
    parameters[[p is old for p in parameters].index(True)] = model.norm.weight
    step(small.batch("gpt2", 1, rank.rank))
    assert _same_everywhere(small.weights(model))
    assert (model.norm.weight - 1).abs().max() < 0.1


def test_parameters_that_all_ranks_replace() -> None:
    crew_of(2, {}).run(_replaced_by_both)


def _no_memory(rank: Rank) -> None:
    """An error while buckets are made anew: the next call makes them, and does not train each rank by itself."""
    rank.init()
    _play(False)
    model: Any = small.make("gpt2")
    step = capture(model, _adam(model), small.loss)
    step(small.batch("gpt2", 0, rank.rank))
    model.norm.requires_grad_(False)
    real = captured.Buckets
    captured.Buckets = _refuse  # type: ignore[assignment,misc]
    try:
        with pytest.raises(torch.OutOfMemoryError):
            step(small.batch("gpt2", 1, rank.rank))
    finally:
        captured.Buckets = real  # type: ignore[misc]
    for number in range(2, 4):
        step(small.batch("gpt2", number, rank.rank))
    assert _same_everywhere(small.weights(model))
    step.close()


def _refuse(*_: Any) -> None:
    raise torch.OutOfMemoryError("for buckets")


def test_buckets_that_find_no_memory() -> None:
    crew_of(2, {}).run(_no_memory)


def _frozen(rank: Rank, what: str) -> str:
    """Rank 1's frozen parameter or buffer has another form, which copies from rank 0 would not fit."""
    rank.init()
    _play(False)
    model: Any = small.make("gpt2")

    def change(size: int) -> None:
        if what == "buffer":
            model.register_buffer("more", torch.ones(size))
        else:
            model.more = nn.Parameter(torch.ones(size), requires_grad=False)

    size = 40 if rank.rank == 1 else 4
    change(4 if what == "later" else size)
    with pytest.raises(ValueError) as caught:
        step = capture(model, _adam(model), small.loss)
        step(small.batch("gpt2", 0, rank.rank))
        change(size)
        step(small.batch("gpt2", 1, rank.rank))
    if what == "later":
        change(4)
        step(small.batch("gpt2", 2, rank.rank))
        assert _same_everywhere(small.weights(model))
        step.close()
    return str(caught.value)


@pytest.mark.parametrize("what", ["parameter", "buffer", "later"])
def test_what_is_frozen_differs(what: str) -> None:
    name = "buffer" if what == "buffer" else "frozen parameter"
    for rank, text in enumerate(crew_of(2, {}).run(_frozen, what, timeout=30)):
        assert text.startswith(
            f"ark: [rank {rank}] train.capture: {name} 'more' is float32 [40] on rank 1 and float32 [4] on rank 0: "
        ), text


def _as_it_is(rank: Rank) -> str:
    """A wrapper that averages by itself does not notice parameters that are unfrozen."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank.init()
    model: Any = small.make("gpt2")
    model.norm.requires_grad_(False)
    ddp = DDP(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    step = capture(ddp, _adam(ddp), small.loss)
    step(small.batch("gpt2", 0, rank.rank))
    model.tokens.weight.data = model.tokens.weight.data.clone()  # as .to() of another device and back does
    step(small.batch("gpt2", 1, rank.rank))
    model.norm.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        step(small.batch("gpt2", 1, rank.rank))
    return str(caught.value)


def test_unfreezing_in_a_wrapper_that_averages_by_itself() -> None:
    for text in crew_of(2, {}).run(_as_it_is):
        assert "which the DistributedDataParallel's own buckets do not notice: wrap the model anew" in text


def _other_number_of_steps(rank: Rank, graph: bool) -> None:
    """Unless both notice, sums of one rank's third step meet those of the other's next call."""
    rank.init()
    _play(graph)
    model = small.make("gpt2")
    step = capture(model, _adam(model), small.loss, steps=3)
    batches = [small.batch("gpt2", number, rank.rank) for number in range(3)]
    step(batches)
    with pytest.raises(ValueError) as caught:
        step(batches[: 3 - rank.rank])
    assert str(caught.value) == (
        f"ark: [rank {rank.rank}] train.capture: 2 steps in this call on rank 1 and 3 on rank 0: pass as many batches "
        "on all ranks."
    )
    step(batches[:2])
    assert _same_everywhere(small.weights(model))
    graphs.recorder_for = _REAL
    step.close()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])
def test_ranks_that_pass_other_numbers_of_batches(graph: bool) -> None:
    crew_of(2, {}).run(_other_number_of_steps, graph, timeout=20)


# --- rates and options ---


def _differs(rank: Rank, what: str) -> str:
    rank.init()
    model: Any = small.make("gpt2")
    other = rank.rank == 1
    groups: Any = model.parameters()
    options: dict[str, Any] = {"lr": 0.1}
    captures: dict[str, Any] = {}
    if what == "groups" and other:
        groups = [{"params": model.tokens.parameters()}, {"params": [*model.positions.parameters()]}]
    elif what == "members":
        first, second = model.tokens.parameters(), model.positions.parameters()
        split = [*first, *second] if other else [*first]
        groups = [{"params": split}, {"params": [*model.norm.parameters()]}]
    elif what == "lr of a group":
        groups = [{"params": model.tokens.parameters()}, {"params": [*model.norm.parameters()], "lr": 0.5 + other}]
    elif what == "scaler":
        captures["scaler"] = torch.amp.GradScaler("cpu", growth_interval=100 + other)
    elif other and what in OPTIONS:
        options |= OPTIONS[what]
    with pytest.raises(ValueError) as caught:
        capture(model, torch.optim.AdamW(groups, **options), small.loss, **captures)
    return str(caught.value)


OPTIONS: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.25},
    "lr as a tensor": {"lr": torch.tensor(0.25)},
    "betas": {"betas": (0.5, 0.75)},
    "weight_decay": {"weight_decay": 0.5},
    "amsgrad": {"amsgrad": True},
}
TOLD = {
    "lr": "param_groups[0]['lr'] is 0.25 on rank 1 and 0.1 on rank 0",
    "lr as a tensor": "param_groups[0]['lr'] is 0.25 on rank 1 and 0.1 on rank 0",
    "betas": "param_groups[0]['betas'] is (0.5, 0.75) on rank 1 and (0.9, 0.999) on rank 0",
    "weight_decay": "param_groups[0]['weight_decay'] is 0.5 on rank 1 and 0.01 on rank 0",
    "amsgrad": "param_groups[0]['amsgrad'] is True on rank 1 and False on rank 0",
    "groups": "the number of the optimizer's param_groups is 2 on rank 1 and 1 on rank 0",
    "members": "the number of parameters in param_groups[0] is 2 on rank 1 and 1 on rank 0",
    "lr of a group": "param_groups[1]['lr'] is 1.5 on rank 1 and 0.5 on rank 0",
    "scaler": "the scaler's growth_interval is 101 on rank 1 and 100 on rank 0",
}


@pytest.mark.parametrize("what", TOLD)
def test_ranks_with_other_rates_or_options(what: str) -> None:
    for rank, text in enumerate(crew_of(2, {}).run(_differs, what)):
        assert text.startswith(f"ark: [rank {rank}] train.capture: {TOLD[what]}: "), text


def _groups_of_one_rank(rank: Rank) -> list[Tensor]:
    rank.init()
    _play(False)
    if rank.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    weights, steps = [], []
    for _ in range(2):
        model = small.make("gpt2")
        step = capture(model, _adam(model), small.loss)
        for number in range(2):
            step(small.batch("gpt2", number, rank.rank))
        weights.append(small.weights(model))
        steps.append(step)
        if rank.rank == 1:
            step.close()
    assert _same_everywhere(torch.cat(weights))
    return weights


def test_ranks_in_other_numbers_of_groups() -> None:
    """One rank is in a group of its own, and closes its first step later. PyTorch counts groups to name new ones."""
    for first, second in crew_of(2, {}).run(_groups_of_one_rank):
        assert torch.equal(first, second)
