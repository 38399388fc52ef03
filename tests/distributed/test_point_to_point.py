"""Point to point: batches, tags, any source, large messages that cross, and use beside collectives.

Some tests wait for something that happens only if another part makes progress by itself. The launcher's limit protects
them: a deadlock becomes a failure with every thread's stack.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input


def _batch(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    after, before = (me + 1) % world, (me - 1) % world
    for count in (1, 1000, 300_000):
        sent = [make_input(torch.float32, count, s, me) for s in range(3)]
        got = [torch.full((count,), float("nan")) for _ in range(3)]
        operations = [dist.P2POp(dist.irecv, got[i], before) for i in range(3)]
        operations += [dist.P2POp(dist.isend, sent[i], after) for i in range(3)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for i in range(3):
            assert_same_bits(got[i], make_input(torch.float32, count, i, before), f"batch {count} [{i}]")


@pytest.mark.by_day("3")
@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 3])
def test_batch_isend_irecv(world: int) -> None:
    run_ranks(_batch, world)


def _refused_in_a_batch(rank: Rank) -> None:
    """An error in a batch ends only that batch, although PyTorch's manager never ends it."""
    rank.init()
    me, peer = rank.rank, 1 - rank.rank
    for round_ in range(3):
        sent, got = torch.full((9,), float(10 * round_ + me)), torch.zeros(9)
        good = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)]
        if round_ < 2 or me == 0:
            with pytest.raises(ValueError, match="this rank"):
                dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, me), *good])
        works = dist.batch_isend_irecv(good)
        assert len(works) == 1
        works[0].wait()
        assert got.tolist() == [float(10 * round_ + peer)] * 9
    # An earlier work of the failed batch still completes, and does not become part of the next batch.
    early = torch.full((9,), float(me))
    with pytest.raises(ValueError, match="this rank"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, early, peer), dist.P2POp(dist.isend, early, me)])
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, peer)]):
        assert len(work.result()) == 1
        work.wait()
    assert got.tolist() == [float(peer)] * 9
    dist.barrier()


@ark_only
@pytest.mark.quick
def test_refused_in_a_batch() -> None:
    run_ranks(_refused_in_a_batch, 2)


def _tags(rank: Rank) -> None:
    """Tags are received in another order than sent. Equal tags keep their order."""
    rank.init()
    if rank.rank == 0:
        works = [dist.isend(torch.full((1 + tag * 3000,), float(tag)), 1, tag=tag) for tag in range(20)]
        for i in range(10):
            works.append(dist.isend(torch.full((7,), float(i)), 1, tag=5))
        for work in works:
            work.wait()
        dist.barrier()
    else:
        for tag in reversed(range(20)):
            got = torch.full((1 + tag * 3000,), float("nan"))
            dist.recv(got, 0, tag=tag)
            assert got.unique().tolist() == [float(tag)]
        for i in range(10):
            got = torch.full((7,), float("nan"))
            dist.recv(got, 0, tag=5)
            assert got.tolist() == [float(i)] * 7, "messages of one tag overtook each other"
        dist.barrier()


@pytest.mark.quick
def test_tags_out_of_order() -> None:
    run_ranks(_tags, 2)


def _any_source(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    if me == 0:
        for round_ in range(5):
            seen = []
            for _ in range(world - 1):
                got = torch.full((1000,), float("nan"))
                source = dist.recv(got, None, tag=round_)
                assert got.unique().tolist() == [float(source * 10 + round_)]
                seen.append(source)
            assert sorted(seen) == list(range(1, world))
        work = dist.irecv(got, None, tag=99)
        work.wait()
        assert work._source_rank() == 1 and got[0].item() == 7
    else:
        for round_ in range(5):
            dist.send(torch.full((1000,), float(me * 10 + round_)), 0, tag=round_)
        if me == 1:
            dist.send(torch.full((1000,), 7.0), 0, tag=99)
    dist.barrier()


@pytest.mark.by_day("2")
@pytest.mark.parametrize("world", [2, 4])
def test_receive_from_any_source(world: int) -> None:
    run_ranks(_any_source, world)


def _crossing(rank: Rank) -> None:
    """Both sides send large messages before either receives. isend (and the pipeline schedules) rely on it."""
    rank.init()
    peer = 1 - rank.rank
    count = 8 << 20
    works = [dist.isend(torch.full((count,), float(rank.rank + i)), peer, tag=i) for i in range(3)]
    for i in reversed(range(3)):
        got = torch.full((count,), float("nan"))
        dist.recv(got, peer, tag=i)
        assert got[0].item() == got[-1].item() == peer + i
    for work in works:
        work.wait()


def test_isend_never_blocks() -> None:
    run_ranks(_crossing, 2)


def _send_and_collect(rank: Rank) -> None:
    """Pending point-to-point operations do not delay collectives, and vice versa."""
    rank.init()
    me = rank.rank
    if me == 0:
        received = torch.full((10,), float("nan"))
        work = dist.irecv(received, 1, tag=3)
        dist.all_reduce(torch.ones(1000))
        dist.barrier()
        work.wait()
        assert received.tolist() == [5.0] * 10
    else:
        dist.all_reduce(torch.ones(1000))
        dist.barrier()
        dist.send(torch.full((10,), 5.0), 0, tag=3)


@pytest.mark.quick
def test_point_to_point_beside_collectives() -> None:
    run_ranks(_send_and_collect, 2)
