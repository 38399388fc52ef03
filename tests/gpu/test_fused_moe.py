"""moe_dispatch, moe_combine, moe_layer on GPUs: bits, graphs with changing routing, gradients, bad input."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support.moe import ACTIVATIONS, Case, Unfused, draw, draw_experts, experts_one_by_one, random_case
from support.products import same
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import moe_combine, moe_dispatch, moe_layer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
hopper = pytest.mark.skipif(not HOPPER, reason="Hopper")


def _check(case: Case, device: torch.device, group: Any = None, **more: int) -> None:
    me = dist.get_rank(group)
    x, ids, weights = draw(case, me, device)
    unfused = Unfused(case, ids, group)
    rows, counts, handle = moe_dispatch(x, ids, group, num_experts=case.experts, **more)
    used = int(unfused.counts.sum())
    same(counts.cpu(), unfused.counts, case)
    same(handle.rank_counts.long().cpu(), unfused.by_rank, case)
    same(rows[:used], unfused.there(x), case)
    assert not rows[used:].any(), case
    y = torch.full((len(rows), case.dim + 8), float("nan"), dtype=case.dtype, device=device)
    y[:used] = torch.randn(used, case.dim + 8, generator=torch.Generator().manual_seed(me)).to(y)
    for scale in (weights, None):
        same(moe_combine(y, handle, scale), unfused.back(y[:used], scale, len(x)), case)


def _random(rank: Rank, seed: int, count: int) -> None:
    device = start(rank)
    random = Random(seed)
    for number in range(count):
        _check(random_case(random, rank.world_size, 100 * seed + number, DTYPES), device)


def test_random_shapes() -> None:
    run(_random, 1, 60)


def _large(rank: Rank) -> None:
    """More than 2^31 elements come back as they were."""
    device, world = start(rank), rank.world_size
    dim = 8320
    tokens = ((1 << 31) // dim // world + 8) * world
    x = torch.randn(tokens, dim, dtype=torch.bfloat16, device=device)
    ids = torch.arange(tokens, device=device).view(-1, 1) % world
    rows, counts, handle = moe_dispatch(x, ids, num_experts=world, max_tokens=tokens, max_rows=tokens)
    assert counts.tolist() == [tokens] and rows.numel() > 1 << 31
    assert torch.equal(rows[rank.rank * tokens // world :][: tokens // world], x[rank.rank :: world])
    assert torch.equal(moe_combine(rows, handle), x)


def test_more_elements_than_32_bits_count() -> None:
    run(_large)


def _real_sizes(rank: Rank) -> None:
    device = start(rank)
    world = rank.world_size
    for tokens, k, local, dim in ((1, 2, 8 // world, 1024), (64, 8, 64, 2048), (4096, 2, 8 // world, 1024),
                                  (2048, 8, 128 // world, 7168)):  # fmt: skip
        case = Case([tokens] * world, k, local, dim, torch.bfloat16, "distinct", seed=tokens)
        _check(case, device)
        _check(case, device, max_tokens=tokens)


def test_real_sizes() -> None:
    run(_real_sizes)


def _close(got: Tensor, wanted: Tensor, what: object, dtype: torch.dtype | None = None) -> None:
    """Allows the rounding of products in this dtype."""
    assert got.shape == wanted.shape and not got.isnan().any(), what
    error = (got.double().cpu() - wanted.double().cpu()).abs()
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    allowed = {torch.float32: 1e-4}.get(dtype or got.dtype, 3e-2) * max(scale, 1e-3)
    assert not error.numel() or float(error.max()) <= allowed, (what, float(error.max()), allowed)


def _layers(rank: Rank, seed: int, count: int) -> None:
    """As one operator and in pieces, both compared with products in float64."""
    device = start(rank)
    random = Random(seed)
    for number in range(count):
        case = random_case(random, rank.world_size, 100 * seed + number, DTYPES)
        case.dim = random.choice([64, 136, 512])
        x, ids, weights = draw(case, rank.rank, device)
        gated, ffn, activation = random.random() < 0.7, random.choice([8, 200, 384]), random.choice(sorted(ACTIVATIONS))
        w1, w2 = draw_experts(case, rank.rank, ffn, gated, device)
        got = moe_layer(x, ids, weights, w1, w2, activation=activation)
        rows, counts, handle = moe_dispatch(x, ids, num_experts=case.experts)
        y = torch.ops.ark.moe_experts(rows, counts, w1, w2, activation)
        same(got, moe_combine(y, handle, weights), ("one go", case, activation, gated, ffn))
        unfused = Unfused(case, ids)
        wide = [one.double() for one in (unfused.there(x), w1, w2)]
        exact = experts_one_by_one(wide[0], unfused.counts.tolist(), *wide[1:], activation)
        _close(got, unfused.back(exact, weights, len(x)), (case, activation, gated, ffn))


def test_layers() -> None:
    run(_layers, 2, 30)


@hopper
@pytest.mark.parametrize("ffn", [256, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tails_of_every_height(dtype: torch.dtype, ffn: int) -> None:
    """An expert's last tile has 1 to 128 rows, behind 0 to 2 whole ones.

    By ffn, the first product has fewer or more tiles than the GPU has blocks. By ffn, gate and room, every tile shape
    is chosen. Rows after the counts are NaN, and so is what an expert without rows would multiply.
    """
    device, local = torch.device("cuda", 0), 17
    case = Case([0], 1, local, 256, dtype, seed=ffn)
    w1, w2 = draw_experts(case, 0, ffn, True, device)
    w1[0], w2[0] = float("nan"), float("nan")
    for batch in range(8):
        counts = [0] + [batch + 8 * e + 1 + 128 * (e % 3) for e in range(local - 1)]
        case.tokens, case.seed = [sum(counts)], batch
        rows = draw(case, 0, device)[0]
        activation, first = sorted(ACTIVATIONS)[batch % 4], w1 if batch < 4 else w1[:, :ffn].contiguous()
        wanted = experts_one_by_one(rows.float(), counts, first.float(), w2.float(), activation)
        for room in (rows, torch.cat([rows, torch.full_like(rows, float("nan"))])):
            got = torch.ops.ark.moe_experts(room, torch.tensor(counts, device=device), first, w2, activation)
            _close(got[: len(rows)], wanted, (counts, activation, len(first[0]), len(room)), dtype)


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bits_of_activations(dtype: torch.dtype) -> None:
    """Matrices that give every number of the type to the activation, and what it makes of it to the result."""
    device = torch.device("cuda", 0)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    rows = torch.where(every.isfinite(), every, 0).view(1024, 64)
    counts, whole = torch.tensor([1000, 24], device=device), torch.eye(64, dtype=dtype, device=device).repeat(2, 1, 1)
    for activation in ("silu", "relu"):
        through = ACTIVATIONS[activation](rows)
        got = torch.ops.ark.moe_experts(rows, counts, whole, whole, activation)
        assert torch.equal(got, through), activation
        got = torch.ops.ark.moe_experts(rows, counts, whole.repeat(1, 2, 1), whole, activation)
        wanted = through * rows
        assert torch.equal(got[wanted.isfinite().all(1)], wanted[wanted.isfinite().all(1)]), activation


def _graphs(rank: Rank) -> None:
    """Replays use the current x, topk_ids and weights. Several calls in a graph do not overlap."""
    device = start(rank)
    world = rank.world_size
    cases = [Case([24] * world, 2, 2, 128, torch.bfloat16, "distinct", seed=seed) for seed in range(5)]
    cases[3].kind, cases[4].kind = "one", "none"
    most = {"max_tokens": 24, "max_rows": 48 * world}
    x, ids, weights = (one.clone() for one in draw(cases[0], rank.rank, device))
    w1, w2 = draw_experts(cases[0], rank.rank, 64, True, device)

    def step() -> list[Tensor]:
        rows, counts, handle = moe_dispatch(x, ids, num_experts=2 * world, **most)
        out = moe_combine(rows * 2, handle, weights)
        return [rows, counts, handle.places, out, moe_layer(x, ids, weights, w1, w2, **most)]

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [step() for _ in range(4)]
    for case in (*cases, *cases):
        for to, value in zip((x, ids, weights), draw(case, rank.rank, device), strict=True):
            to.copy_(value)
        for _ in range(50):
            graph.replay()
        wanted = step()
        for one in captured:
            for number, (got, value) in enumerate(zip(one, wanted, strict=True)):
                same(got, value, (case, number))


@hopper
def test_graphs() -> None:
    run(_graphs)


def _training_graph(rank: Rank, dtype: torch.dtype) -> None:
    """Forward and backward in a graph, also in a dtype whose eager calls need the host."""
    device = start(rank)
    world = rank.world_size
    case = Case([12] * world, 2, 2, 64, dtype, "distinct", seed=6)
    x, ids, weights = (one.clone() for one in draw(case, rank.rank, device))
    inputs = [one.requires_grad_() for one in (x, *draw_experts(case, rank.rank, 40, True, device))]

    def step() -> list[Tensor]:
        x, w1, w2 = inputs
        out = moe_layer(x, ids, weights, w1, w2, max_tokens=12)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (6, 7, 8):
        case.seed = seed
        ids.copy_(draw(case, rank.rank, device)[1])
        graph.replay()
        for number, (got, wanted) in enumerate(zip(captured, step(), strict=True)):
            _close(got.detach(), wanted.detach(), (dtype, seed, number))


@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_of_training(dtype: torch.dtype) -> None:
    run(_training_graph, dtype)


def _late(rank: Rank) -> None:
    """Kept results do not change; ranks may be late; sizes alternate."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    cases = [Case([tokens] * world, 2, 2, dim, torch.bfloat16, "distinct", seed=tokens)
             for tokens, dim in ((1, 256), (40, 72), (300, 1024))]  # fmt: skip
    drawn = [draw(case, me, device) for case in cases]

    def there_and_back(number: int) -> Tensor:
        x, ids, weights = drawn[number]
        rows, _, handle = moe_dispatch(x, ids, num_experts=2 * world, max_tokens=300)
        return moe_combine(rows, handle, weights)

    wanted = [there_and_back(number) for number in range(3)]
    kept = []
    for step in range(60):
        if step % world == me:
            torch.cuda._sleep(300_000)
        kept.append((step % 3, there_and_back(step % 3)))
    for number, out in kept:
        same(out, wanted[number], cases[number])


def test_many_calls() -> None:
    run(_late)


def _gradients(rank: Rank, dtype: torch.dtype) -> None:
    """Compares with the same layer on CPU ranks in float64."""
    device = start(rank)
    world = rank.world_size
    case = Case([20 + 3 * r for r in range(world)], 2, 2, 64, dtype, "distinct", seed=6)
    x, ids, weights = draw(case, rank.rank, device)
    made = [x, weights, *draw_experts(case, rank.rank, 40, True, device)]
    results = []
    for there in (lambda one: one, lambda one: one.cpu().double()):
        x, weights, w1, w2 = inputs = [there(one.detach().clone()).requires_grad_() for one in made]
        out = moe_layer(x, ids.to(x.device), weights, w1, w2)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(rank.rank)).to(out)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, gradient)])
    for number, (got, wanted) in enumerate(zip(*results, strict=True)):
        _close(got, wanted, (dtype, number), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype) -> None:
    run(_gradients, dtype)


def _bits_of_gradients(rank: Rank) -> None:
    """Gradients of rows, dispatched and combined, add in the order of the choices: they have the bits of CPU ranks."""
    device = start(rank)
    case = Case([9] * rank.world_size, 3, 2, 40, torch.bfloat16, seed=8)
    results = []
    for where in (device, torch.device("cpu")):
        x, ids, weights = draw(case, rank.rank, where)
        rows, _, handle = moe_dispatch(x.requires_grad_(), ids, num_experts=case.experts)
        out = moe_combine(rows, handle, weights)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(rank.rank)).to(out)
        results.append([out.detach().cpu(), torch.autograd.grad(out, x, gradient)[0].cpu()])
    for got, wanted in zip(*results, strict=True):
        same(got, wanted, "gradient")


def test_bits_of_gradients() -> None:
    run(_bits_of_gradients)


def _groups(rank: Rank) -> None:
    device = start(rank)
    other = dist.new_group(list(range(rank.world_size)))
    alone = [dist.new_group([r]) for r in range(rank.world_size)][rank.rank]
    for seed in range(6):
        for group, size in ((None, rank.world_size), (other, rank.world_size), (alone, 1)):
            _check(Case([11] * size, 2, 3, 80, DTYPES[seed % 3], seed=seed), device, group)
            _check(Case([0] * size, 2, 3, 80, DTYPES[seed % 3], seed=seed), device, group)
    for group, size in ((None, rank.world_size), (alone, 1)):  # no token chooses an expert
        x, ids = torch.ones(4, 16, device=device), torch.zeros(4, 0, dtype=torch.int64, device=device)
        rows, counts, handle = moe_dispatch(x, ids, group, num_experts=2 * size, max_rows=3)
        assert not rows.any() and counts.tolist() == [0, 0]
        same(moe_combine(rows, handle), torch.zeros_like(x), "no choice")


def test_groups() -> None:
    run(_groups, own=True)


def _compiled(rank: Rank) -> None:
    device = start(rank)
    case = Case([16] * rank.world_size, 2, 2, 64, torch.bfloat16, "distinct", seed=3)
    x, ids, weights = draw(case, rank.rank, device)
    w1, w2 = draw_experts(case, rank.rank, 32, True, device)
    layer = lambda x: moe_layer(torch.tanh(x), ids, weights, w1, w2) + x  # noqa: E731
    compiled = torch.compile(layer)
    with torch.no_grad():
        _close(compiled(x), layer(x), "compiled")
    gradients = []
    for function in (layer, compiled):
        mine = x.clone().requires_grad_()
        function(mine).float().square().sum().backward()
        gradients.append(mine.grad)
    _close(gradients[1], gradients[0], "compiled, backward")


def test_compiled() -> None:
    run(_compiled)


def _bad(rank: Rank) -> None:
    """Refused before a launch: an error on all ranks, and the group still works."""
    device = start(rank, timeout=20)
    odd, last = rank.rank == rank.world_size - 1, rank.world_size - 1
    experts = rank.world_size
    x, ids = torch.ones(4, 8, device=device), torch.zeros(4, 1, dtype=torch.int64, device=device)
    for more in ({}, {"max_tokens": 4, "max_rows": 4 * experts}):
        with pytest.raises(TypeError if odd else dist.DistBackendError) as caught:
            moe_dispatch(x, ids.float() if odd else ids, num_experts=experts, **more)
        wanted = "topk_ids is torch.float32" if odd else f"rank {last} refused its arguments"
        assert "moe_dispatch" in str(caught.value) and wanted in str(caught.value), caught.value
        with pytest.raises(dist.DistBackendError, match=f"rank {last} has another number of columns of x"):
            moe_dispatch(x[:, :4] if odd else x, ids, num_experts=experts, **more)
        rows, _, handle = moe_dispatch(x, ids, num_experts=experts, **more)
        same(moe_combine(rows, handle), x, "the group goes on")


@pytest.mark.skipif(WORLD < 2, reason="needs ranks that can disagree")
def test_bad_input() -> None:
    run(_bad, own=True)


def _bad_id(rank: Rank, what: str) -> str:
    """The launch ends the context, like a failed assertion. The next call names position and value."""
    device = start(rank, timeout=20)
    world, guilty = rank.world_size, rank.rank == 0 or what == "rows"
    x, ids = torch.ones(5, 64, device=device), torch.zeros(5, 2, dtype=torch.int32, device=device)
    more = {"max_tokens": 5, "max_rows": 10 * world}
    moe_dispatch(x, ids, num_experts=2 * world, **more)
    torch.cuda.synchronize()
    if what == "rows":
        more["max_rows"] = 10 * world - 1
    elif guilty:
        ids[3, 1] = 2 * world
    with pytest.raises(RuntimeError):
        for _ in range(3):
            moe_dispatch(x, ids, num_experts=2 * world, **more)
            torch.cuda.synchronize()
    if not guilty:
        return ""
    with pytest.raises(ValueError if what == "rows" else IndexError) as caught:
        moe_dispatch(x, ids, num_experts=2 * world, **more)
    return str(caught.value)


@pytest.mark.parametrize("what", ["id", "rows"])
def test_what_only_the_device_sees(what: str) -> None:
    told = run(_bad_id, what, own=True, destroy=False)[0]
    text = {"id": f"topk_ids[3][1] is {2 * WORLD}, and there are {2 * WORLD} experts",
            "rows": f"the experts of rank 0 get {10 * WORLD} rows, and max_rows is {10 * WORLD - 1}"}  # fmt: skip
    assert "moe_dispatch" in told and text[what] in told, told
