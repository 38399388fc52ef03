"""Fused operators on CUDA tensors of groups whose ranks share no memory: PyTorch's NCCL carries them. Needs no GPU.

A Recorder (support/pretended) stands in for NCCL, and like NCCL returns no work for a synchronous operation. PyTorch's
own operators compute, and ark's kernels do nothing: so products have their values, and other results their shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.pretended.groups import begin, host
from support.rank import Rank

import ark_torch
from ark_torch import _jit, ops
from ark_torch.distributed import compressed_all_reduce

pytestmark = [ark_only]
SIZES = (1003, 33)  # of two segments


def _apart(rank: Rank) -> tuple[Any, Any, Any]:
    """Returns a group of ranks that share no memory, a function (what was carried since its last call), and its log."""
    _jit.configure()
    group, carriers, lines = begin(rank, shared_memory=ark_torch.Options.SharedMemory.OFF)
    heard = 0

    def carried() -> list[str]:
        nonlocal heard
        calls = carriers.made[0].calls()
        heard, since = len(calls), calls[heard:]
        return list(since)

    return group, carried, lines


def _on(rank: Rank, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [pretended.on(rank.rank, one) for one in tensors]


def _compressed(rank: Rank) -> None:
    group, carried, _ = _apart(rank)
    world, total = rank.world_size, sum(SIZES)
    segments: tuple[Any, ...] = (SIZES, (4, 0), (128, 128), "uniform", "nearest", 7)
    x, shares, residual, far = _on(rank, torch.ones(total), torch.ones(world * total), torch.zeros(total),
                                   torch.zeros(world * total))  # fmt: skip
    operators = torch.ops.ark
    launches = pretended.driver.pretend_launches
    launched = 2 + (1 if rank.rank == 0 else 2) + 2  # a launch for each width: all parts, the own one, all sums
    for kept, wide in ((None, None), (residual, far)):
        before = launches()
        out = operators.compressed_all_reduce(x, kept, *segments, "avg", group.group_name)
        assert out.shape == x.shape and carried() == ["alltoall_base", "_allgather_base"]
        assert launches() - before == launched
        out = operators.compressed_reduce_scatter(shares, wide, *segments, "sum", group.group_name)
        assert out.shape == (total,) and carried() == ["alltoall_base"]
    assert operators.compressed_all_gather(x, *segments, group.group_name).shape == (world * total,)
    assert carried() == ["_allgather_base"]
    assert compressed_all_reduce(x, bits=4, group=group).shape == x.shape
    assert carried() == ["alltoall_base", "_allgather_base"]


def test_compressed_collectives(pretended_gpu: Any) -> None:
    run_ranks(_compressed, 2, env=pretended_gpu)


def _products(rank: Rank) -> None:
    group, carried, lines = _apart(rank)
    me, world = rank.rank, rank.world_size

    def drawn(r: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(r)
        return [torch.randint(-3, 4, shape, generator=generator).float() for shape in ((4 * world, 16), (16, 24))]

    a, b = _on(rank, *drawn(me))
    total = sum(x @ y for x, y in map(drawn, range(world)))
    rows = torch.cat([drawn(r)[0] for r in range(world)])
    for operator, wanted, call in (
        (ops.matmul_all_reduce, total, "allreduce"),
        (ops.matmul_reduce_scatter, total[4 * me : 4 * me + 4], "_reduce_scatter_base"),  # type: ignore[index]
        (ops.all_gather_matmul, rows @ drawn(me)[1], "_allgather_base"),
    ):
        for form in ("auto", "unfused"):
            assert torch.equal(host(operator(a, b, group, form=form)), wanted), (call, form)
            assert carried() == [call]
    assert lines.about("registered memory") == []  # it would not help


def test_products(pretended_gpu: Any) -> None:
    run_ranks(_products, 2, env=pretended_gpu)


def _rows(rank: Rank) -> None:
    """Tables' rows and experts' rows."""
    group, carried, lines = _apart(rank)
    table, indices, offsets = _on(rank, torch.ones(10, 8), torch.zeros(6, dtype=torch.int64), torch.arange(6))
    bags = ops.embedding_bag_all_to_all([table], [indices], [offsets], group=group)
    assert bags.shape == (3, 2, 8) and carried() == ["alltoall_base"]
    x, ids, weights = _on(rank, torch.ones(6, 64), torch.zeros(6, 2, dtype=torch.int64), torch.ones(6, 2))
    rows, counts, handle = ops.moe_dispatch(x, ids, group, num_experts=4)
    assert rows.shape[1] == 64 and counts.shape == (2,) and "alltoall_base" in carried()
    assert ops.moe_combine(rows, handle, weights).shape == x.shape and "alltoall_base" in carried()
    assert lines.about("registered memory") == []


def test_rows(pretended_gpu: Any) -> None:
    run_ranks(_rows, 2, env=pretended_gpu)
