"""Mixtures of experts and recommenders: one region, only chosen rows are copied, errors compared with Inductor's."""

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

pytestmark = pytest.mark.timeout(200)


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


def beside_inductor(model: nn.Module, call: Any, arguments: tuple[Any, ...], right: Tensor) -> None:
    """Allows 1.5 times Inductor's error against float64, plus one unit in the last place."""
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
    """Grouped products read matrices in place. No lookup copies one."""
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
    """Tokens that choose the same two experts under any rounding, so that the rest can be compared."""
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
    """Groups whose ends are known at run time. Some experts have no rows."""
    model = models.SortedExperts().to(torch.bfloat16).eval()
    call, report = compiled(model, fallback=False, minimum=1)
    for _ in range(2):
        x = torch.randn(6, 48).to(torch.bfloat16)
        torch.testing.assert_close(call(x), model(x), rtol=2e-2, atol=2e-2)
    assert len(report.regions) == 1
    if plan == "cpp":
        kinds = {stage["kind"] for stage in json.loads(report.regions[0].region.json())["stages"]}
        assert {"experts", "select", "scan", "gather", "scatter"} <= kinds


def fallback_of_transformers() -> Any:
    """The operator that Hugging Face's experts use where `torch._grouped_mm` does not apply."""
    pytest.importorskip("transformers.integrations.moe", reason="this transformers has no grouped experts")
    return torch.ops.transformers.grouped_mm_fallback


@pytest.mark.by_day("float32")
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_grouped_mm_of_transformers(name: str, compiled: Any) -> None:
    """An expert without rows, rows after the last group, ends of both types, weights in both layouts: one region."""
    operator, dtype = fallback_of_transformers(), getattr(torch, name)
    x, w = torch.randn(11, 24).to(dtype), torch.randn(4, 24, 20).to(dtype)
    turned = w.transpose(1, 2).contiguous().transpose(1, 2)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}

    def run(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return operator(x * 0.5, weight, ends) + 1

    call, report = compiled(run, dynamic=False, fallback=False)
    for weight, ends in (
        (w, torch.tensor([3, 3, 7, 9])),
        (w, torch.tensor([0, 0, 0, 11])),
        (turned, torch.tensor([0, 5, 11, 11], dtype=torch.int32)),
    ):
        torch.testing.assert_close(call(x, weight, ends), run(x, weight, ends), **near)
    assert len(report.regions) == 2 and not report.fallbacks


def test_grouped_mm_of_transformers_refuses_what_eager_refuses(compiled: Any) -> None:
    operator = fallback_of_transformers()
    call, _ = compiled(lambda x, w, ends: operator(x, w, ends) + 1)
    x, w, ends = torch.randn(6, 8), torch.randn(3, 8, 5), torch.tensor([2, 4, 6])
    for given, said in (
        ((x, w, ends.float()), "integer tensor"),
        ((x, w[:2], ends), "number of experts"),
        ((x[:, :7], w, ends), "input_dim mismatch"),
    ):
        with pytest.raises(Exception, match=said):
            call(*given)


def test_mixtral_by_groups_is_one_region(compiled: Any) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: Mixtral is not tested")
    fallback_of_transformers()
    config = transformers.MixtralConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_local_experts=4,
        vocab_size=60,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation("grouped_mm")
    ids = torch.randint(0, 60, (2, 9))
    call, report = compiled(model, fallback=False)
    right = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(call(input_ids=ids, use_cache=False).logits, right, rtol=1e-4, atol=1e-5)
    assert len(report.regions) == 1 and not report.fallbacks
    assert "experts" in {stage["kind"] for stage in json.loads(report.regions[0].region.json())["stages"]}


def test_loops_over_experts_fall_back(compiled: Any) -> None:
    """The sizes of rows picked by nonzero() depend on the data. The results must be eager's."""

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
    # Inductor's error is the same on any number of ranks, and its compilation is slow.
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
