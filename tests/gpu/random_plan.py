"""The plan of the random operations: what all ranks do for a seed, and in which groups.

Nothing in it depends on the rank. Reductions use dtypes that NCCL supports, and operations whose results on small
integers are exact, so that bits must agree in any order of addition.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.reference import ALL_DTYPES

KINDS = (
    *("all_reduce", "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"),
    *("reduce_scatter_tensor", "gather", "scatter", "all_to_all_single", "all_to_all", "send_recv"),
)
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
# NCCL's own dtypes. It moves all others as bytes, and ark's reductions of those are tested elsewhere.
NCCL_INTS = (torch.uint8, torch.int8, torch.int32, torch.int64)
NCCL_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NCCL_DTYPES = (torch.bool, *NCCL_INTS, *NCCL_FLOATS)
# Floats are more frequent, as in practice.
REDUCED = (*NCCL_DTYPES, *NCCL_FLOATS, torch.complex64)
SIZES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 64, 100, 127, 128, 255, 257, 513, 1000, 1024, 2049, 4097)
LARGE = (16_385, 65_537, 262_147)
POOL = 3 << 20


@dataclass(frozen=True)
class Step:
    """One operation of the plan, the same on every rank."""

    number: int
    kind: str
    dtype: torch.dtype
    op: str
    count: int
    shift: int  # elements before the tensor; +1 on odd ranks, for different alignments
    at: int  # where the values start in the pool
    group: int
    root: int  # in the group
    stream: int
    how: str  # sync, async, graph
    splits: tuple[tuple[int, ...], ...]


@dataclass
class Group:
    members: list[int]
    ark: Any
    rival: Any


def ops_for(dtype: torch.dtype, ranks: int) -> list[str]:
    """Returns the reduce ops that both support, with equal bits."""
    if dtype.is_complex:
        return ["SUM"]
    if dtype in NCCL_FLOATS:
        exact = ranks & (ranks - 1) == 0  # a mean of 3 is rounded, differently by each implementation
        return ["SUM", "SUM", "MIN", "MAX", "PRODUCT", *(["AVG"] if exact else [])]
    return ["SUM", "MIN", "MAX", "PRODUCT"]


class Plan:
    """Draws steps. Nothing depends on the rank."""

    def __init__(self, seed: int, groups: list[list[int]], streams: int, graphs: bool, kinds: tuple[str, ...]) -> None:
        self._random = random.Random(seed)
        self._groups, self._streams, self._graphs, self._kinds = groups, streams, graphs, kinds
        self._number = -1

    def draw(self) -> Step:
        rng = self._random
        self._number += 1
        group = 0 if rng.random() < 0.6 else rng.randrange(len(self._groups))
        size = len(self._groups[group])
        kind = "barrier" if rng.random() < 0.003 else rng.choice(self._kinds)
        dtype = rng.choice(REDUCED if kind in REDUCING else ALL_DTYPES)
        if dtype.is_complex and kind in ("reduce_scatter", "reduce_scatter_tensor"):
            dtype = torch.float32  # NCCL does not add complex numbers there
        draw = rng.random()
        count = rng.choice(LARGE) if draw < 0.01 else rng.choice(SIZES) if draw < 0.8 else rng.randrange(3000)
        graph = self._graphs and rng.random() < 0.02 and kind != "barrier"
        return Step(
            number=self._number,
            kind=kind,
            dtype=dtype,
            op=rng.choice(ops_for(dtype, size)),
            count=count,
            shift=rng.choice((0, 0, 1, 3, 8)),
            at=rng.randrange(POOL // 8),
            group=group,
            root=rng.randrange(size),
            stream=rng.randrange(self._streams),
            how="graph" if graph else "async" if rng.random() < 0.3 else "sync",
            splits=tuple(tuple(rng.choice((0, 1, 7, 60, 300)) for _ in range(size)) for _ in range(size)),
        )


def make_groups(rival: str, device: torch.device) -> list[Group]:
    """Creates the world, a second group over it, and parts of it, in the same order on every rank, each warmed up."""
    world = list(range(dist.get_world_size()))
    halves = [world[: (len(world) + 1) // 2], world[(len(world) + 1) // 2 :], world[::-1][: max(1, len(world) - 1)]]
    layouts = [world, world, *(sorted(part) for part in halves if part)]
    groups = []
    for members in layouts:
        group = Group(members, dist.new_group(members), dist.new_group(members, backend=rival))
        if dist.get_rank() in members:
            for handle in (group.ark, group.rival):
                dist.all_reduce(torch.ones(1, device=device), group=handle)
        groups.append(group)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return groups
