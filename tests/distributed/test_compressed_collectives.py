"""Compressed collectives on CPU ranks: values against an oracle in plain torch (support/quantizer.py), to the bit.

Over shared memory and over Gloo. What all ranks get is compared, residuals too; then what is refused, what ranks that
disagree are told, and a peer that dies.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from support import quantizer
from support.grid import each_world, run
from support.groups import ark_only
from support.quantizer import Segment, Settings
from support.rank import Rank
from torch import Tensor

pytestmark = [ark_only]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Odd sizes, empty segments, one-element buckets, one bucket, exact segments, all widths.
LAYOUTS: dict[str, list[Segment]] = {
    "one bucket": [Segment(512)],
    "one element": [Segment(1, 3, 128)],
    "nothing": [Segment(0)],
    "no segment": [],
    "odd": [Segment(1003, 5, 160), Segment(0, 2, 128), Segment(129, 1, 128), Segment(7, 8, 4096)],
    "exact": [Segment(300, 0, 128), Segment(2049, 4, 512), Segment(1, 0, 128), Segment(33, 7, 128)],
    "all widths": [Segment(257 + bits, bits, 128) for bits in range(1, 9)],
    "fp8": [Segment(700, 8, 256), Segment(65, 0, 128), Segment(513, 8, 512)],
}


def _arguments(segments: list[Segment], settings: Settings) -> tuple[Any, ...]:
    return (
        [s.numel for s in segments],
        [s.bits for s in segments],
        [s.bucket for s in segments],
        settings.format,
        settings.rounding,
        settings.seed,
    )


def _drawn(count: int, dtype: torch.dtype, seed: int, world: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=generator) * 3).to(dtype) for _ in range(world)]


def _same(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def _cases(name: str) -> list[Settings]:
    formats = ["fp8"] if name == "fp8" else ["uniform"]
    return [Settings(f, r, 11) for f, r in product(formats, ("nearest", "stochastic"))]


def _against_oracle(rank: Rank, dtypes: tuple[torch.dtype, ...]) -> None:
    rank.init()
    torch.set_num_threads(1)
    group = dist.group.WORLD
    _check_all(rank.rank, rank.world_size, group, dtypes)


def _check_all(me: int, world: int, group: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    operators = torch.ops.ark
    for seed, ((name, segments), dtype) in enumerate(product(LAYOUTS.items(), dtypes)):
        count = sum(s.numel for s in segments)
        of = quantizer.owners(segments, dtype.itemsize, world)
        for settings, op, fed in product(_cases(name), ("sum", "avg"), (False, True)):
            what = f"{name}, {dtype}, {settings}, {op}, {'fed' if fed else 'not fed'}"
            arguments = _arguments(segments, settings)
            inputs = _drawn(count, dtype, seed, world)
            owed = [x.float() / 7 for x in _drawn(count, torch.float32, seed + 1, world)] if fed else None
            residual = owed[me].clone() if owed else None
            kept = inputs[me].clone()
            got = operators.compressed_all_reduce(inputs[me], residual, *arguments, op, group.group_name)
            _same(inputs[me], kept, f"{what}: the input")
            _same(got, quantizer.all_reduce(inputs, owed, segments, settings, op, of), what)
            if residual is not None and owed is not None:
                _same(residual, owed[me], f"{what}: residual")

            inputs = _drawn(count * world, dtype, seed + 2, world)
            owed = [x / 7 for x in _drawn(count * world, torch.float32, seed + 3, world)] if fed else None
            residual = owed[me].clone() if owed else None
            got = operators.compressed_reduce_scatter(inputs[me], residual, *arguments, op, group.group_name)
            expected = quantizer.reduce_scatter(inputs, owed, segments, settings, op)
            _same(got, expected[me * count : (me + 1) * count], f"reduce_scatter, {what}")
            if residual is not None and owed is not None:
                _same(residual, owed[me], f"reduce_scatter, {what}: residual")
        for settings in _cases(name):
            inputs = _drawn(count, dtype, seed, world)
            got = operators.compressed_all_gather(inputs[me], *_arguments(segments, settings), group.group_name)
            _same(got, quantizer.all_gather(inputs, segments, settings), f"all_gather, {name}, {dtype}, {settings}")


@each_world
def test_values(world: int, carrier: str) -> None:
    run(_against_oracle, world, carrier, DTYPES if world == 2 and carrier == "shm" else (torch.bfloat16,))
