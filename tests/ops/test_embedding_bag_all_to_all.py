"""embedding_bag_all_to_all on CPU ranks: bits, gradients, bad input, compilers, groups."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.embedding import Case, check, draw, gradient_of, random_case, reference, same
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import embedding_bag_all_to_all

pytestmark = [ark_only]
NAME = "embedding_bag_all_to_all"


def _random(rank: Rank, seed: int, count: int) -> None:
    rank.init()
    torch.set_num_threads(1)
    random = Random(seed)
    for number in range(count):
        check(random_case(random, rank.world_size, 100 * seed + number), rank.rank, rank.world_size)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_shapes(world: int) -> None:
    run_ranks(_random, world, world, 20)


def _carried(rank: Rank, seed: int) -> None:
    """A group without shared memory, carried by Gloo, and rows larger than a piece."""
    import ark_torch

    rank.init(pg_options=ark_torch.Options())
    options = ark_torch.Options()
    options.shared_memory = ark_torch.Options.SharedMemory.OFF
    apart = dist.new_group(pg_options=options)
    random = Random(seed)
    for number in range(5):
        check(random_case(random, rank.world_size, 100 * seed + number), rank.rank, rank.world_size, apart)
    check(Case([1, 2], 2, 70_000, seed=seed), rank.rank, rank.world_size)


@pytest.mark.nightly
def test_without_shared_memory_and_long_rows() -> None:
    run_ranks(_carried, 2, 9)


def _like_pytorch(rank: Rank) -> None:
    """Compares with the unfused form over the same group, in float32: equal bits where torch adds in the same order."""
    rank.init()
    me, world = rank.rank, rank.world_size
    case = Case([3] * world, 16, 32, seed=5)
    part = draw(case, me, world)
    pooled = torch.stack(
        [F.embedding_bag(i, t, o, mode="sum") if t.numel() else torch.zeros(world * case.batch, case.dim)
         for t, i, o in zip(part.tables, part.indices, part.offsets, strict=True)], 1,
    )  # fmt: skip
    received = torch.empty_like(pooled)
    dist.all_to_all_single(received, pooled)
    unfused = received.view(world, case.batch, 3, case.dim).permute(1, 0, 2, 3).reshape(case.batch, -1, case.dim)
    torch.testing.assert_close(part.call(case), unfused, rtol=1e-6, atol=1e-6)


def test_like_pytorchs_own() -> None:
    run_ranks(_like_pytorch, 3)


def _gradcheck(rank: Rank, mode: str, weighted: bool) -> None:
    """Numerical gradients: every rank perturbs the same element of its own table, and adds up all results."""
    rank.init()
    me, world = rank.rank, rank.world_size
    case = Case([2] * world, 3, 4, torch.float64, mode=mode, weighted=weighted, seed=4)
    part = draw(case, me, world)
    inputs = [one.requires_grad_() for one in (*part.tables, *(part.weights or []))]
    gradient = gradient_of(case, me)
    analytic = torch.autograd.grad(part.call(case), inputs, gradient)

    def total() -> float:
        value = (part.call(case).detach() * gradient).sum()
        dist.all_reduce(value)
        return float(value)

    sizes: list[Any] = [None] * world
    dist.all_gather_object(sizes, [one.numel() for one in inputs])
    for which in range(len(inputs)):
        for element in range(max(one[which] for one in sizes)):
            for owner in range(world):
                if element >= sizes[owner][which]:
                    continue
                values = []
                for step in (1e-6, -1e-6):
                    if owner == me:
                        inputs[which].detach().view(-1)[element] += step
                    values.append(total())
                    if owner == me:
                        inputs[which].detach().view(-1)[element] -= step
                if owner == me:
                    numeric = (values[0] - values[1]) / 2e-6
                    assert abs(numeric - float(analytic[which].view(-1)[element])) < 1e-6


@pytest.mark.by_day("sum-True")
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_gradients_are_numerical_ones(mode: str, weighted: bool) -> None:
    run_ranks(_gradcheck, 2, mode, weighted)


def _alone(rank: Rank) -> None:
    rank.init()
    part = draw(Case([2], 4, 3, torch.float64, seed=2), 0, 1)
    for table in part.tables:
        table.requires_grad_()

    def call(*tables: Tensor) -> Tensor:
        return embedding_bag_all_to_all(list(tables), part.indices, part.offsets)

    assert torch.autograd.gradcheck(call, tuple(part.tables))


def test_gradcheck() -> None:
    run_ranks(_alone, 1)


def _of_the_weights(rank: Rank) -> None:
    rank.init()
    me, world = rank.rank, rank.world_size
    case = Case([1] * world, 5, 8, weighted=True, seed=14)
    part = draw(case, me, world)
    assert part.weights is not None
    for weight in part.weights:
        weight.requires_grad_()
    part.call(case).backward(gradient_of(case, me))
    gradients = torch.cat([gradient_of(case, r)[:, me] for r in range(world)])
    bag = torch.repeat_interleave(torch.arange(world * case.batch), torch.tensor(part.lengths[0]))
    wanted = (part.tables[0][part.indices[0]] * gradients[bag]).sum(1)
    torch.testing.assert_close(part.weights[0].grad, wanted)


def test_gradients_of_weights() -> None:
    run_ranks(_of_the_weights, 2)


BAD: dict[str, tuple[str, type[Exception]]] = {
    "index": (r"index 9 is out of bounds for dimension 0 with size 5 of tables\[1\] \(indices\[1\]\[2\]\)", IndexError),
    "negative": (r"index -1 is out of bounds .* tables\[0\]", IndexError),
    "offset": (r"offsets\[1\]\[3\] is 99", ValueError),
    "first": (r"offsets\[0\]\[0\] is 1", ValueError),
    "bags": (r"offsets\[0\] has 5 elements, and 2 ranks", ValueError),
    "uneven": (r"offsets\[1\] has 2 elements, offsets\[0\] 4", ValueError),
    "dtype": (r"tables\[1\] is torch.float64 but tables\[0\] is torch.float32", TypeError),
    "integer": (r"tables\[0\] is torch.int64", TypeError),
    "indices": (r"indices\[0\] is torch.float32", TypeError),
    "dims": (r"indices\[1\] has 2 dimensions", ValueError),
    "columns": (r"tables\[1\] has 3 columns, tables\[0\] 4", ValueError),
    "strides": (r"tables\[0\] is not contiguous", ValueError),
    "count": (r"offsets has 1 entries", ValueError),
    "mode": (r"mode is 'max'", ValueError),
    "weights": (r"per_sample_weights are given, and mode is 'mean'", ValueError),
    "shape of weights": (r"per_sample_weights\[0\] has not the shape", ValueError),
    "known": (r"tables_per_rank has 3 entries", ValueError),
}


def spoilt(what: str, spoil: bool) -> dict[str, Any]:
    call: dict[str, Any] = {
        "tables": [torch.ones(5, 4), torch.ones(5, 4)],
        "indices": [torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)],
        "offsets": [torch.arange(4), torch.arange(4)],
    }
    if not spoil:
        return call
    if what == "index":
        call["indices"][1][2] = 9
    elif what == "negative":
        call["indices"][0][0] = -1
    elif what == "offset":
        call["offsets"][1][3] = 99
    elif what == "first":
        call["offsets"][0][0] = 1
    elif what == "bags":
        call["offsets"][0] = torch.zeros(5, dtype=torch.int64)
    elif what == "uneven":
        call["offsets"][1] = torch.zeros(2, dtype=torch.int64)
    elif what == "dtype":
        call["tables"][1] = torch.ones(5, 4, dtype=torch.float64)
    elif what == "integer":
        call["tables"][0] = torch.ones(5, 4, dtype=torch.int64)
    elif what == "indices":
        call["indices"][0] = torch.zeros(4)
    elif what == "dims":
        call["indices"][1] = torch.zeros(2, 2, dtype=torch.int64)
    elif what == "columns":
        call["tables"][1] = torch.ones(5, 3)
    elif what == "strides":
        call["tables"][0] = torch.ones(4, 5).t()
    elif what == "count":
        call["offsets"] = call["offsets"][:1]
    elif what == "mode":
        call["mode"] = "max"
    elif what == "weights":
        call |= {"mode": "mean", "per_sample_weights": [torch.ones(4), torch.ones(4)]}
    elif what == "shape of weights":
        call["per_sample_weights"] = [torch.ones(3), torch.ones(4)]
    elif what == "known":
        call["tables_per_rank"] = [2, 2, 2]
    return call


def _bad(rank: Rank) -> None:
    """One rank's mistake is an error on all ranks at once, and the group still works."""
    rank.init(timeout=20)
    for what, (text, kind) in BAD.items():
        culprit = rank.rank == 1
        with pytest.raises(kind if culprit else dist.DistBackendError) as caught:
            embedding_bag_all_to_all(**spoilt(what, culprit))
        assert NAME in str(caught.value) and f"[rank {rank.rank}]" in str(caught.value), caught.value
        assert re.search(text if culprit else "rank 1 refused its arguments", str(caught.value)), caught.value
        assert embedding_bag_all_to_all(**spoilt(what, False)).unique().tolist() == [1.0]


def test_bad_input() -> None:
    run_ranks(_bad, 2)


DISAGREE = {"batch": "another batch", "columns": "dimension of the tables", "dtype": "another dtype", "mode": "mode",
            "trained": "take gradients"}  # fmt: skip


def _disagree(rank: Rank) -> None:
    rank.init(timeout=20)
    for what, text in DISAGREE.items():
        call, odd = spoilt("", False), rank.rank == 1
        if what == "batch" and odd:
            call["offsets"] = [torch.zeros(2, dtype=torch.int64)] * 2
        elif what == "columns" and odd:
            call["tables"] = [torch.ones(5, 6)] * 2
        elif what == "dtype" and odd:
            call["tables"] = [torch.ones(5, 4, dtype=torch.float16)] * 2
        elif what == "mode" and odd:
            call["mode"] = "mean"
        elif what == "trained" and odd:
            call["tables"] = [table.requires_grad_() for table in call["tables"]]
        with pytest.raises(dist.DistBackendError, match=text):
            embedding_bag_all_to_all(**call)
    with pytest.raises(ValueError, match="no rank has a table"):
        embedding_bag_all_to_all([], [], [])


def test_ranks_that_disagree() -> None:
    run_ranks(_disagree, 2)


def _no_such_group(rank: Rank) -> None:
    rank.init("gloo")
    with pytest.raises(ValueError, match="backend is not 'ark'"):
        embedding_bag_all_to_all(**spoilt("", False))


def test_another_backend() -> None:
    run_ranks(_no_such_group, 2)


def _groups(rank: Rank) -> None:
    """Two groups with different members, in turns."""
    rank.init()
    me = rank.rank
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for step in range(3):
        for number, group in enumerate(pairs):
            if dist.get_rank(group) < 0:
                continue
            case = Case([1, 2], 4, 5, seed=10 * step + number)
            check(case, dist.get_rank(group), 2, group)
        check(Case([1, 0, 2], 3, 4, seed=100 + step), me, 3)


@pytest.mark.nightly
def test_two_groups() -> None:
    run_ranks(_groups, 3)


def _compiled(rank: Rank, backend: str) -> None:
    """With a known shape, or one that each call finds; forward and backward; also on a rank without tables."""
    rank.init()
    torch.set_num_threads(1)
    cases = (([2, 1], True), ([2, 1], False), ([2, 0], False))
    for tables, known in cases if "eager" in backend else cases[:1]:  # the others' compilers are slow
        _compare_compiled(Case(tables, 4, 6, seed=60), rank, backend, tables if known else None)


def _compare_compiled(case: Case, rank: Rank, backend: str, known: list[int] | None) -> None:
    me, world = rank.rank, rank.world_size
    part = draw(case, me, world)
    like = None if part.tables else torch.zeros(1, requires_grad=True)

    def model(scale: Tensor, tables: list[Tensor]) -> Tensor:
        out = embedding_bag_all_to_all(tables, part.indices, part.offsets, tables_per_rank=known, like=like)
        return out * 2 + scale

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    scale = torch.ones(1, requires_grad=True)
    for _ in range(2):
        mine = [table.clone().requires_grad_() for table in part.tables]
        got = compiled(scale, mine)
        same(got.detach(), reference(case, me, world) * 2 + 1, f"{backend} {case}")
        got.backward(gradient_of(case, me))
        other = [table.clone().requires_grad_() for table in part.tables]
        model(scale, other).backward(gradient_of(case, me))
        for one, two in zip(mine, other, strict=True):
            assert one.grad is not None and two.grad is not None
            same(one.grad, two.grad, f"gradient, {backend} {case}")


@pytest.mark.by_day("eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "ark", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled(backend: str) -> None:
    run_ranks(_compiled, 2, backend, timeout=300)


def _opcheck(rank: Rank) -> None:
    """PyTorch's checks of an operator: schema, autograd, fake kernel."""
    rank.init()
    part = draw(Case([2], 3, 4, seed=6), 0, 1)
    tables = [table.requires_grad_() for table in part.tables]
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    arguments = (
        tables,
        part.indices,
        part.offsets,
        [],
        None,
        name,
        "sum",
        False,
        [2],
        -1,
        -1,
        False,
        "dense",
        [],
        None,
        0.0,
    )
    torch.library.opcheck(torch.ops.ark.embedding_bag_all_to_all.default, arguments)


def test_what_pytorch_asks_of_an_operator() -> None:
    run_ranks(_opcheck, 1)


def _lost(rank: Rank) -> str:
    """A rank ends: the others get an error within seconds that names it."""
    rank.init(timeout=60)
    embedding_bag_all_to_all(**spoilt("", False))
    if rank.rank == 1:
        raise SystemExit(0)
    with pytest.raises(dist.DistBackendError) as caught:
        for _ in range(1000):
            embedding_bag_all_to_all(**spoilt("", False))
    return str(caught.value)


def test_a_lost_rank() -> None:
    from support.launcher import Job

    with Job(_lost, 2, destroy=False) as job:
        outcome = job.wait_outcomes([0], 15)[0]
        assert outcome.kind == "result" and "rank 1" in outcome.value, outcome
        job.finish(20)
