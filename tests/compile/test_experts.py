"""Mixtures of experts and recommenders: one region, nothing copied that was not chosen, errors beside Inductor's."""

from __future__ import annotations

import copy
import json
from typing import Any

import models
import pytest
import recommender
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn

pytestmark = pytest.mark.limit(200)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


def beside_inductor(model: nn.Module, call: Any, arguments: tuple[Any, ...], right: Tensor) -> None:
    """At most 1.5 times Inductor's error against float64, and a last place."""
    inductor = torch.compile(model, backend="inductor", dynamic=False)(*arguments)
    got = call(*arguments)
    assert torch.equal(got, call(*arguments)), "two runs differ"
    assert got.dtype == inductor.dtype
    place = torch.finfo(got.dtype).eps * float(right.abs().max())
    assert error(got, right) <= 1.5 * error(inductor, right) + place


@pytest.mark.by_day("cpp-tokens1")
@pytest.mark.parametrize("tokens", [(1,), (3, 11)])
def test_mixture_of_experts(tokens: tuple[int, ...], plan: str, compiled: Any) -> None:
    model = models.Experts().eval()
    call, report = compiled(model, fallback=False, minimum=1)
    x = torch.randn(*tokens, 48)
    torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-5)
    right = copy.deepcopy(model).double()(x.double())
    beside_inductor(model, call, (x,), right)
    assert len(report.regions) == 1 and not report.fallbacks


@pytest.mark.quick
def test_no_expert_is_copied(double: Any, compiled: Any) -> None:
    """Matrices are read where they lie: by grouped products alone, no lookup makes a copy of one."""
    model = models.Experts().eval()
    call, _ = compiled(model, fallback=False, minimum=1)
    call(torch.randn(5, 48))
    graph = double.made[0].graph
    assert graph.ops().count("experts") == 3
    matrices = {i for i, value in enumerate(graph.values) if value["shape"] and list(value["shape"])[:1] == [8]}
    large = {i for i in matrices if len(graph.values[i]["shape"]) == 3}
    readers = {node["op"] for node in graph.nodes if large & set(node["inputs"])}
    assert readers == {"experts"}


@pytest.mark.nightly
def test_experts_in_bfloat16(compiled: Any) -> None:
    """Tokens that choose the same two experts whatever is rounded, so that the rest can be compared."""
    model = models.Experts().eval()
    model.gate.weight.data *= 8
    half = copy.deepcopy(model).to(torch.bfloat16)
    call, _ = compiled(half, fallback=False, minimum=1)
    exact = copy.deepcopy(half).double()
    x = torch.randn(64, 48).to(torch.bfloat16)
    scores = exact.gate(exact.norm(x.double())).sort(-1, descending=True)[0]
    x = x[(scores[:, 1] - scores[:, 2]) > 0.2][:16]
    assert len(x) == 16
    beside_inductor(half, call, (x,), exact(x.double()))


@pytest.mark.nightly
def test_sorted_experts(plan: str, compiled: Any) -> None:
    """Runs whose ends are known at run time; some experts have no rows."""
    model = models.SortedExperts().to(torch.bfloat16).eval()
    call, report = compiled(model, fallback=False, minimum=1)
    for _ in range(2):
        x = torch.randn(6, 48).to(torch.bfloat16)
        torch.testing.assert_close(call(x), model(x), rtol=2e-2, atol=2e-2)
    assert len(report.regions) == 1
    if plan == "cpp":
        kinds = {stage["kind"] for stage in json.loads(report.regions[0].region.json())["stages"]}
        assert {"experts", "select", "scan", "gather", "scatter"} <= kinds


def test_loops_over_experts_fall_back(compiled: Any) -> None:
    """Rows picked by nonzero() have sizes that only the data say: eager's numbers, whoever runs what."""

    def routed(x: Tensor, gate: Tensor, weights: Tensor) -> Tensor:
        chosen = (x @ gate).argmax(-1)
        out = torch.zeros_like(x)
        for e in range(4):
            rows = (chosen == e).nonzero().squeeze(-1)
            out.index_add_(0, rows, x[rows] @ weights[e])
        return out * 2 + 1

    call, _ = compiled(routed)
    x, gate, weights = torch.randn(9, 16), torch.randn(16, 4), torch.randn(4, 16, 16)
    torch.testing.assert_close(call(x, gate, weights), routed(x, gate, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function, arguments, said",
    [
        (lambda w, i: torch.bmm(w[i], torch.ones(3, 4, 1)) + 1, (torch.ones(2, 5, 4), torch.tensor([0, 2, 1])), "2"),
        (lambda w, i: torch.gather(w, 1, i) * 2, (torch.ones(2, 3), torch.tensor([[0], [3]])), "3"),
        (
            lambda w, i: torch.nn.functional.embedding_bag(i, w, torch.tensor([0, 1])) * 2,
            (torch.ones(3, 4), torch.tensor([0, 3, 1])),
            "3",
        ),
        (lambda w, i: torch.nn.functional.one_hot(i, 3) + w, (torch.ones(3), torch.tensor([0, 7])), "Class values"),
    ],
)
def test_what_is_out_of_range_is_an_error(function: Any, arguments: Any, said: str, compiled: Any) -> None:
    call, _ = compiled(function, fallback=False, minimum=1)
    with pytest.raises((IndexError, ValueError, RuntimeError), match=said):
        call(*arguments)


def _recommend(rank: Rank) -> None:
    rank.init()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    whole = recommender.Dlrm().eval().requires_grad_(False)
    exact = copy.deepcopy(whole).double()
    group = dist.group.WORLD
    assert group is not None
    part = recommender.Shard(copy.deepcopy(whole), group)
    call = torch.compile(part, backend="ark", dynamic=False, options={"choose": "ark", "fallback": False})
    # Inductor's error is the same on any number of ranks, and its compiler takes long.
    alone = rank.world_size == 1
    other = torch.compile(part, backend="inductor", dynamic=False) if alone else part
    generator = torch.Generator().manual_seed(9)
    batch = 3 * rank.world_size
    for _ in range(3):
        dense, indices, offsets = recommender.features(batch, 8, generator)
        tables = part.mine(8)
        mine = (dense[part.mine(batch)], indices[tables], offsets[tables])
        with torch.no_grad():
            got, others, beside = call(*mine), whole(dense, indices, offsets), other(*mine)
            right = exact(dense.double(), indices, offsets)[part.mine(batch)]
        torch.testing.assert_close(got, others[part.mine(batch)], rtol=1e-5, atol=1e-6)
        assert error(got, right) <= 1.5 * error(beside, right) + torch.finfo(torch.float32).eps


@pytest.mark.nightly
def test_recommender_on_ranks() -> None:
    run_ranks(_recommend, 1)
    run_ranks(_recommend, 2)
    run_ranks(_recommend, 4)


def test_recommender(plan: str, compiled: Any) -> None:
    model = recommender.Dlrm().eval()
    call, report = compiled(model, fallback=False)
    for seed in range(2):
        given = recommender.features(5, 8, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(call(*given), model(*given), rtol=1e-5, atol=1e-6)
    assert len(report.regions) == 1 and len(report.graphs) == 1
