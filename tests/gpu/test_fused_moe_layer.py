"""moe_layer in one kernel: the bits of dispatch, products and combine, in eager calls and graphs, for any routing."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support.moe import ACTIVATIONS, Case, draw, draw_experts, random_case
from support.products import same
from support.rank import Rank
from torch import Tensor

from ark_torch.ops import moe_combine, moe_dispatch, moe_layer

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(WORLD < 2 or not HOPPER, reason="ranks on Hopper GPUs")
HALVES = (torch.bfloat16, torch.float16)


def _pieces(case: Case, x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, activation: str) -> Tensor:
    rows, counts, handle = moe_dispatch(x, ids, num_experts=case.experts, max_tokens=max(case.tokens))
    return moe_combine(torch.ops.ark.moe_experts(rows, counts, w1, w2, activation), handle, weights)


def _random(rank: Rank, seed: int, count: int) -> None:
    device = start(rank)
    random = Random(seed)
    for number in range(count):
        case = random_case(random, rank.world_size, 100 * seed + number, HALVES)
        if not any(case.tokens):
            case.tokens[0] = 5
        case.dim = random.choice([8, 64, 136, 520])
        x, ids, weights = draw(case, rank.rank, device)
        gated, ffn, activation = random.random() < 0.7, random.choice([8, 200, 384]), random.choice(sorted(ACTIVATIONS))
        w1, w2 = draw_experts(case, rank.rank, ffn, gated, device)
        most = {} if number % 2 else {"max_tokens": max(case.tokens)}
        got = moe_layer(x, ids, weights, w1, w2, activation=activation, form="fused", **most)
        same(got, _pieces(case, x, ids, weights, w1, w2, activation), (case, activation, gated, ffn))


def test_random_shapes() -> None:
    run(_random, 3, 40)


def _real_sizes(rank: Rank, dim: int, ffn: int) -> None:
    """Numbers of tokens for which each tile shape is chosen; distinct experts, and all tokens to one expert."""
    device = start(rank)
    world = rank.world_size
    for tokens in (1, 4, 16, 64, 384, 1024, 4096):
        for kind in ("distinct", "one"):
            case = Case([tokens] * world, 2, 8 // world, dim, torch.bfloat16, kind, seed=tokens)
            x, ids, weights = draw(case, rank.rank, device)
            w1, w2 = draw_experts(Case([], 2, 8 // world, dim, torch.bfloat16, seed=1), rank.rank, ffn, True, device)
            wanted = _pieces(case, x, ids, weights, w1, w2, "silu")
            for _ in range(3):
                same(moe_layer(x, ids, weights, w1, w2, max_tokens=tokens, form="fused"), wanted, case)


def test_real_sizes() -> None:
    run(_real_sizes, 1024, 2048)


def _graphs(rank: Rank) -> None:
    """Replays use the current tokens and choices, between launches of other operators."""
    device = start(rank)
    world = rank.world_size
    cases = [Case([300] * world, 2, 4, 256, torch.bfloat16, "distinct", seed=seed) for seed in range(5)]
    cases[3].kind, cases[4].kind = "one", "none"
    x, ids, weights = (one.clone() for one in draw(cases[0], rank.rank, device))
    w1, w2 = draw_experts(cases[0], rank.rank, 192, True, device)

    def step() -> list[Tensor]:
        rows, _, handle = moe_dispatch(x, ids, num_experts=4 * world, max_tokens=300)
        made = [moe_layer(x, ids, weights, w1, w2, max_tokens=300, form=form) for form in ("fused", "unfused", "fused")]
        return [*made, moe_combine(rows, handle, weights)]

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = [step() for _ in range(2)]
    for case in (*cases, *cases):
        for to, value in zip((x, ids, weights), draw(case, rank.rank, device), strict=True):
            to.copy_(value)
        for _ in range(20):
            graph.replay()
        wanted = step()
        same(wanted[0], wanted[1], case)
        for one in captured:
            for number, (got, value) in enumerate(zip(one, wanted, strict=True)):
                same(got, value, (case, number))


def test_graphs() -> None:
    run(_graphs)


def _late(rank: Rank) -> None:
    """Ranks come late by turns, sizes alternate, and earlier results stay."""
    device = start(rank)
    me, world = rank.rank, rank.world_size
    drawn: list[tuple[Any, ...]] = []
    for tokens in ([1] * world, [40 + 9 * r for r in range(world)], [700 if r == 0 else 0 for r in range(world)]):
        case = Case(tokens, 2, 2, 512, torch.bfloat16, "distinct", seed=sum(tokens))
        drawn.append((case, *draw(case, me, device), *draw_experts(case, me, 320, True, device)))
    wanted = [_pieces(*one, "gelu") for one in drawn]
    kept = []
    for step in range(90):
        if step % world == me:
            torch.cuda._sleep(200_000)
        case, *inputs = drawn[step % 3]
        out = moe_layer(*inputs, activation="gelu", max_tokens=max(case.tokens), form="fused")
        kept.append((step % 3, out))
    for number, out in kept:
        same(out, wanted[number], drawn[number][0])


def test_many_calls() -> None:
    run(_late)


def _profiled(rank: Rank) -> None:
    """Stamps of each block: as many tasks as there are tiles, and no time is longer than the whole."""
    device = start(rank)
    case = Case([64] * rank.world_size, 2, 2, 256, torch.bfloat16, "distinct", seed=2)
    x, ids, weights = draw(case, rank.rank, device)
    w1, w2 = draw_experts(case, rank.rank, 128, True, device)
    wanted = _pieces(case, x, ids, weights, w1, w2, "silu")
    stamps = torch.zeros(160, 14, 2, dtype=torch.int64, device=device)
    torch.ops.ark.moe_layer_profile(stamps)
    try:
        same(moe_layer(x, ids, weights, w1, w2, max_tokens=64, form="fused"), wanted, "profiled")
    finally:
        torch.ops.ark.moe_layer_profile(None)
    same(moe_layer(x, ids, weights, w1, w2, max_tokens=64, form="fused"), wanted, "not profiled")
    told = stamps[stamps[:, 0, 1] == 1].cpu()
    assert len(told) > 0 and (told[:, 0, 0] > 0).all()
    assert int(told[:, 8, 1].sum()) > 0 and int(told[:, 9, 1].sum()) > 0
    assert (told[:, [1, 2, 3, 4], 0] <= told[:, :1, 0]).all()


def test_profile() -> None:
    run(_profiled)


def _refused(rank: Rank) -> None:
    """Forms that ranks cannot take are refused by all of them, and the group goes on."""
    device = start(rank, timeout=20)
    case = Case([6] * rank.world_size, 2, 2, 64, torch.bfloat16, "distinct", seed=1)
    x, ids, weights = draw(case, rank.rank, device)
    w1, w2 = draw_experts(case, rank.rank, 64, True, device)
    wanted = _pieces(case, x, ids, weights, w1, w2, "silu")
    wide = [one.float() for one in (x, w1, w2)]
    with pytest.raises(ValueError, match="form is 'fused', and it needs float16 or bfloat16"):
        moe_layer(wide[0], ids, weights, *wide[1:], max_tokens=6, form="fused")
    odd = rank.rank == 0
    with pytest.raises(dist.DistBackendError, match="another operator, or form"):
        moe_layer(x, ids, weights, w1, w2, max_tokens=6, form="fused" if odd else "unfused")
    same(moe_layer(x, ids, weights, w1, w2, max_tokens=6, form="fused"), wanted, "the group goes on")


def test_refused() -> None:
    run(_refused, own=True)


def _bad_id(rank: Rank) -> str:
    """The launch ends the context; the next call names position and value."""
    device = start(rank, timeout=20)
    case = Case([5] * rank.world_size, 2, 2, 64, torch.bfloat16, "distinct", seed=1)
    x, ids, weights = draw(case, rank.rank, device)
    w1, w2 = draw_experts(case, rank.rank, 64, True, device)

    def layer() -> None:
        moe_layer(x, ids, weights, w1, w2, max_tokens=5, form="fused")
        torch.cuda.synchronize()

    layer()
    if rank.rank == 0:
        ids[3, 1] = case.experts
    with pytest.raises(RuntimeError):
        for _ in range(3):
            layer()
    if rank.rank != 0:
        return ""
    with pytest.raises(IndexError) as caught:
        layer()
    return str(caught.value)


def test_what_only_the_device_sees() -> None:
    told = run(_bad_id, own=True, destroy=False)[0]
    assert f"topk_ids[3][1] is {2 * WORLD}, and there are {2 * WORLD} experts" in told, told
