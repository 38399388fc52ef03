"""Messages of send and recv on a pretended device: how many kernels each takes. None runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import begin
from support.rank import Rank

from ark_torch import _C, _jit

pytestmark = [ark_only]
MB = 1 << 20


def _launches(rank: Rank) -> None:
    _jit.configure()
    group, _, _ = begin(rank)
    from_on = _C._default_cuda_dispatch(rank.world_size)["rendezvous_from"]
    assert from_on == 2 * MB
    for count, kernels in ((4, 1), (from_on - 4, 1), (from_on, 2), (128 * MB, 2), (128 * MB + 4, 3)):
        tensor = pretended.on(rank.rank, torch.zeros(count // 4))
        before = pretended.driver.pretend_launches()
        if rank.rank == 0:
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(tensor, 0, group=group)
        assert pretended.driver.pretend_launches() - before == kernels, count
    itself = [pretended.on(rank.rank, torch.ones(MB)) for _ in range(2)]
    before = pretended.driver.pretend_launches()
    ends = zip((dist.isend, dist.irecv), itself, strict=True)
    for work in dist.batch_isend_irecv([dist.P2POp(end, tensor, rank.rank, group) for end, tensor in ends]):
        work.wait()
    assert pretended.driver.pretend_launches() - before <= 1, "no rendezvous with oneself"


def test_large_messages_meet_first(pretended_gpu: Any) -> None:
    run_ranks(_launches, 2, env=pretended_gpu)
