"""Collectives on ark groups in graphs that Inductor compiles, with its passes that overlap them with computation.

PyTorch 2.14 moves collectives earlier and their waits later by default. Older versions have parts of that, off by
default. The test enables every pass that this PyTorch has. Results must equal eager PyTorch's.
"""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

# They ask Triton for the memory bandwidth, on CPUs too. PyTorch's CUDA wheels include it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Inductor's passes need Triton")
# Settings in torch._inductor.config, if they exist.
PASSES = {
    "reorder_for_compute_comm_overlap": True,
    "aten_distributed_optimizations.enable_simple_overlap": True,
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.insert_overlap_deps": False,
    "aten_distributed_optimizations.collective_bucketing": True,
}


def _layers(x: Tensor, weights: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Waits that can move after products, and collectives that can move before them. Some read what others wrote."""
    hidden = x
    for weight in weights:
        total = funcol.all_reduce(hidden @ weight, "sum", group)
        gathered = funcol.all_gather_tensor(hidden[:2] * 2, 0, group)
        beside = torch.tanh(hidden @ weight.t()) + gathered.sum()
        part = funcol.reduce_scatter_tensor(beside + total, "sum", 0, group)
        hidden = torch.tanh(hidden + funcol.all_gather_tensor(part, 0, group) * 0.1) + total.mean()
    return hidden


def _overlapped(rank: Rank, named: str) -> None:
    import torch._inductor.config as inductor

    rank.init()
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(8, 8, generator=generator) / 3 for _ in range(3)]
    known = set(inductor.get_config_copy())
    options = {"choose": "inductor"} if named == "ark" else {}
    with contextlib.ExitStack() as stack:
        for name, value in PASSES.items():
            if name in known:
                stack.enter_context(inductor.patch({name: value}))
        compiled = torch.compile(_layers, backend=named, options=options or None)
        with torch.no_grad():
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank.rank))
                wanted = _layers(x, weights, group) + 0
                torch.testing.assert_close(compiled(x, weights, group), wanted)
                sums = torch.full((3,), float(rank.rank))
                dist.all_reduce(sums)  # the ranks must still agree on the order of the group's operations
                assert sums.tolist() == [float(sum(range(rank.world_size)))] * 3


@pytest.mark.parametrize("named", ["inductor", "ark"])
def test_overlapped_collectives_are_right(named: str) -> None:
    run_ranks(_overlapped, 2, named, timeout=200)
