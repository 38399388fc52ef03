"""What all fused operators take as a group, and what they refuse before C++ sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.products import OPERATORS, same
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import embedding_bag_all_to_all, moe_combine, moe_dispatch, moe_layer

pytestmark = [ark_only]
Call = Callable[[Any], Any]


def _calls(world: int) -> dict[str, Call]:
    """Each operator, as a function of the group."""
    a, b = torch.ones(2 * world, 3), torch.ones(3, 5)
    table, ids, ends = torch.ones(4, 3), torch.zeros(8, dtype=torch.long), torch.arange(2 * world)
    x, experts, weights = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    w1, w2 = torch.ones(1, 10, 3), torch.ones(1, 3, 5)
    calls: dict[str, Call] = {
        name: lambda group, call=call: call(a, b, group)  # type: ignore[misc]
        for name, call in OPERATORS.items()
    }
    calls["embedding_bag_all_to_all"] = lambda group: embedding_bag_all_to_all([table], [ids], [ends], group)
    calls["moe_dispatch"] = lambda group: moe_dispatch(x, experts, group, num_experts=world)[0]
    calls["moe_layer"] = lambda group: moe_layer(x, experts, weights, w1, w2, group)
    return calls


def _groups(rank: Rank) -> None:
    rank.init()
    world = rank.world_size
    known = dist.group.WORLD
    assert known is not None
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("data", "tensor"))
    for name, call in _calls(world).items():
        wanted = call(None)
        for group in (known, known.group_name, mesh["tensor"], (mesh, 1)):
            got: Tensor = call(group)
            same(got, wanted, (name, group))
        for wrong in (mesh, "nobody", 0, dist.ReduceOp.SUM):
            with pytest.raises(ValueError, match=rf"\[rank {rank.rank}\] {name}: group is .*Pass a process group"):
                call(wrong)


def test_groups_in_any_form() -> None:
    run_ranks(_groups, 2)


def _no_tensors(rank: Rank) -> None:
    rank.init()
    x, ids, weights = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.long), torch.ones(4, 2)
    w1, w2 = torch.ones(1, 10, 3), torch.ones(1, 3, 5)
    bags = [torch.ones(4, 3)], [torch.zeros(8, dtype=torch.long)], [torch.arange(2 * rank.world_size)]
    handle = moe_dispatch(x, ids, num_experts=rank.world_size)[2]
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: embedding_bag_all_to_all(bags[0][0], *bags[1:]), "_to_all: tables is of type Tensor"),  # type: ignore[arg-type]
        (lambda: embedding_bag_all_to_all(bags[0], bags[1], None), "_to_all: offsets is of type NoneType"),  # type: ignore[arg-type]
        (lambda: embedding_bag_all_to_all([None], *bags[1:]), "an entry of tables is of type NoneType"),  # type: ignore[list-item]
        (lambda: embedding_bag_all_to_all(*bags, per_sample_weights=weights), "per_sample_weights is of type"),  # type: ignore[arg-type]
        (lambda: moe_dispatch(None, ids, num_experts=2), "moe_dispatch: x is of type NoneType"),  # type: ignore[arg-type]
        (lambda: moe_layer(x, ids, weights, w1, [w2]), "moe_layer: w2 is of type list"),  # type: ignore[arg-type]
        (lambda: moe_combine(x.numpy(), handle), "moe_combine: y is of type ndarray"),  # type: ignore[arg-type]
    ]
    for call, text in wrong:
        with pytest.raises(TypeError, match=text) as caught:
            call()
        assert f"[rank {rank.rank}]" in str(caught.value)
    for name, operator in OPERATORS.items():
        with pytest.raises(ValueError, match="b is on meta but a is on cpu"):
            operator(torch.ones(4, 3), torch.ones(3, 5, device="meta"))
        # C++ tells the others.
        culprit = rank.rank == 1
        with pytest.raises(TypeError if culprit else dist.DistBackendError) as caught:
            operator(torch.ones(4, 3).numpy() if culprit else torch.ones(4, 3), torch.ones(3, 5))  # type: ignore[arg-type]
        assert f"{name}: {'a is not a tensor' if culprit else 'rank 1 refused'}" in str(caught.value)


def test_what_is_no_tensor() -> None:
    run_ranks(_no_tensors, 2)
