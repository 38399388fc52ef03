"""The rows of embedding tables on this rank: which they are, their initial values, and their form in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

ROWS_AT_ONCE = 1 << 14  # rows per seed


class TableShard(nn.Module):
    """Rows of one table: `weight`, and `sum` if an optimizer keeps one number per row."""

    sum: Tensor | None

    def __init__(self, table: int, rows: int, first: int, weight: Tensor) -> None:
        super().__init__()
        self.table, self.rows, self.first = table, rows, first  # the table, its local rows, and the first of them
        self.weight = nn.Parameter(weight, requires_grad=True)
        self.register_buffer("sum", None)

    def reset_parameters(self) -> None:
        """Draws normal values from seeds that depend on table and row only, so that they do not depend on the
        sharding."""
        rows, dim = self.weight.shape
        seed = torch.initial_seed()
        generator = torch.Generator(self.weight.device)
        with torch.no_grad():
            for block in range(self.first // ROWS_AT_ONCE, -(-(self.first + rows) // ROWS_AT_ONCE)):
                begin = block * ROWS_AT_ONCE
                generator.manual_seed((seed * 1_000_003 + self.table * 7_919 + block * 104_729) % (1 << 63))
                count = min(self.rows - begin, ROWS_AT_ONCE)
                drawn = torch.randn(count, dim, generator=generator, device=self.weight.device, dtype=torch.float32)
                here = drawn[max(self.first - begin, 0) : self.first + rows - begin]
                at = max(begin - self.first, 0)
                self.weight[at : at + len(here)].copy_(here)


def balanced(sizes: list[int], ranks: int) -> list[int]:
    """The owner of each table: assigns the largest first, each to the least loaded rank."""
    owners, load = [0] * len(sizes), [0] * ranks
    for table in sorted(range(len(sizes)), key=lambda t: (-sizes[t], t)):
        owners[table] = min(range(ranks), key=lambda r: (load[r], r))
        load[owners[table]] += sizes[table]
    return owners


def block_of(rows: int, ranks: int) -> int:
    """Rows per rank, except the last ranks, as in torch.chunk."""
    return -(-rows // ranks)


def as_dtensor(local: Tensor, rows: int, group: dist.ProcessGroup | None) -> DTensor:
    """This rank's rows as part of the whole table, for checkpoints."""
    mesh = DeviceMesh.from_group(group or dist.distributed_c10d._get_default_group(), local.device.type)
    shape = torch.Size((rows, *local.shape[1:]))
    stride = (local.shape[1], 1) if local.dim() == 2 else (1,)
    return DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def rows_of(value: Any, shard: TableShard, rows: int, row_wise: bool) -> Tensor:
    """This shard's value from a state dict that holds either the whole table or these rows."""
    if isinstance(value, DTensor):
        value = value.to_local() if row_wise else value.full_tensor()
    tensor: Tensor = value
    mine = len(shard.weight)
    return tensor[shard.first : shard.first + mine] if row_wise and len(tensor) == rows != mine else tensor
