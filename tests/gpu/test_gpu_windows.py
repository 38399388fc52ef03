"""One-sided windows of CUDA tensors between the GPUs of a node: puts by copy engines, signals, mapped memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support.rank import Rank

import ark_torch

COUNTS = (1, 1000, (4 << 20) + 3)


def _pooled(count: int, device: torch.device) -> torch.Tensor:
    with torch.cuda.use_mem_pool(ark_torch.memory.pool()):
        return torch.zeros(count, device=device)


def _exchange(rank: Rank, count: int) -> None:
    """Every rank writes to every other, many times, ordered by signals alone."""
    device = start(rank)
    me, size = rank.rank, rank.world_size
    own = _pooled(size * count, device)
    source = torch.empty(count, device=device)
    window = ark_torch.distributed.new_window(own)
    stream = torch.cuda.Stream()
    for turn in range(10):
        with torch.cuda.stream(stream if turn % 2 else torch.cuda.current_stream()):
            source.fill_(100.0 * turn + me)  # the put waits for it
            for peer in range(size):
                window.put(source, peer, me * count, False)
                window.signal(peer, False)
            for peer in range(size):
                window.wait_signal(peer, False)
            expected = torch.arange(size, device=device).add(100.0 * turn).repeat_interleave(count)
            assert torch.equal(own, expected), turn
            torch.cuda.current_stream().synchronize()
        for peer in range(size):  # nobody writes the next turn before all have read this one
            window.signal(peer, False)
        for peer in range(size):
            window.wait_signal(peer, False)
    host = torch.full((count,), -1.0)
    window.put(host, me, me * count, False)
    assert torch.equal(own[me * count : (me + 1) * count].cpu(), host)
    dist.barrier()
    peer = (me + 1) % size
    mapped = window.map_remote_tensor(peer)
    assert mapped.device == device and torch.equal(mapped[peer * count : (peer + 1) * count].cpu(), host)
    dist.barrier()
    window.tensor_deregister()


@pytest.mark.parametrize("count", COUNTS)
def test_exchange(count: int) -> None:
    run(_exchange, count, own=True)


def _refused(rank: Rank) -> None:
    device = start(rank)
    with pytest.raises(ValueError, match=r"not of ark_torch.memory.pool\(\)"):
        ark_torch.distributed.new_window(torch.zeros(64, device=device))
    own = _pooled(64, device)
    window = ark_torch.distributed.new_window(own)
    with pytest.raises(ValueError, match="beyond the window"):
        window.put(torch.ones(65, device=device), WORLD - 1, 0, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="a graph is being captured"):
        window.put(own, WORLD - 1, 0, False)
    dist.barrier()
    window.tensor_deregister()


def test_what_is_refused() -> None:
    run(_refused, own=True)
