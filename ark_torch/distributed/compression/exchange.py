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
from ark_torch.distributed.compression.plan import Plan, Segments
from ark_torch.distributed.compression.state import State


def all_reduce(state: State, data: Tensor, plan: Plan) -> Tensor:
    """The mean over ranks of `data`, [sum of the plan's numels]. Reads and updates the layers' residuals."""
    operator, group = torch.ops.ark.compressed_all_reduce.default, state.group
    if plan.part is not None and state.nodes is not None:
        return _between(state, state.nodes, data, plan, plan.part)
    return _reduced(operator, state, data, plan, "avg", group, 1, _all_reduce_times(state))


def reduce_scatter(state: State, data: Tensor, plan: Plan, op: str, group: dist.ProcessGroup) -> Tensor:
    """This rank's share, [sum of the plan's numels], of the sum or mean of `data`, which holds a row for each rank."""
    operator, world = torch.ops.ark.compressed_reduce_scatter.default, group.size()
    nodes = state.nodes_in(group, data.device)
    if nodes is not None:
        return _scattered_between(state, nodes, data, plan, op, group)
    return _reduced(operator, state, data, plan, op, group, world, world - 1)


def _reduced(
    operator: Callable[..., Tensor], state: State, data: Tensor, plan: Plan, op: str, group: dist.ProcessGroup,
    rows: int, times: float,
) -> Tensor:  # fmt: skip
    """`rows`: number of copies of the plan's layout in `data`; `times`: how often each element leaves this rank."""
    count(state, plan.segments, data.element_size(), times)
    residual = state.layers.residual(plan, rows) if state.error_feedback else None
    result = _run(operator, state, data, residual, plan, op, group.group_name, rows, state.next_seed())
    if not data.is_cuda:
        _check(state, plan, result, data.view(rows, -1)[group.rank() if rows > 1 else 0], group.rank())
    return result


def _between(state: State, nodes: Nodes, data: Tensor, plan: Plan, part: Plan) -> Tensor:
    """The mean over ranks, with few bits between nodes alone.

    All of a rank's residual goes into the node's sum, and its part's new error into the residual: whichever layers
    travel together next, and so whose part an element is in, nothing stays behind.
    """
    operator, numel = torch.ops.ark.compressed_all_reduce.default, data.numel()
    count(state, part.segments, 4, _rail_times(nodes))
    seed = _seed_of_rail(state, nodes)
    whole = nodes.padded(data)
    residual = state.layers.residual(plan, 1) if state.error_feedback else None
    error = None
    if residual is None:
        whole[:numel].copy_(data)
    else:
        torch.add(residual, data, out=whole[:numel])
        error = residual.zero_()[slice(*nodes.held(numel))]

    def over_rail(mine: Tensor) -> Tensor:
        return _run(operator, state, mine, error, part, "sum", nodes.rail_name, 1, seed)

    # Not a view: it would keep the padding.
    mean = nodes.sum(whole, numel, over_rail).div_(state.group.size()).to(data.dtype, copy=True)
    if not data.is_cuda:
        _check(state, plan, mean, data, state.group.rank())
    return mean


def _scattered_between(
    state: State, nodes: Nodes, data: Tensor, plan: Plan, op: str, group: dist.ProcessGroup
) -> Tensor:
    """reduce_scatter() with few bits between nodes alone. Residuals are as in _between()."""
    operator, world = torch.ops.ark.compressed_reduce_scatter.default, group.size()
    count(state, plan.segments, 4, nodes.nodes - 1)
    seed = _seed_of_rail(state, nodes)
    whole, error = data.float().view(world, -1), None
    residual = state.layers.residual(plan, world).view(world, -1) if state.error_feedback else None
    if residual is not None:
        whole, error = whole + residual, whole.new_zeros(nodes.nodes * whole.shape[1])

    def over_rail(mine: Tensor) -> Tensor:
        return _run(operator, state, mine, error, plan, "sum", nodes.rail_name, nodes.nodes, seed)

    result: Tensor = nodes.scatter(whole, over_rail)
    if residual is not None and error is not None:
        residual.zero_().index_copy_(0, nodes.rows(), error.view(nodes.nodes, -1))
    result = (result.div_(world) if op == "avg" else result).to(data.dtype)
    if not data.is_cuda:
        _check(state, plan, result, data.view(world, -1)[group.rank()], group.rank())
    return result


def _seed_of_rail(state: State, nodes: Nodes) -> int:
    """Rails draw random numbers of their own."""
    return int(state.next_seed() ^ (nodes.place * 0x9E3779B97F4A7C15 & (2**63 - 1)))


def _run(
    operator: Callable[..., Tensor], state: State, data: Tensor, residual: Tensor | None, plan: Plan, op: str,
    group: str, rows: int, seed: int,
) -> Tensor:  # fmt: skip
    segments, word = plan.segments, None if plan.slot is None else plan.slot.word

    def run(given: Tensor) -> Tensor:
        return operator(
            given, residual, segments.numel, segments.bits, segments.bucket, state.format, state.rounding, seed, op,
            group, word,
        )  # fmt: skip

    if residual is None or not plan.clips:
        return run(data)
    return loaded(data, residual, rows, plan.numels, plan.widths, run)


def _check(state: State, plan: Plan, result: Tensor, given: Tensor, rank: int) -> None:
    numels = plan.numels
    state.watch.check(plan.layers, result.split_with_sizes(numels), given.split_with_sizes(numels), rank)


def all_gather(state: State, data: Tensor, segments: Segments, group: dist.ProcessGroup) -> Tensor:
    """All ranks' data, [world * sum of segments]. Rounds to nearest, so that every gathering gives the same result."""
    nodes = state.nodes_in(group, data.device)
    count(state, segments, data.element_size(), times_in(state, group, data.device))
    result: Tensor = torch.ops.ark.compressed_all_gather(
        data, segments.numel, segments.bits, segments.bucket, state.format, "nearest", 0,
        group.group_name if nodes is None else nodes.rail_name,
    )  # fmt: skip
    return result if nodes is None else nodes.gather(result)


def times_in(state: State, group: dist.ProcessGroup, device: torch.device) -> int:
    """How often a rank's share leaves it in a gather or scatter; where="between": its node."""
    nodes = state.nodes_in(group, device)
    return group.size() - 1 if nodes is None else nodes.nodes - 1


def count(state: State, segments: Segments, item: int, times: float) -> None:
    """Counts the bytes that this rank sends; `times`: how often each element leaves it."""
    state.bytes_sent += round(segments.bytes_of(item) * times)
    state.bytes_exact += round(segments.elements * item * times)


def count_exact(state: State, data: Tensor, times: float | None = None) -> None:
    """Counts an exact exchange of `data`: `times` sends per element; None: those of an all-reduce."""
    times = _all_reduce_times(state) if times is None else times
    count(state, Segments([data.numel()], [0], [state.bucket]), data.element_size(), times)


def count_left_out(state: State, data: Tensor, layers: Sequence[Layer], travelling: Sequence[bool]) -> None:
    """Counts what an exact all-reduce would have sent for the layers that do not travel."""
    numel = sum(layer.numel for layer, travels in zip(layers, travelling, strict=True) if not travels)
    state.bytes_exact += round(numel * data.element_size() * _all_reduce_times(state))


def _all_reduce_times(state: State) -> float:
    """Each rank sends the others their parts and then its own sum; where="between": a rail its part of the tensor."""
    if state.nodes is not None:
        return _rail_times(state.nodes) / state.nodes.rails if state.nodes.has_rail else 0
    return _times(state.group.size())


def _rail_times(nodes: Nodes) -> float:
    return _times(nodes.nodes)


def _times(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks
