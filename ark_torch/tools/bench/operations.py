"""The collectives of the benchmark: how each is called, its expected result, and its bus bandwidth factor.

Sizes are those of nccl-tests: the bytes of the larger of a rank's two buffers (`count` elements). Inputs are scaled
random whole numbers, small enough that every partial sum is exact in the dtype: in any order of addition the right
result is one bit pattern, and any other counts as wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import DTYPES

ROOT = 0
# Renamed in PyTorch 2.13, where the old names warn.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
REDUCE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
PATTERN = 65_537  # elements of the random block that larger inputs repeat; prime, so that all chunks differ


@dataclass(frozen=True)
class Case:
    """One operation at one size on one rank."""

    rank: int
    world: int
    count: int  # elements of the larger buffer; a multiple of world if the operation splits it
    dtype: str
    redop: str

    @property
    def share(self) -> int:
        return self.count // self.world

    @property
    def reduce_op(self) -> Any:
        return REDUCE_OPS[self.redop]

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.world

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.world

    def input_of(self, rank: int, elements: int) -> Tensor:
        """A rank's random input; every rank can generate all inputs to know the expected result."""
        largest, divisor = DTYPES[self.dtype]
        generator = torch.Generator().manual_seed(1000 * self.count + rank)
        block = torch.randint(-largest, largest + 1, (min(elements, PATTERN),), generator=generator)
        block = (block / divisor if divisor > 1 else block).to(getattr(torch, self.dtype))
        return block.repeat(-(-elements // block.numel()))[:elements] if elements else block

    def reduced(self, elements: int, start: int = 0, stop: int | None = None) -> Tensor:
        total = self.input_of(0, elements)[start:stop].clone()
        for rank in range(1, self.world):
            REDUCE_FUNCTIONS[self.redop](total, self.input_of(rank, elements)[start:stop], out=total)
        return total


Call = Callable[[], object]


@dataclass(frozen=True)
class Operation:
    """`bind` makes the timed call; x is the input, y the output (the same tensor if `in_place`)."""

    name: str
    bus_factor: Callable[[int], float]
    bind: Callable[[Case, dist.ProcessGroup, Tensor, Tensor], Call]
    bind_mpi: Callable[[Case, Any, Any, Any], Call]  # communicator, buffers
    expected: Callable[[Case], Tensor | None]  # None: this rank's output is undefined
    input_shared: bool = False  # the input is one rank's share of `count`
    output_shared: bool = False
    in_place: bool = False
    reduces: bool = False
    has_root: bool = False

    @property
    def splits(self) -> bool:
        return self.input_shared or self.output_shared or self.name == "all_to_all_single"

    def count_for(self, size: int, itemsize: int, world: int) -> int:
        """Number of elements for a size in bytes: at least one, or at least one per rank if they are split."""
        count = max(1, size // itemsize)
        return max(1, count // world) * world if self.splits else count

    def input_elements(self, case: Case) -> int:
        return case.share if self.input_shared else case.count

    def output_elements(self, case: Case) -> int:
        return case.share if self.output_shared else case.count


def at_root(case: Case, value: Callable[[], Tensor]) -> Tensor | None:
    return value() if case.rank == ROOT else None


def all_inputs(case: Case) -> Tensor:
    return torch.cat([case.input_of(rank, case.share) for rank in range(case.world)])


def own_share(case: Case, rank: int) -> Tensor:
    """The part of a rank's input destined for this rank."""
    return case.input_of(rank, case.count)[case.rank * case.share : (case.rank + 1) * case.share]


def bind_gather(case: Case, group: dist.ProcessGroup, x: Tensor, y: Tensor) -> Call:
    outputs = list(y.chunk(case.world)) if case.rank == ROOT else None
    return lambda: dist.gather(x, outputs, ROOT, group=group)


def bind_scatter(case: Case, group: dist.ProcessGroup, x: Tensor, y: Tensor) -> Call:
    inputs = list(x.chunk(case.world)) if case.rank == ROOT else None
    return lambda: dist.scatter(y, inputs, ROOT, group=group)


def bind_all_gather(case: Case, group: dist.ProcessGroup, x: Tensor, y: Tensor) -> Call:
    outputs = list(y.chunk(case.world))
    return lambda: dist.all_gather(outputs, x, group=group)


def bind_send_recv(case: Case, group: dist.ProcessGroup, x: Tensor, y: Tensor) -> Call:
    to, source = case.next, case.previous

    def exchange() -> None:
        work = dist.isend(x, to, group=group)
        dist.recv(y, source, group=group)
        if work is not None:
            work.wait()

    return exchange


def mpi_op(case: Case) -> Any:
    from mpi4py import MPI

    return {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}[case.redop]


def mpi_in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


def mpi_reduce(c: Case, comm: Any, x: Any, y: Any) -> Call:
    source, target, op = (mpi_in_place(), y, mpi_op(c)) if c.rank == ROOT else (y, None, mpi_op(c))
    return lambda: comm.Reduce(source, target, op, ROOT)


def mpi_all_reduce(c: Case, comm: Any, x: Any, y: Any) -> Call:
    source, op = mpi_in_place(), mpi_op(c)
    return lambda: comm.Allreduce(source, y, op)


def mpi_reduce_scatter(c: Case, comm: Any, x: Any, y: Any) -> Call:
    op = mpi_op(c)
    return lambda: comm.Reduce_scatter_block(x, y, op)


def shared_out(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    op.name: op
    for op in (
        Operation(
            "all_reduce", lambda n: 2 * (n - 1) / n,
            lambda c, g, x, y: lambda: dist.all_reduce(y, c.reduce_op, group=g),
            mpi_all_reduce, lambda c: c.reduced(c.count), in_place=True, reduces=True,
        ),
        Operation(
            "all_gather", shared_out, bind_all_gather,
            lambda c, comm, x, y: lambda: comm.Allgather(x, y), all_inputs, input_shared=True,
        ),
        Operation(
            "all_gather_into_tensor", shared_out,
            lambda c, g, x, y: lambda: ALL_GATHER(y, x, group=g),
            lambda c, comm, x, y: lambda: comm.Allgather(x, y), all_inputs, input_shared=True,
        ),
        Operation(
            "reduce_scatter_tensor", shared_out,
            lambda c, g, x, y: lambda: REDUCE_SCATTER(y, x, c.reduce_op, group=g), mpi_reduce_scatter,
            lambda c: c.reduced(c.count, c.rank * c.share, (c.rank + 1) * c.share), output_shared=True, reduces=True,
        ),
        Operation(
            "all_to_all_single", shared_out,
            lambda c, g, x, y: lambda: dist.all_to_all_single(y, x, group=g),
            lambda c, comm, x, y: lambda: comm.Alltoall(x, y),
            lambda c: torch.cat([own_share(c, rank) for rank in range(c.world)]),
        ),
        Operation(
            "broadcast", lambda n: 1.0,
            lambda c, g, x, y: lambda: dist.broadcast(y, ROOT, group=g),
            lambda c, comm, x, y: lambda: comm.Bcast(y, ROOT),
            lambda c: c.input_of(ROOT, c.count), in_place=True, has_root=True,
        ),
        Operation(
            "reduce", lambda n: 1.0,
            lambda c, g, x, y: lambda: dist.reduce(y, ROOT, c.reduce_op, group=g),
            mpi_reduce, lambda c: at_root(c, lambda: c.reduced(c.count)), in_place=True, reduces=True, has_root=True,
        ),
        Operation(
            "gather", shared_out, bind_gather,
            lambda c, comm, x, y: lambda: comm.Gather(x, y, ROOT),
            lambda c: at_root(c, lambda: all_inputs(c)), input_shared=True, has_root=True,
        ),
        Operation(
            "scatter", shared_out, bind_scatter,
            lambda c, comm, x, y: lambda: comm.Scatter(x, y, ROOT),
            lambda c: own_share(c, ROOT), output_shared=True, has_root=True,
        ),
        Operation(
            "send_recv", lambda n: 1.0, bind_send_recv,
            lambda c, comm, x, y: lambda: comm.Sendrecv(x, c.next, 0, y, c.previous, 0),
            lambda c: c.input_of(c.previous, c.count),
        ),
        Operation(
            "barrier", lambda n: 0.0,
            lambda c, g, x, y: lambda: dist.barrier(group=g),
            lambda c, comm, x, y: comm.Barrier, lambda c: None,
        ),
    )
}  # fmt: skip
