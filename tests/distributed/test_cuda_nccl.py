"""NCCL as an entry of the dispatch table for CUDA tensors: what it carries, when it is created, failures. Needs no GPU.

A Recorder (support/pretended) stands in for NCCL. It really carries its operations by a CPU group over the same memory,
while ark's kernels do nothing. So a result shows who carried it.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import Job, run_ranks
from support.pretended.groups import BIG, MOVING, REDUCING, SMALL, begin, every, host, on_rank, table
from support.rank import Rank

import ark_torch

pytestmark = [ark_only]


def _shares(rank: Rank, reduction: str, async_op: bool) -> None:
    group, carriers, lines = begin(rank, reduction=reduction, cuda_dispatch=table(rank.world_size))
    backend = group._get_backend(torch.device("cuda"))
    launches = pretended.driver.pretend_launches
    small = every(rank, group, SMALL, async_op)
    assert not any(small.values()), small
    assert not carriers.made and backend.cuda_carrier == "ark", "made before it was needed"
    before = launches()
    big = every(rank, group, BIG, async_op)
    sums = {name: carried for name, carried in big.items() if "reduce" in name}
    assert set(sums.values()) == {reduction == "fast"}, big
    assert not big.pop("all_to_all_single, splits"), "its counts may differ between ranks"
    assert all(carried for name, carried in big.items() if "reduce" not in name), big
    # Before NCCL's operation, our kernel waits for the peers, on the current stream.
    calls = carriers.made[0].calls()
    assert len(carriers.made) == 1 and calls[0] == f"connect cuda:{rank.rank}", calls
    expected = ["_allgather_base", "allgather", "broadcast", "alltoall_base"]
    if reduction == "fast":
        expected = ["allreduce", "reduce", "_reduce_scatter_base", "reduce_scatter", *expected]
    assert calls[1:] == expected, calls
    assert backend.cuda_carried == len(expected)
    assert launches() - before >= 9, "a barrier or a kernel each"
    # Not every rank sees all sizes if they differ. Some here are below the table's limit.
    mine = BIG if rank.rank == 0 else 16
    uneven = [on_rank(rank, torch.zeros(BIG if r == 0 else 16)) for r in range(rank.world_size)]
    dist.all_gather(uneven, on_rank(rank, torch.ones(mine)), group=group)
    # NCCL never gets reductions other than floating-point sums.
    ints = pretended.on(rank.rank, torch.ones(2 * BIG, dtype=torch.int32))
    dist.all_reduce(ints, group=group)
    dist.all_reduce(on_rank(rank, torch.ones(BIG)), dist.ReduceOp.MAX, group=group)
    dist.all_reduce(on_rank(rank, torch.ones(BIG)), dist._make_nccl_premul_sum(2.0), group=group)
    assert backend.cuda_carried == len(expected) and carriers.made[0].calls()[1:] == expected
    told = lines.about("NCCL")
    names = [*MOVING, *(REDUCING if reduction == "fast" else ())]
    assert len(told) == (len(names) if rank.rank == 0 else 0), told
    assert all(any(f"carries {name} from 24 KB on" in line for line in told) for name in names) or rank.rank, told
    states = {entry["state"] for entry in ark_torch.flight_record()["entries"]}
    assert states == {"completed"}, states
    dist.destroy_process_group(group)
    assert carriers.made[0].calls()[-1] == "shutdown"


@pytest.mark.by_day("exact-sync", "fast-async")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_nccl_carries_what_the_table_gives_it(pretended_gpu: Any, reduction: str, async_op: bool) -> None:
    run_ranks(_shares, 2, reduction, async_op, env=pretended_gpu)


MB = 1 << 20


def _carried(rank: Rank, group: Any, size: int) -> bool:
    """Returns whether NCCL, which is pretended and adds up to 10, carried an all_reduce of so many bytes."""
    x = on_rank(rank, torch.full((size // 4,), float(rank.rank + 1)))
    dist.all_reduce(x, group=group)
    return set(host(x).tolist()) == {10.0}


def _by_default(rank: Rank, model: str, options: dict[str, Any], carried: bool) -> None:
    """Four GPUs of a model: NCCL has the sums that it was measured to be faster at, if their order does not matter."""
    group, carriers, lines = begin(rank, **options)
    pretended.driver.pretend_model(model.encode())
    assert not _carried(rank, group, MB) and not carriers.made
    assert _carried(rank, group, 64 * MB) == carried
    assert len(carriers.made) == carried
    told = lines.about("NCCL")
    assert len(told) == (rank.rank == 0 and carried), told
    assert all("measured faster here, carries all_reduce from 64 MB on" in line for line in told), told


FAST = {"reduction": "fast"}
DEFAULTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "measured": ("NVIDIA H200", FAST, True),
    "another model": ("NVIDIA H200 NVL", FAST, False),
    "exact": ("NVIDIA H200", {}, False),
    "a table": ("NVIDIA H200", {**FAST, "cuda_dispatch": [(4, {})]}, False),
    "one GPU": ("NVIDIA H200", {**FAST, "share_gpu": True}, False),
    "NCCL by way of the host": ("NVIDIA H200", FAST, False),
}


@pytest.mark.by_day("measured", "exact")
@pytest.mark.parametrize("case", DEFAULTS)
def test_what_nccl_carries_by_default(pretended_gpu: Any, case: str) -> None:
    env = {**pretended_gpu, **({"NCCL_P2P_DISABLE": "1"} if case == "NCCL by way of the host" else {})}
    run_ranks(_by_default, 4, *DEFAULTS[case], env=env)


def _rank_0_decides(rank: Rank) -> None:
    mine = table(rank.world_size) if rank.rank == 0 else []
    group, carriers, _ = begin(rank, reduction="fast" if rank.rank == 0 else "exact", cuda_dispatch=mine)
    assert every(rank, group, BIG)["all_reduce"]
    assert len(carriers.made) == 1


def test_rank_0_decides(pretended_gpu: Any) -> None:
    run_ranks(_rank_0_decides, 3, env=pretended_gpu)


def _coalesced(rank: Rank) -> None:
    group, carriers, _ = begin(rank, cuda_dispatch=table(rank.world_size))
    size = rank.world_size
    with dist._coalescing_manager(group=group, device=torch.device("cuda", rank.rank)):
        outputs = []
        for count in (BIG, SMALL):
            outputs.append(on_rank(rank, torch.full((count,), -1.0)))
            dist.all_gather_into_tensor(outputs[-1], on_rank(rank, torch.full((count // size,), 1.0)), group=group)
    assert set(host(outputs[0]).tolist()) == {1.0} and set(host(outputs[1]).tolist()) == {-1.0}
    assert carriers.made[0].calls()[1:] == ["_allgather_base"]


def test_coalesced_ones_are_decided_one_by_one(pretended_gpu: Any) -> None:
    run_ranks(_coalesced, 2, env=pretended_gpu)


def _uneven_parts(rank: Rank) -> None:
    """In a reduce_scatter with unequal parts, only rank 0's part is large enough to create NCCL: no rank creates it."""
    group, carriers, _ = begin(rank, reduction="fast", cuda_dispatch=table(rank.world_size))
    backend, me = group._get_backend(torch.device("cuda")), rank.rank

    def scatter(counts: tuple[int, int]) -> torch.Tensor:
        output = on_rank(rank, torch.full((counts[me],), -1.0))
        dist.reduce_scatter(output, [on_rank(rank, torch.ones(count)) for count in counts], group=group)
        return host(output)

    scatter((BIG, 16))
    dist.all_reduce(on_rank(rank, torch.ones(SMALL)), group=group)
    assert not carriers.made
    half = BIG // 2  # together, parts of this size reach the table's limit
    assert set(scatter((half - 1, half - 1)).tolist()) == {-1.0} and not carriers.made
    assert set(scatter((half, half)).tolist()) == {2.0} and backend.cuda_carried == 1
    assert carriers.made[0].calls()[1:] == ["reduce_scatter"]


def test_uneven_parts_make_no_rank_wait(pretended_gpu: Any) -> None:
    run_ranks(_uneven_parts, 2, env=pretended_gpu)


def _set_timeout(rank: Rank) -> None:
    """NCCL's timeout is later than the group's, which raises the error."""
    group, carriers, _ = begin(rank, cuda_dispatch=table(rank.world_size))
    group.set_timeout(timedelta(seconds=50))
    dist.broadcast(on_rank(rank, torch.ones(BIG)), 0, group=group)
    group.set_timeout(timedelta(seconds=40))
    assert carriers.timeouts == [timedelta(seconds=110)]
    assert carriers.made[0].calls()[-1] == "timeout 100000"


def test_set_timeout_reaches_nccl(pretended_gpu: Any) -> None:
    run_ranks(_set_timeout, 2, env=pretended_gpu)


def _capture(rank: Rank) -> None:
    group, carriers, _ = begin(rank, cuda_dispatch=table(rank.world_size))
    x = on_rank(rank, torch.full((BIG,), float(rank.rank)))
    capture = pretended.driver.pretend_capture
    capture(7)
    with pytest.raises(
        ValueError, match=r"first operation on CUDA tensors is under graph capture.*Call one collective"
    ):
        dist.broadcast(x, 0, group=group)
    capture(0)
    dist.all_reduce(on_rank(rank, torch.ones(SMALL)), group=group)
    capture(8)
    dist.broadcast(x, 0, group=group)
    assert not carriers.made, "ranks cannot meet under capture: ark's own carries it"
    capture(0)
    dist.broadcast(x, 0, group=group)
    capture(9)
    dist.broadcast(x, 0, group=group)
    capture(0)
    assert carriers.made[0].calls()[1:] == ["broadcast", "broadcast"]


def test_never_made_under_capture(pretended_gpu: Any) -> None:
    run_ranks(_capture, 2, env=pretended_gpu)


def _refused(rank: Rank) -> None:
    """One rank cannot connect: no rank uses NCCL, and all log it once and continue."""
    group, carriers, lines = begin(rank, fails=True, cuda_dispatch=table(rank.world_size))
    for _ in range(3):
        big = every(rank, group, BIG)
        assert not any(big.values()), big
    assert carriers.made[0].calls()[1:] == []
    told = lines.about("NCCL")
    last = rank.world_size - 1
    assert len(told) == (1 if rank.rank == 0 else 0), told
    assert all(f"rank {last}: no transport between these GPUs" in line for line in told), told


def test_not_made_on_one_rank_is_used_on_none(pretended_gpu: Any) -> None:
    run_ranks(_refused, 3, env=pretended_gpu)


def _raises(rank: Rank) -> str:
    """NCCL fails on one rank during an operation: every rank gets an error."""
    group, carriers, _ = begin(rank, cuda_dispatch=table(rank.world_size))
    x = on_rank(rank, torch.ones(BIG))
    dist.broadcast(x, 0, group=group)
    dist.barrier()
    with pytest.raises(dist.DistBackendError) as caught:
        carriers.made[0].fail(rank.rank == 1)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            dist.broadcast(on_rank(rank, torch.ones(SMALL if rank.rank == 0 else BIG)), 0, group=group)
            time.sleep(0.05)
    if rank.rank == 0:
        until = time.monotonic() + 5
        while "abort" not in carriers.made[0].calls() and time.monotonic() < until:
            time.sleep(0.02)
        assert "abort" in carriers.made[0].calls(), "its kernels would wait for rank 1"
    return str(caught.value)


def test_nccl_that_fails_fails_the_group(pretended_gpu: Any) -> None:
    first, second = run_ranks(_raises, 2, env=pretended_gpu)
    assert "PyTorch's NCCL, which carries this operation, failed: unhandled cuda error" in second
    assert "rank 1 reported in broadcast" in first and "unhandled cuda error" in first


def _hangs(rank: Rank) -> str:
    """A peer dies while NCCL is created: the others get an error at once."""
    group, carriers, _ = begin(rank, cuda_dispatch=table(rank.world_size))
    make = carriers.__class__.__call__

    def stuck(self: Any, *args: Any) -> Any:
        made = make(self, *args)
        made.hang(True)
        rank.report("inside")
        return made

    carriers.__class__.__call__ = stuck  # type: ignore[method-assign]
    dist.all_reduce(on_rank(rank, torch.ones(SMALL)), group=group)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.broadcast(on_rank(rank, torch.ones(BIG)), 0, group=group)
    carriers.made[0].hang(False)
    return str(caught.value)


def test_peer_lost_while_nccl_is_made(pretended_gpu: Any) -> None:
    with Job(_hangs, 2, env=pretended_gpu, destroy=False) as job:
        job.wait_all("inside")
        since = job.kill(1)
        outcome = job.finish(30, [0])[0]
        assert outcome.kind == "result" and "rank 1 is gone" in outcome.value, outcome.describe()
        assert outcome.ended - since < 10
