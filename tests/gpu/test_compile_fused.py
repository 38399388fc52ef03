"""torch.compile(backend="ark") of products next to collectives on GPUs finds the operators, with eager's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from on_gpu import run, start
from support.rank import Rank
from torch import Tensor
from torch.nn.functional import embedding_bag, gelu, linear

pytestmark = [pytest.mark.timeout(300)]


def _layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A block of sequence parallelism, followed by a sum over all ranks."""
    rows = funcol.all_gather_tensor(x, 0, "0")
    part = funcol.reduce_scatter_tensor(linear(gelu(linear(rows, up)), down), "sum", 0, "0")
    return funcol.all_reduce(linear(part + x, up), "sum", "0").relu()


def _found(rank: Rank, dtype: torch.dtype) -> None:
    from ark_torch.compile import backend, options
    from ark_torch.compile.report import Report

    device = start(rank)
    torch.manual_seed(rank.rank)
    x, up, down = torch.randn(64, 256), torch.randn(512, 256) / 16, torch.randn(256, 512) / 32
    x, up, down = (one.to(device, dtype) for one in (x, up, down))
    report = Report()

    def compile_graph(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, options.parse(None, {"choose": "ark"}), report)

    call = torch.compile(_layer, backend=compile_graph, dynamic=False)
    close = {"rtol": 2e-2, "atol": 5e-2} if dtype != torch.float32 else {"rtol": 1e-3, "atol": 1e-3}
    with torch.no_grad():
        torch.testing.assert_close(call(x, up, down), _layer(x, up, down), **close)
        told = report.graphs[0].products
        names = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
        assert [line.split(".")[1] for line in told] == names, told
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(x, up, down)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(out, _layer(x, up, down), **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_of_three(dtype: torch.dtype) -> None:
    run(_found, dtype)


def _trains(rank: Rank) -> None:
    device = start(rank)
    torch.manual_seed(rank.rank)
    x, w = torch.randn(32, 128, device=device), torch.randn(64, 128, device=device) / 12
    x.requires_grad_(), w.requires_grad_()

    def step(x: Tensor, w: Tensor) -> Tensor:
        rows = funcol.all_gather_tensor_autograd(x, 0, "0")
        return funcol.reduce_scatter_tensor_autograd(linear(rows, w).sin(), "sum", 0, "0").square().sum()

    step(x, w).backward()
    wanted = [x.grad, w.grad]
    x.grad = w.grad = None
    torch.compile(step, backend="ark")(x, w).backward()
    torch.testing.assert_close([x.grad, w.grad], wanted, rtol=1e-3, atol=1e-3)


def test_training() -> None:
    run(_trains)


def _embeddings(rank: Rank) -> None:
    """DLRM's form: bags of each table, stacked, sent to the ranks of their samples."""
    from ark_torch.compile import backend, options
    from ark_torch.compile.report import Report

    device = start(rank)
    torch.manual_seed(rank.rank)
    tables, columns, samples, world = 3, 64, 40, rank.world_size
    weights = [torch.randn(100, columns, device=device, dtype=torch.bfloat16) for _ in range(tables)]
    offsets = [torch.arange(0, samples * world * 4, 4, device=device) for _ in range(tables)]
    indices = [torch.randint(0, 100, (samples * world * 4,), device=device) for _ in range(tables)]

    def model(weights: list[Tensor], indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        bags = [embedding_bag(i, w, o, mode="sum") for i, w, o in zip(indices, weights, offsets, strict=True)]
        rows = funcol.all_to_all_single(torch.stack(bags, 1), None, None, "0").view(world, samples, tables, columns)
        return rows.transpose(0, 1).reshape(samples, -1).relu()

    report = Report()

    def compile_graph(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, options.parse(None, {"choose": "ark"}), report)

    call = torch.compile(model, backend=compile_graph, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(call(weights, indices, offsets), model(weights, indices, offsets))
        told = report.graphs[0].products
        assert len(told) == 1 and told[0].endswith("ark.embedding_bag_all_to_all.default"), told
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(weights, indices, offsets)
        for one in indices:
            one.copy_(torch.randint_like(one, 0, 100))
        graph.replay()
        torch.testing.assert_close(out, model(weights, indices, offsets))


def test_embeddings() -> None:
    run(_embeddings)


def _trained_embeddings(rank: Rank) -> list[str]:
    from support.told import Lines

    device, told = start(rank), Lines("ark_torch.compile")
    torch.manual_seed(rank.rank)
    tables, columns, samples, world = 3, 64, 40, rank.world_size
    weights = [torch.randn(100, columns, device=device, requires_grad=True) for _ in range(tables)]
    offsets = [torch.arange(0, samples * world * 4, 4, device=device) for _ in range(tables)]
    indices = [torch.randint(0, 100, (samples * world * 4,), device=device) for _ in range(tables)]

    def loss(weights: list[Tensor], indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        bags = [embedding_bag(i, w, o, mode="sum") for i, w, o in zip(indices, weights, offsets, strict=True)]
        rows = funcol.all_to_all_single_autograd(torch.stack(bags, 1), None, None, torch.distributed.group.WORLD)
        return rows.view(world, samples, tables, columns).transpose(0, 1).reshape(samples, -1).sigmoid().square().sum()

    wanted = torch.autograd.grad(loss(weights, indices, offsets), weights)
    got = torch.autograd.grad(torch.compile(loss, backend="ark", dynamic=False)(weights, indices, offsets), weights)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    return told.lines


def test_embeddings_that_train() -> None:
    for lines in run(_trained_embeddings):
        assert any("joint graph" in line and "ark.embedding_bag_all_to_all.default" in line for line in lines), lines
