"""Pooled embeddings with an all-to-all in training graphs: both passes become the operator's, and gradients stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

pytestmark = [ark_only]
SAMPLES, COLUMNS = 6, 4
BATCHES = (SAMPLES, 9, 2)  # of one graph
Form = Callable[[list[Tensor], list[int], int], Tensor]  # pooled rows of this rank's tables, tables of each rank, rank


def exchanged(x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
    return funcol.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


def _samples(pooled: list[Tensor], tables: list[int]) -> int:
    return pooled[0].shape[0] // len(tables)


def _stacked(pooled: list[Tensor], tables: list[int], _: int) -> Tensor:
    """DLRM's form: [bags, tables, columns] to all, then samples to the front; beside dense features."""
    y = exchanged(torch.stack(pooled, 1))
    world, count, samples = len(tables), tables[0], _samples(pooled, tables)
    y = y.view(world, samples, count, COLUMNS).permute(1, 0, 2, 3).reshape(samples, world * count * COLUMNS)
    return torch.cat([torch.ones(samples, 3), y], 1).sigmoid()


def _side_by_side(pooled: list[Tensor], tables: list[int], _: int) -> Tensor:
    y = exchanged(torch.cat(pooled, 1))
    world, count = len(tables), tables[0]
    return y.view(world, -1, count * COLUMNS).transpose(0, 1).reshape(len(y) // world, -1).sigmoid()


class _AllToAll(torch.autograd.Function):
    """TorchRec's way: an autograd function of its own around torch.distributed's function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.sizes = received, sent
        y = x.new_empty(sum(received))
        dist.all_to_all_single(y, x, received, sent)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        received, sent = ctx.sizes
        y = gradient.new_empty(sum(sent))
        dist.all_to_all_single(y, gradient.contiguous(), sent, received, group=backward_group)
        return y, None, None


backward_group: Any = None  # None: the default group


def _uneven(pooled: list[Tensor], tables: list[int], rank: int) -> Tensor:
    samples = _samples(pooled, tables)
    each = samples * COLUMNS
    got, sent = [count * each for count in tables], [tables[rank] * each] * len(tables)
    y = _AllToAll.apply(torch.cat(pooled, 1).view(-1), got, sent)
    return torch.cat([part.view(samples, -1) for part in y.split(got)], 1).sigmoid()


def _tables_first(pooled: list[Tensor], tables: list[int], rank: int) -> Tensor:
    count, world, samples = tables[rank], len(tables), _samples(pooled, tables)
    each = samples * COLUMNS
    x = torch.stack(pooled).view(count, world, each).transpose(0, 1).reshape(-1)
    y = exchanged(x, [of * each for of in tables], [count * each] * world)
    parts = y.split([of * each for of in tables])
    return torch.cat([part.view(-1, samples, COLUMNS).transpose(0, 1) for part in parts], 1).sigmoid() * 2


def _read_too(pooled: list[Tensor], tables: list[int], rank: int) -> Tensor:
    return _stacked(pooled, tables, rank) + pooled[0].sum()


def _gradient_doubled(pooled: list[Tensor], tables: list[int], rank: int) -> Tensor:
    """Each table's gradient is computed, not only moved, before it comes to the table."""
    y = funcol.all_to_all_single_autograd(torch.stack(pooled, 1), None, None, dist.group.WORLD)
    pooled[0].register_hook(lambda gradient: gradient * 2)
    world, count = len(tables), tables[0]
    return y.view(world, SAMPLES, count, COLUMNS).permute(1, 0, 2, 3).reshape(SAMPLES, -1).sigmoid()


FOUND: dict[str, tuple[Form, list[int]]] = {
    "stacked": (_stacked, [2, 2]),
    "side by side": (_side_by_side, [2, 2]),
    "one table": (_side_by_side, [1, 1]),
    "uneven": (_uneven, [3, 1]),
    "uneven, tables first": (_tables_first, [1, 2]),
}
LEFT: dict[str, tuple[Form, dict[str, Any], str]] = {
    "rows read too": (_read_too, {}, "is read by others, too"),
    "doubled": (_gradient_doubled, {}, "do not come from one exchange"),
    "another group": (_uneven, {"elsewhere": True}, "in another group"),
    "by frequency": (_stacked, {"scale_grad_by_freq": True}, "are scaled by frequency"),
}
OPERATOR = "ark.embedding_bag_all_to_all.default"


def fused(told: list[str], targets: list[str]) -> Any:
    """Returns a backend of torch.compile that only runs the pass, on the CPU; `targets`: the compiled graphs' calls."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    from ark_torch.compile import decompositions, inductor_pass

    def partition(joint: Any, inputs: Any, **rest: Any) -> Any:
        told.extend(inductor_pass.fuse_joint(joint.graph, "cpu"))
        joint.graph.lint()
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **rest)

    def compile(graph_module: Any, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph_module.graph.nodes)
        return graph_module.forward

    return aot_autograd(fw_compiler=compile, partition_fn=partition, decompositions=decompositions.table())


class _Model(torch.nn.Module):
    def __init__(self, form: Form, tables: list[int], rank: int, dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__()
        self.form, self.tables, self.rank, self.kwargs = form, tables, rank, kwargs
        self.weights = torch.nn.ParameterList(torch.randn(9, COLUMNS).to(dtype) for _ in range(tables[rank]))

    def forward(self, indices: list[Tensor], offsets: list[Tensor], of_samples: list[Any]) -> Tensor:
        pooled = [
            F.embedding_bag(i, table, o, per_sample_weights=w, **self.kwargs)
            for table, i, o, w in zip(self.weights, indices, offsets, of_samples, strict=True)
        ]
        return self.form(pooled, self.tables, self.rank)


def compare(
    rank: Rank,
    form: Form,
    tables: list[int],
    *,
    weighted: bool = False,
    frozen: bool = False,
    elsewhere: bool = False,
    dtype: torch.dtype = torch.float32,
    batches: tuple[int, ...] = (SAMPLES,),
    **kwargs: Any,
) -> tuple[list[str], list[str]]:
    """Several batches share a graph in which they are symbolic."""
    global backward_group
    backward_group = dist.new_group() if elsewhere else None
    torch.manual_seed(3 + rank.rank)
    model = _Model(form, tables, rank.rank, dtype, **kwargs)
    model.weights[0].requires_grad_(not frozen)
    told: list[str] = []
    targets: list[str] = []
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fused(told, targets), dynamic=len(batches) > 1)
    for samples in batches:
        bags = samples * rank.world_size
        counts = [
            2 * bags + 5 + t for t in range(tables[rank.rank])
        ]  # PyTorch makes graphs of their own for equal sizes
        lengths = [torch.bincount(torch.randint(0, bags, (n,)), minlength=bags) for n in counts]
        indices = [torch.randint(0, 9, (int(one.sum()),)) for one in lengths]
        offsets = [one.cumsum(0) - one for one in lengths]
        weights = [torch.rand(len(one), requires_grad=weighted) if weighted else None for one in indices]
        results = []
        for call in (model, compiled):
            y = call(indices, offsets, weights)
            factors = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
            leaves = [one for one in (*model.weights, *weights) if one is not None and one.requires_grad]
            results.append([y.detach(), *torch.autograd.grad((y * factors).sum(), leaves)])
        for one, other in zip(*results, strict=True):
            close = 2e-2 if dtype != torch.float32 else 1e-6
            torch.testing.assert_close(one, other, rtol=close, atol=close)
    return told, targets


def _run(rank: Rank, which: str) -> dict[str, tuple[list[str], list[str]]]:
    rank.init()
    torch.set_num_threads(1)
    forms = {
        "found": {name: functools.partial(compare, rank, *one) for name, one in FOUND.items()},
        "symbolic": {name: functools.partial(compare, rank, *one, batches=BATCHES) for name, one in FOUND.items()},
        "left": {
            name: functools.partial(compare, rank, form, [2, 2], **more) for name, (form, more, _) in LEFT.items()
        },
        "kinds": {
            "weighted": functools.partial(compare, rank, _stacked, [2, 2], weighted=True, mode="sum"),
            "a frozen table": functools.partial(compare, rank, _stacked, [2, 2], frozen=True, mode="sum"),
            "half": functools.partial(compare, rank, _side_by_side, [2, 2], dtype=torch.bfloat16),
        },
    }[which]
    return {name: call() if which == "kinds" else call(mode="sum") for name, call in forms.items()}


@pytest.mark.parametrize("which", ["found", "symbolic", pytest.param("kinds", marks=pytest.mark.nightly)])
def test_both_passes_become_the_operator(which: str) -> None:
    for said in run_ranks(_run, 2, which):
        for name, (told, targets) in said.items():
            assert len(told) == 1 and told[0].endswith(OPERATOR), (name, told)
            assert "_c10d_functional.all_to_all_single.default" not in targets, (name, targets)
            assert targets.count("ark.embedding_bag_all_to_all_backward.default") == 1, (name, targets)
            assert not any("_embedding_bag" in one and "ark." not in one for one in targets), (name, targets)


def test_what_is_left() -> None:
    for said in run_ranks(_run, 2, "left"):
        for name, (_, _, reason) in LEFT.items():
            told, targets = said[name]
            assert len(told) == 1 and reason in told[0], (name, told)
            assert targets.count("_c10d_functional.all_to_all_single.default") == 2, (name, targets)
