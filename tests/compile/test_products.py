"""Collectives next to products become one operator: which forms are found, which are not, and unchanged bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.functional import linear

pytestmark = [ark_only]
Form = Callable[[Tensor, Tensor], Any]


def _gathered_twice(x: Tensor, w: Tensor) -> Any:
    rows = funcol.all_gather_tensor(x, 0, "0")
    return linear(rows, w), linear(rows, w * 2)


FOUND: dict[str, tuple[Form, tuple[int, ...], str]] = {
    "all_reduce": (lambda x, w: funcol.all_reduce(linear(x, w), "sum", "0") + 1, (6, 8), "matmul_all_reduce"),
    "all_reduce of three": (
        lambda x, w: funcol.all_reduce(linear(x, w), "sum", "0").relu(),
        (2, 3, 8),
        "matmul_all_reduce",
    ),
    "all_reduce, product": (lambda x, w: funcol.all_reduce(x @ w.t(), "sum", "0"), (6, 8), "matmul_all_reduce"),
    "reduce_scatter": (
        lambda x, w: funcol.reduce_scatter_tensor(linear(x, w), "sum", 0, "0") * 2,
        (6, 8),
        "matmul_reduce_scatter",
    ),
    "reduce_scatter of three": (
        lambda x, w: funcol.reduce_scatter_tensor(linear(x, w), "sum", 0, "0") * 2,
        (4, 3, 8),
        "matmul_reduce_scatter",
    ),
    "reduce_scatter of positions": (
        lambda x, w: funcol.reduce_scatter_tensor(linear(x, w), "sum", 1, "0") * 2,
        (3, 4, 8),
        "matmul_reduce_scatter",
    ),
    "reduce_scatter of positions, batch 1": (
        lambda x, w: funcol.reduce_scatter_tensor(linear(x, w), "sum", 1, "0") * 2,
        (1, 4, 8),
        "matmul_reduce_scatter",
    ),
    "all_gather": (lambda x, w: linear(funcol.all_gather_tensor(x, 0, "0"), w) + 1, (3, 8), "all_gather_matmul"),
    "all_gather, bias": (
        lambda x, w: linear(funcol.all_gather_tensor(x, 0, "0"), w, w[:, 3]).relu(),
        (3, 8),
        "all_gather_matmul",
    ),
    "all_gather of positions, bias": (
        lambda x, w: linear(funcol.all_gather_tensor(x, 1, "0"), w, w[:, 3]),
        (2, 3, 8),
        "all_gather_matmul",
    ),
    "gathered rows read twice": (_gathered_twice, (3, 8), "all_gather_matmul"),
    "gathered positions read twice": (
        lambda x, w: (linear(rows := funcol.all_gather_tensor(x, 1, "0"), w), rows * 2, linear(rows, w + 1)),
        (1, 3, 8),
        "all_gather_matmul",
    ),
    "all_gather of three": (
        lambda x, w: linear(funcol.all_gather_tensor(x, 0, "0"), w) + 1,
        (2, 3, 8),
        "all_gather_matmul",
    ),
    "all_gather of positions": (
        lambda x, w: linear(funcol.all_gather_tensor(x, 1, "0"), w) + 1,
        (2, 3, 8),
        "all_gather_matmul",
    ),
    "all_gather of positions, batch 1": (
        lambda x, w: linear(funcol.all_gather_tensor(x, 1, "0"), w) + 1,
        (1, 3, 8),
        "all_gather_matmul",
    ),
}


def _read_twice(x: Tensor, w: Tensor) -> Any:
    product = linear(x, w)
    return funcol.all_reduce(product, "sum", "0") + product


LEFT: dict[str, tuple[Form, tuple[int, ...], str]] = {
    "maximum": (lambda x, w: funcol.all_reduce(linear(x, w), "max", "0"), (6, 8), "its operation is max"),
    "product read twice": (_read_twice, (6, 8), "is read by others, too"),
    "no product": (lambda x, w: funcol.all_reduce(x + 1, "sum", "0"), (6, 8), "no product"),
    "columns apart": (
        lambda x, w: funcol.all_reduce(linear(x, w).view(6, 2, 6), "sum", "0"),
        (6, 8),
        "takes its columns apart",
    ),
    "double": (lambda x, w: funcol.all_reduce(linear(x.double(), w.double()), "sum", "0"), (6, 8), "torch.float64"),
}


def fused(told: list[str], least_rows: int = 1) -> Any:
    """Returns a backend of torch.compile that only runs the pass on the CPU."""
    from torch._dynamo.backends.common import aot_autograd

    from ark_torch.compile import decompositions, products

    def compile(graph_module: Any, _: Any) -> Any:
        told.extend(products.fuse(graph_module.graph, "cpu", least_rows))
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module.forward

    return aot_autograd(fw_compiler=compile, decompositions=decompositions.table())


def _run(rank: Rank, forms: str) -> dict[str, list[str]]:
    rank.init()
    torch.set_num_threads(1)
    said = {}
    for name, (form, shape, _) in (FOUND if forms == "found" else LEFT).items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(rank.rank)
            x, w = torch.randn(shape, dtype=dtype), torch.randn(12, 8, dtype=dtype)
            torch._dynamo.reset()
            told: list[str] = []
            with torch.no_grad():
                got = torch.compile(form, backend=fused(told), dynamic=False)(x, w)
                wanted = form(x, w)
            for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
                if "bias" in name:  # rounded before it is added
                    torch.testing.assert_close(one, other, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1.6e-2)
                else:
                    assert torch.equal(one, other), (name, dtype)
            said[name] = told
    return said


def test_what_is_found() -> None:
    for said in run_ranks(_run, 2, "found"):
        for name, (_, _, operator) in FOUND.items():
            assert len(said[name]) == 1 and said[name][0].endswith(f"ark.{operator}.default"), (name, said[name])


@pytest.mark.nightly
def test_what_is_left() -> None:
    for said in run_ranks(_run, 2, "left"):
        for name, (_, _, reason) in LEFT.items():
            assert len(said[name]) == 1 and reason in said[name][0], (name, said[name])


def _dtensor(rank: Rank) -> list[str]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))
    plan = {"0": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(model, dist.init_device_mesh("cpu", (rank.world_size,)), plan)
    told: list[str] = []
    x = torch.randn(1, 4, 8)
    with torch.no_grad():
        wanted = model(x)
        torch.testing.assert_close(torch.compile(model, backend=fused(told), dynamic=False)(x), wanted)
    return told


@pytest.mark.nightly
def test_sequence_parallelism_of_dtensor() -> None:
    for told in run_ranks(_dtensor, 2):
        assert [one.split(".")[1] for one in told] == ["all_gather_matmul", "matmul_reduce_scatter"], told


def _trains(rank: Rank) -> list[str]:
    """Inductor's forward and backward graphs, as rest.whole compiles them."""
    import logging

    from torch._inductor import config

    from ark_torch.compile import inductor_pass, products

    rank.init()
    torch.manual_seed(rank.rank)
    messages: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    log = logging.getLogger("ark_torch.compile")
    log.setLevel(logging.INFO)
    log.addHandler(Keeps())
    plain = products.fuse
    products.fuse = lambda graph: plain(graph, "cpu", 1)  # type: ignore[assignment]
    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)

    def step(x: Tensor, w: Tensor) -> Tensor:
        rows = funcol.all_gather_tensor_autograd(x, 0, "0")
        return funcol.reduce_scatter_tensor_autograd(linear(rows, w).sin(), "sum", 0, "0").sum()

    step(x, w).backward()
    wanted = [x.grad, w.grad]
    x.grad = w.grad = None
    with config.patch(compile_threads=1):
        torch.compile(step, backend="ark")(x, w).backward()
    torch.testing.assert_close([x.grad, w.grad], wanted)
    assert inductor_pass.FuseCollectives().uuid()
    return [message for message in messages if "Inductor's graph" in message]


@pytest.mark.nightly
def test_graphs_that_train() -> None:
    for messages in run_ranks(_trains, 2, timeout=240):
        assert any("all_gather_matmul" in one for one in messages), messages
        assert any("matmul_reduce_scatter" in one for one in messages), messages


def _few_rows(rank: Rank) -> list[str]:
    rank.init()
    told: list[str] = []
    call = torch.compile(lambda x, w: funcol.all_reduce(x @ w, "sum", "0"), backend=fused(told, 32), dynamic=False)
    with torch.no_grad():
        call(torch.randn(31, 8), torch.randn(8, 8))
    return told


@pytest.mark.nightly
def test_few_rows_stay_in_the_region() -> None:
    for told in run_ranks(_few_rows, 2):
        assert "it has 31 rows" in told[0], told
