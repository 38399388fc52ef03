"""ShardedEmbeddingBags in a captured step on two ranks: each rank has its own tables, the rest is averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import recommending
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import nn

from ark_torch.ops import SGD, RowwiseAdagrad
from ark_torch.train import capture

pytestmark = [ark_only]
WAYS: dict[str, dict[str, Any]] = {
    "rowwise_adagrad": {"optimizer_class": RowwiseAdagrad, "optimizer_kwargs": {"lr": 0.05}},
    "sgd": {"optimizer_class": SGD, "optimizer_kwargs": {"lr": 0.05}},
    "sparse": {"sparse": True},
    "dense": {},
}


def _like_a_loop(rank: Rank, way: str, sharding: str) -> None:
    rank.init()
    torch.set_num_threads(1)
    kwargs = {**WAYS[way], "sharding": sharding}
    for fixed in (False, True):  # with counts on the host, and in buffers of fixed size as on GPUs
        looped, stepped = recommending.Recommender(**kwargs), recommending.Recommender(**kwargs)
        for one in (looped, stepped):
            one.bags._fixed_on_cpus = fixed
        tables = [table.weight.clone() for table in stepped.bags.tables.values()]
        losses = recommending.in_a_loop(looped, 5, rank.rank)
        step = capture(stepped, recommending.optimizer_of(stepped), recommending.loss)
        assert all(torch.equal(a, b.weight) for a, b in zip(tables, stepped.bags.tables.values(), strict=True))
        for number, wanted in enumerate(losses):
            assert torch.equal(step(recommending.batch(number, rank.rank)), wanted), (fixed, number)
        for (name, one), other in zip(stepped.named_parameters(), looped.parameters(), strict=True):
            assert torch.equal(one, other), (fixed, name)
        changed = [not torch.equal(a, b.weight) for a, b in zip(tables, stepped.bags.tables.values(), strict=True)]
        assert any(changed) and not step.captured
        step.close()


@pytest.mark.by_day("rowwise_adagrad-table_wise", "sparse-row_wise")
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize("way", WAYS)
def test_like_a_loop(way: str, sharding: str) -> None:
    run_ranks(_like_a_loop, 2, way, sharding)


def _weights_of_the_first(rank: Rank) -> None:
    """capture() gives a plain module the first rank's weights, except for its tables."""
    rank.init()
    model = recommending.Recommender()
    with torch.no_grad():
        for p in model.rest.parameters():
            p.fill_(rank.rank)
        for table in model.bags.tables.values():
            table.weight.fill_(10 + rank.rank)
    capture(model, recommending.optimizer_of(model), recommending.loss).close()
    assert all(not p.any() for p in model.rest.parameters())
    assert all((table.weight == 10 + rank.rank).all() for table in model.bags.tables.values())


def test_weights_of_the_first_rank() -> None:
    run_ranks(_weights_of_the_first, 2)


def _refused(rank: Rank) -> None:
    rank.init()
    model = recommending.Recommender()
    optimizer = recommending.optimizer_of(model)
    with pytest.raises(ValueError, match=r"max_norm is given, and 'bags\.tables"):
        capture(model, optimizer, recommending.loss, max_norm=1.0)
    updated = recommending.Recommender(**WAYS["sgd"])
    with pytest.raises(ValueError, match="scaler is given"):
        capture(
            updated, recommending.optimizer_of(updated), recommending.loss, scaler=torch.amp.GradScaler("cpu")
        )  # fmt: skip
    step = capture(updated, recommending.optimizer_of(updated), recommending.loss, max_norm=1.0)
    step(recommending.batch(0, rank.rank))
    plain = nn.utils.parameters_to_vector(updated.rest.parameters()).detach()
    every = [torch.empty_like(plain) for _ in range(rank.world_size)]
    dist.all_gather(every, plain)
    assert torch.equal(*every)


def test_what_is_refused() -> None:
    run_ranks(_refused, 2)
