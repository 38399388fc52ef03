"""A whole node that disappears at once: the others must name it, its ranks and what the store knows of it.

Ranks pretend to be on nodes (ARK_NODE). To kill a node, its ranks are stopped first, so that none can report another's
end. An unplugged node is one whose ranks are stopped.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import Job
from support.rank import Rank

pytestmark = [ark_only]

Placement = tuple[int, ...]
TWO, UNEVEN, STAR = (0, 0, 1, 1), (0, 0, 1, 1, 1), (0, 1, 1, 1)


def _store(rank: Rank, hosted: bool) -> dist.Store | None:
    """Returns the job's store, which outlives all ranks, or one that rank 0 hosts."""
    if not hosted:
        return None
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rank.report("port", store.port)
        return store
    return dist.TCPStore("127.0.0.1", rank.wait_for("port"), is_master=False, timeout=timedelta(seconds=30))


def _loses_a_node(rank: Rank, placement: Placement, hosted: bool, timeout: float, expected: str) -> None:
    os.environ["ARK_NODE"] = str(placement[rank.rank])
    store = _store(rank, hosted)
    rank.init(timeout=timeout, **({"store": store} if store else {}))
    x = torch.ones(300_000)
    dist.all_reduce(x)
    rank.report("running")
    with pytest.raises(RuntimeError, match=expected):
        while True:
            dist.all_reduce(x)
    with pytest.raises(RuntimeError, match=expected):  # now the group has failed
        dist.barrier()


def _lose(placement: Placement, node: int, how: str, expected: str, hosted: bool = False, timeout: float = 3.0) -> None:
    ranks = range(len(placement))
    gone = [r for r in ranks if placement[r] == node]
    with Job(_loses_a_node, len(placement), placement, hosted, timeout, expected, destroy=False) as job:
        if hosted:
            port = job.wait_event(0, "port")
            for r in ranks[1:]:
                job.go(r, "port", port)
        job.wait_all("running")
        for r in gone:
            job.stop(r)
        if how == "killed":
            for r in gone:
                job.kill(r)
        for outcome in job.finish(30, [r for r in ranks if r not in gone]):
            assert outcome.kind == "result", outcome.value


@pytest.mark.parametrize(
    "placement, node, named",
    [
        (TWO, 1, r"node 1 \(ranks 2 and 3\)"),
        pytest.param(UNEVEN, 0, r"node 0 \(ranks 0 and 1\)", marks=pytest.mark.nightly),
        pytest.param((0, 1), 1, r"node 1 \(rank 1\)", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_node_that_is_killed(placement: Placement, node: int, named: str) -> None:
    """Detected before the group's timeout, because its connections end."""
    _lose(placement, node, "killed", rf"none of {named} says why: gloo.* failed with rank \d", timeout=60.0)


def _idle(rank: Rank, expected: str) -> None:
    os.environ["ARK_NODE"] = str(TWO[rank.rank])
    rank.init(timeout=60.0)
    x = torch.ones(10)
    dist.all_reduce(x)
    rank.report("running")
    rank.wait_for("go")
    with pytest.raises(RuntimeError, match=expected):
        dist.all_reduce(x)


def test_a_node_that_is_killed_between_collectives() -> None:
    """The next message does not even begin; that names the node, too."""
    with Job(
        _idle, len(TWO), r"none of node 1 \(ranks 2 and 3\) says why: gloo.* failed with rank \d", destroy=False
    ) as job:
        job.wait_all("running")
        for r in (2, 3):
            job.kill(r)
        time.sleep(1.0)  # until connections have ended
        for r in (0, 1):
            job.go(r, "go")
        for outcome in job.finish(30, [0, 1]):
            assert outcome.kind == "result", outcome.value


@pytest.mark.by_day("(0, 0, 1, 1)-1-node 1 \\\\(ranks 2 and 3\\\\)")
@pytest.mark.parametrize(
    "placement, node, named",
    [
        (UNEVEN, 0, r"node 0 \(ranks 0 and 1\)"),  # rank 4 has no rail: it waits for a rank of its node that has one
        (TWO, 1, r"node 1 \(ranks 2 and 3\)"),
        ((0, 1, 2), 2, r"node 2 \(rank 2\)"),  # ranks 0 and 1 may also wait for each other
        pytest.param((0, 1), 1, r"node 1 \(rank 1\)", marks=pytest.mark.nightly),
        pytest.param(STAR, 1, r"node 1 \(ranks 1, 2 and 3\)", marks=pytest.mark.nightly),
        pytest.param(STAR, 0, r"node 0 \(rank 0\)", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_node_that_is_unplugged(placement: Placement, node: int, named: str) -> None:
    """No connection ends. At the group's timeout the store shows no sign of life."""
    _lose(placement, node, "stopped", rf"{named} has not been heard of for \d+ s: its machine is down")


def test_the_node_with_the_store_is_killed() -> None:
    _lose(TWO, 0, "killed", r"none of node 0 \(ranks 0 and 1\) says why", hosted=True, timeout=60.0)


@pytest.mark.nightly
def test_the_node_with_the_store_is_unplugged() -> None:
    expected = r"node 0 \(ranks 0 and 1\) is silent, and so is the rendezvous store, .*\(no answer in 2000 ms\)"
    _lose(TWO, 0, "stopped", expected, hosted=True)


class _Counting(dist.Store):
    """Records a rank's accesses to its store."""

    def __init__(self, real: dist.Store) -> None:
        super().__init__()
        self.real = real
        self.calls: list[tuple[str, str]] = []

    def _count(self, what: str, key: str) -> None:
        self.calls.append((what, key))

    def set(self, key: str, value: Any) -> None:
        self._count("set", key)
        self.real.set(key, value)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        return self.real.get(key)

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys[0])
        return self.real.check(keys)

    def add(self, key: str, amount: int) -> int:
        self._count("add", key)
        return self.real.add(key, amount)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._count("wait", keys[0])
        self.real.wait(keys, *timeout)


def _counts(rank: Rank, placement: Placement, beats: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns a healthy group's store accesses over that many beats of each node, and the next group's."""
    os.environ["ARK_NODE"] = str(placement[rank.rank])
    store = _Counting(rank.store("counted"))
    rank.init(timeout=4.0, store=store)
    dist.barrier()
    before = len(store.calls)
    first = rank.rank == 0 or placement[rank.rank] != placement[rank.rank - 1]
    deadline = time.monotonic() + 30
    while True:
        dist.all_reduce(torch.ones(1000))
        enough = torch.tensor([int(not first or len(store.calls) - before >= beats)])
        dist.all_reduce(enough, dist.ReduceOp.MIN)
        if enough.item() or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    asked = store.calls[before:]
    dist.barrier()  # no rank leaves while others count
    dist.destroy_process_group()
    after = len(store.calls)
    time.sleep(0.6)
    return asked, store.calls[after:]


@pytest.mark.nightly
def test_what_beats_cost_the_store() -> None:
    """One write per node and period, nothing else, until the group ends."""
    with Job(_counts, 5, UNEVEN, 4) as job:
        values = job.values(60)
    for rank, (asked, later) in enumerate(values):
        if rank in (0, 2):
            node = UNEVEN[rank]
            assert len(asked) >= 4 and all(what == "set" for what, _ in asked), asked
            assert all("/beat/" in key and key.endswith(f"/{node}") for _, key in asked), asked
            assert len({key for _, key in asked}) == 1
        else:
            assert asked == [], (rank, asked)
        assert later == [], (rank, later)
