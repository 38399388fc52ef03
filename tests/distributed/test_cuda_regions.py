"""Compiled regions on a pretended device: which ranks meet, and when; where inputs are. No kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import Summing, begin
from support.rank import Rank

from ark_torch import _C, _jit

pytestmark = [ark_only]


def _meet(rank: Rank) -> None:
    _jit.configure()
    group, _, _ = begin(rank)
    first, other = Summing(rank, group, 1000), Summing(rank, group, 500 + rank.rank)
    assert [first() for _ in range(3)] == [1, 1, 1]
    with pytest.raises(dist.DistBackendError, match="compiled a region with other collectives"):
        other()
    costs = [Summing(rank, group, 1000, costs={"task_us": us}) for us in (0.5, 0.5 + rank.rank)]
    assert costs[0]() == 1, "measured costs are as good as others, where all ranks have them"
    with pytest.raises(dist.DistBackendError, match=r"or other costs of work(?s:.*)ARK_COSTS=assumed"):
        costs[1]()
    assert first() == 1
    late = Summing(rank, group, 1000)
    pretended.driver.pretend_capture(7)
    with pytest.raises(ValueError, match="first call with this group is under graph capture"):
        late()
    assert first() == 1
    pretended.driver.pretend_capture(0)
    assert late() == 1 and first.fell == late.fell == 0
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="there is no process group"):
        first()


def test_ranks_meet_at_the_first_call(pretended_gpu: Any) -> None:
    """Once per region, outside of captures, if all ranks have compiled the same."""
    run_ranks(_meet, 2, env=pretended_gpu)


def _carried(rank: Rank) -> None:
    _jit.configure()
    group, _, _ = begin(rank)
    pretended.driver.pretend_reach(0)
    region = Summing(rank, group, 1000)
    assert [region(), region()] == [0, 0] and region.fell == 2


def test_groups_that_ark_does_not_carry_run_otherwise(pretended_gpu: Any) -> None:
    run_ranks(_carried, 2, env={**pretended_gpu, "ARK_DISABLE_P2P": "0"})


def _anywhere(rank: Rank, line: int) -> None:
    """An input that the region writes, 4 bytes behind a multiple of 16, whose rows may have gaps."""
    _jit.configure()
    begin(rank)
    rows, columns = 64, 8192
    graph = _C.plan.Graph()
    span = (rows - 1) * line + columns
    buffer = graph.buffer("input", 0, span * 4, mutated=True)
    before, after = (graph.value(buffer, "float32", [rows, columns], [line, 1]) for _ in range(2))
    graph.argument(before)
    graph.node("add", [before, before], [after], {}, "here")
    region = _C.plan.Region(graph, "a region", {"device": rank.rank, "costs_from": "measured"})
    pretended.driver.pretend_loop_adds(columns + 3)  # into the gap, if there is one
    for first in (1, 0):
        memory = torch.rand(span + 4)
        kept = memory.clone()
        given = memory.as_strided((rows, columns), (line, 1), first)
        region([pretended.on(rank.rank, given)])
        at = pretended.driver.pretend_loop_added()
        assert at % 16 == 0 and (at == given.data_ptr()) == (first == 0)
        kept[first : first + (columns if first == 1 and line > columns else columns + 3)] += 1
        assert torch.equal(memory, kept), "what the kernel wrote, but of a copy no gap"


@pytest.mark.parametrize("line", [8192, 8196])
def test_inputs_that_are_not_aligned(pretended_gpu: Any, line: int) -> None:
    """They are copied, and what was written is copied back, but no gap."""
    run_ranks(_anywhere, 1, line, env=pretended_gpu)
