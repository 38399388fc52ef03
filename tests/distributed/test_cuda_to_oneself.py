"""Messages of a rank to itself in CUDA tensors, on a pretended device: the copy, its order, and what waits for it.

The copy is real, in host memory. Streams and events do nothing but record their order.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import begin, host, on_rank
from support.rank import Rank

pytestmark = [ark_only]


class Copies:
    """The device's copy_ and record_stream calls, with their streams."""

    def __init__(self, library: torch.library.Library) -> None:
        self.streams: list[int] = []
        self.recorded: list[int] = []
        library.impl("copy_", self._copy, "CUDA")
        library.impl("record_stream", self._record, "CUDA")

    def _copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
        self.streams.append(pretended.device.stream())
        pretended.device.mark("copy")
        return to

    def _record(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        self.recorded.append(stream.stream_id)


def _waited_for(steps: list[tuple[str, int, int]], later: int) -> set[int]:
    """Returns the streams whose events stream `later` waits for."""
    at: dict[int, int] = {}
    found = set()
    for what, event, stream in steps:
        if what == "record":
            at[event] = stream
        elif what == "block" and stream == later:
            found.add(at[event])
    return found


def _alone(rank: Rank) -> None:
    """One rank alone, in a group that has not met on any device."""
    group, _, _ = begin(rank)
    device, me = torch.device("cuda", rank.rank), rank.rank
    if me == 0:
        with torch.library._scoped_library("aten", "IMPL") as library:
            copies = Copies(library)
            on_stream, steps = pretended.device.set_stream, pretended.device.steps
            sent, got = on_rank(rank, torch.arange(8)), on_rank(rank, torch.zeros(8))
            sent.requires_grad_()
            got.requires_grad_()
            on_stream(3)
            steps()
            ends = [dist.P2POp(dist.irecv, got, group=group, group_peer=me)]
            ends += [dist.P2POp(dist.isend, sent, group=group, group_peer=me)]
            (work,) = dist.batch_isend_irecv(ends)
            issued = steps()
            assert host(got).tolist() == list(range(8)) and copies.streams == [3]
            assert got.is_leaf and got.grad_fn is None and not copies.recorded
            # The event is recorded after the copy, and the other stream waits for it.
            behind = [step for step in issued if step[0] != "block"]
            assert [step[0] for step in behind] == ["record", "copy", "record"], issued
            end = behind[-1][1]
            work.wait()
            assert steps() == [], "the stream's own order suffices"
            on_stream(4)
            work.wait()
            assert steps() == [("block", end, 4)]
            pretended.device.lag(True)
            assert not work.is_completed() and not work.is_success()
            pretended.device.lag(False)
            assert work.is_completed() and work.is_success()
            future = work.get_future()
            assert future.done() and future.value()[0].data_ptr() == got.data_ptr()

            # Two messages, with their ends on two streams.
            other_sent, other_got = on_rank(rank, torch.ones(5)), on_rank(rank, torch.zeros(5))
            steps()
            with dist._coalescing_manager(group, device, async_ops=True) as manager:
                on_stream(5)
                dist.isend(sent, group=group, group_dst=me)
                dist.isend(other_sent, group=group, group_dst=me)
                on_stream(6)
                dist.irecv(got, group=group, group_src=me)
                dist.irecv(other_got, group=group, group_src=me)
            issued = steps()
            assert _waited_for(issued[: [step[0] for step in issued].index("copy")], 6) == {5}
            assert copies.streams == [3, 6, 6] and copies.recorded == [6, 6]
            assert host(other_got).tolist() == [1.0] * 5
            on_stream(7)
            manager.wait()
            assert _waited_for(issued + steps(), 7) == {6}

            # A mismatch ends only its own batch.
            with pytest.raises(dist.DistBackendError, match="sends 20 bytes to itself and receives 32"):
                dist.batch_isend_irecv([ends[0], dist.P2POp(dist.isend, other_sent, group=group, group_peer=me)])
            with pytest.raises(ValueError, match="has no counterpart in the batch"):
                dist.batch_isend_irecv(ends[:1])
            dist.batch_isend_irecv(ends)[0].wait()
            on_stream(0)
    dist.barrier()


def test_alone(pretended_gpu: Any) -> None:
    run_ranks(_alone, 2, env=pretended_gpu)


def _beside_others(rank: Rank, carried: bool, timing: bool) -> None:
    """In one batch with messages to a peer, also as the group's first operation on its device."""
    group, carriers, _ = begin(rank, timing=timing)
    me, peer = rank.rank, 1 - rank.rank
    if carried:
        pretended.driver.pretend_reach(0)
    with torch.library._scoped_library("aten", "IMPL") as library:
        copies = Copies(library)
        for first in (True, False):
            sent, got = on_rank(rank, torch.arange(8)), on_rank(rank, torch.zeros(8))
            ends = [dist.P2POp(dist.isend, sent, group=group, group_peer=me)]
            ends += [dist.P2POp(dist.irecv, got, group=group, group_peer=me)]
            others = [dist.P2POp(dist.isend, on_rank(rank, torch.full((8,), me + 1.0)), group=group, group_peer=peer)]
            others += [dist.P2POp(dist.irecv, on_rank(rank, torch.zeros(8)), group=group, group_peer=peer)]
            pretended.device.set_stream(40)
            pretended.device.steps()
            (work,) = dist.batch_isend_irecv([*ends, *others] if first else [others[0], *ends, others[1]])
            assert host(got).tolist() == list(range(8)) and copies.streams.pop() == 40
            pretended.device.set_stream(41)
            issued = pretended.device.steps()
            work.wait()
            waited = _waited_for(issued + pretended.device.steps(), 41)
            assert 40 in waited and len(waited) == (1 if carried else 3), waited
            if timing and not carried:
                assert work._get_duration() == 1.5
            # The future's needs must not make the caller's stream wait.
            pretended.device.steps()
            work.get_future()
            blocked = {stream for what, _, stream in pretended.device.steps() if what == "block"}
            assert blocked.isdisjoint({41}) and (carried or 40 not in blocked), blocked
    pretended.device.set_stream(0)
    if carried:
        assert carriers.made[0].calls().count("send") == 2
    dist.barrier()


@pytest.mark.parametrize("timing", [False, True], ids=["", "timed"])
@pytest.mark.parametrize("carried", [False, True], ids=["ark", "carried"])
def test_beside_others(pretended_gpu: Any, carried: bool, timing: bool) -> None:
    run_ranks(_beside_others, 2, carried, timing, env={**pretended_gpu, "ARK_DISABLE_P2P": "0"})
