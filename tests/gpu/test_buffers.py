"""GPU memory that a group shares: none before its first use, a small arena, more for large buckets under a limit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, device_of, run, same
from support.rank import Rank
from support.reference import make_input

import ark_torch
from ark_torch.distributed.group import complete

ARENA = 80 << 20
LARGE = 128 << 20  # bytes: copy engines carry two ranks' all_reduces from here


def _shared(rank: Rank, limit_mb: int) -> int:
    torch.cuda.set_device(device_of(rank))
    options = complete(ark_torch.Options())
    options.buffer_mb = limit_mb if rank.rank == 0 else 512  # rank 0's limit applies
    rank.init(pg_options=options)
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    assert backend.cuda_shared_bytes == 0, "a group that moved nothing shares nothing"
    dist.all_reduce(torch.ones(8, device="cuda"))
    idle = backend.cuda_shared_bytes
    assert 0 < idle <= ARENA
    for extra in (0, 7, 3 << 20):
        expected = make_input(torch.bfloat16, LARGE // 2 + extra, 5, rank.rank)
        tensor = expected.cuda()
        dist.all_reduce(tensor)
        dist.all_reduce(expected)
        same(tensor, expected, f"{extra} more than the least, {limit_mb} MB")
    return int(backend.cuda_shared_bytes - idle)


@pytest.mark.parametrize(("limit_mb", "made"), [(0, False), (5, False), (24, True), (512, True)])
def test_large_buckets_share_memory_under_a_limit(limit_mb: int, made: bool) -> None:
    assert WORLD >= 2
    for grown in run(_shared, limit_mb, world=2, own=True):
        assert (0 < grown <= limit_mb << 20) if made else grown == 0, f"{grown >> 20} MB of {limit_mb}"
