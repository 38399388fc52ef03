"""Tensor parallel models through torch.distributed.tensor.parallel, on an ark group: DTensor parameters, collectives
inside the compiled region, numbers against float64 and against Inductor on the same group."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))

import exactness

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
Plan = dict[str, ParallelStyle]


def report_of(model: Any) -> tuple[Any, Any]:
    """The compiled model, and what became of its graphs."""
    from ark_torch.compile import backend, options
    from ark_torch.compile.report import Report

    report, chosen = Report(), options.parse(None, {"choose": "ark"})

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, chosen, report)

    return torch.compile(model, backend=run, dynamic=False), report


def alike(results: list[Tensor]) -> None:
    """The same bits on every rank."""
    for result in results:
        others = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(others, result.contiguous())
        assert all(torch.equal(other, result) for other in others)


def check(model: nn.Module, plan: Plan, run: Callable[[Any], list[Tensor]], collectives: dict[str, int]) -> None:
    """One region with the collectives in it, on every rank the same bits, twice the same, as right as Inductor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = exactness.exact(model, lambda exact, _: run(exact))
    split = [parallelize_module(copy.deepcopy(model), mesh, plan) for _ in range(2)]
    assert any(isinstance(p, DTensor) for p in split[0].parameters())
    inductor = exactness.error(run(torch.compile(split[0], dynamic=False)), wanted)
    call, report = report_of(split[1])
    got = run(call)
    for one, other in zip(run(call), got, strict=True):
        assert torch.equal(one, other)
    alike(got)
    assert exactness.error(got, wanted) <= exactness.FACTOR * inductor, (exactness.error(got, wanted), inductor)
    assert inductor < 1e-5
    for graph in report.graphs:
        (piece,) = graph.pieces
        assert piece.runs_on == "ark" and not graph.fallbacks and not graph.whole, report
        assert {name: piece.operators[name] for name in COLLECTIVES if name in piece.operators} == collectives, report
    assert report.graphs


class Block(nn.Module):
    def __init__(self, dim: int = 64, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        batch, length, _ = h.shape
        q, k, v = (w(h).view(batch, -1, w_heads(w, self), self.head_dim) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.wo(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def w_heads(linear: nn.Linear, block: Block) -> int:
    """The heads that this rank's share of a product has."""
    weight = linear.weight
    return (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0] // block.head_dim


COLUMNS, ROWS = ("wq", "wk", "wv", "up"), ("wo", "down")


def _blocks(rank: Rank) -> None:
    """One all_reduce for attention and one for the MLP."""
    rank.init()
    torch.manual_seed(0)
    model = Block().eval()
    x = torch.randn(2, 8, 64)
    plan: Plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    with torch.no_grad():
        check(model, plan, lambda call: [call(x.to(next(iter(model.parameters())).dtype))], {"all_reduce": 2})
