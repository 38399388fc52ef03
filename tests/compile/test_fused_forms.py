"""Forms that people write around linear layers and collectives: what becomes one operator, forward and backward.

The table of docs/compile.md lists them. Each runs compiled with the pass alone and eagerly, on CPU ranks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, linear
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_products import Copy, Gather, Reduce, Scatter

pytestmark = [ark_only, pytest.mark.timeout(300)]
WIDTH = 8


class Feed(nn.Module):
    """A rank's part of a feed-forward layer, with the communication of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(self.inner(Copy.apply(x)))  # type: ignore[no-any-return, no-untyped-call]


class BiasOnce(Feed):
    """Megatron's row-parallel layer: the bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = gelu(self.up(Copy.apply(x)))  # type: ignore[no-untyped-call]
        return Reduce.apply(linear(hidden, self.down.weight)) + self.down.bias  # type: ignore[no-any-return, no-untyped-call]


class Sequence(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return Scatter.apply(self.inner(Gather.apply(x)))  # type: ignore[no-any-return, no-untyped-call]


class Recomputed(Sequence):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sequence()

    def forward(self, x: Tensor) -> Tensor:
        given = {name: one * 2 for name, one in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, given, (x,))  # type: ignore[no-any-return]


class Autocast(Feed):
    """Rows are sent in bfloat16. The sum of their gradients is float32's, which is no sum of bfloat16 products."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            rows = self.inner(funcol.all_gather_tensor_autograd(x, 0, "0"))
            return funcol.reduce_scatter_tensor_autograd(rows, "sum", 0, "0")


class Gated(Feed):
    """Two products read the rows: the sum of their gradients is none of a product."""

    def forward(self, x: Tensor) -> Tensor:
        rows = Gather.apply(x)  # type: ignore[no-untyped-call]
        return Scatter.apply(self.down(F.silu(self.up(rows)) * linear(rows, self.up.weight * 2)))  # type: ignore[no-any-return, no-untyped-call]


class Layer(nn.Module):
    """DTensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.feed = Feed()
        self.feed.forward = self.feed.inner  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (one(x).unflatten(-1, (-1, 2)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return self.feed(self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


COLUMNS, ROWS = ("q", "k", "v", "feed.up"), ("o", "feed.down")
TENSOR: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
SEQUENCE = {
    "norm": SequenceParallel(),
    **{name: ColwiseParallel(input_layouts=Shard(1)) for name in COLUMNS},
    **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS},
}
SUM, SCATTERED, GATHERED = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"
Form = tuple[Callable[[], nn.Module], Any, tuple[int, ...], list[str], list[str]]
# The module, DTensor's plan, the shape of its rows, and what is told of collectives forward and backward.
FORMS: dict[str, Form] = {
    "tensor": (Feed, None, (4, 3, WIDTH), [SUM], [SUM]),
    "bias once": (BiasOnce, None, (4, 3, WIDTH), [SUM], [SUM]),
    "sequence": (Sequence, None, (4, 3, WIDTH), [GATHERED, SCATTERED], [GATHERED, SCATTERED]),
    "recomputed": (Recomputed, None, (4, 3, WIDTH), [GATHERED, SCATTERED], [GATHERED, GATHERED, SCATTERED]),
    "functional": (Functional, None, (4, 3, WIDTH), [GATHERED, SCATTERED], [GATHERED, SCATTERED]),
    "autocast": (Autocast, None, (4, WIDTH), [GATHERED, SCATTERED], [GATHERED, "no product"]),
    "gated": (Gated, None, (4, WIDTH), [GATHERED, SCATTERED], [GATHERED, "no product"]),
    "dtensor": (Layer, TENSOR, (2, 4, WIDTH), [SUM] * 2, [SUM] * 4),
    "dtensor sequence": (
        Layer,
        SEQUENCE,
        (1, 4, WIDTH),
        [GATHERED, SCATTERED] * 2,
        [GATHERED, SCATTERED] * 2 + [SCATTERED] * 2,
    ),
    "dtensor sequence, batch of three": (
        Layer,
        SEQUENCE,
        (3, 4, WIDTH),
        [GATHERED, SCATTERED] * 2,
        [GATHERED, SCATTERED] * 2 + [SCATTERED] * 2,
    ),
}


def passes(told: dict[str, list[str]]) -> Any:
    """A backend of torch.compile that only runs the pass, as in Inductor's graphs, on the CPU."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    from ark_torch.compile import products

    def compiler(where: str) -> Any:
        def compile(graph_module: Any, _: Any) -> Any:
            told[where] = products.fuse(graph_module.graph, "cpu", 1)
            graph_module.graph.lint()
            graph_module.recompile()
            return graph_module.forward

        return compile

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def _results(call: Any, module: nn.Module, x: Tensor, trains: bool) -> list[Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_(trains)
    out = call(x)
    if not trains:
        return [out]
    (out.float() ** 2).sum().backward()
    gradients = [x.grad, *(one.grad for one in module.parameters())]
    return [
        out.detach(),
        *(one.to_local() if isinstance(one, DTensor) else one for one in gradients if one is not None),
    ]


def _run(rank: Rank, name: str) -> dict[str, list[str]]:
    rank.init()
    torch.set_num_threads(1)
    make, plan, shape, _, _ = FORMS[name]
    torch.manual_seed(0 if plan else rank.rank)
    modules = [made := make(), copy.deepcopy(made)]
    if plan:
        mesh = dist.init_device_mesh("cpu", (rank.world_size,))
        modules = [parallelize_module(one, mesh, plan) for one in modules]
    told: dict[str, list[str]] = {}
    for trains in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(modules[0], backend=passes(told), dynamic=False)
        x = torch.randn(shape)
        with torch.set_grad_enabled(trains):
            got, wanted = _results(compiled, modules[0], x, trains), _results(modules[1], modules[1], x, trains)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 if name != "autocast" else 1e-2)
    return told


@pytest.mark.by_day("sequence")
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    _, _, _, forward, backward = FORMS[name]
    for told in run_ranks(_run, 2, name, timeout=280):
        for where, wanted in (("inference", forward), ("forward", forward), ("backward", backward)):
            got = told[where]
            assert len(got) == len(wanted), (where, got)
            assert all(text in line for text, line in zip(wanted, got, strict=True)), (where, got)


def _two_dimensions(rank: Rank) -> dict[str, list[str]]:
    """fully_shard over pairs of ranks with sequence parallelism in each; blocks are compiled one by one."""
    from torch.distributed.fsdp import fully_shard

    rank.init()
    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    made, told = Layer(), dict[str, list[str]]()
    x = torch.randn(1, 4, WIDTH)
    results = []
    for compiled in (True, False):
        module = parallelize_module(copy.deepcopy(made), mesh["tensor"], SEQUENCE)
        if compiled:
            module.compile(backend=passes(told), dynamic=False)
        fully_shard(module, mesh=mesh["data"])
        results.append(_results(module, module, x, True))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    return told


@pytest.mark.nightly
def test_fully_shard_and_sequence_parallelism() -> None:
    for told in run_ranks(_two_dimensions, 4, timeout=280):
        assert all("ark." in line for where in ("forward", "backward") for line in told[where]), told
        assert len(told["forward"]) == 4 and len(told["backward"]) == 6, told
