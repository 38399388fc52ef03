"""matmul_all_reduce, matmul_reduce_scatter, all_gather_matmul on GPUs in both forms: values, graphs, bad input."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support.products import OPERATORS, Case, close, draw, exact, random_case, same, unfused
from support.rank import Rank

import ark_torch
from ark_torch.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

HALVES = (torch.bfloat16, torch.float16)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
FORMS = ["unfused", pytest.param("fused", marks=pytest.mark.skipif(not HOPPER or WORLD < 2, reason="Hopper, peers"))]


def _check(case: Case, form: str, device: torch.device, group: Any = None) -> None:
    me, world = dist.get_rank(group), dist.get_world_size(group)
    a, b = draw(case, me, device)
    got = case.call(a, b, group, form=form)
    if form == "unfused":
        same(got, unfused(case, a, b, world, group), case)
    else:
        same(case.call(a, b, group, form=form), got, f"again: {case}")  # bits must not depend on which rank comes first
    close(got, exact(case, me, world), sum(case.k) if case.name != "all_gather_matmul" else case.k[0], (form, case))


def _random(rank: Rank, seed: int, count: int) -> None:
    device = start(rank)
    random = Random(seed)
    for number in range(count):
        dtypes = (torch.float32, *HALVES)
        _check(random_case(random, rank.world_size, 100 * seed + number, dtypes), "unfused", device)


def test_product_first() -> None:
    run(_random, 1, 40)


def _large(rank: Rank, form: str) -> None:
    """More than 2^31 elements of a, and of a result; a is the same on all ranks, and b is not."""
    device, me, world = start(rank), rank.rank, rank.world_size
    generator = torch.Generator(device).manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

    k, m = 8320, ((1 << 31) // 8320 // (64 * world) + 1) * 64 * world
    a, all_b = drawn(m, k), [drawn(k, 64) for _ in range(world)]
    part = matmul_reduce_scatter(a, all_b[me], form=form)
    whole = matmul_all_reduce(a, all_b[me], form=form)
    for first in (0, m // world - 64):
        there = me * m // world + first
        want = sum(a[there : there + 64].double() @ b.double() for b in all_b)
        for got in (part[first : first + 64], whole[there : there + 64]):
            assert float((got.double() - want).norm() / want.norm()) < 5e-3, first
    # A sum of more tiles than one kernel has flags for.
    a, b = drawn(32768 * world, 8), drawn(8, 4096)
    if form == "fused":
        with pytest.raises(ValueError, match=r"the tiles of a rank's part of the result of .* more than 2048"):
            matmul_all_reduce(a, b, form=form)
    want = world * (a[-64:].double() @ b.double())
    assert float((matmul_all_reduce(a, b)[-64:].double() - want).norm() / want.norm()) < 5e-3
    del a, part, whole
    # The second has more rows than flags even for groups of as many rows as a tile has.
    for m, k, n in ((((1 << 31) // 4160 // world // 64 + 1) * 64, 64, 4160), ((1 << 21) + 64, 8, 8)):
        every, b = [drawn(m, k) for _ in range(world)], drawn(k, n)
        out = all_gather_matmul(every[me], b, form=form)
        assert n == 8 or out.numel() > 1 << 31
        for r, a in enumerate(every):
            for first in (0, m // 2 + 1, m - 64):
                want = a[first : first + 64].double() @ b.double()
                got = out[r * m + first :][:64]
                assert float((got.double() - want).norm() / want.norm()) < 5e-3, (r, first)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS)
def test_more_elements_than_32_bits_count(form: str) -> None:
    run(_large, form)


def _auto(rank: Rank) -> None:
    """With the form that the operator chooses."""
    device = start(rank)
    random = Random(5)
    for number in range(40):
        dtypes = (torch.float32, *HALVES)
        _check(random_case(random, rank.world_size, 900 + number, dtypes), "auto", device)


@pytest.mark.skipif(WORLD < 2, reason="needs peers")
def test_the_form_that_is_chosen() -> None:
    run(_auto)


def kernel_cases(world: int) -> list[Case]:
    """Tiles of every shape, whole and at edges; depths below a stage; any matrix layout."""
    bf16, f16 = HALVES
    cases: list[Case] = []
    for name in OPERATORS:

        def case(m: int, k: int, n: int, dtype: torch.dtype, *, name: str = name, **layouts: str) -> Case:
            gathers = name == "all_gather_matmul"
            rows = m * world if name == "matmul_reduce_scatter" else m
            k_of = [k] * world if gathers else [k + 8 * r for r in range(world)]
            n_of = [n + 8 * r for r in range(world)] if gathers else [n] * world
            return Case(name, rows, k_of, n_of, dtype, seed=m + k + n, **layouts)  # type: ignore[arg-type]

        cases += [
            case(1, 64, 64, dtype=bf16),
            case(1, 4096, 2048, dtype=bf16, b="transposed"),
            case(16, 512, 8192, dtype=f16),
            case(128, 64, 256, dtype=bf16),
            case(64, 200, 136, dtype=f16, b="transposed"),
            case(100, 72, 264, dtype=bf16, a="transposed"),
            case(384, 256, 1024, dtype=bf16, b="transposed"),
            case(512, 1024, 4096, dtype=bf16),
            case(2048, 512, 4096, dtype=f16, b="transposed"),
            case(1000, 136, 4000, dtype=bf16, b="strided"),
            case(130, 136, 520, dtype=f16, a="narrowed", b="narrowed"),
        ]
    cases += [
        Case("matmul_all_reduce", 40, [0] + [33] * (world - 1), [72] * world, bf16, seed=91),  # one rank without depth
        Case("all_gather_matmul", 40, [64] * world, [0] + [33] * (world - 1), f16, seed=92),  # one rank without columns
        Case("all_gather_matmul", 7, [64] * world, [5] * world, bf16, b="transposed", seed=93),
    ]
    return cases


def _cases(rank: Rank) -> None:
    device = start(rank)
    for case in kernel_cases(rank.world_size):
        _check(case, "fused", device)


@pytest.mark.skipif(not HOPPER or WORLD < 2, reason="Hopper, peers")
def test_one_kernel() -> None:
    run(_cases)


def _biases(rank: Rank, form: str) -> None:
    """A bias on one rank or on all, where columns end in a tile, too."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    for number, case in enumerate(kernel_cases(world)):
        owners = range(world) if number % 2 else [number // 2 % world]
        drawn = {r: torch.randn(case.n[r], generator=torch.Generator().manual_seed(70 + r)) for r in owners}
        biases = {r: one.to(case.dtype) for r, one in drawn.items()}
        a, b = draw(case, me, device)
        got = case.call(a, b, bias=biases[me].to(device) if me in biases else None, form=form)
        gathers = case.name == "all_gather_matmul"
        wanted = exact(case, me, world)
        for r, one in biases.items():
            wanted = wanted + one.double() if r == me or not gathers else wanted
        close(got, wanted, case.k[0] if gathers else sum(case.k), (form, case, owners))


@pytest.mark.parametrize("form", FORMS)
def test_biases(form: str) -> None:
    run(_biases, form)


def _sums_in_rank_order(rank: Rank) -> None:
    """Products of small integers are exact in any implementation, and so are the bits of their rounded sums."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    rows = {"matmul_all_reduce": (1, 16, 60, 200), "matmul_reduce_scatter": (world, 200 * world)}
    for name, m in ((one, m) for one in OPERATORS for m in rows.get(one, (1, 200))):
        for dtype in HALVES:
            for n in (72, 1024):
                generator = torch.Generator(device=device).manual_seed(me)
                # Ranks' products differ in size, so that the order and the single rounding show.
                a = torch.randint(-3, 4, (m, 96), generator=generator, device=device).to(dtype)
                generator.manual_seed(50 + me * (name != "all_gather_matmul"))
                b = torch.randint(-3, 4, (96, n), generator=generator, device=device).to(dtype) * 17.0**-me
                case = Case(name, m, [96] * world, [n] * world)
                same(OPERATORS[name](a, b, form="fused"), unfused(case, a, b, world), (name, dtype, n))


@pytest.mark.skipif(not HOPPER or WORLD < 2, reason="Hopper, peers")
def test_bits_of_the_unfused_form() -> None:
    run(_sums_in_rank_order)


def _captured(rank: Rank, form: str) -> None:
    """Several calls in one graph do not overlap. Replays use the current matrices."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    for name in OPERATORS:
        rows = 96 * world
        case = Case(name, rows, [256] * world, [512] * world, torch.bfloat16, b="transposed", seed=3)
        a, b = draw(case, me, device)
        wanted = case.call(a, b, form=form)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outs = [case.call(a, b, form=form) for _ in range(11)]  # more than there are separate places
        for _ in range(1000):
            graph.replay()
        for out in outs:
            same(out, wanted, (name, "replayed"))
        a.mul_(2)
        graph.replay()
        for out in outs:
            same(out, wanted * 2, (name, "replayed with other rows"))
        same(case.call(a, b, form=form), wanted * 2, (name, "eager beside a graph"))
        del graph, outs


@pytest.mark.parametrize("form", FORMS)
def test_graphs(form: str) -> None:
    run(_captured, form)


def _eager(rank: Rank, form: str) -> None:
    """Kept results do not change; ranks may be late; shapes alternate."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    cases = [
        Case(name, m * world, [128] * world, [n] * world, torch.float16, seed=m + n)
        for name in OPERATORS
        for m, n in ((8, 1024), (160, 320), (640, 256))
    ]
    drawn = [draw(case, me, device) for case in cases]
    wanted = [case.call(a, b, form=form) for case, (a, b) in zip(cases, drawn, strict=True)]
    kept = []
    for step in range(20):
        for number, (case, (a, b)) in enumerate(zip(cases, drawn, strict=True)):
            if (step + number) % world == me:
                torch.cuda._sleep(500_000)
            kept.append((number, case.call(a, b, form=form)))
    for number, out in kept:
        same(out, wanted[number], cases[number])


@pytest.mark.parametrize("form", FORMS)
def test_many_calls(form: str) -> None:
    run(_eager, form)


def _registered(rank: Rank, form: str) -> None:
    """In registered memory an all_reduce's result is stored at its final place."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    case = Case("matmul_all_reduce", 2048, [128] * world, [2048] * world, torch.bfloat16, seed=9)
    a, b = draw(case, me, device)
    wanted = case.call(a, b, form=form)
    with torch.cuda.use_mem_pool(ark_torch.memory.pool()):
        held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    assert ark_torch.distributed.register(held)
    dist.group.WORLD._get_backend(device).register_mem_pool(ark_torch.memory.pool())
    begin, end = held.data_ptr(), held.data_ptr() + held.nbytes
    del held
    for _ in range(10):
        out = case.call(a, b, form=form)
        same(out, wanted, "registered")
        assert begin <= out.data_ptr() < end


@pytest.mark.parametrize("form", FORMS)
def test_registered_memory(form: str) -> None:
    run(_registered, form)


def _groups(rank: Rank, form: str) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    other = dist.new_group(list(range(world)))
    cases = [Case(name, 64 * world, [72] * world, [256] * world, torch.float16, seed=s)
             for s, name in enumerate(OPERATORS)]  # fmt: skip
    for _ in range(5):
        for case in cases:
            a, b = draw(case, me, device)
            outs = [case.call(a, b, group, form=form) for group in (None, other)]
            same(outs[0], outs[1], "two groups")
            close(outs[0], exact(case, me, world), 72 * world, case)


@pytest.mark.parametrize("form", FORMS)
def test_two_groups(form: str) -> None:
    run(_groups, form)


def _gradients(rank: Rank, form: str) -> None:
    """Compares the gradients of both forms with PyTorch's own differentiable collectives."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    for name in OPERATORS:
        case = Case(name, 64 * world, [72] * world, [128] * world, torch.bfloat16, b="transposed", seed=7)
        a, b = (one.requires_grad_() for one in draw(case, me, device))
        out = case.call(a, b, form=form)
        generator = torch.Generator(device=device).manual_seed(0 if name == "matmul_all_reduce" else me)
        gradient = torch.randn(out.shape, generator=generator, device=device).to(out.dtype)
        of_a, of_b = torch.autograd.grad(out, (a, b), gradient)
        all_of = [draw(case, r) for r in range(world)]
        gathered = torch.empty(world * gradient.shape[0], gradient.shape[1], dtype=gradient.dtype, device=device)
        dist.all_gather_into_tensor(gathered, gradient)
        gradients = gathered.cpu().double().chunk(world)
        if name == "all_gather_matmul":
            total = sum(g @ b_.double().t() for g, (_, b_) in zip(gradients, all_of, strict=True))
            wanted_a = total.chunk(world)[me]
            wanted_b = torch.cat([a_ for a_, _ in all_of]).double().t() @ gradients[me]
        else:
            whole = torch.cat(gradients) if name == "matmul_reduce_scatter" else gradients[me]
            wanted_a, wanted_b = whole @ all_of[me][1].double().t(), all_of[me][0].double().t() @ whole
        close(of_a, wanted_a, 128 * world, (name, "a"))
        close(of_b, wanted_b, 64 * world * world, (name, "b"))


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str) -> None:
    run(_gradients, form)


def _layer(a: torch.Tensor, column: torch.Tensor, row: torch.Tensor, form: str) -> torch.Tensor:
    hidden = torch.relu(all_gather_matmul(a, column.t(), form=form))
    out = matmul_reduce_scatter(hidden, row.t(), form=form) + a
    return matmul_all_reduce(out, column.t(), form=form)


def _compiled(rank: Rank, form: str) -> None:
    device = start(rank)
    generator = torch.Generator(device=device).manual_seed(rank.rank)
    made = [torch.randn(size, generator=generator, device=device).to(torch.bfloat16) / 16
            for size in ((64, 256), (512, 256), (256, 512))]  # fmt: skip
    gradients = []
    for function in (_layer, torch.compile(_layer, backend="inductor")):
        a, column, row = (one.clone().requires_grad_() for one in made)
        function(a, column, row, form).float().square().sum().backward()
        gradients.append([a.grad, column.grad, row.grad])
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("form", FORMS)
def test_compiled(form: str) -> None:
    run(_compiled, form)


def _alone(rank: Rank) -> None:
    """A group of one rank, without a peer or an earlier collective."""
    device = start(rank)
    alone = [dist.new_group([r]) for r in range(rank.world_size)][rank.rank]
    for name in OPERATORS:
        _check(Case(name, 30, [48], [56], torch.float16, seed=15), "auto", device, alone)


def test_a_group_of_one() -> None:
    run(_alone, own=True)


def _bad(rank: Rank) -> None:
    """Refused or mismatched input is found before a launch: an error on all ranks, and the group still works."""
    device = start(rank, timeout=20)
    odd = rank.rank == rank.world_size - 1
    last = rank.world_size - 1
    a = torch.ones(8 * rank.world_size, 64, device=device, dtype=torch.bfloat16)
    b = torch.ones(64, 128, device=device, dtype=torch.bfloat16)
    for name, operator in OPERATORS.items():
        with pytest.raises(ValueError if odd else dist.DistBackendError) as caught:
            operator(a, b[:32] if odd else b)
        wanted = "columns of a are not rows of b" if odd else f"rank {last} refused its arguments"
        assert name in str(caught.value) and wanted in str(caught.value), caught.value
        with pytest.raises(dist.DistBackendError, match=f"rank {last} has another number of rows of a"):
            operator(torch.cat([a, a]) if odd else a, b)
        with pytest.raises(dist.DistBackendError, match=f"rank {last} has another dtype"):
            operator(a.half() if odd else a, b.half() if odd else b)
        total = 64.0 * (1 if name == "all_gather_matmul" else rank.world_size)
        assert operator(a, b).unique().tolist() == [total]


@pytest.mark.skipif(WORLD < 2, reason="needs ranks that can disagree")
def test_bad_input() -> None:
    run(_bad, own=True)


def _late_disagreement(rank: Rank, form: str) -> str:
    """Another operator than the peers', with a shape that all know: the launches find it, or it times out."""
    device = start(rank, timeout=5)
    a = torch.ones(64 * rank.world_size, 64, device=device, dtype=torch.bfloat16)
    b = torch.ones(64, 128, device=device, dtype=torch.bfloat16)
    for operator in OPERATORS.values():
        operator(a, b, form=form)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError) as caught:
        for _ in range(20):
            (matmul_all_reduce if rank.rank == 0 else matmul_reduce_scatter)(a, b, form=form)
            torch.cuda.synchronize()
    return str(caught.value)


@pytest.mark.skipif(not HOPPER or WORLD < 2, reason="Hopper, peers")
def test_operators_that_differ() -> None:
    for told in run(_late_disagreement, "fused", own=True, destroy=False):
        assert "another fused operator" in told or "matmul_" in told, told
