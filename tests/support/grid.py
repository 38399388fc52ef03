"""The parameters of the collectives' tests: dtypes, operations, sizes, numbers of ranks, and carriers.

The same bodies run over shared memory and over Gloo (ARK_SHARED_MEMORY=off). The carrier must not change the bits,
which are those of support/reference.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support import layouts, reference
from support.launcher import BACKEND, run_ranks
from support.reference import make_input, reduce, supported

OPS: tuple[str, ...] = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
DTYPES: tuple[torch.dtype, ...] = reference.ALL_DTYPES
SPREAD: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
)
LAYOUTS: tuple[str, ...] = layouts.LAYOUTS
SMALL = (0, 1, 3, 1023)
LARGE = (65537, (1 << 20) + 3)
WORLDS = [1, 2, 3, 4]
CARRIERS = {"shm": {}, "gloo": {"ARK_SHARED_MEMORY": "off"}}
if BACKEND == "gloo":  # plain Gloo's features, for working on the tests themselves
    DTYPES = SPREAD = (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)
    OPS, LAYOUTS = ("SUM", "PRODUCT", "MIN", "MAX"), ("plain",)

# Large sizes for one type of each width, because data movement depends only on the width.
WIDTHS = (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
SIZED = [(dtype, count) for dtype in DTYPES for count in SMALL + (LARGE[:1] if dtype in WIDTHS else ())]


def factor_of(rank: int) -> float:
    return 0.25 + 0.375 * rank


def op_of(name: str, rank: int) -> Any:
    return dist._make_nccl_premul_sum(factor_of(rank)) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def expected_of(dtype: torch.dtype, count: int, seed: int, world: int, op: str) -> torch.Tensor:
    inputs = [make_input(dtype, count, seed, r) for r in range(world)]
    return reduce(inputs, op, [factor_of(r) for r in range(world)])


def cases() -> list[tuple[torch.dtype, str]]:
    return [(dtype, op) for dtype, op in itertools.product(DTYPES, OPS) if supported(dtype, op)]


def uneven_splits(world: int, seed: int) -> list[list[int]]:
    """splits[s][d] is the number of elements from s to d. Some rows and columns are empty."""
    return [[((s + 2 * d + seed) * 37) % 50 if (s + d + seed) % 3 else 0 for d in range(world)] for s in range(world)]


def each_world(test: Any) -> Any:
    """W = 1, 2, 3 over shared memory, 2 over Gloo (4 and 3 at night). W = 2 is quick."""
    parameters = []
    for world in WORLDS:
        marks = {2: [pytest.mark.quick], 4: [pytest.mark.nightly]}.get(world, [])
        parameters.append(pytest.param(world, "shm", marks=marks, id=f"{world}"))
    parameters.append(pytest.param(2, "gloo", id="2-carried"))
    parameters.append(pytest.param(3, "gloo", marks=[pytest.mark.nightly], id="3-carried"))
    return pytest.mark.parametrize("world, carrier", parameters)(test)


def run(body: Any, world: int, carrier: str, *args: Any) -> list[Any]:
    return run_ranks(body, world, *args, env=CARRIERS[carrier], timeout=200)
