"""Tensor-parallel models through torch.distributed.tensor.parallel on an ark group: DTensor parameters.

Collectives are inside the compiled region. Numbers are compared with float64 and with Inductor on the same group.
"""

from __future__ import annotations

import copy
import sys
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
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))

import exactness
import parallel_llama

pytestmark = pytest.mark.timeout(300)

COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
Plan = dict[str, ParallelStyle]


def report_of(model: Any) -> tuple[Any, Any]:
    """Returns the compiled model, and the report of its graphs."""
    from ark_torch.compile import backend, options
    from ark_torch.compile.report import Report

    report, chosen = Report(), options.parse(None, {"choose": "ark"})

    def run(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, chosen, report)

    return torch.compile(model, backend=run, dynamic=False), report


def alike(results: list[Tensor]) -> None:
    """Checks that every rank has the same bits."""
    for result in results:
        others = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(others, result.contiguous())
        assert all(torch.equal(other, result) for other in others)


def check(model: nn.Module, plan: Plan, run: exactness.Run, collectives: dict[str, int], rival: str) -> None:
    """Checks for one region with the collectives in it, the same bits on every rank and in two runs.

    It must be as accurate as the rival on the same group (Inductor, which compiles slowly, or eager).
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = exactness.exact(model, run)
    split = [parallelize_module(copy.deepcopy(model), mesh, plan) for _ in range(2)]
    assert any(isinstance(p, DTensor) for p in split[0].parameters())
    call, report = report_of(split[0])
    got = run(call, torch.float32)
    for one, other in zip(run(call, torch.float32), got, strict=True):
        assert torch.equal(one, other)
    alike(got)
    assert report.graphs
    for graph in report.graphs:
        (piece,) = graph.pieces
        assert piece.runs_on == "ark" and not graph.fallbacks and not graph.whole, report
        assert {name: piece.operators[name] for name in COLLECTIVES if name in piece.operators} == collectives, report
    other = torch.compile(split[1], dynamic=False) if rival == "inductor" else split[1]
    bound = exactness.error(run(other, torch.float32), wanted)
    assert exactness.error(got, wanted) <= exactness.FACTOR * bound, (exactness.error(got, wanted), bound)
    assert bound < 1e-5


class Block(nn.Module):
    def __init__(self, dim: int = 64, head_dim: int = 16) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        q, k, v = (w(h).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


COLUMNS, ROWS = ("wq", "wk", "wv", "up"), ("wo", "down")


def _blocks(rank: Rank, sequence: bool, rival: str) -> None:
    """An all_reduce for attention and one for the MLP. With a split sequence, the two halves of each."""
    rank.init()
    torch.manual_seed(0)
    model = nn.Sequential(Block()).eval()
    x = torch.randn(2, 8, 64)
    if sequence:
        plan: Plan = {f"0.{name}": ColwiseParallel(input_layouts=Shard(1)) for name in COLUMNS}
        plan |= {f"0.{name}": RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in ROWS}
        plan |= {"0.n1": SequenceParallel(), "0.n2": SequenceParallel()}
        plan["0"] = PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=False,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        )
        # Queries, keys and values are gathered once each, as DTensor requests.
        wanted = {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 2}
    else:
        plan = {f"0.{name}": ColwiseParallel() for name in COLUMNS} | {f"0.{name}": RowwiseParallel() for name in ROWS}
        wanted = {"all_reduce": 2}
    with torch.no_grad():
        check(model, plan, lambda call, dtype: [call(x.to(dtype))], wanted, rival)


@pytest.mark.nightly
def test_blocks() -> None:
    run_ranks(_blocks, 2, False, "inductor")


def test_sequence_parallel() -> None:
    run_ranks(_blocks, 2, True, "eager")


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_of_four(sequence: bool) -> None:
    run_ranks(_blocks, 4, sequence, "inductor", timeout=280)


def _llama(rank: Rank, layers: int, rival: str) -> None:
    """Hugging Face's, with a static cache of the rank's own heads: the prompt, then steps with one kernel."""
    rank.init()
    torch.manual_seed(0)
    model = parallel_llama.make(layers, 32)
    ids = torch.randint(0, 100, (1, 7))

    def run(call: Any, dtype: torch.dtype) -> list[Tensor]:
        ranks = 1 if dtype == torch.float64 else rank.world_size
        cache = parallel_llama.cache_of(model.config, dtype, ranks)
        steps = [ids, *(torch.tensor([[token]]) for token in (3, 14, 15))]
        return [call(input_ids=step, past_key_values=cache).logits for step in steps]

    with torch.no_grad():
        check(model, parallel_llama.plan(), run, {"all_reduce": 2 * layers}, rival)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ranks, layers, rival",
    [(2, 1, "eager"), (4, 1, "eager"), *(pytest.param(n, 2, "inductor", marks=pytest.mark.nightly) for n in (2, 4))],
)
def test_llama(ranks: int, layers: int, rival: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (make setup does)")
    run_ranks(_llama, ranks, layers, rival, timeout=280)
