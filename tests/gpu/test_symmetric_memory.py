"""PyTorch's symmetric memory (its CUDA backend, multicast off) over an ark group, which provides the Store."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from on_gpu import run, same, start
from support.rank import Rank


def _begin(rank: Rank) -> torch.device:
    device = start(rank)
    if symm_mem.get_backend(device) != "CUDA":  # a process fixes it at its first allocation
        symm_mem.set_backend("CUDA")
    return device


def _integers(count: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, (count,), generator=generator).to(dtype)


def _reductions(rank: Rank) -> None:
    """Sums of small integers, exact in every order: both implementations agree bit for bit, also in one graph."""
    device = _begin(rank)
    group = dist.group.WORLD
    assert group is not None
    for dtype, count in ((torch.bfloat16, 1024), (torch.bfloat16, 16384), (torch.float32, 1 << 20)):
        tensor = symm_mem.empty(count, dtype=dtype, device=device)
        handle = symm_mem.rendezvous(tensor, group)
        assert (handle.rank, handle.world_size) == (rank.rank, rank.world_size)
        values = _integers(count, rank.rank, dtype).to(device)
        expected = values.clone()
        dist.all_reduce(expected)
        for repeat in range(3):
            tensor.copy_(values)
            one = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name)
            same(one, expected.cpu(), f"one-shot {dtype} {count} {repeat}")
            handle.barrier()
            torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", group.group_name)
            same(tensor, expected.cpu(), f"two-shot {dtype} {count} {repeat}")
        # Our collectives use its memory like any other.
        tensor.copy_(values)
        handle.barrier()
        dist.all_reduce(tensor)
        same(tensor, expected.cpu(), f"ark on symmetric memory {dtype} {count}")
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(values)
        tensor.copy_(values)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            out.copy_(torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group.group_name))
            dist.all_reduce(out)
        for _ in range(3):
            graph.replay()
        same(out, (expected * rank.world_size).cpu(), f"both in a graph {dtype} {count}")


def test_reductions() -> None:
    run(_reductions)


def _peers(rank: Rank) -> None:
    """Buffers of peers, signals, and the all-gather through them."""
    device = _begin(rank)
    group = dist.group.WORLD
    assert group is not None
    world, me = rank.world_size, rank.rank
    tensor = symm_mem.empty(4096, dtype=torch.float32, device=device)
    handle = symm_mem.rendezvous(tensor, group)
    tensor.fill_(float(me))
    handle.barrier()
    for peer in range(world):
        assert handle.get_buffer(peer, (4096,), torch.float32).unique().tolist() == [float(peer)]
    handle.barrier()
    handle.get_buffer((me + 1) % world, (4096,), torch.float32).fill_(100.0 + me)
    if world > 1:
        handle.put_signal(dst_rank=(me + 1) % world, channel=1)
        handle.wait_signal(src_rank=(me - 1) % world, channel=1)
    assert tensor.unique().tolist() == [100.0 + (me - 1) % world]
    gathered = torch.ops.symm_mem._low_contention_all_gather(tensor, group.group_name)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    expected = torch.empty(4096 * world, device=device)
    dist.all_gather_into_tensor(expected, tensor)
    same(gathered, expected.cpu(), "low-contention all-gather")


def test_peers() -> None:
    run(_peers)


def _subgroup(rank: Rank) -> None:
    device = _begin(rank)
    group = dist.new_group(list(range(rank.world_size))[::-1])
    assert group is not None
    tensor = symm_mem.empty(1000, dtype=torch.int32, device=device).fill_(rank.rank)
    handle = symm_mem.rendezvous(tensor, group)
    handle.barrier()
    whole = sum(handle.get_buffer(peer, (1000,), torch.int32) for peer in range(rank.world_size))
    handle.barrier()
    dist.all_reduce(tensor, group=group)
    same(tensor, whole.cpu(), "a group of its own")  # type: ignore[union-attr]


def test_another_group() -> None:
    run(_subgroup)
