"""Streams, events, futures and barriers as ProcessGroupNCCL's users need them, with deliberately late work."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, busy, run, same, start, sum_of_ranks
from support.rank import Rank

import ark_torch


def _late_inputs(rank: Rank) -> None:
    """Inputs that a busy stream has yet to write, and results read without a host wait."""
    device = start(rank)
    world, total = rank.world_size, sum_of_ranks(rank.world_size)
    dist.all_reduce(torch.ones(1, device=device))
    for asynchronous in (False, True):
        for side in (False, True):
            for count in (5, 1 << 20):
                stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    tensor = torch.zeros(count, device=device)
                    busy()
                    tensor.fill_(rank.rank + 1)
                    work = dist.all_reduce(tensor, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
                    result = tensor * 2
                torch.cuda.current_stream().wait_stream(stream)
                what = f"async {asynchronous}, side stream {side}, {count}"
                same(result, torch.full((count,), total * 2), what)
                assert world == 1 or result[0].item() == 2 * total, what


@pytest.mark.parametrize("world", sorted({1, WORLD}))
def test_streams_wait_and_the_host_does_not(world: int) -> None:
    run(_late_inputs, world=world)


def _order_over_streams(rank: Rank) -> None:
    """Collectives of one group on changing streams, synchronous or not, without a wait between them."""
    device = start(rank)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    tensors, works = [], []
    for step in range(120):
        with torch.cuda.stream(streams[step % 3]):
            if step % 7 == rank.rank:
                busy(2)
            tensor = torch.full((1 + step * 37 % 5000,), float(rank.rank + 1 + step), device=device)
            works.append(dist.all_reduce(tensor, async_op=step % 2 == 0))
            tensors.append(tensor)
    for step, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        with torch.cuda.stream(streams[step % 3]):
            if work is not None:
                work.wait()
            same(tensor, torch.full_like(tensor, sum_of_ranks(rank.world_size, step)).cpu(), f"step {step}")


def test_order_over_streams() -> None:
    run(_order_over_streams)


def _dropped(rank: Rank) -> None:
    """Tensors of works that nobody waits for are not reused while the device uses them."""
    device = start(rank)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    for _ in range(20):
        busy(3)
        tensor = torch.full((1 << 18,), 1.0, device=device)
        strided = torch.full((1 << 18, 2), 1.0, device=device)[:, 0]
        first, second = dist.all_reduce(tensor, async_op=True), dist.all_reduce(strided, async_op=True)
        del first, second, tensor, strided
        gc.collect()
        torch.full((1 << 18,), float("nan"), device=device)
        torch.full((1 << 18, 2), float("nan"), device=device)
        kept = torch.full((1 << 18,), 1.0, device=device)
        dist.all_reduce(kept)
        assert kept.unique().tolist() == [rank.world_size]
    del kept
    torch.cuda.synchronize()
    ark_torch.flight_record()  # polls the device, which releases what was dropped
    assert torch.cuda.memory_allocated() <= base


def _waited_elsewhere(rank: Rank) -> None:
    """A staged copy outlives a wait on another stream than the one that would reuse its memory."""
    device = start(rank)
    side = torch.cuda.Stream()
    for _ in range(20):
        strided = torch.full((1 << 18, 2), 1.0, device=device)[:, 0]
        busy(3)
        work = dist.all_reduce(strided, async_op=True)
        with torch.cuda.stream(side):
            work.wait()
        for _ in range(4):
            torch.full((1 << 18,), float("nan"), device=device)
        torch.cuda.current_stream().wait_stream(side)
        assert strided.unique().tolist() == [rank.world_size]


def test_waited_for_on_another_stream() -> None:
    run(_waited_elsewhere)


def test_dropped_works() -> None:
    run(_dropped)


def _futures(rank: Rank) -> float:
    device = start(rank)
    total = sum_of_ranks(rank.world_size)
    for count in (7, 1 << 20):
        busy()
        tensor = torch.full((count,), float(rank.rank + 1), device=device)
        work = dist.all_reduce(tensor, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        result = doubled.wait()
        same(result, torch.full((count,), 2 * total), f"future of {count}")
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.result()[0].data_ptr() == tensor.data_ptr()
    # A host that waits with a timeout, and one that polls.
    busy(200)
    late = dist.all_reduce(tensor, async_op=True)
    assert not late.is_completed()
    with pytest.raises(dist.DistBackendError, match="goes on"):
        from datetime import timedelta

        late.wait(timedelta(milliseconds=20))
    until = time.monotonic() + 20
    while not late.is_completed():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert late.wait()
    return tensor[0].item()


def test_futures_and_waiting_hosts() -> None:
    values = run(_futures)
    assert len(set(values)) == 1


def _barrier(rank: Rank) -> None:
    device = start(rank)
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(device).cuda_carrier == "", "nothing is made before the first operation on CUDA tensors"
    dist.barrier()
    dist.all_reduce(torch.ones(1, device=device))
    assert group._get_backend(device).cuda_carrier == "ark"
    for asynchronous in (False, True):
        busy(100)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        work = dist.barrier(async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert done.query(), "a barrier waits for what the stream held"
    store = rank.store("barrier")
    for step in range(20):
        if rank.rank == step % rank.world_size:
            time.sleep(0.02)
            store.set(f"step{step}", "here")
        dist.barrier()
        assert store.check([f"step{step}"]), "nobody passes before all have come"
    dist.barrier(device_ids=[device.index])


def test_barrier_waits_for_the_device() -> None:
    run(_barrier)
