"""matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul on CPU ranks: bits, gradients, bad input, compilers."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.products import OPERATORS, Case, draw, product_of, random_case, reference, same, unfused
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

pytestmark = [ark_only]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SUMS = ("matmul_all_reduce", "matmul_reduce_scatter")


def _check(case: Case, rank: Rank, group: Any = None) -> None:
    me, world = dist.get_rank(group), dist.get_world_size(group)
    a, b = draw(case, me)
    got = case.call(a, b, group)
    same(got, unfused(case, a, b, world, group), case)
    same(got, reference(case, me, world), case)
    assert got.is_contiguous() and (not got.numel() or got.data_ptr() not in (a.data_ptr(), b.data_ptr()))


def _random(rank: Rank, seed: int, count: int) -> None:
    rank.init()
    torch.set_num_threads(1)
    random = Random(seed)
    for number in range(count):
        _check(random_case(random, rank.world_size, 100 * seed + number, DTYPES), rank)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_shapes(world: int) -> None:
    run_ranks(_random, world, world, 30)


def _bias(rank: Rank) -> None:
    """The bits of addmm and the collective, whichever ranks have a bias, and gradients of PyTorch's own collectives."""
    rank.init()
    torch.set_num_threads(1)
    me, world = rank.rank, rank.world_size
    for name in OPERATORS:
        for dtype in (torch.float64, torch.bfloat16):
            for owners in ({0}, {*range(world)}):
                case = _of(name, world, dtype, m=3)
                a, b = (one.requires_grad_() for one in draw(case, me))
                bias = torch.randn(b.shape[1], 2).to(dtype)[:, 1].requires_grad_() if me in owners else None
                got = case.call(a, b, bias=bias)
                with torch.no_grad():
                    same(got, unfused(case, a, b, world, bias=bias), (name, dtype, owners))
                if dtype == torch.float64:
                    inputs = [one for one in (a, b, bias) if one is not None]
                    gradient = _gradient(got, 0 if name == "matmul_all_reduce" else me)
                    wanted = torch.autograd.grad(_by_pytorch(case, a, b, bias), inputs, gradient)
                    torch.testing.assert_close(torch.autograd.grad(got, inputs, gradient), wanted)


@pytest.mark.by_day("2")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bias(world: int) -> None:
    run_ranks(_bias, world)


def _carried(rank: Rank, seed: int) -> None:
    """A group without shared memory, carried by Gloo."""
    import ark_torch

    rank.init(pg_options=ark_torch.Options())
    options = ark_torch.Options()
    options.shared_memory = ark_torch.Options.SharedMemory.OFF
    apart = dist.new_group(pg_options=options)
    random = Random(seed)
    for number in range(8):
        _check(random_case(random, rank.world_size, 100 * seed + number, DTYPES), rank, apart)


@pytest.mark.nightly
def test_without_shared_memory() -> None:
    run_ranks(_carried, 2, 9)


def _large(rank: Rank) -> None:
    """Several chunks of the shared memory."""
    rank.init()
    torch.set_num_threads(1)
    for name in OPERATORS:
        sums = name in SUMS
        k, n = ([33, 70], [900, 900]) if sums else ([700, 700], [33, 70])
        _check(Case(name, 1200, k, n, torch.bfloat16, b="transposed", seed=3), rank)


@pytest.mark.nightly
def test_large() -> None:
    run_ranks(_large, 2)


def _of(name: str, world: int, dtype: torch.dtype = torch.float64, m: int = 2) -> Case:
    """Returns a small case, with matrices that differ between ranks where allowed."""
    sums = name in SUMS
    k = [3 + r if sums else 3 for r in range(world)]
    n = [4 if sums else 4 + r for r in range(world)]
    return Case(name, m * world, k, n, dtype, a="transposed", b="transposed", seed=4)


def _gradient(out: Tensor, rank: int) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(50 + rank)).to(out.dtype)


def _gradcheck(rank: Rank, name: str) -> None:
    """Numerical gradients: every rank perturbs the same element of its own matrices, and adds up all results.

    After an all_reduce all ranks hold the same result and each has its gradient, so a rank uses only its own.
    """
    rank.init()
    me, world = rank.rank, rank.world_size
    case = _of(name, world)
    inputs = [one.clone().requires_grad_() for one in draw(case, me)]
    out = case.call(*inputs)
    gradient = _gradient(out, 0 if name == "matmul_all_reduce" else me)
    analytic = torch.autograd.grad(out, inputs, gradient)

    def total() -> float:
        value = (case.call(*inputs).detach() * gradient).sum()
        if name != "matmul_all_reduce":
            dist.all_reduce(value)
        return float(value)

    sizes: list[Any] = [None] * world
    dist.all_gather_object(sizes, [one.numel() for one in inputs])
    for which in range(2):
        for element in range(max(one[which] for one in sizes)):
            for owner in range(world):
                if element >= sizes[owner][which]:
                    continue
                row, column = divmod(element, sizes[owner][which] // inputs[which].shape[0] if owner == me else 1)
                values = []
                for step in (1e-6, -1e-6):
                    if owner == me:
                        inputs[which].detach()[row, column] += step
                    values.append(total())
                    if owner == me:
                        inputs[which].detach()[row, column] -= step
                if owner == me:
                    numeric = (values[0] - values[1]) / 2e-6
                    assert abs(numeric - float(analytic[which][row, column])) < 1e-6, (which, row, column)


@pytest.mark.by_day("matmul_reduce_scatter")
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_numerical_ones(name: str) -> None:
    run_ranks(_gradcheck, 2, name)


def _alone(rank: Rank) -> None:
    rank.init()
    for name in OPERATORS:
        case = _of(name, 1)
        inputs = tuple(one.requires_grad_() for one in draw(case, 0))
        assert torch.autograd.gradcheck(case.call, inputs)
        assert torch.autograd.gradgradcheck(case.call, inputs)


def test_gradcheck() -> None:
    run_ranks(_alone, 1)


def _bits_of_gradients(rank: Rank) -> None:
    """Gradients have the bits of the transposed operator, also when only one matrix requires one."""
    rank.init()
    torch.set_num_threads(1)
    me, world = rank.rank, rank.world_size
    for name in OPERATORS:
        case = _of(name, world, torch.bfloat16, m=5)
        all_of = [draw(case, r) for r in range(world)]
        outs = [reference(case, r, world) for r in range(world)]
        gradients = [_gradient(out, 0 if name == "matmul_all_reduce" else r) for r, out in enumerate(outs)]
        a, b = all_of[me]
        if name == "all_gather_matmul":
            parts = [torch.mm(gradients[r], all_of[r][1].t()) for r in range(world)]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            of_a = total.to(a.dtype).chunk(world)[me]
            of_b = torch.mm(torch.cat([one for one, _ in all_of]).t(), gradients[me])
        else:
            gathered = torch.cat(gradients) if name == "matmul_reduce_scatter" else gradients[me]
            of_a, of_b = torch.mm(gathered, b.t()), torch.mm(a.t(), gathered)
        for which in ((True, True), (True, False), (False, True)):
            inputs = [one.clone().requires_grad_(takes) for one, takes in zip((a, b), which, strict=True)]
            case.call(*inputs).backward(gradients[me])
            for got, wanted, takes in zip(inputs, (of_a, of_b), which, strict=True):
                assert (got.grad is not None) == takes
                if got.grad is not None:
                    same(got.grad, wanted, (name, which))


@pytest.mark.by_day("3")
@pytest.mark.parametrize("world", [2, 3])
def test_bits_of_gradients(world: int) -> None:
    run_ranks(_bits_of_gradients, world)


def _second_gradients(rank: Rank) -> None:
    """The gradient of a gradient has its own collectives."""
    rank.init()
    for name in OPERATORS:
        case = _of(name, rank.world_size)
        seconds = []
        for call in (case.call, lambda a, b, case=case: _by_pytorch(case, a, b)):
            a, b = (one.clone().requires_grad_() for one in draw(case, rank.rank))
            firsts = torch.autograd.grad(call(a, b).square().sum(), (a, b), create_graph=True)
            seconds.append(torch.autograd.grad(sum(one.square().sum() for one in firsts), (a, b)))
        for got, wanted in zip(*seconds, strict=True):
            torch.testing.assert_close(got, wanted)


def _by_pytorch(case: Case, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes the same with PyTorch's own differentiable collectives. After all_reduce, the gradient is unchanged."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    if case.name == "all_gather_matmul":
        return product_of(funcol.all_gather_tensor_autograd(a.contiguous(), 0, group), b, bias)
    product = product_of(a, b, bias)
    if case.name == "matmul_reduce_scatter":
        return funcol.reduce_scatter_tensor_autograd(product, "sum", 0, group)
    other = product.detach().clone()
    dist.all_reduce(other)
    return product + (other - product.detach())


@pytest.mark.nightly
def test_second_gradients() -> None:
    run_ranks(_second_gradients, 2)


def _arguments(what: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    a, b = torch.ones(4, 3), torch.ones(3, 5)
    return {
        "": ((a, b), {}),
        "inner": ((a, torch.ones(4, 5)), {}),
        "dims": ((a[0], b), {}),
        "batched": ((a[None], b), {}),
        "dtype": ((a, b.double()), {}),
        "integer": ((a.long(), b.long()), {}),
        "form": ((a, b), {"form": "quick"}),
        "kernel": ((a, b), {"form": "fused"}),
        "rows": ((torch.ones(5, 3), b), {}),
        "device": ((a, b.to("meta")), {}),
        "bias": ((a, b), {"bias": torch.ones(4)}),
        "bias of rows": ((a, b), {"bias": torch.ones(4, 5)}),
        "dtype of bias": ((a, b), {"bias": torch.ones(5).double()}),
    }[what]


BAD: dict[str, tuple[str, type[Exception]]] = {
    "inner": (r"a is \[4, 3\] and b is \[4, 5\]: columns of a are not rows of b", ValueError),
    "dims": (r"a is \[3\] and b is \[3, 5\], not two matrices", ValueError),
    "batched": (r"a is \[1, 4, 3\]", ValueError),
    "dtype": (r"b is torch.float64 but a is torch.float32", TypeError),
    "integer": (r"a is torch.int64", TypeError),
    "form": (r"form is 'quick'", ValueError),
    "bias": (r"bias is \[4\] but b is \[3, 5\]", ValueError),
    "bias of rows": (r"bias is \[4, 5\] but b is \[3, 5\]", ValueError),
    "dtype of bias": (r"bias is torch.float64 but a is torch.float32", TypeError),
    "kernel": (r"form is 'fused', and .*CUDA", ValueError),
    "rows": (r"a has 5 rows, which 2 ranks cannot share evenly", ValueError),
}


def _bad(rank: Rank) -> None:
    """One rank's mistake is an error on all ranks at once, and the group still works."""
    rank.init(timeout=20)
    for name, operator in OPERATORS.items():
        for what, (text, kind) in BAD.items():
            if what == "rows" and name != "matmul_reduce_scatter":
                continue
            culprit = rank.rank == 1
            arguments, options = _arguments(what if culprit else "")
            with pytest.raises(kind if culprit else dist.DistBackendError) as caught:
                operator(*arguments, **options)
            assert name in str(caught.value) and f"[rank {rank.rank}]" in str(caught.value), caught.value
            assert re.search(text if culprit else "rank 1 refused its arguments", str(caught.value)), caught.value
            arguments, _ = _arguments("")
            assert operator(*arguments).unique().tolist() == [3.0 if name == "all_gather_matmul" else 6.0]


def test_bad_input() -> None:
    run_ranks(_bad, 2)


def _disagree(rank: Rank) -> None:
    rank.init(timeout=20)
    odd = rank.rank == 1
    ones = torch.ones
    for name, operator in OPERATORS.items():
        gathers = name == "all_gather_matmul"
        texts = {
            "number of rows of a": (ones(8 if odd else 4, 3), ones(3, 5)),
            f"number of columns of {'a' if gathers else 'b'}": (
                ones(4, 6 if odd and gathers else 3),
                ones(6 if odd and gathers else 3, 6 if odd else 5),
            ),
            "dtype": tuple(one.to(torch.float16 if odd else torch.float32) for one in (ones(4, 3), ones(3, 5))),
        }
        if name != "matmul_all_reduce":
            texts["gradients"] = (ones(4, 3).requires_grad_(odd), ones(3, 5))
        for text, (a, b) in texts.items():
            with pytest.raises(dist.DistBackendError, match=f"{name}.*rank 1 has another .*{text}"):
                operator(a, b)
        with pytest.raises(dist.DistBackendError, match="another form"):
            operator(ones(4, 3), ones(3, 5), form="unfused" if odd else "auto")
    with pytest.raises(dist.DistBackendError, match="another operator"):
        (matmul_all_reduce if odd else matmul_reduce_scatter)(ones(4, 3), ones(3, 5))
    # Where the backward pass has no collective, requires_grad may differ between ranks.
    assert matmul_all_reduce(ones(4, 3).requires_grad_(odd), ones(3, 5)).unique().tolist() == [6.0]


def test_ranks_that_disagree() -> None:
    run_ranks(_disagree, 2)


def _no_such_group(rank: Rank) -> None:
    rank.init("gloo")
    for operator in OPERATORS.values():
        with pytest.raises(ValueError, match="backend is not 'ark'"):
            operator(torch.ones(4, 3), torch.ones(3, 5))


def test_another_backend() -> None:
    run_ranks(_no_such_group, 2)


def _groups(rank: Rank) -> None:
    """Two groups with different members, in turns."""
    rank.init()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    random = Random(5)
    for step in range(12):
        for number, group in enumerate(pairs):
            case = random_case(random, 2, 10 * step + number, DTYPES)
            if dist.get_rank(group) >= 0:
                _check(case, rank, group)
        _check(random_case(random, 3, 100 + step, DTYPES), rank)


@pytest.mark.nightly
def test_two_groups() -> None:
    run_ranks(_groups, 3)


def _layers(a: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """A feed-forward layer with sequence parallelism, and one without."""
    hidden = torch.relu(all_gather_matmul(a, column.t()))
    out = matmul_reduce_scatter(hidden, row.t()) * 2 + a
    return matmul_all_reduce(out, column.t() * 0.5) + 1


def _compiled(rank: Rank, backend: str) -> None:
    """Forward and backward equal eager's."""
    rank.init()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(rank.rank)
    results = []
    made = [torch.randn(size, generator=generator) for size in ((6, 16), (24, 16), (16, 24))]
    torch._dynamo.reset()
    for function in (_layers, torch.compile(_layers, backend=backend)):
        for _ in range(2):
            a, column, row = (one.clone().requires_grad_() for one in made)
            out = function(a, column, row)
            out.square().sum().backward()
            results.append([out.detach(), a.grad, column.grad, row.grad])
        with torch.no_grad():
            same(function(*made), results[0][0], backend)
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert got is not None and wanted is not None
            torch.testing.assert_close(got, wanted)
    same(results[2][0], results[0][0], backend)


@pytest.mark.by_day("aot_eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "ark", "inductor"])
def test_compiled(backend: str) -> None:
    run_ranks(_compiled, 2, backend, timeout=300)


def _dynamic(rank: Rank) -> None:
    """Sizes unknown to the compiler."""
    rank.init()
    compiled = torch.compile(lambda a, b: matmul_reduce_scatter(a, b) + 1, backend="aot_eager", dynamic=True)
    for rows in (4, 8, 12):
        a, b = torch.ones(rows, 3), torch.ones(3, 5)
        same(compiled(a, b), torch.full((rows // 2, 5), 7.0), rows)


@pytest.mark.nightly
def test_dynamic_shapes() -> None:
    run_ranks(_dynamic, 2)


def _opcheck(rank: Rank) -> None:
    """PyTorch's checks of an operator: schema, autograd, fake kernel."""
    rank.init()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    library = torch.ops.ark
    for operator, more in (
        (library.matmul_all_reduce.default, ()),
        (library.matmul_reduce_scatter.default, ()),
        (library.all_gather_matmul.default, (False,)),
        (library.all_gather_matmul.default, (True,)),
    ):
        for bias in (None, torch.randn(5, requires_grad=True)):
            torch.library.opcheck(operator, (a, b, name, "auto", 3, *more, bias))


def test_what_pytorch_asks_of_an_operator() -> None:
    run_ranks(_opcheck, 1)


def _lost(rank: Rank) -> str:
    """A rank ends: the others get an error within seconds that names it."""
    rank.init(timeout=60)
    a, b = torch.ones(4, 3), torch.ones(3, 5)
    matmul_all_reduce(a, b)
    if rank.rank == 1:
        raise SystemExit(0)
    with pytest.raises(dist.DistBackendError) as caught:
        for _ in range(1000):
            matmul_all_reduce(a, b)
    return str(caught.value)


def test_a_lost_rank() -> None:
    from support.launcher import Job

    with Job(_lost, 2, destroy=False) as job:
        outcome = job.wait_outcomes([0], 15)[0]
        assert outcome.kind == "result" and "rank 1" in outcome.value, outcome
        job.finish(20)
