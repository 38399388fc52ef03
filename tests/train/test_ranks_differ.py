"""Ranks whose graphs hold different collectives, and gradients that overflow on one rank alone."""

from __future__ import annotations

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

from ark_torch.train import capture, graphs, held

pytestmark = [ark_only]

_REAL = graphs.recorder_for


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _watched(rank: Rank) -> list[held.Held]:
    """Collectives of groups with the same ranks are noted, and no others."""
    rank.init()
    both, alone = dist.new_group([0, 1]), [dist.new_group([member]) for member in range(2)][rank.rank]
    for group in (None, both, alone):
        dist.all_reduce(torch.ones(3), group=group)
    watch = held.Watch(dist.group.WORLD, torch.device("cpu"))
    empty = watch.held()
    dist.all_reduce(torch.ones(5), dist.ReduceOp.MAX)
    dist.broadcast(torch.ones(2), 1)
    dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
    dist.all_reduce(torch.ones(7), group=both)
    dist.all_reduce(torch.ones(7), group=alone)
    if rank.rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        dist.recv(torch.ones(2), 0)
    return [empty, watch.held()]


def test_what_a_graph_holds() -> None:
    told = crew_of(2, {}).run(_watched)
    assert told[0] == told[1] and held.digest(told[0][1]) == held.digest(told[1][1]) != held.digest({})
    empty, both = told[0]
    default, other = sorted(both.values(), key=len, reverse=True)
    assert empty == {} and len(both) == 2
    assert default[:2] == ["all_reduce(5 x float32, MAX)", "broadcast(2 x float32, root 1)"]
    assert default[2:] == ["all_gather_into_tensor(float32)"]
    assert other == ["all_reduce(7 x float32, SUM)"]


def _over_gloo(rank: Rank) -> held.Held:
    """Backends that list nothing count."""
    rank.init()
    group = dist.new_group(backend="gloo")
    watch = held.Watch(group, torch.device("cpu"))
    for _ in range(2 + rank.rank):
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
    found = watch.held()
    for _ in range(1 - rank.rank):
        dist.all_reduce(torch.ones(3), group=group)
    assert held.Watch(group, torch.device("cpu"), counts=False).held() == {}
    return found


def test_what_a_graph_over_another_backend_holds() -> None:
    told = crew_of(2, {}).run(_over_gloo)
    assert [len(texts) for one in told for texts in one.values()] == [2, 3]
    assert held.difference(told).endswith("is collective on rank 1 (3 in all) and missing on rank 0 (2 in all)")


def _one_more(watch: held.Watch) -> held.Held:
    """As if the graph held another collective. A capture sends nothing, so that no peer has to take part."""
    return {"0": ["all_reduce(3 x float32, SUM)"]}


def _differ(rank: Rank, late: bool) -> tuple[str, list[bool]]:
    """Rank 1's first graph differs, or that of a later shape, which it captures while rank 0 replays."""
    rank.init()
    model = small.make("gpt2")
    recorder = fake_graphs.use()
    step = capture(model, _adam(model), small.loss)
    captured, refused = [], 6 if late else 3
    with pytest.MonkeyPatch.context() as monkeypatch:
        for number in range(9):
            if rank.rank == 1 and number == refused:
                monkeypatch.setattr(held.Watch, "held", _one_more)
            length = 10 if late and rank.rank == 1 and number >= 5 else 12
            batch = small.batch("gpt2", number, rank.rank, length=length)
            if number == refused:
                with pytest.warns(UserWarning, match="runs steps eagerly: the ranks' graphs differ"):
                    step(batch)
            else:
                step(batch)
            captured.append(step.captured)
    graphs.recorder_for = _REAL
    assert recorder.counts["resets"] == recorder.counts["records"] > 0
    weights = small.weights(model)
    every = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(every, weights)
    assert torch.equal(*every)
    return step.reason, captured


@pytest.mark.parametrize("late", [False, True], ids=["at once", "a later shape"])
def test_graphs_that_differ_are_named_on_both_sides(late: bool) -> None:
    told = crew_of(2, {}).run(_differ, late)
    replays = [False] * 3 + [late] * 2 + [False] * 4
    reason = (
        "the ranks' graphs differ: collective 1 of group '0' is all_reduce(3 x float32, SUM) on rank 1 "
        "(1 in all) and missing on rank 0 (0 in all)"
    )
    assert told == [(reason, replays)] * 2


def _mixed(rank: Rank) -> tuple[str, list[bool]]:
    """Graphs of the longer shape hold more, alike on all ranks. Then rank 1 alone replays that one."""
    rank.init()
    fake_graphs.use()
    model = small.make("gpt2")
    step = capture(model, _adam(model), small.loss)
    captured = []
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.warns(UserWarning, match="the ranks' graphs differ"):
        for number, lengths in enumerate([(8, 8)] * 4 + [(12, 12)] * 3 + [(8, 8), (8, 12), (8, 8)]):
            if number == 4:
                monkeypatch.setattr(held.Watch, "held", _one_more)
            step(small.batch("gpt2", number, rank.rank, length=lengths[rank.rank]))
            captured.append(step.captured)
    graphs.recorder_for = _REAL
    return step.reason, captured


def test_graphs_that_differ_in_a_replay() -> None:
    for reason, captured in crew_of(2, {}).run(_mixed):
        assert captured == [False] * 3 + [True, False] + [True] * 3 + [False] * 2
        assert reason.startswith("the ranks' graphs differ: collective 1 of group '0' is ")


def _refused(rank: Rank, with_graphs: bool) -> tuple[list[str], list[bool], Tensor]:
    """Invalid calls of one rank, of another one, and of both: no rank runs them, and all go on."""
    rank.init()
    if with_graphs:
        fake_graphs.use()
    model = small.make("gpt2")
    optimizer = _adam(model)
    step = capture(model, optimizer, small.loss, bucket_mb="auto" if with_graphs else 0.02)
    said, captured = [], []
    for number in range(8):
        batch: Any = small.batch("gpt2", number, rank.rank)
        wrong = {2: [0], 4: [1], 5: [0, 1], 6: [1]}.get(number, [])
        before = small.weights(model)
        if wrong:
            with pytest.raises((TypeError, RuntimeError)) as caught:
                if number == 6 and rank.rank in wrong:
                    with torch.no_grad():
                        step(batch)
                else:
                    step(object() if rank.rank in wrong else batch)
            said.append(str(caught.value))
            assert torch.equal(small.weights(model), before)
            if number == 4 and rank.rank == 0:  # graphs of what was there before this call must not be replayed
                optimizer.load_state_dict(optimizer.state_dict())
        step(batch)
        captured.append(step.captured)
    graphs.recorder_for = _REAL
    return said, captured, small.weights(model)


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
def test_a_call_that_one_rank_refuses(with_graphs: bool) -> None:
    (first, replays, weights), (second, others, same) = crew_of(2, {}).run(_refused, with_graphs)
    own = "ark: train.capture: batch is a object: pass tensors, numbers, strings and None, in lists and dicts."

    def of(rank: int, other: int, text: str) -> str:
        why = f"no rank has run this step, since rank {other} refused the call"
        return f"ark: [rank {rank}] train.capture: {why}: {text}"

    told = own.removeprefix("ark: train.capture: ")
    without = "step() under torch.no_grad(): a step needs gradients; leave it."
    assert first == [own, of(0, 1, told), own, of(0, 1, without)]
    assert second == [of(1, 0, told), own, own, f"ark: train.capture: {without}"]
    assert replays == others and any(replays) == with_graphs
    assert torch.equal(weights, same)


def _overflows(rank: Rank, sharded: bool, max_norm: float | None) -> tuple[list[float], float]:
    """Only the last rank's gradients, or only its shard, overflow in the second step. All ranks leave that one out."""
    rank.init()
    fake_graphs.use()
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) * batch[1]).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = capture(model, optimizer, loss, scaler=scaler, max_norm=max_norm)
    for number in range(5):
        factors = torch.ones(8)
        if number == 1 and (sharded or rank.rank == 1):
            factors[7] = float("inf")  # of the last row, which the last rank's shard holds
        step((torch.ones(4, 8), factors))
    assert step.captured, step.reason
    graphs.recorder_for = _REAL
    weight = model.weight.full_tensor() if sharded else model.weight  # type: ignore[operator]
    return weight.detach().sum(1).tolist(), scaler.get_scale()


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("sharded", [False, True], ids=["buckets", "fully_shard"])
def test_an_overflow_on_one_rank_is_left_out_by_all(sharded: bool, max_norm: float | None) -> None:
    told = run_ranks(_overflows, 2, sharded, max_norm)  # DTensor's caches keep meshes
    torch.manual_seed(0)
    weight = nn.Linear(8, 8, bias=False).weight.detach()
    for number in range(5):
        if number == 1:
            continue
        gradient = torch.full((8, 8), 4.0)
        norm = gradient.norm()
        weight = weight - 0.1 * gradient * (1.0 if max_norm is None else max_norm / (norm + 1e-6))
    assert told[0] == told[1] and told[0][1] == 2.0
    torch.testing.assert_close(torch.tensor(told[0][0]), weight.sum(1), rtol=1e-4, atol=1e-4)
