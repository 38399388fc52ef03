"""Several groups at once, a group beside NCCL, a group that NCCL carries, and the record of a group's operations."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from on_gpu import busy, run, same, start, sum_of_ranks
from support.rank import Rank
from support.reference import make_input

import ark_torch

# Loading a kernel waits for all of the GPU's work, and blocks other threads' calls meanwhile. With two groups at work,
# ranks that load kernels would wait for each other (README, Troubleshooting). So each test runs every kernel once
# before. (With CUDA_MODULE_LOADING=EAGER instead, 3 of 3 runs had not ended after 35 s.)


def _groups(rank: Rank) -> None:
    """Several groups on several streams and threads at once, in different orders on the device."""
    device = start(rank)
    groups = [dist.new_group() for _ in range(3)]
    alone = [dist.new_group([r]) for r in range(rank.world_size)][rank.rank]
    failures = []

    def loop(index: int, steps: int) -> None:
        try:
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(steps):
                    tensor = torch.full((1 + step * 911 % 100_000,), float(rank.rank + 1 + index), device=device)
                    work = dist.all_reduce(tensor, group=groups[index], async_op=step % 3 == 0)
                    if work is not None:
                        work.wait()
                    expected = sum_of_ranks(rank.world_size, index)
                    assert tensor[0].item() == tensor[-1].item() == expected, f"group {index}, step {step}"
        except Exception as error:
            failures.append(error)

    for index in range(len(groups)):
        loop(index, 2)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=loop, args=(index, 200)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for step in range(100):
        tensor = make_input(torch.float32, 1000, step, rank.rank).to(device)
        before = tensor.clone()
        dist.all_reduce(tensor, group=alone)
        same(tensor, before.cpu(), "a group of one")
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_groups_and_threads() -> None:
    run(_groups, own=True, timeout=60)


def _beside_nccl(rank: Rank) -> None:
    device = start(rank)
    nccl = dist.new_group(backend="nccl")
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    count = 1 << 22
    for group in (None, nccl):  # a group's first operation connects the ranks, so all need the same order
        first = torch.ones(count, device=device)
        dist.all_reduce(first, group=group)
        assert first.clone().unique().tolist() == [rank.world_size]
    for step in range(100):
        a = torch.full((count,), float(rank.rank + 1), device=device)
        b = a.clone()
        for stream in (ours, theirs):
            stream.wait_stream(torch.cuda.current_stream())
        # The order of issue differs between ranks.
        for mine in (True, False) if (step + rank.rank) % 2 == 0 else (False, True):
            with torch.cuda.stream(ours if mine else theirs):
                dist.all_reduce(a if mine else b, group=None if mine else nccl)
        for stream in (ours, theirs):
            torch.cuda.current_stream().wait_stream(stream)
        assert a.unique().tolist() == b.unique().tolist() == [sum_of_ranks(rank.world_size)], f"step {step}"


def test_beside_an_nccl_group() -> None:
    run(_beside_nccl, own=True, timeout=60)


def _carried(rank: Rank) -> None:
    """Ranks that share no memory: NCCL gets the same calls."""
    device = start(rank)
    world, me = rank.world_size, rank.rank
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.full((1000,), float(me + 1), device=device)
    dist.all_reduce(tensor)
    assert tensor[0].item() == sum_of_ranks(world)
    assert group._get_backend(device).cuda_carrier == "nccl"
    output = torch.empty(world * 4, device=device)
    dist.all_gather_into_tensor(output, torch.full((4,), float(me), device=device), async_op=True).wait()
    assert output.tolist() == [float(r) for r in range(world) for _ in range(4)]
    if world > 1:
        got = torch.empty(3, device=device)
        ops = [
            dist.P2POp(dist.isend, torch.full((3,), float(me), device=device), (me + 1) % world),
            dist.P2POp(dist.irecv, got, (me - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.tolist() == [float((me - 1) % world)] * 3
    dist.barrier()
    on_host = torch.ones(3)
    dist.all_reduce(on_host)
    assert on_host.tolist() == [world] * 3


def test_carried_by_nccl() -> None:
    run(_carried, env={"ARK_SHARED_MEMORY": "off"})


def _flight(rank: Rank) -> list[str]:
    device = start(rank)
    for _ in range(50):
        dist.all_reduce(torch.ones(10, device=device))
    busy(100)
    dist.all_reduce(torch.ones(10, device=device))
    states = [entry["state"] for entry in ark_torch.flight_record()["entries"]]
    assert states[-1] in ("scheduled", "started"), states[-5:]
    torch.cuda.synchronize()
    return [entry["state"] for entry in ark_torch.flight_record()["entries"]]


def test_flight_record_follows_the_device() -> None:
    for states in run(_flight):
        assert states[-51:] == ["completed"] * 51, states


def _timed(rank: Rank) -> None:
    """Times are the device's: an operation after 50 ms of computation starts after it, and is short."""
    device = start(rank)
    options = ark_torch.Options()
    options.timing = True
    group = dist.new_group(pg_options=options)
    tensor = torch.ones(1000, device=device)
    for later in (False, True):  # the first of a kind creates streams, which may take longer than the wait below
        group._get_backend(device).allreduce([tensor], _async(later)).wait()
    torch.cuda.synchronize()
    for later in (False, True):
        dist.barrier()
        begun = time.time_ns()  # not the operation's time_created_ns, because the host may be delayed in between
        busy(50)
        work = group._get_backend(device).allreduce([tensor], _async(later))
        entry = ark_torch.flight_record()["entries"][-1]
        assert entry["state"] in ("scheduled", "started"), entry
        torch.cuda.synchronize()
        # The other ranks' computation may end later.
        assert 0 < work._get_duration() < 45, work._get_duration()
        entry = ark_torch.flight_record()["entries"][-1]
        assert abs(entry["duration_ns"] / 1e6 - work._get_duration()) < 0.01, entry
        waited = (entry["time_started_ns"] - begun) / 1e6
        assert 20 < waited < 500, waited
        work.wait()
    # A late rank shows in the others' durations, and the record shows them as running.
    if rank.rank == 0:
        busy(100)
    work = group._get_backend(device).allreduce([tensor], _async(False))
    if rank.rank != 0:
        time.sleep(0.03)
        assert ark_torch.flight_record()["entries"][-1]["state"] == "started"
    torch.cuda.synchronize()
    assert (work._get_duration() > 20) == (rank.rank != 0), work._get_duration()


def _async(later: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.asyncOp = later
    return options


def test_times_are_the_devices() -> None:
    run(_timed)
