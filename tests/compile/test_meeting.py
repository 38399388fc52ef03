"""Ranks decide together who runs a graph with collectives, and none waits for ever for one that does not come."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import Job, run_ranks
from support.rank import Rank

from ark_torch.compile import meeting
from ark_torch.compile.choice import Choice
from ark_torch.compile.contest import Contest
from ark_torch.compile.meeting import Meeting

CPU = torch.device("cpu")


def alike(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    assert all(one == every[0] for one in every), every
    return every


def _lockstep(rank: Rank) -> None:
    rank.init()
    group = dist.group.WORLD
    # Fast on rank 0, but slowest on rank 1: the slower rank is what a step waits for.
    seconds = {"ark": (0.001, 0.03)[rank.rank], "inductor": 0.01, "eager": 0.002 + 0.06 * rank.rank}

    def waiting(name: str) -> Any:
        def call() -> None:
            dist.barrier()
            time.sleep(seconds[name])

        return call

    contest = Contest({name: waiting(name) for name in seconds}, agree=Meeting(group, "timed", CPU).agree)
    while contest.choice is None:
        if contest.turn:
            contest.call(())
        else:
            contest.go_on()
    assert contest.choice.runs_on == "inductor", contest.choice
    alike(contest.choice)


def _held(rank: Rank) -> None:
    rank.init()
    group = dist.group.WORLD
    ready, mine = ["ark", "inductor", "eager"], Choice("eager", {}, False, "ark")

    assert Meeting(group, "new", CPU).hold(None, ready, "ark") == (None, ready)
    assert Meeting(group, "known", CPU).hold(mine, ["ark", "eager"], "ark") == (mine, [])
    # One rank knows, and has only what it needs; the other has all.
    known, has = (mine, ["eager", "ark"]) if rank.rank else (None, ready)
    clear, names = Meeting(group, "one knows", CPU).hold(known, has, "ark")
    assert clear is None and sorted(names) == ["ark", "eager"]
    # One rank lacks what the other knows.
    clear, names = Meeting(group, "less", CPU).hold(mine if rank.rank else None, ["ark"] if rank.rank else ready, "ark")
    assert clear == Choice("ark") and not names

    # A rank that compiled alone waits for a while; a peer that comes later takes the same.
    meeting._WAIT_S = 0.5
    if rank.rank == 1:
        assert Meeting(group, "alone", CPU).hold(None, ready, "inductor") == (Choice("inductor"), [])
    dist.barrier()
    if rank.rank == 0:
        assert Meeting(group, "alone", CPU).hold(mine, ready, "inductor") == (Choice("inductor"), [])
    # And they meet again the next time.
    meeting._WAIT_S = 60.0
    assert Meeting(group, "alone", CPU).hold(None, ready, "inductor") == (None, ready)


def _of_nodes(rank: Rank) -> None:
    rank.init()
    other = dist.new_group([0, 1], backend="ark")
    alone = dist.new_group([rank.rank], backend="ark", use_local_synchronization=True)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def reduced(group: Any) -> torch.fx.Node:
        return graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", group.group_name))

    world = dist.group.WORLD
    assert meeting.group_of([reduced(world), reduced(world)]) is world
    assert meeting.group_of([reduced(world), reduced(other)]) is None
    assert meeting.group_of([reduced(alone)]) is None
    assert meeting.group_of([graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,))]) is None


def test_the_slowest_rank_counts() -> None:
    run_ranks(_lockstep, 2)


def test_what_ranks_agree_on() -> None:
    run_ranks(_held, 2)


def test_the_group_of_a_graph() -> None:
    run_ranks(_of_nodes, 2)


def _left_alone(rank: Rank) -> None:
    rank.init(timeout=120)
    dist.barrier()
    rank.report("ready")
    if rank.rank == 1:
        time.sleep(100)
    clear = Meeting(dist.group.WORLD, "left", CPU).hold(None, ["ark", "eager"], "ark")
    assert clear == (Choice("ark"), [])
    with pytest.raises(RuntimeError, match="rank 1"):
        dist.barrier()


def test_a_rank_that_died_is_not_waited_for() -> None:
    with Job(_left_alone, 2, destroy=False) as job:
        job.wait_all("ready", 60)
        job.kill(1)
        job.wait_outcomes([0], timeout=30)
