"""Collectives next to products become one operator: which forms are found, which are not, and unchanged bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.utils._pytree as pytree
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.functional import linear

pytestmark = [ark_only, pytest.mark.timeout(300)]
Form = Callable[[Tensor, Tensor], Any]


def bias(w: Tensor, first: int = 0) -> Tensor:
    return w.flatten()[first : first + len(w)]


def _gathered_twice(x: Tensor, w: Tensor) -> Any:
    rows = funcol.all_gather_tensor(x, 0, "0")
    return linear(rows, w), linear(rows, w * 2)


class Reduce(torch.autograd.Function):
    """Megatron's, of a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Copy(torch.autograd.Function):
    """Megatron's, of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def _of_all(x: Tensor) -> Tensor:
    rows = x.new_empty(2 * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(rows, x.contiguous())
    return rows


def _scattered(x: Tensor) -> Tensor:
    rows = x.new_empty(x.shape[0] // 2, *x.shape[1:])
    dist.reduce_scatter_tensor(rows, x.contiguous())
    return rows


class Gather(torch.autograd.Function):
    """Megatron's, of sequence parallelism; Scatter is the other half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _of_all(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _scattered(gradient)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _scattered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _of_all(gradient)


def _autocast(x: Tensor, w: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        rows = funcol.all_gather_tensor(x, 0, "0")
        return linear(rows, w), linear(rows, w + 1, bias(w))


FOUND: dict[str, tuple[Form, tuple[int, ...], str]] = {
    "all_reduce": (lambda x, w: funcol.all_reduce(linear(x, w), "sum", "0") + 1, (6, 8), "matmul_all_reduce"),
    "all_reduce of three": (
        lambda x, w: funcol.all_reduce(linear(x, w), "sum", "0").relu(),
        (2, 3, 8),
        "matmul_all_reduce",
    ),
    "all_reduce, product": (lambda x, w: funcol.all_reduce(x @ w.t(), "sum", "0"), (6, 8), "matmul_all_reduce"),
    "all_reduce, bias": (
        lambda x, w: funcol.all_reduce(linear(x, w, bias(w)), "sum", "0"),
        (2, 3, 8),
        "matmul_all_reduce",
    ),
    "all_reduce, bias of one rank": (
        lambda x, w: funcol.all_reduce(linear(x, w, bias(w) if dist.get_rank() == 0 else None), "sum", "0"),
        (6, 8),
        "matmul_all_reduce",
    ),
    "all_reduce, bias with gaps": (
        lambda x, w: funcol.all_reduce(linear(x, w, w[:, 3]), "sum", "0"),
        (2, 3, 8),
        "matmul_all_reduce",
    ),
    "all_reduce in place": (lambda x, w: Reduce.apply(linear(x, w)) + bias(w), (2, 3, 8), "matmul_all_reduce"),
    "reduce_scatter, bias": (
        lambda x, w: funcol.reduce_scatter_tensor(linear(x, w, bias(w)), "sum", 0, "0"),
        (6, 8),
        "matmul_reduce_scatter",
    ),
    "reduce_scatter of positions, bias": (
        lambda x, w: funcol.reduce_scatter_tensor(linear(x, w, bias(w)), "sum", 1, "0"),
        (3, 4, 8),
        "matmul_reduce_scatter",
    ),
    "reduce_scatter into a tensor": (
        lambda x, w: Scatter.apply(linear(x, w)).relu(),
        (4, 3, 8),
        "matmul_reduce_scatter",
    ),
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
        lambda x, w: linear(funcol.all_gather_tensor(x, 0, "0"), w, bias(w)).relu(),
        (3, 8),
        "all_gather_matmul",
    ),
    "all_gather of positions, bias": (
        lambda x, w: linear(funcol.all_gather_tensor(x, 1, "0"), w, bias(w)),
        (2, 3, 8),
        "all_gather_matmul",
    ),
    "all_gather into a tensor": (lambda x, w: linear(Gather.apply(x), w), (4, 3, 8), "all_gather_matmul"),
    "gathered for each of three": (
        lambda x, w: [linear(funcol.all_gather_tensor(x, 0, "0"), w + i, bias(w, i)) for i in range(3)],
        (3, 8),
        "all_gather_matmul",
    ),
    "positions gathered for each of three": (
        lambda x, w: [linear(funcol.all_gather_tensor(x, 1, "0"), w + i, bias(w, i)) for i in range(3)],
        (1, 3, 8),
        "all_gather_matmul",
    ),
    "all_gather, autocast": (_autocast, (3, 8), "all_gather_matmul"),
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
    "residual": (
        lambda x, w: funcol.all_reduce(torch.addmm(x @ w.t() * 2, x, w.t()), "sum", "0"),
        (6, 8),
        "is no bias",
    ),
    "sum of products": (lambda x, w: funcol.all_reduce(x @ w.t() + x @ w.t(), "sum", "0"), (6, 8), "of add"),
    "several readers of positions": (
        lambda x, w: (linear(rows := funcol.all_gather_tensor(x, 1, "0"), w), rows * 2),
        (2, 3, 8),
        "in another order",
    ),
    "factor of gathered rows": (
        lambda x, w: ((rows := funcol.all_gather_tensor(x, 0, "0")) @ rows.t(), rows * 2),
        (3, 8),
        "factor or bias is there",
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


def _run(rank: Rank, forms: str, dynamic: bool = False) -> dict[str, list[str]]:
    rank.init()
    torch.set_num_threads(1)
    said = {}
    for name, (form, shape, _) in (FOUND if forms == "found" else LEFT).items():
        dtype = torch.float32 if "autocast" in name else torch.bfloat16
        torch.manual_seed(rank.rank)
        w = torch.randn(12, 8, dtype=dtype)
        torch._dynamo.reset()
        told: list[str] = []
        compiled = torch.compile(form, backend=fused(told), dynamic=dynamic)
        for times in (1, 3, 2) if dynamic else (1,):
            x = torch.randn([times * size for size in shape[:-1]] + [8], dtype=dtype)
            if len(shape) == 3 and shape[0] == 1:  # a batch of one stays one
                x = x[:1]
            with torch.no_grad():
                got, wanted = compiled(x, w), form(x, w)
            for one, other in zip(*map(pytree.tree_leaves, (got, wanted)), strict=True):
                if "gaps" in name:  # eager rounds the product before it adds the bias
                    torch.testing.assert_close(one, other, atol=0.13, rtol=0)
                else:
                    assert torch.equal(one, other), name
        said[name] = told
    return said


@pytest.mark.by_day("False")
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_found(dynamic: bool) -> None:
    """With symbolic sizes one graph serves all of them."""
    for said in run_ranks(_run, 2, "found", dynamic, timeout=240):
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
    products.fuse = lambda graph, *_: plain(graph, "cpu", 1)  # type: ignore[assignment]
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


def _explained(rank: Rank, form: str) -> list[str]:
    import ark_torch

    rank.init()
    torch.set_num_threads(1)
    w, x = torch.randn(8, 8), torch.randn(64, 8, requires_grad=form == "training")
    if form == "symbolic sizes":
        torch._dynamo.mark_dynamic(x, 0)

    def layer(x: Tensor) -> Tensor:
        rows = funcol.all_gather_tensor_autograd(x, 0, "0")
        return funcol.reduce_scatter_tensor_autograd(linear(linear(rows, w, w[0]).sin(), w), "sum", 0, "0")

    with torch._inductor.config.patch(compile_threads=1):
        report = ark_torch.explain(
            layer, x, training=form == "training", target="sm_90a", ark_options={"choose": "ark"}
        )
    assert bool(report.graphs[0].whole) == (form != "inference") and all(
        line in str(report) for line in report.graphs[0].products
    )
    return report.graphs[0].products


@pytest.mark.by_day("inference")
@pytest.mark.parametrize("form", ["inference", "training", "symbolic sizes"])
def test_what_a_gpu_would_fuse(form: str) -> None:
    """On CPU ranks explain says it of the target."""
    for told in run_ranks(_explained, 2, form, timeout=240):
        assert told == [
            "on sm_90a: all_gather_into_tensor: ark.all_gather_matmul.default",
            "on sm_90a: reduce_scatter_tensor: ark.matmul_reduce_scatter.default",
        ]


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
