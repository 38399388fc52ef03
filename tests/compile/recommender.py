"""A DLRM: dense features through an MLP, sparse ones through pooled embeddings, their dot products through another MLP.

Tables are sharded over the ranks. Each rank pools its own tables for the whole batch, and an all_to_all gives every
rank all tables for its part of the batch.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for given, made in itertools.pairwise(sizes):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    def __init__(self, tables: int = 8, rows: int = 50, dim: int = 20, dense: int = 13) -> None:
        super().__init__()
        self.dim = dim
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(rows + t, dim)) for t in range(tables))
        self.bottom, self.top = mlp(dense, 32, dim), mlp(dim + tables * (tables + 1) // 2, 24, 1)
        pairs = [(i, j) for i in range(tables + 1) for j in range(i)]
        self.register_buffer("left", torch.tensor([i for i, _ in pairs]))
        self.register_buffer("right", torch.tensor([j for _, j in pairs]))

    def pooled(self, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        """Returns [batch, tables, dim] of this rank's tables."""
        bags = zip(self.tables, indices, offsets, strict=True)
        return torch.stack([F.embedding_bag(i, table, o, mode="sum") for table, i, o in bags], 1)

    def predict(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        x = F.relu(self.bottom(dense))
        every = torch.cat([x[:, None], embeddings], 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.left, self.right]
        return torch.sigmoid(self.top(torch.cat([x, products], 1)))

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        return self.predict(dense, self.pooled(indices, offsets))


class Shard(nn.Module):
    """One rank's part: its tables, both MLPs, and its rows of the batch."""

    def __init__(self, whole: Dlrm, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.whole, self.group = whole, group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.dim = whole.dim
        whole.tables = nn.ParameterList(list(whole.tables)[self.mine(len(whole.tables))])

    def mine(self, count: int) -> slice:
        part = count // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        pooled = self.whole.pooled(indices, offsets)  # [batch, my tables, dim]
        batch = pooled.shape[0] // self.ranks
        moved = funcol.all_to_all_single(pooled, [batch] * self.ranks, [batch] * self.ranks, self.group)
        # From rank r: my rows of its tables.
        every = moved.view(self.ranks, batch, -1, self.dim).transpose(0, 1).flatten(1, 2)
        return self.whole.predict(dense, every)


def features(batch: int, model_tables: int, generator: torch.Generator) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Dense features, and bags of 0 to 4 indices for each table. Equal generators give equal values on all ranks."""
    dense = torch.randn(batch, 13, generator=generator)
    indices, offsets = [], []
    for _ in range(model_tables):
        sizes = torch.randint(0, 5, (batch,), generator=generator)
        sizes[-1] += 4 * batch - int(sizes.sum())  # as many indices in every batch, so that shapes stay the same
        offsets.append(F.pad(sizes.cumsum(0), (1, 0))[:-1])
        indices.append(torch.randint(0, 50, (4 * batch,), generator=generator))
    return dense, indices, offsets
