"""Groups on the pretended device: the stand-in for NCCL, the log lines, and every collective once."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ark_torch
from ark_torch import _C
from ark_torch.distributed import group as making
from support import pretended
from support.rank import Rank
from support.told import Lines

BIG, SMALL = 6144, 1536  # elements of float32; the table below gives NCCL tensors of 24 KB and more
FROM = 4 * BIG
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("all_gather", "broadcast", "all_to_all")


def table(size: int, names: tuple[str, ...] = REDUCING + MOVING) -> list[tuple[int, dict[str, int]]]:
    return [(size, {f"nccl_{name}_from": FROM for name in names})]


def begin(
    rank: Rank, fails: bool = False, carrier: str = "nccl", **options: Any
) -> tuple[Any, pretended.Carriers, Lines]:
    """Returns the world group on the pretended device, its carriers, and the lines that it logs."""
    pretended.enter()
    pretended.device.set_device(rank.rank)
    lines = Lines()
    rank.init()
    inner = [dist.new_group() for _ in range(2)]
    carriers = pretended.Carriers(inner, fails and rank.rank == rank.world_size - 1, carrier)
    setattr(making, f"_make_{carrier}", carriers)
    making.dist.is_nccl_available = lambda: carrier == "nccl"
    given = ark_torch.Options()
    for name, value in options.items():
        setattr(given, name, value)
    group = dist.new_group(pg_options=given, timeout=timedelta(seconds=30))
    return group, carriers, lines


def on_rank(rank: Rank, values: Any) -> torch.Tensor:
    return pretended.on(rank.rank, torch.as_tensor(values, dtype=torch.float32))


def host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the host memory behind a pretended tensor."""
    return pretended.device.host(tensor)  # type: ignore[no-any-return]


class Summing:
    """A region that sums an input of that many elements over the ranks in place. Counts runs of the fallback."""

    def __init__(
        self, rank: Rank, group: Any, elements: int, nodes: int = 1, costs: dict[str, float] | None = None
    ) -> None:
        self.fell = 0
        graph = _C.plan.Graph()
        buffer = graph.buffer("input", 0, elements * 4, mutated=True)
        before, after = (graph.value(buffer, "float32", [elements], [1]) for _ in range(2))
        graph.argument(before)
        attributes = {"group": 0, "ranks": rank.world_size, "reduce_op": "sum", "nodes": nodes}
        graph.node("all_reduce", [before], [after], attributes, "here")
        options = {"device": rank.rank, "groups": [group.group_name], "otherwise": self._otherwise}
        options |= {"costs": costs or {}, "costs_from": "measured"}
        self.region = _C.plan.Region(graph, "a region", options)
        self.values = torch.ones(elements)
        self.given = on_rank(rank, self.values)

    def _otherwise(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.fell += 1
        return []

    def __call__(self) -> int:
        """Returns how many kernels it launched."""
        before = pretended.driver.pretend_launches()
        assert self.region([self.given]) == []
        launches = pretended.driver.pretend_launches() - before
        assert isinstance(launches, int)
        return launches


def every(rank: Rank, group: Any, count: int, async_op: bool = False) -> dict[str, bool]:
    """Runs every collective once, with `count` elements in the tensor that the table checks. Returns which were
    carried.
    """
    me, size = rank.rank, rank.world_size
    total, part = float(sum(r + 1 for r in range(size))), count // size
    done: dict[str, bool] = {}

    def wait(work: Any) -> None:
        if work is not None:
            work.wait()

    def note(name: str, tensor: torch.Tensor, expected: list[float]) -> None:
        # One value for each of `expected`'s equal pieces.
        pieces = [set(piece.tolist()) for piece in host(tensor).flatten().chunk(len(expected))]
        done[name] = pieces == [{value} for value in expected]

    x = on_rank(rank, torch.full((count,), float(me + 1)))
    wait(dist.all_reduce(x, group=group, async_op=async_op))
    note("all_reduce", x, [total])
    x = on_rank(rank, torch.full((count,), float(me + 1)))
    wait(dist.reduce(x, 1, group=group, async_op=async_op))
    note("reduce", x, [total if me == 1 else float(me + 1)])
    if me != 1:
        done.pop("reduce")
    x = on_rank(rank, torch.arange(size).float().repeat_interleave(part))
    y = on_rank(rank, torch.full((part,), -1.0))
    wait(dist.reduce_scatter_tensor(y, x, group=group, async_op=async_op))
    note("reduce_scatter_tensor", y, [float(me * size)])
    y = on_rank(rank, torch.full((part,), -1.0))
    wait(dist.reduce_scatter(y, [on_rank(rank, torch.full((part,), 2.0)) for _ in range(size)], group=group))
    note("reduce_scatter", y, [2.0 * size])
    x, y = on_rank(rank, torch.full((part,), float(me))), on_rank(rank, torch.full((count,), -1.0))
    wait(dist.all_gather_into_tensor(y, x, group=group, async_op=async_op))
    note("all_gather_into_tensor", y, [float(r) for r in range(size)])
    outs = [on_rank(rank, torch.full((part,), -1.0)) for _ in range(size)]
    wait(dist.all_gather(outs, x, group=group, async_op=async_op))
    done["all_gather"] = [set(host(out).tolist()) for out in outs] == [{float(r)} for r in range(size)]
    x = on_rank(rank, torch.full((count,), float(me)))
    wait(dist.broadcast(x, 1, group=group, async_op=async_op))
    note("broadcast", x, [1.0])
    if me == 1:
        done.pop("broadcast")
    x, y = (
        on_rank(rank, torch.arange(size).float().repeat_interleave(part) + 10 * me),
        on_rank(rank, torch.zeros(count)),
    )
    wait(dist.all_to_all_single(y, x, group=group, async_op=async_op))
    note("all_to_all_single", y, [float(10 * r + me) for r in range(size)])
    y = on_rank(rank, torch.full((count,), -1.0))
    splits = [part] * size
    wait(dist.all_to_all_single(y, x, splits, splits, group=group, async_op=async_op))
    note("all_to_all_single, splits", y, [float(10 * r + me) for r in range(size)])
    return done
