"""The host side of CUDA tensors on a pretended device: groups that ark cannot carry, bad input, machines, times.

No kernel runs here.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import BIG, SMALL, begin, every, host, on_rank, table
from support.rank import Rank

import ark_torch
from ark_torch import _C

pytestmark = [ark_only]


def _through_the_host(rank: Rank, refused: bool) -> None:
    """Ranks share host memory, whether devices reach each other or not. Without such memory NCCL takes over."""
    group, carriers, lines = begin(rank)
    pretended.driver.pretend_reach(0)
    if refused and rank.rank == 0:
        pretended.driver.pretend_host_memory(0)
    if refused:
        assert all(every(rank, group, SMALL).values())
        told = lines.about("carried by PyTorch's NCCL")
        assert len(told) == (rank.rank == 0) and all("on the host, beside device 0" in line for line in told), told
        return
    big = every(rank, group, SMALL)
    assert not any(big.values()), big
    backend = group._get_backend(torch.device("cuda"))
    assert backend.cuda_carrier == "ark" and not carriers.made
    assert len(lines.about("go through memory of the host")) == (rank.rank == 0), lines.lines


@pytest.mark.parametrize("refused", [False, True], ids=["shared", "refused"])
def test_through_memory_of_the_host(pretended_gpu: Any, refused: bool) -> None:
    run_ranks(_through_the_host, 2, refused, env={**pretended_gpu, "ARK_DISABLE_P2P": "1"})


def _many(rank: Rank) -> None:
    group, carriers, lines = begin(rank)
    x = on_rank(rank, torch.full((8,), float(rank.rank + 1)))
    dist.all_reduce(x, group=group)
    assert set(host(x).tolist()) == {45.0}
    assert len(carriers.made) == 1
    assert len(lines.about("a group of 9 ranks on one node; kernels are made for up to 8")) == (rank.rank == 0)


def test_more_ranks_than_kernels_are_made_for(pretended_gpu: Any) -> None:
    run_ranks(_many, 9, env=pretended_gpu)


def _nodes(rank: Rank) -> None:
    group, _, lines = begin(rank, shared_memory=ark_torch.Options.SharedMemory.OFF)
    x = on_rank(rank, torch.full((8,), float(rank.rank + 1)))
    dist.all_reduce(x, group=group)
    assert set(host(x).tolist()) == {3.0}
    assert len(lines.about("CUDA tensors are carried by PyTorch's NCCL: its ranks share no memory")) == (rank.rank == 0)


def _without_nccl(rank: Rank) -> None:
    """Without NCCL, Gloo carries what ark cannot. The table's NCCL entries do not apply to it."""
    group, _, lines = begin(rank, carrier="gloo", cuda_dispatch=table(rank.world_size))
    big = every(rank, group, BIG)
    assert not any(big.values()), big
    assert len(lines.about("this PyTorch has no NCCL")) == (rank.rank == 0), lines.lines
    pretended.driver.pretend_reach(0)
    os.environ["ARK_DISABLE_P2P"] = "0"
    other = dist.new_group()
    x = on_rank(rank, torch.full((8,), float(rank.rank + 1)))
    dist.all_reduce(x, group=other)
    assert set(host(x).tolist()) == {3.0}
    assert other._get_backend(torch.device("cuda")).cuda_carrier == "gloo"
    assert len(lines.about("carried by PyTorch's Gloo")) == (rank.rank == 0), lines.lines


def test_without_nccl(pretended_gpu: Any) -> None:
    run_ranks(_without_nccl, 2, env=pretended_gpu)


def test_ranks_on_several_nodes_are_carried(pretended_gpu: Any) -> None:
    run_ranks(_nodes, 2, env=pretended_gpu)


BAD_MACHINES = {
    "compute capability": ("pretend_capability", 75, r"(?s)compute capability 7\.5.*8\.0"),
    "old driver": ("pretend_version", 11080, r"(?s)11\.8.*12\.4"),
}


def _bad_machine(rank: Rank, case: str, who: int) -> str:
    setter, value, _ = BAD_MACHINES[case]
    group, _, _ = begin(rank)
    if who in (-1, rank.rank):
        getattr(pretended.driver, setter)(value)
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        dist.all_reduce(on_rank(rank, torch.ones(8)), group=group)
    assert time.monotonic() - began < 10, "the others wait for what will not come"
    with pytest.raises(type(caught.value)):
        dist.all_reduce(on_rank(rank, torch.ones(8)), group=group)
    host = torch.ones(8)
    dist.all_reduce(host, group=group)  # CPU tensors still work
    assert host[0].item() == rank.world_size
    return str(caught.value)


@pytest.mark.by_day("compute capability-all")
@pytest.mark.parametrize("who", [-1, 1], ids=["all", "one"])
@pytest.mark.parametrize("case", BAD_MACHINES)
def test_machines_that_will_not_do(pretended_gpu: Any, case: str, who: int) -> None:
    told = run_ranks(_bad_machine, 2, case, who, env=pretended_gpu)
    for rank, text in enumerate(told):
        assert re.search(BAD_MACHINES[case][2], text), text
        assert text.startswith(f"ark: [rank {rank}] all_reduce"), text


def _no_compiler(rank: Rank, who: int) -> str:
    """A missing NVRTC is found at the first kernel, when the peers already wait for this rank."""
    if who in (-1, rank.rank):
        os.environ["ARK_NVRTC"] = __file__
        os.environ["ARK_CACHE"] = str(rank.scratch / "cache")
    group, _, _ = begin(rank)
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        while time.monotonic() - began < 20:
            dist.all_reduce(on_rank(rank, torch.ones(8)), group=group)
    assert time.monotonic() - began < 10
    return str(caught.value)


@pytest.mark.by_day("one")
@pytest.mark.parametrize("who", [-1, 1], ids=["all", "one"])
def test_no_compiler(pretended_gpu: Any, who: int) -> None:
    told = run_ranks(_no_compiler, 2, who, env=pretended_gpu)
    assert all("no NVRTC" in text for text in told) and any("ARK_NVRTC" in text for text in told), told
    assert who < 0 or "rank 1" in told[0].partition("] ")[2], told


def _no_driver(rank: Rank) -> str:
    rank.init()
    pretended.enter(with_driver=False)
    pretended.device.set_device(rank.rank)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(on_rank(rank, torch.ones(8)))
    return str(caught.value)


@pytest.mark.skipif(_C._has_cuda_driver(), reason="this machine has one")
def test_no_driver(pretended_gpu: Any) -> None:
    for rank, text in enumerate(run_ranks(_no_driver, 2, env=pretended_gpu)):
        assert text.startswith(f"ark: [rank {rank}] all_reduce") and "libcuda.so.1" in text, text
        assert "CPU tensors" in text, text


def _wrong_device(rank: Rank) -> None:
    """The rank must use the device passed to init_process_group, and every rank its own."""
    pretended.enter()
    pretended.device.set_device(rank.rank)
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")  # torch.distributed checks it
    torch.accelerator.device_count = lambda: 16
    rank.init(device_id=torch.device("cuda", rank.rank))
    with pytest.raises(ValueError, match=r"is on cuda:5, but init_process_group was given device_id=cuda:\d.*Move"):
        dist.all_reduce(pretended.on(5, torch.ones(8)))
    dist.all_reduce(on_rank(rank, torch.ones(8)))
    dist.destroy_process_group()
    rank.init()
    with pytest.raises(ValueError, match=r"uses the same GPU as .*torch.cuda.set_device"):
        dist.all_reduce(pretended.on(3, torch.ones(8)))


def test_wrong_device(pretended_gpu: Any) -> None:
    run_ranks(_wrong_device, 2, env=pretended_gpu)


def _shared_by_some(rank: Rank) -> None:
    """Ranks that may share a GPU divide their memory differently from ranks that have one each."""
    pretended.enter()
    os.environ["ARK_SHARE_GPU"] = "1" if rank.rank == 0 else "0"
    rank.init()
    with pytest.raises(RuntimeError, match=rf"\[rank {rank.rank}\] all_reduce.*Give .*the same ARK_SHARE_GPU"):
        dist.all_reduce(on_rank(rank, torch.ones(8)))


def test_shared_by_some(pretended_gpu: Any) -> None:
    run_ranks(_shared_by_some, 2, env=pretended_gpu)


def _bad_input(rank: Rank) -> None:
    group, _, _ = begin(rank)
    backend, me, other = group._get_backend(torch.device("cuda")), rank.rank, 1 - rank.rank
    here, there = on_rank(rank, torch.ones(8)), pretended.on(other, torch.ones(8))

    def refused(words: str, call: Any) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert str(caught.value).startswith(f"ark: [rank {me}] "), caught.value

    gathered = [on_rank(rank, torch.ones(8)), there]
    refused(
        rf"output\[1\] is on cuda:{other} but input\[0\] is on cuda:{me}",
        lambda: backend.allgather([gathered], [here]),
    )
    refused(
        "is on cuda.* but .* on cpu", lambda: backend._reduce_scatter_base(on_rank(rank, torch.ones(4)), torch.ones(8))
    )
    dist.all_reduce(here, group=group)
    refused(
        rf"the tensor is on cuda:{other}, but this group uses cuda:{me}.*torch.cuda.set_device",
        lambda: backend.allreduce([there]),
    )
    refused(rf"cuda:{other}, but this group uses", lambda: backend.send([there], other, 0))
    early = backend.broadcast([here])
    pretended.driver.pretend_capture(5)
    # Under capture, what cannot be captured raises an error, and the capture continues.
    refused("under graph capture for an operation that was issued before.*Wait for it before", early.wait)
    dist.all_reduce(here, group=group)
    pretended.driver.pretend_capture(0)
    early.wait()


def test_bad_input(pretended_gpu: Any) -> None:
    run_ranks(_bad_input, 2, env=pretended_gpu)


def _times(rank: Rank, timing: bool) -> None:
    group, _, _ = begin(rank, timing=timing)
    backend = group._get_backend(torch.device("cuda"))
    x = on_rank(rank, torch.ones(8))
    works = [backend.allreduce([x]) for _ in range(3)]
    if timing:
        assert [work._get_duration() for work in works] == [1.5] * 3
    else:
        with pytest.raises(RuntimeError, match="ARK_TIMING=1"):
            works[0]._get_duration()
    record = ark_torch.flight_record()
    ours = next(g["id"] for g in record["groups"] if g["name"] == group.group_name)
    entries = [entry for entry in record["entries"] if entry["group"] == ours]
    assert [entry["state"] for entry in entries] == ["completed"] * 3
    for entry in entries:
        assert entry["time_ended_ns"] is not None
        if timing:  # measured by the device: a pretended event completes every 1.5 ms
            assert entry["duration_ns"] == 1_500_000, entry
            assert entry["time_created_ns"] <= entry["time_started_ns"] == entry["time_ended_ns"] - 1_500_000
        else:  # the start is unknown
            assert entry["duration_ns"] is None and entry["time_started_ns"] is None, entry
    # A running operation is reported as started when somebody looks.
    pretended.device.lag(True)
    backend.allreduce([x])
    state = ark_torch.flight_record()["entries"][-1]
    assert state["state"] == "scheduled" and state["time_ended_ns"] is None, state
    pretended.device.lag(False)
    if not timing:
        group._enable_collectives_timing()
        work = backend.allreduce([x])
        assert work._get_duration() == 1.5


@pytest.mark.by_day("True")
@pytest.mark.parametrize("timing", [True, False])
def test_times_of_the_device(pretended_gpu: Any, timing: bool) -> None:
    run_ranks(_times, 2, timing, env=pretended_gpu)


def _no_copy_engines(rank: Rank) -> list[str]:
    """When the first large call comes, the memory for copy engines can no longer be shared. Kernels take over."""
    group, _, lines = begin(rank)
    dist.all_reduce(on_rank(rank, torch.ones(8)), group=group)
    pretended.driver.pretend_reach(0)
    for _ in range(2):
        dist.all_reduce(on_rank(rank, torch.ones(8 << 20)), group=group)
    return lines.about("copy engines")


def test_copy_engines_that_cannot_be_had_are_told_once(pretended_gpu: Any) -> None:
    [told], others = run_ranks(_no_copy_engines, 2, env=pretended_gpu)
    assert re.search(r"kernels move what copy engines would, which share no memory: .+", told) and not others
