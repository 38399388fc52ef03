"""Groups that Gloo carries: at the sizes where collectives change their course, and what ends them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.grid import CARRIERS
from support.groups import ark_only
from support.launcher import Job, run_ranks
from support.rank import Rank

pytestmark = [ark_only]
GLOO = CARRIERS["gloo"]
# Bytes around: none, one message's room, what goes whole, a chunk, several chunks of unequal parts.
SIZES = (0, 4, 972, 976, 980, 16 << 10, (64 << 10) // 3 + 100, 512 << 10, (1 << 20) + 4, (5 << 20) + 12)


def _sizes(rank: Rank) -> None:
    """Every collective at every size, in float32, whose bits tell the order of additions."""
    rank.init()
    me, world = rank.rank, rank.world_size
    for size in SIZES:
        count = size // 4

        def made(r: int, count: int = count, size: int = size) -> torch.Tensor:
            return torch.randn(count, generator=torch.Generator().manual_seed(size * 10 + r))

        inputs = [made(r) for r in range(world)]
        total = inputs[0].clone()
        for one in inputs[1:]:
            total += one
        x = made(me)
        dist.all_reduce(x)
        assert torch.equal(x, total), size
        x = made(me)
        dist.reduce(x, world - 1)
        assert torch.equal(x, total if me == world - 1 else inputs[me]), size
        x = made(0) if me == 0 else torch.full((count,), -1.0)
        dist.broadcast(x, 0)
        assert torch.equal(x, inputs[0]), size
        outs = [torch.empty(count) for _ in range(world)]
        dist.all_gather(outs, inputs[me])
        assert all(map(torch.equal, outs, inputs)), size
        gathered = [torch.empty(count) for _ in range(world)] if me == 1 else None
        dist.gather(inputs[me], gathered, 1)
        assert gathered is None or all(map(torch.equal, gathered, inputs)), size
        x = torch.empty(count)
        dist.scatter(x, inputs if me == 1 else None, 1)
        assert torch.equal(x, inputs[me]), size
        x = torch.empty(count)
        dist.reduce_scatter(x, [inputs[me] * (1 + r) for r in range(world)])
        wanted = inputs[0] * (1 + me)
        for one in inputs[1:]:
            wanted += one * (1 + me)
        assert torch.equal(x, wanted), size
        # Uneven: rank s sends count // (1 + d) of what it has to rank d.
        splits = [count // (1 + d) for d in range(world)]
        sent = torch.cat([inputs[me][:n] for n in splits])
        received = torch.empty(splits[me] * world)
        dist.all_to_all_single(received, sent, [splits[me]] * world, splits)
        assert torch.equal(received, torch.cat([one[: splits[me]] for one in inputs])), size
        dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_sizes(world: int) -> None:
    run_ranks(_sizes, world, env=GLOO)


def _beside(rank: Rank) -> None:
    """Messages of the user's, whatever their tag, and collectives do not meet."""
    rank.init()
    peer = 1 - rank.rank
    for tag in (0, 2**31 - 17):
        got = torch.empty(5000)
        messages = [dist.isend(torch.full((5000,), 1.0 + rank.rank), peer, tag=tag), dist.irecv(got, peer, tag=tag)]
        x = torch.ones(200_000)
        dist.all_reduce(x)
        assert x.unique().tolist() == [2.0]
        for message in messages:
            message.wait()
        assert got.unique().tolist() == [1.0 + peer]
    with pytest.raises(ValueError, match=r"tag is 2147483647.*Use a tag below 2147483632"):
        dist.isend(torch.ones(1), peer, tag=2**31 - 1)


def test_messages_beside_collectives() -> None:
    run_ranks(_beside, 2, env=GLOO)


def _disagree(rank: Rank) -> None:
    rank.init()
    with pytest.raises(RuntimeError, match=r"ranks disagree: rank \d called all_reduce\((3|70000) x float32"):
        dist.all_reduce(torch.ones(70_000 if rank.rank else 3))


def test_ranks_that_disagree() -> None:
    run_ranks(_disagree, 2, env=GLOO)


def _alone(rank: Rank, how: str) -> float:
    """Rank 0 waits for what does not come."""
    group = rank.init(timeout=2.0 if how == "timeout" else 60.0)
    dist.barrier()
    rank.report("running")
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    if how == "abort":
        threading.Timer(0.5, group.abort).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"gloo, which carries this group|abort"):
        dist.all_reduce(torch.ones(300_000))
    rank.report("ended")
    return time.monotonic() - began


@pytest.mark.parametrize("how", ["abort", "timeout", "killed"])
def test_what_ends_a_collective(how: str) -> None:
    with Job(_alone, 2, how, env=GLOO, destroy=False) as job:
        job.wait_all("running")
        if how == "killed":
            time.sleep(0.3)
            job.kill(1)
        job.wait_event(0, "ended", timeout=20)
        if how != "killed":
            job.go(1, "go")
        (outcome,) = job.finish(20, [0])
        assert outcome.value is not None and outcome.value < 10
