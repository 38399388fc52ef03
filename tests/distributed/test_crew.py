"""Tests the crew itself: bodies share only the ranks, and an error costs the crew, not the next body."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support import crew
from support.outcome import RanksFailed
from support.rank import Rank

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    crew.finish_all()


def _sum(rank: Rank, value: float, leave: bool = True) -> tuple[int, float, float]:
    rank.init()
    first = torch.rand(1).item()
    tensor = torch.full((5,), value + rank.rank)
    dist.all_reduce(tensor)
    rank.store("same name").add("count", 1)
    dist.barrier()
    assert rank.store("same name").add("count", 0) == rank.world_size, "met a store of an earlier body"
    if leave:
        dist.destroy_process_group()
    return os.getpid(), tensor[0].item(), first


def test_bodies_share_ranks() -> None:
    ranks = crew.crew_of(2, {})
    one, two, three = ranks.run(_sum, 1.0), ranks.run(_sum, 5.0, False), ranks.run(_sum, 7.0)
    assert [[pid for pid, *_ in values] for values in (two, three)] == [[pid for pid, *_ in one]] * 2
    assert [values[0][1] for values in (one, two, three)] == [3.0, 11.0, 15.0]
    assert {values[0][2] for values in (one, two, three)} == {one[0][2]}, "each body finds the same random numbers"
    assert crew.crew_of(2, {}) is ranks


def _trouble(rank: Rank, what: str) -> None:
    if rank.rank == 1 and what == "raises":
        raise ValueError("no reason")
    if rank.rank == 1 and what == "ends":
        os._exit(3)
    if rank.rank == 1 and what == "exits":
        sys.exit(7)
    if what == "hangs" or rank.rank == 0:
        time.sleep(100)


@pytest.mark.by_day("raises")
@pytest.mark.parametrize("what", ["raises", "ends", "exits", "hangs"])
def test_trouble_costs_the_crew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "OTHERS_S", 0.5)
    ranks = crew.crew_of(2, {})
    before = ranks.run(_sum, 1.0)
    with pytest.raises(RanksFailed) as caught:
        ranks.run(_trouble, what, timeout=3.0 if what == "hangs" else 60.0)
    text = str(caught.value)
    assert "time.sleep(100)" in text or "in _trouble" in text, f"shows where rank 0 is: {text}"
    assert {"raises": "no reason", "ends": "exit code 3", "exits": "exit", "hangs": "not within 3.0 s"}[what] in text
    after = crew.crew_of(2, {}).run(_sum, 1.0)
    assert after[0][1] == 3.0 and after[0][0] != before[0][0]
