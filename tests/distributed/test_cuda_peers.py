"""Peer access between GPUs that is missing, or claimed but broken: who carries CUDA tensors then, and what is logged.

The pretended device loses writes to peers' memory, delivers wrong values, or never finishes. The only kernel that runs
is the one that tests peers. ark's other kernels do nothing, so a result shows who carried it.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import SMALL, begin, every, host, on_rank
from support.rank import Rank

import ark_torch

pytestmark = [ark_only]

LOST, WRONG, ENDLESS = 1, 2, 3
STORES, COPIES = 1, 2
WITHIN, BEYOND = 512 << 10, 4 << 20  # elements of float32: 2 MB, which NCCL carries in such a group, and 16 MB


def _cuda(group: Any) -> Any:
    return group._get_backend(torch.device("cuda"))


def _sums(rank: Rank, group: Any, count: int, op: Any = dist.ReduceOp.SUM) -> bool:
    """Returns whether the stand-in for NCCL carried an all_reduce."""
    x = on_rank(rank, torch.full((count,), float(2 * rank.rank + 2)))
    dist.all_reduce(x, op, group=group)
    total = sum(2 * r + 2 for r in range(rank.world_size))
    return set(host(x).tolist()) == {float(total if op == dist.ReduceOp.SUM else total // rank.world_size)}


def _gathers(rank: Rank, group: Any, count: int) -> bool:
    part = count // rank.world_size
    x, y = on_rank(rank, torch.full((part,), float(rank.rank + 1))), on_rank(rank, torch.zeros(part * rank.world_size))
    dist.all_gather_into_tensor(y, x, group=group)
    return sorted(set(host(y).tolist())) == [float(r + 1) for r in range(rank.world_size)]


def _missing(rank: Rank, who: int) -> None:
    group, carriers, lines = begin(rank)
    if rank.rank == who or who < 0:
        pretended.driver.pretend_reach(0)
    assert not any(every(rank, group, SMALL).values())
    backend = _cuda(group)
    assert backend.cuda_carrier == "ark" and not carriers.made
    told = lines.about("go through memory of the host")
    assert len(told) == (rank.rank == 0), lines.lines
    for line in told:
        assert "for all pairs, since " in line and "has no peer access to device" in line, line
        assert re.search(r"\((\d+) MB of it pinned for each rank\)", line), line
        assert "of 1024 KB to 6 MB" in line, line
    assert 0 < backend.cuda_shared_bytes * rank.world_size <= 64 << 20
    # NCCL carries what it does faster with the same bits: a sum of two ranks, but not an average.
    assert _sums(rank, group, WITHIN) and _gathers(rank, group, WITHIN)
    assert not _sums(rank, group, BEYOND) and not _gathers(rank, group, BEYOND)
    assert not _sums(rank, group, WITHIN, dist.ReduceOp.AVG)
    assert len(carriers.made) == 1 and backend.cuda_carried == 2


@pytest.mark.by_day("one")
@pytest.mark.parametrize("who", [-1, 1], ids=["all", "one"])
def test_without_peer_access_ark_goes_through_the_host(pretended_gpu: Any, who: int) -> None:
    run_ranks(_missing, 2, who, env=pretended_gpu)


def _three(rank: Rank, reduction: str) -> None:
    group, _, lines = begin(rank, reduction=reduction)
    pretended.driver.pretend_reach(0)
    assert _gathers(rank, group, WITHIN)
    assert _sums(rank, group, WITHIN) == (reduction == "fast"), "NCCL adds three in an order of its own"
    assert len(lines.about("ARK_REDUCTION=fast")) == (rank.rank == 0 and reduction == "exact"), lines.lines


@pytest.mark.by_day("exact")
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_sums_of_three_keep_their_bits(pretended_gpu: Any, reduction: str) -> None:
    run_ranks(_three, 3, reduction, env=pretended_gpu)


def _left_to_nccl(rank: Rank, lies: bool) -> None:
    """ARK_DISABLE_P2P=0: the driver's answer is trusted, and if it is no, NCCL carries everything."""
    group, carriers, lines = begin(rank)
    if lies:
        pretended.driver.pretend_lie(LOST, STORES | COPIES, 0)
    else:
        pretended.driver.pretend_reach(0)
    done = every(rank, group, SMALL)
    assert pretended.driver.pretend_tests() == 0
    assert set(done.values()) == {not lies}, done
    assert _cuda(group).cuda_carrier == ("ark" if lies else "nccl") and _cuda(group).cuda_carried == 0
    told = lines.about("carried by PyTorch's NCCL")
    assert len(told) == (rank.rank == 0 and not lies), lines.lines
    assert all("no peer access" in line for line in told), told
    if not lies:
        dist.barrier(group=group)
        assert carriers.made[0].calls()[-1] == "barrier"


@pytest.mark.by_day("lying")
@pytest.mark.parametrize("lies", [False, True], ids=["missing", "lying"])
def test_untested_where_it_is_asked_for(pretended_gpu: Any, lies: bool) -> None:
    run_ranks(_left_to_nccl, 2, lies, env={**pretended_gpu, "ARK_DISABLE_P2P": "0"})


def _honest(rank: Rank) -> None:
    """A process tests each pair once, for all later groups. A group of other devices tests its own pairs."""
    groups = begin(rank)[0], dist.new_group(), dist.new_group([0, 1])
    x = on_rank(rank, torch.ones(8))
    dist.all_reduce(x, group=groups[0])
    tests = pretended.driver.pretend_tests
    assert tests() == rank.world_size - 1 and _cuda(groups[0]).cuda_carrier == "ark"
    dist.all_reduce(x, group=groups[1])
    if rank.rank < 2:
        dist.all_reduce(x, group=groups[2])
    assert tests() == rank.world_size - 1
    if rank.rank < 2:
        assert _cuda(groups[2]).cuda_shared_bytes > 32 << 20, "on the device: more than it would have on the host"


def test_a_pair_is_tested_once(pretended_gpu: Any) -> None:
    run_ranks(_honest, 3, env=pretended_gpu)


SAYS = {
    (LOST, STORES): "values do not arrive: 512 of 512 words by stores are missing",
    (LOST, COPIES): "values do not arrive: 512 of 512 words by copies are missing",
    (WRONG, STORES): r"values arrive wrong: 1 of 512 words by stores, the first as 0x[0-9a-f]{16} instead of 0x",
    (WRONG, COPIES): r"values arrive wrong: 1 of 512 words by copies, the first as 0x",
    (ENDLESS, STORES): "a kernel's stores did not end within 3000 ms",
    (ENDLESS, COPIES): "a copy did not end within 3000 ms",
}


def _lying(rank: Rank, how: int, way: int) -> None:
    """Only access from rank 1 to rank 0 fails. The whole group uses host memory; so does the next, without a test."""
    group, carriers, lines = begin(rank)
    if rank.rank == 1:
        pretended.driver.pretend_lie(how, way, 0)
    began = time.monotonic()
    assert not any(every(rank, group, SMALL).values())
    assert time.monotonic() - began < 20
    backend = _cuda(group)
    assert backend.cuda_carrier == "ark" and 0 < backend.cuda_shared_bytes * rank.world_size <= 64 << 20
    told = lines.about("go through memory of the host")
    assert len(told) == (rank.rank == 0), lines.lines
    expected = r"peer access from GPU 1 \(rank 1\) to GPU 0 \(rank 0\) claims to work, but " + SAYS[how, way]
    assert all(re.search(expected, line) for line in told), told
    # NCCL would trust the driver.
    assert not _sums(rank, group, WITHIN) and not carriers.made
    tests = pretended.driver.pretend_tests()
    assert tests == 1
    other = dist.new_group(timeout=timedelta(seconds=30))
    assert not _sums(rank, other, SMALL)
    assert pretended.driver.pretend_tests() == tests, "the verdict was known"
    assert len(lines.about("claims to work, but")) == 2 * (rank.rank == 0), lines.lines
    assert _cuda(other).cuda_shared_bytes == backend.cuda_shared_bytes
    x = torch.ones(8)
    dist.all_reduce(x)
    assert x[0].item() == rank.world_size, "CPU tensors are not concerned"


@pytest.mark.by_day("lost-stores", "wrong-copies", "endless-stores")
@pytest.mark.parametrize("way", [STORES, COPIES], ids=["stores", "copies"])
@pytest.mark.parametrize("how", [LOST, WRONG, ENDLESS], ids=["lost", "wrong", "endless"])
def test_peer_access_that_lies(pretended_gpu: Any, how: int, way: int) -> None:
    run_ranks(_lying, 2, how, way, env=pretended_gpu)


def _one_pair(rank: Rank) -> None:
    """The failing pair is named, and no others. A group without it uses peers' memory."""
    group, _, lines = begin(rank)
    pair = dist.new_group([0, 1])
    if rank.rank == 0:
        pretended.driver.pretend_lie(LOST, STORES, 2)  # rank 2's memory is the second that rank 0 maps
    dist.all_reduce(on_rank(rank, torch.ones(8)), group=group)
    told = lines.about("go through memory of the host")
    assert len(told) == (rank.rank == 0), lines.lines
    assert all("from GPU 0 (rank 0) to GPU 2 (rank 2) claims" in line for line in told), told
    if rank.rank < 2:
        pretended.driver.pretend_lie(0, 0, 0)
        dist.all_reduce(on_rank(rank, torch.ones(8)), group=pair)
        assert _cuda(pair).cuda_shared_bytes > 32 << 20, "on the device: more than it would have on the host"


def test_one_pair_that_lies(pretended_gpu: Any) -> None:
    run_ranks(_one_pair, 3, env=pretended_gpu)


def _lying_without_host(rank: Rank, told_nccl: bool) -> None:
    group, carriers, _ = begin(rank)
    pretended.driver.pretend_lie(LOST, STORES, 0)
    if rank.rank == 0:
        pretended.driver.pretend_host_memory(0)
    if told_nccl:
        assert all(every(rank, group, SMALL).values()) and carriers.made
        return
    with pytest.raises(RuntimeError, match=r"(?s)claims to work, but.*by way of the host.*NCCL_P2P_DISABLE=1"):
        _sums(rank, group, SMALL)
    assert not carriers.made, "NCCL would send into the void"


@pytest.mark.by_day("plain")
@pytest.mark.parametrize("told_nccl", [False, True], ids=["plain", "NCCL_P2P_DISABLE"])
def test_lies_and_no_memory_of_the_host(pretended_gpu: Any, told_nccl: bool) -> None:
    env = {**pretended_gpu, **({"NCCL_P2P_DISABLE": "1"} if told_nccl else {})}
    run_ranks(_lying_without_host, 2, told_nccl, env=env)


def _lying_beside_nccl(rank: Rank) -> None:
    group, carriers, lines = begin(rank)
    pretended.driver.pretend_lie(LOST, STORES, 0)
    assert _sums(rank, group, WITHIN) and not _sums(rank, group, SMALL) and len(carriers.made) == 1
    assert len(lines.about("NCCL has what it is faster with")) == (rank.rank == 0), lines.lines


def test_nccl_that_leaves_peers_alone_has_its_share(pretended_gpu: Any) -> None:
    run_ranks(_lying_beside_nccl, 2, env={**pretended_gpu, "NCCL_P2P_DISABLE": "1"})


def _rank_zeros(rank: Rank) -> None:
    given = ark_torch.Options()
    assert given.disable_p2p is None
    group, _, lines = begin(rank, disable_p2p=rank.rank == 0)
    assert not _sums(rank, group, SMALL)
    assert len(lines.about("as ARK_DISABLE_P2P asks")) == (rank.rank == 0), lines.lines
    assert _cuda(group).cuda_shared_bytes * rank.world_size <= 64 << 20


def test_rank_zeros_wish_counts(pretended_gpu: Any) -> None:
    run_ranks(_rank_zeros, 2, env=pretended_gpu)
