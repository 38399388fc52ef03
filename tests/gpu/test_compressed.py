"""Compressed collectives on CUDA tensors have the bits of the CPU path, which tests/distributed compares with an
oracle.

Every type, width, format and rounding; buckets of a warp and of a block; odd sizes and offsets; residuals; graphs.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, busy, run, same, start
from support.rank import Rank
from torch import Tensor

from ark_torch.distributed import compressed_all_reduce

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# numel, bits and bucket of each segment. A bucket above 512 uses a block.
LAYOUTS: dict[str, list[tuple[int, int, int]]] = {
    "nothing": [(0, 4, 512)],
    "no segment": [],
    "one element": [(1, 3, 128)],
    "odd": [(1003, 5, 160), (0, 2, 128), (129, 1, 128), (7, 8, 4096), (5001, 4, 4096)],
    "exact": [(300, 0, 128), (2049, 4, 512), (1, 0, 128), (33, 7, 1024), (4097, 0, 4096)],
    "all widths": [(257 + bits, bits, 128) for bits in range(1, 9)],
    "all widths of blocks": [(4097 + bits, bits, 2048) for bits in range(1, 9)],
    "more than a launch takes": [(100 + i, 1 + i % 8, 128 if i % 3 else 1024) for i in range(150)],
    "large": [(3_000_001, 4, 512)],
}
FP8 = {
    "fp8": [(700, 8, 256), (65, 0, 128), (513, 8, 512), (9000, 8, 4096)],
    "large": [(1_000_003, 8, 512)],
}
CASES = [
    *(("uniform", name, layout) for name, layout in LAYOUTS.items()),
    *(("fp8", name, layout) for name, layout in FP8.items()),
]


def _drawn(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def _lists(layout: list[tuple[int, int, int]]) -> tuple[list[int], ...]:
    return tuple([segment[i] for segment in layout] for i in range(3))


def _with_residual(name: str, x: Tensor, owed: Tensor | None, *arguments: Any) -> list[Tensor]:
    """Returns the operator's result and its new residual."""
    owed = None if owed is None else owed.clone()
    result = getattr(torch.ops.ark, name)(x, owed, *arguments)
    return [result] if owed is None else [result, owed]


def _quantiser(rank: Rank) -> None:
    device = start(rank)
    for seed, (dtype, rounding, bucket) in enumerate(product(DTYPES, ("nearest", "stochastic"), (128, 160, 512, 4096))):
        for numel, (format, bits) in product(
            (0, 1, 7, 8, 9, 130, 513, 5000, 100_003),
            [("fp8", 8), *(("uniform", bits) for bits in range(1, 9))],
        ):
            what = f"{dtype} {rounding} {bucket} {numel} {format} {bits}"
            x = _drawn(numel, dtype, seed)
            codes = torch.ops.ark.quantize(x, bits, bucket, format, rounding, seed)
            same(torch.ops.ark.quantize(x.to(device), bits, bucket, format, rounding, seed), codes, what)
            back = torch.ops.ark.dequantize(codes, numel, dtype, bits, bucket, format)
            same(torch.ops.ark.dequantize(codes.to(device), numel, dtype, bits, bucket, format), back, what)
        # The start of the tensor decides how it is read, and must change nothing else.
        x = _drawn(2001, dtype, seed)
        for offset in (1, 3, 8):
            part, there = x[offset:], x.to(device)[offset:]
            codes = torch.ops.ark.quantize(part, 4, bucket, "uniform", rounding, seed)
            same(torch.ops.ark.quantize(there, 4, bucket, "uniform", rounding, seed), codes, f"{dtype} at {offset}")


def test_the_quantiser_alone() -> None:
    run(_quantiser, world=1)


def _special(rank: Rank) -> None:
    """NaN, infinities, both zeros, subnormal numbers, and a range that overflows float32."""
    device = start(rank)
    tiny = torch.arange(600) * 1e-41
    large = torch.linspace(-3e38, 3e38, 600)
    for format, bits in (("uniform", 4), ("uniform", 8), ("fp8", 8)):
        for rounding, dtype in product(("nearest", "stochastic"), DTYPES):
            for x in (
                *(_drawn(600, torch.float32, 3).index_fill(0, torch.tensor([517]), bad)
                  for bad in (torch.nan, torch.inf, -torch.inf)),
                torch.zeros(600), -torch.zeros(600), torch.full((600,), -3.25), tiny, -tiny, large,
            ):  # fmt: skip
                x = x.to(dtype)  # noqa: PLW2901
                codes = torch.ops.ark.quantize(x, bits, 512, format, rounding, 9)
                there = torch.ops.ark.quantize(x.to(device), bits, 512, format, rounding, 9)
                same(there, codes, f"{format} {bits} {rounding} {dtype} {x[:3]}")
                back = torch.ops.ark.dequantize(codes, 600, dtype, bits, 512, format)
                same(torch.ops.ark.dequantize(there, 600, dtype, bits, 512, format), back, f"{format} {bits} {x[:3]}")


def test_special_values() -> None:
    run(_special, world=1)


def _collectives(rank: Rank) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    group = dist.group.WORLD.group_name
    cases = list(product(CASES, ("nearest", "stochastic"), ("sum", "avg"), (False, True)))
    for number, ((format, name, layout), rounding, op, fed) in enumerate(cases):
        dtype = DTYPES[number % 3]
        numel, bits, bucket = _lists(layout)
        count = sum(numel)
        arguments = (numel, bits, bucket, format, rounding, 1000 + me)
        for operator, elements in (
            ("compressed_all_reduce", count),
            ("compressed_reduce_scatter", count * world),
        ):
            what = f"{operator} {format} {name} {rounding} {op} {dtype} {'fed' if fed else 'not fed'}"
            x = _drawn(elements, dtype, 10 * number + me)
            owed = _drawn(elements, torch.float32, 10 * number + me + 5) / 7 if fed else None
            on_cpu = _with_residual(operator, x, owed, *arguments, op, group)
            busy(1)
            there = x.to(device, non_blocking=True)
            on_gpu = _with_residual(operator, there, None if owed is None else owed.to(device), *arguments, op, group)
            for got, expected in zip(on_gpu, on_cpu, strict=True):
                same(got, expected, what)
            same(there, x, f"{what}: the input")
        x = _drawn(count, dtype, 10 * number + me)
        expected = torch.ops.ark.compressed_all_gather(x, *arguments, group)
        same(torch.ops.ark.compressed_all_gather(x.to(device), *arguments, group), expected, f"all_gather {name}")


def test_collectives() -> None:
    run(_collectives)


def _rounds(rank: Rank) -> None:
    """Larger than the shared memory for it: several rounds, the same bits and owners."""
    device = start(rank)
    group = dist.group.WORLD.group_name
    layout = [(34_000_001, 8, 512), (5000, 0, 128), (100_000, 3, 4096)]
    count = sum(segment[0] for segment in layout)
    arguments = (*_lists(layout), "uniform", "stochastic", 3, "avg", group)
    x, owed = _drawn(count, torch.bfloat16, rank.rank), _drawn(count, torch.float32, 5 + rank.rank) / 9
    there = _with_residual("compressed_all_reduce", x.to(device), owed.to(device), *arguments)
    for got, expected in zip(there, _with_residual("compressed_all_reduce", x, owed, *arguments), strict=True):
        same(got, expected, "rounds")


def test_round_by_round() -> None:
    run(_rounds)


def _every_rank_has_the_same(rank: Rank) -> None:
    device = start(rank)
    x = torch.randn(1_000_003, device=device, dtype=torch.bfloat16)
    got = compressed_all_reduce(x, bits=4)
    gathered = [torch.empty_like(got) for _ in range(rank.world_size)]
    dist.all_gather(gathered, got)
    for other in gathered:
        same(other, got, "ranks")
    exact = x.float()
    dist.all_reduce(exact)
    assert (got.float() - exact).abs().max() < 2.0 * rank.world_size


def test_every_rank_has_the_same() -> None:
    run(_every_rank_has_the_same)


def _captured(rank: Rank) -> None:
    """Replays use the current values, including the residual."""
    device = start(rank)
    me = rank.rank
    group = dist.group.WORLD.group_name
    layout = [(70_001, 4, 512), (300, 0, 128), (9001, 6, 4096)]
    count = sum(segment[0] for segment in layout)
    arguments = (*_lists(layout), "uniform", "stochastic", 5, "avg", group)
    x, residual = torch.zeros(count, device=device, dtype=torch.bfloat16), torch.zeros(count, device=device)
    torch.ops.ark.compressed_all_reduce(x, residual, *arguments)  # ranks compare arguments, kernels are compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        out = torch.ops.ark.compressed_all_reduce(x, residual, *arguments)
    owed = torch.zeros(count)
    residual.zero_()
    for replay in range(4):
        given = _drawn(count, torch.bfloat16, 7 * replay + me)
        x.copy_(given)
        graph.replay()
        expected = torch.ops.ark.compressed_all_reduce(given, owed, *arguments)
        same(out, expected, f"replay {replay}")
        same(residual, owed, f"residual of replay {replay}")
    dist.barrier()


def test_in_a_graph() -> None:
    run(_captured)


NOTHING = 2**63 - 1


def _word() -> Tensor:
    return torch.full((1,), NOTHING).pin_memory()


def _first(result: Tensor) -> int:
    bad = (~result.isfinite()).nonzero().flatten().tolist()
    return bad[0] if bad else NOTHING


def _nonfinite(rank: Rank) -> None:
    """The smallest index of a NaN or infinity, in buckets of a warp and of a block, coded and exact."""
    device = start(rank)
    group = dist.group.WORLD.group_name
    layout = [(300, 0, 128), (5001, 4, 512), (9001, 8, 4096), (4097, 0, 4096), (77, 3, 128)]
    count = sum(segment[0] for segment in layout)
    arguments = (*_lists(layout), "uniform", "nearest", 0, "sum", group)
    places = (None, 0, 299, 301, 5300, 5301, 14_301, 14_302, count - 78, count - 77, count - 1)
    for number, (place, bad) in enumerate(product(places, (torch.nan, torch.inf, -torch.inf))):
        for operator, rows in (("compressed_all_reduce", 1), ("compressed_reduce_scatter", rank.world_size)):
            what = f"{operator} {place} {bad}"
            x = _drawn(rows * count, DTYPES[number % 3], 10 * number + rank.rank).to(device)
            if place is not None and rank.rank == rank.world_size - 1:
                x.view(rows, count)[:, place] = bad
            word = _word()
            result = getattr(torch.ops.ark, operator)(x, None, *arguments, nonfinite=word)
            torch.cuda.synchronize()
            assert word.item() == _first(result), what
            assert (word.item() == NOTHING) == (place is None), what
    # Finite numbers that float16 cannot add up; what a slot holds already stays if it is smaller.
    x = torch.ones(3000, device=device, dtype=torch.float16)
    x[1234], x[2999] = 60000.0, -60000.0
    one = ([3000], [0], [512], "uniform", "nearest", 0, "sum", group)
    for before in (NOTHING, 2000, 17):
        word = _word()
        word[0] = before
        result = torch.ops.ark.compressed_all_reduce(x, None, *one, nonfinite=word)
        torch.cuda.synchronize()
        assert word.item() == min(before, 1234 if rank.world_size > 1 else NOTHING)
        assert result[1234].isinf() == (rank.world_size > 1)


def test_the_first_nan_or_infinity_is_noted() -> None:
    run(_nonfinite)


def _nonfinite_in_a_graph(rank: Rank) -> None:
    """Replays note it in the slot that was captured."""
    device = start(rank)
    group = dist.group.WORLD.group_name
    arguments = (*_lists([(70_001, 4, 512), (300, 0, 128)]), "uniform", "nearest", 5, "avg", group)
    x, word = torch.zeros(70_301, device=device), _word()
    torch.ops.ark.compressed_all_reduce(x, None, *arguments, nonfinite=word)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        out = torch.ops.ark.compressed_all_reduce(x, None, *arguments, nonfinite=word)
    for place in (None, 70_100, 9, None):
        x.zero_()
        if place is not None and rank.rank == 0:
            x[place] = torch.nan
        word[0] = NOTHING
        graph.replay()
        torch.cuda.synchronize()
        assert word.item() == _first(out) and (word.item() == NOTHING) == (place is None), place
    dist.barrier()


def test_a_replay_notes_nan() -> None:
    run(_nonfinite_in_a_graph)


def _streams(rank: Rank) -> None:
    """On the current stream, after its earlier work. The host does not wait."""
    device = start(rank)
    side = torch.cuda.Stream(device)
    x = torch.zeros(100_000, device=device)
    compressed_all_reduce(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy(50)
        x.fill_(float(rank.rank + 1))
        got = compressed_all_reduce(x)
        assert not side.query(), "the host waited"
    torch.cuda.current_stream().wait_stream(side)
    assert (got == sum(range(1, rank.world_size + 1))).all()


def test_on_the_current_stream() -> None:
    run(_streams)


def _bad(rank: Rank) -> None:
    device = start(rank)
    x = torch.ones(1000, device=device)
    assert (compressed_all_reduce(x) == rank.world_size).all()
    with pytest.raises(TypeError, match=re.escape("input is torch.int32")):
        compressed_all_reduce(x.int())
    group = dist.group.WORLD.group_name
    arguments = ([1000], [4], [512], "uniform", "nearest", 0, "sum", group)
    with pytest.raises(ValueError, match="residual is on cpu and input on cuda"):
        torch.ops.ark.compressed_all_reduce(x, torch.zeros(1000), *arguments)
    for word in (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64, device=device)):
        with pytest.raises(ValueError, match=r"nonfinite is on .*pin_memory=True"):
            torch.ops.ark.compressed_all_reduce(x, None, *arguments, nonfinite=word)
    if rank.world_size > 1:
        with pytest.raises(dist.DistBackendError, match=r"another bits than rank 0 \(8, 4\)" if WORLD == 2 else "bits"):
            compressed_all_reduce(x, bits=8 if rank.rank == 1 else 4, bucket=256)
    assert (compressed_all_reduce(x) == rank.world_size).all()


def test_bad_input() -> None:
    run(_bad, own=True)


def _compiled(rank: Rank) -> None:
    device = start(rank)

    def step(x: Tensor) -> Tensor:
        return compressed_all_reduce(x * 2, bits=8, format="fp8") + 1

    compiled = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        x = torch.randn(64, 300, device=device, dtype=torch.bfloat16)
        same(compiled(x), step(x), "compiled")


def test_compiled() -> None:
    run(_compiled, own=True)
