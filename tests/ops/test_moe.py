"""moe_dispatch, moe_combine, moe_layer on CPU ranks: bits, gradients, groups, compilers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.moe import ACTIVATIONS, Case, Unfused, draw, draw_experts, experts_one_by_one, random_case
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import MoeHandle, moe_combine, moe_dispatch, moe_layer

pytestmark = [ark_only]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _same(got: Tensor, wanted: Tensor, what: object) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, (what, got.shape, wanted.shape)
    assert torch.equal(got, wanted), f"{what}: {(got.double() - wanted.double()).abs().max()}"


def _check(case: Case, rank: Rank, group: Any = None) -> None:
    me = dist.get_rank(group)
    x, ids, weights = draw(case, me)
    unfused = Unfused(case, ids, group)
    rows, counts, handle = moe_dispatch(x, ids, group, num_experts=case.experts)
    used = sum(unfused.counts.tolist())
    _same(counts, unfused.counts, case)
    _same(handle.rank_counts.long(), unfused.by_rank, case)
    _same(rows[:used], unfused.there(x), case)
    assert not rows[used:].any(), case
    assert (handle.places[0] >= 0).equal(ids >= 0), case
    y = torch.full((len(rows), case.dim + 1), float("nan"), dtype=case.dtype)
    y[:used] = torch.randn(used, case.dim + 1, generator=torch.Generator().manual_seed(me)).to(case.dtype)
    for scale in (weights, None):
        _same(moe_combine(y, handle, scale), unfused.back(y[:used], scale, len(x)), case)


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


def _carried(rank: Rank, seed: int) -> None:
    """A group without shared memory, carried by Gloo, and rows larger than a piece of the shared memory."""
    import ark_torch

    rank.init(pg_options=ark_torch.Options())
    options = ark_torch.Options()
    options.shared_memory = ark_torch.Options.SharedMemory.OFF
    apart = dist.new_group(pg_options=options)
    random = Random(seed)
    for number in range(8):
        _check(random_case(random, rank.world_size, 100 * seed + number, DTYPES), rank, apart)
    for group in (apart, None):
        _check(Case([2, 3], 2, 2, 200_000, seed=seed), rank, group)


@pytest.mark.nightly
def test_without_shared_memory_and_long_rows() -> None:
    run_ranks(_carried, 2, 9)


def _layers(rank: Rank, seed: int, count: int) -> None:
    """Compares the layer bit for bit with products expert by expert between all-to-alls."""
    rank.init()
    torch.set_num_threads(1)
    random = Random(seed)
    for number in range(count):
        case = random_case(random, rank.world_size, 100 * seed + number, DTYPES)
        x, ids, weights = draw(case, rank.rank)
        gated, ffn = random.random() < 0.7, random.choice([1, 8, 24])
        activation = random.choice(sorted(ACTIVATIONS))
        w1, w2 = draw_experts(case, rank.rank, ffn, gated)
        got = moe_layer(x, ids, weights, w1, w2, activation=activation)
        unfused = Unfused(case, ids)
        y = experts_one_by_one(unfused.there(x), unfused.counts.tolist(), w1, w2, activation)
        _same(got, unfused.back(y, weights, len(x)), (case, activation, gated, ffn))


@pytest.mark.by_day("2")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_layers(world: int) -> None:
    run_ranks(_layers, world, world, 16)


def _of(world: int) -> Case:
    """Small and uneven, with choices that go nowhere, and an expert chosen twice."""
    return Case([3 + r for r in range(world)], 2, 2, 3, torch.float64, weights=torch.float64, seed=4)


def _layer_inputs(rank: int, case: Case) -> tuple[Tensor, list[Tensor]]:
    x, ids, weights = draw(case, rank)
    return ids, [x, weights, *draw_experts(case, rank, 4, True)]


def _layer(ids: Tensor, inputs: list[Tensor], case: Case) -> Tensor:
    x, weights, w1, w2 = inputs
    return moe_layer(x, ids, weights, w1, w2)


def _pieces(ids: Tensor, inputs: list[Tensor], case: Case) -> Tensor:
    """As a user writes it: every row through one product, then back."""
    x, weights, w1, w2 = inputs
    rows, counts, handle = moe_dispatch(x, ids, num_experts=case.experts)
    y = torch.ops.ark.moe_experts(rows * 2, counts, w1, w2, "silu")
    return moe_combine(torch.sin(y), handle, weights)


FORMS = {"layer": _layer, "pieces": _pieces}


def _numerical(rank: Rank, form: str) -> None:
    """Numerical gradients: every rank perturbs the same element of its own tensors, and adds up all results."""
    rank.init()
    me, world = rank.rank, rank.world_size
    case = _of(world)
    ids, made = _layer_inputs(me, case)
    inputs = [one.clone().requires_grad_() for one in made]
    out = FORMS[form](ids, inputs, case)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(50 + me), dtype=out.dtype)
    analytic = torch.autograd.grad(out, inputs, gradient)
    sizes: list[Any] = [None] * world
    dist.all_gather_object(sizes, [one.numel() for one in inputs])

    def total() -> float:
        value = (FORMS[form](ids, inputs, case).detach() * gradient).sum()
        dist.all_reduce(value)
        return float(value)

    compared = 0
    for which, one in enumerate(inputs):
        for owner in range(world):
            for element in range(0, sizes[owner][which], 1 + sizes[owner][which] // 12):
                values = []
                for step in (1e-6, -1e-6):
                    if owner == me:
                        one.detach().view(-1)[element] += step
                    values.append(total())
                    if owner == me:
                        one.detach().view(-1)[element] -= step
                if owner == me:
                    numerical = (values[0] - values[1]) / 2e-6
                    got = float(analytic[which].reshape(-1)[element])
                    assert abs(got - numerical) < 1e-6, (form, which, element, got, numerical)
                    compared += got != 0
    assert compared > 8


@pytest.mark.by_day("pieces")
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_numerical_ones(form: str) -> None:
    run_ranks(_numerical, 2, form)


def _alone(rank: Rank) -> None:
    rank.init()
    case = _of(1)
    for form in FORMS.values():
        ids, inputs = _layer_inputs(0, case)
        for one in inputs:
            one.requires_grad_()
        torch.autograd.gradcheck(lambda *given, form=form, ids=ids: form(ids, list(given), case), inputs)

    def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
        rows, _, handle = moe_dispatch(x, ids, num_experts=case.experts)
        return moe_combine(rows * rows, handle, weights)

    torch.autograd.gradcheck(there_and_back, inputs[:2])
    torch.autograd.gradgradcheck(there_and_back, inputs[:2])


@pytest.mark.nightly
def test_gradcheck() -> None:
    run_ranks(_alone, 1)


def _bits_of_gradients(rank: Rank, dtype: torch.dtype) -> None:
    """Gradients of x: rows' gradients, added in float32 in the order of the choices. Weights: within rounding."""
    rank.init()
    torch.set_num_threads(1)
    case = Case([5, 0, 9], 3, 2, 24, dtype, seed=8)
    x, ids, weights = draw(case, rank.rank)
    inputs = [x.requires_grad_(), weights.requires_grad_()]
    rows, _, handle = moe_dispatch(x, ids, num_experts=case.experts)
    out = moe_combine(rows * 3, handle, weights)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(rank.rank)).to(dtype)
    of_x, of_weights = torch.autograd.grad(out, inputs, gradient)
    total = torch.zeros_like(gradient, dtype=torch.float32)
    for j in range(case.k):
        of_row = (gradient.float() * weights.detach()[:, j : j + 1]).to(dtype) * 3
        total += torch.where(ids[:, j : j + 1] >= 0, of_row.float(), torch.zeros(()))
    _same(of_x, total.to(dtype), dtype)
    wanted = ((x.detach() * 3)[:, None].float() * gradient[:, None].float()).sum(-1) * (ids >= 0)
    torch.testing.assert_close(of_weights, wanted)


@pytest.mark.by_day("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_gradients(dtype: torch.dtype) -> None:
    run_ranks(_bits_of_gradients, 3, dtype)


def _training(rank: Rank) -> None:
    """Compares some steps of a small layer, with experts distributed over ranks, with the same layer on one rank."""
    rank.init()
    torch.set_num_threads(1)
    world, me = rank.world_size, rank.rank
    alone = [dist.new_group([r]) for r in range(world)][me]
    case = Case([8] * world, 2, 2, 6, torch.float64, "distinct", weights=torch.float64, seed=3)
    drawn = [draw(case, r) for r in range(world)]
    experts = [draw_experts(case, r, 5, True) for r in range(world)]
    mine = [one.clone().requires_grad_() for one in experts[me]]
    whole = [torch.cat([one[i] for one in experts]).requires_grad_() for i in range(2)]
    together = [torch.cat(parts) for parts in zip(*drawn, strict=True)]
    for _ in range(3):
        x, ids, weights = drawn[me]
        (moe_layer(x, ids, weights, *mine) ** 2).sum().backward()
        (moe_layer(*together, *whole, alone) ** 2).sum().backward()
        with torch.no_grad():
            for one in (*mine, *whole):
                one.sub_(one.grad, alpha=0.05)
                one.grad = None
    for part, all_of in zip(mine, whole, strict=True):
        torch.testing.assert_close(part, all_of.chunk(world)[me])


def test_training_is_that_of_one_rank() -> None:
    run_ranks(_training, 2)


def _groups(rank: Rank) -> None:
    """Two groups with different members, in turns, with several open dispatches."""
    rank.init()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    random = Random(5)
    for step in range(8):
        for number, group in enumerate(pairs):
            case = random_case(random, 2, 10 * step + number, DTYPES)
            if dist.get_rank(group) >= 0:
                _check(case, rank, group)
        _check(random_case(random, 3, 100 + step, DTYPES), rank)
    cases = [Case([4, 1, 3], 2, 2, 5, kind="distinct", seed=seed) for seed in range(3)]
    drawn = [draw(case, rank.rank) for case in cases]
    opened = [moe_dispatch(x, ids, num_experts=6, max_tokens=4) for x, ids, _ in drawn]
    for (rows, _, handle), (x, _, weights) in zip(reversed(opened), reversed(drawn), strict=True):
        wanted = torch.zeros_like(x)
        for j in range(2):
            wanted += x * weights[:, j : j + 1]
        _same(moe_combine(rows, handle, weights), wanted, "in another order")


@pytest.mark.nightly
def test_two_groups() -> None:
    run_ranks(_groups, 3)


def _model(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    rows, counts, handle = moe_dispatch(torch.tanh(x), ids, num_experts=4)
    y = torch.relu(rows) + counts.sum()
    out = moe_combine(y, handle, weights) + x
    return moe_layer(out, ids, weights, w1, w2, activation="gelu") * 2


def _compiled(rank: Rank, backend: str, dynamic: bool) -> None:
    """Forward and backward equal eager's."""
    rank.init()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    compiled = torch.compile(_model, backend=backend, dynamic=dynamic)
    for tokens in (6, 9) if dynamic else (6,):
        case = Case([tokens] * 2, 2, 2, 16, kind="distinct", seed=6)
        x, ids, weights = draw(case, rank.rank)
        made = [x, weights, *draw_experts(case, rank.rank, 8, True)]
        results = []
        for function in (_model, compiled):
            for _ in range(2):
                x, weights, w1, w2 = inputs = [one.clone().requires_grad_() for one in made]
                out = function(x, ids, weights, w1, w2)
                out.square().sum().backward()
                results.append([out.detach(), *(one.grad for one in inputs)])
            with torch.no_grad():
                _same(function(made[0], ids, *made[1:]), results[0][0], backend)
        for other in results[1:]:
            for got, wanted in zip(other, results[0], strict=True):
                assert got is not None and wanted is not None
                torch.testing.assert_close(got, wanted)


@pytest.mark.by_day("eager-False")
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("eager", False),
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("ark", False, marks=pytest.mark.nightly),
        pytest.param("inductor", False, marks=pytest.mark.nightly),
    ],
)
def test_compiled(backend: str, dynamic: bool) -> None:
    run_ranks(_compiled, 2, backend, dynamic, timeout=300)


def _opcheck(rank: Rank) -> None:
    """PyTorch's checks of an operator: schema, autograd, fake kernel."""
    rank.init()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    case = _of(1)
    ids, inputs = _layer_inputs(0, case)
    x, weights, w1, w2 = (one.requires_grad_() for one in inputs)
    rows, counts, handle = moe_dispatch(x.detach(), ids, num_experts=2, max_tokens=3, max_rows=6)
    where = (handle.places, handle.rank_counts)
    rows.requires_grad_()
    library, check = torch.ops.ark, torch.library.opcheck
    check(library.moe_dispatch.default, (x, ids, name, 2, 3, 6, False, 1))
    for scale in (weights, None):
        check(library.moe_scatter.default, (x, *where, scale, name, 3, 6, 3))
        for summed in (True, False):
            check(library.moe_gather.default, (rows, *where, scale, name, 3, summed, 3))
    check(library.moe_experts.default, (rows, counts, w1, w2, "silu"))
    check(library.moe_layer.default, (x, ids, weights, w1, w2, name, 2, "silu", 3, 6, False, 15))


@pytest.mark.nightly
def test_what_pytorch_asks_of_an_operator() -> None:
    run_ranks(_opcheck, 1)


def _handle_is_told(rank: Rank) -> None:
    """The attributes that users may read."""
    rank.init()
    x, ids = torch.arange(6.0).view(3, 2) + 10 * rank.rank, torch.tensor([[3, 0], [-1, 2], [0, 3]])
    rows, counts, handle = moe_dispatch(x, ids, num_experts=4)
    assert isinstance(handle, MoeHandle) and handle.max_tokens == 3 and rows.shape == (12, 2)
    assert handle.rank_counts.tolist() == [[2, 0, 1, 2]] * 2
    assert counts.tolist() == ([4, 0] if rank.rank == 0 else [2, 4])
    first = {0: [0, 4, 10, 14], 1: [2, 12, 0, 4, 10, 14]}[rank.rank]
    assert rows[: len(first), 0].tolist() == first
    assert handle.places[0].tolist() == ([[2, 0], [-1, 0], [1, 3]] if rank.rank == 0 else [[4, 2], [-1, 1], [3, 5]])
    assert handle.places[1].tolist() == [[3, 0], [-1, 2], [1, 4]]
    rows, counts, handle = moe_dispatch(x, ids[:, :0], num_experts=4)  # no token chooses an expert
    assert rows.shape == (0, 2) and counts.tolist() == [0, 0]
    _same(moe_combine(rows, handle), torch.zeros_like(x), "no choice")


def test_order_of_rows() -> None:
    run_ranks(_handle_is_told, 2)


def _lost(rank: Rank) -> str:
    """A rank ends: the others get an error within seconds that names it."""
    rank.init(timeout=60)
    x, ids = torch.ones(4, 3), torch.tensor([[0, 1]] * 4)
    moe_dispatch(x, ids, num_experts=2)
    if rank.rank == 1:
        raise SystemExit(0)
    with pytest.raises(dist.DistBackendError) as caught:
        for _ in range(1000):
            moe_dispatch(x, ids, num_experts=2)
    return str(caught.value)


def test_a_lost_rank() -> None:
    from support.launcher import Job

    with Job(_lost, 2, destroy=False) as job:
        outcome = job.wait_outcomes([0], 15)[0]
        assert outcome.kind == "result" and "rank 1" in outcome.value, outcome
        job.finish(20)
