"""One call of a compressed collective: applies residuals, counts bytes, watches for NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C  # noqa: F401  (defines torch.ops.ark)
from ark_torch.distributed.compression.between import Nodes
from ark_torch.distributed.compression.layers import Layer
from ark_torch.distributed.compression.loading import loaded
from ark_torch.distributed.compression.plan import Plan, Segments, plan_of
from ark_torch.distributed.compression.state import State


def all_reduce(state: State, data: Tensor, plan: Plan) -> Tensor:
    """The mean over ranks of `data`, [sum of the plan's numels]. Reads and updates the layers' residuals."""
    operator, group = torch.ops.ark.compressed_all_reduce.default, state.group
    if state.nodes is not None:
        return _between(state, state.nodes, data, plan)
    return _reduced(operator, state, data, plan, "avg", group, 1, _all_reduce_times(state.group))


def _between(state: State, nodes: Nodes, data: Tensor, plan: Plan) -> Tensor:
    """The same mean, with few bits between nodes alone."""
    mean = nodes.mean_of_node(data)
    pieces, owners = mean.split_with_sizes(plan.numels), nodes.owners(plan.numels)
    mine = [index for index, place in enumerate(owners) if place == nodes.place]
    results: list[Tensor | None] = [None] * len(pieces)
    if mine:
        part = torch.cat([pieces[index] for index in mine])
        own = plan_of(state, [plan.layers[index] for index in mine], part, [plan.numels[index] for index in mine])
        operator, group = torch.ops.ark.compressed_all_reduce.default, nodes.rail_group
        if own.exact:
            count(state, own.segments, part.element_size(), _all_reduce_times(group))
            dist.all_reduce(part, dist.ReduceOp.AVG, group=group)
            result = part
        else:
            result = _reduced(operator, state, part, own, "avg", group, 1, _all_reduce_times(group))
        for index, piece in zip(mine, result.split_with_sizes(own.numels), strict=True):
            results[index] = piece
    return nodes.share(results, mean, plan.numels)


def reduce_scatter(state: State, data: Tensor, plan: Plan, op: str, group: dist.ProcessGroup) -> Tensor:
    """This rank's share, [sum of the plan's numels], of the sum or mean of `data`, which holds a row for each rank."""
    operator, world = torch.ops.ark.compressed_reduce_scatter.default, group.size()
    return _reduced(operator, state, data, plan, op, group, world, world - 1)


def _reduced(
    operator: Callable[..., Tensor], state: State, data: Tensor, plan: Plan, op: str, group: dist.ProcessGroup,
    rows: int, times: float,
) -> Tensor:  # fmt: skip
    """`rows`: number of copies of the plan's layout in `data`; `times`: how often each element leaves this rank."""
    segments, slot = plan.segments, plan.slot
    count(state, segments, data.element_size(), times)
    seed = state.next_seed()
    word = None if slot is None else slot.word

    def run(given: Tensor, residual: Tensor | None) -> Tensor:
        return operator(
            given, residual, segments.numel, segments.bits, segments.bucket, state.format, state.rounding, seed, op,
            group.group_name, word,
        )  # fmt: skip

    if not state.error_feedback:
        result = run(data, None)
    else:
        residual = state.layers.residual(plan, rows)
        if plan.clips:
            result = loaded(data, residual, rows, plan.numels, plan.widths, lambda given: run(given, residual))
        else:
            result = run(data, residual)
    if not data.is_cuda:
        rank = group.rank()
        mine = data.view(rows, -1)[rank if rows > 1 else 0]
        state.watch.check(plan.layers, result.split_with_sizes(plan.numels), mine.split_with_sizes(plan.numels), rank)
    return result


def all_gather(state: State, data: Tensor, segments: Segments, group: dist.ProcessGroup) -> Tensor:
    """All ranks' data, [world * sum of segments]. Rounds to nearest, so that every gathering gives the same result."""
    count(state, segments, data.element_size(), group.size() - 1)
    result: Tensor = torch.ops.ark.compressed_all_gather(
        data, segments.numel, segments.bits, segments.bucket, state.format, "nearest", 0, group.group_name
    )
    return result


def count(state: State, segments: Segments, item: int, times: float) -> None:
    """Counts the bytes that this rank sends; `times`: how often each element leaves it."""
    state.bytes_sent += round(segments.bytes_of(item) * times)
    state.bytes_exact += round(segments.elements * item * times)


def count_exact(state: State, data: Tensor, times: float | None = None) -> None:
    """Counts an exact exchange of `data`: `times` sends per element; None: those of an all-reduce."""
    times = _all_reduce_times(state.group) if times is None else times
    count(state, Segments([data.numel()], [0], [state.bucket]), data.element_size(), times)


def count_left_out(state: State, data: Tensor, layers: Sequence[Layer], travelling: Sequence[bool]) -> None:
    """Counts what an exact all-reduce would have sent for the layers that do not travel."""
    numel = sum(layer.numel for layer, travels in zip(layers, travelling, strict=True) if not travels)
    state.bytes_exact += round(numel * data.element_size() * _all_reduce_times(state.group))


def _all_reduce_times(group: dist.ProcessGroup) -> float:
    """Each rank sends the others their parts and then its own sum."""
    world = group.size()
    return 2 * (world - 1) / world
