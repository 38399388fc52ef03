"""Exchange of sparse gradients (COO, from embeddings): each rank's coalesced rows as index and value, exact."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.distributed.compression.state import State


def mean(state: State, gradient: Tensor) -> Tensor:
    """The mean over ranks of a COO tensor, coalesced. Collective; ranks may hold different numbers of elements.

    Rows are added in rank order, so that all ranks get the same bits.
    """
    group = state.group
    mine = gradient.coalesce()
    device = mine.device
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([mine._nnz()], device=device), group=group)
    numbers = [int(count) for count in counts]
    longest = max(numbers)
    indices = _gathered(mine.indices().t().contiguous(), longest, group)
    values = _gathered(mine.values(), longest, group)
    rows = mine._nnz() * (mine.indices().element_size() * mine.sparse_dim()) + mine.values().nbytes
    times = (group.size() if state.nodes is None else state.nodes.nodes) - 1
    state.bytes_sent += rows * times
    state.bytes_exact += rows * times
    parts = [(i[:n].t(), v[:n]) for i, v, n in zip(indices, values, numbers, strict=True)]
    total = torch.sparse_coo_tensor(
        torch.cat([i for i, _ in parts], dim=1), torch.cat([v for _, v in parts]), gradient.shape, device=device
    ).coalesce()
    return total.div_(group.size())


def _gathered(rows: Tensor, longest: int, group: dist.ProcessGroup) -> list[Tensor]:
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    result = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(result, padded, group=group)
    return result
