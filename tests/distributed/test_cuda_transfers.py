"""A rank's first messages to a peer in CUDA tensors, on a pretended device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import begin, on_rank
from support.rank import Rank

pytestmark = [ark_only]

LONG, SHORT = 1 << 20, 8  # elements of float32; long messages meet first, and go by bulk rings if the dispatch has them


def _first(rank: Rank, dispatch: dict[str, int], long_first: bool) -> tuple[int, int]:
    group, _, _ = begin(rank, cuda_dispatch=[(rank.world_size, dispatch)])
    peer = 1 - rank.rank
    sizes = (LONG, SHORT) if rank.rank == 0 else (SHORT, LONG)
    ends = [
        dist.P2POp(dist.isend, on_rank(rank, torch.ones(sizes[0])), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, on_rank(rank, torch.zeros(sizes[1])), group=group, group_peer=peer),
    ]
    before = pretended.driver.pretend_launches()
    for work in dist.batch_isend_irecv(ends if long_first == (rank.rank == 0) else ends[::-1]):
        work.wait()
    dist.barrier()
    return pretended.driver.pretend_launches() - before, pretended.driver.pretend_loaded_late()


@pytest.mark.parametrize("long_first", [True, False])
@pytest.mark.parametrize("dispatch", [{}, {"bulk_send_from": 1 << 20}], ids=["default", "bulk"])
def test_kernels_are_loaded_before_one_waits(pretended_gpu: Any, dispatch: dict[str, int], long_first: bool) -> None:
    """Loading a kernel waits for those that run, and these for what both ranks post later."""
    outcomes = run_ranks(_first, 2, dispatch, long_first, env=pretended_gpu)
    assert outcomes == [(3, 0), (3, 0)], "a launch in which both meet, and one of each message"
