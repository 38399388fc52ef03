"""One call of a compressed collective: builds segments from layers, applies residuals, counts bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C  # noqa: F401  (defines torch.ops.ark)
from ark_torch.distributed.compression.functional import _coded_bytes
from ark_torch.distributed.compression.layers import Layer
from ark_torch.distributed.compression.loading import ENDS, loaded
from ark_torch.distributed.compression.state import State


@dataclass
class Segments:
    """Layers in the operators' form. Adjacent exact layers form one segment; empty layers are dropped."""

    numel: list[int]
    bits: list[int]
    bucket: list[int]

    @property
    def exact(self) -> bool:
        return not any(self.bits)

    def bytes_of(self, item: int) -> int:
        """Bytes sent: codes and scales, or the elements themselves (`item` bytes each)."""
        each = zip(self.numel, self.bits, self.bucket, strict=True)
        return sum(_coded_bytes(numel, bits, bucket) if bits else numel * item for numel, bits, bucket in each)


def segments_of(widths: Sequence[tuple[int, int]], numels: Sequence[int], bucket: int) -> Segments:
    """`widths`: bits and bucket of each layer; `bucket`: the value for exact segments, since the operators require
    one."""
    segments = Segments([], [], [])
    for (bits, of_layer), numel in zip(widths, numels, strict=True):
        if numel == 0:
            continue
        if bits == 0 and segments.bits and segments.bits[-1] == 0:
            segments.numel[-1] += numel
            continue
        segments.numel.append(numel)
        segments.bits.append(bits)
        segments.bucket.append(of_layer if bits else bucket)
    return segments


def all_reduce(state: State, data: Tensor, layers: Sequence[Layer], segments: Segments) -> Tensor:
    """The mean over ranks of `data`, [sum of segments]. Reads and updates the layers' residuals."""
    group = state.group
    count(state, segments, data.element_size(), _all_reduce_times(state))
    seed = state.next_seed()

    def run(given: Tensor, residual: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.ark.compressed_all_reduce(
            given, residual, segments.numel, segments.bits, segments.bucket, state.format, state.rounding, seed, "avg",
            group.group_name,
        )  # fmt: skip
        return result

    return _with_feedback(state, data, layers, [layer.numel for layer in layers], 1, run)


def reduce_scatter(
    state: State, data: Tensor, layers: Sequence[Layer], shares: Sequence[int], segments: Segments, op: str,
    group: dist.ProcessGroup,
) -> Tensor:  # fmt: skip
    """This rank's share, [sum of segments], of the sum or mean of `data`, [world * sum of segments]."""
    count(state, segments, data.element_size(), group.size() - 1)
    seed = state.next_seed()

    def run(given: Tensor, residual: Tensor | None) -> Tensor:
        result: Tensor = torch.ops.ark.compressed_reduce_scatter(
            given, residual, segments.numel, segments.bits, segments.bucket, state.format, state.rounding, seed, op,
            group.group_name,
        )  # fmt: skip
        return result

    return _with_feedback(state, data, layers, shares, group.size(), run)


def _with_feedback(
    state: State,
    data: Tensor,
    layers: Sequence[Layer],
    numels: Sequence[int],
    rows: int,
    run: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """`run(data, residual)` with the layers' residuals; `data` holds `rows` copies of the layers' layout."""
    if not state.error_feedback:
        return run(data, None)
    residual = state.layers.residual(layers, numels, rows, data.device)
    widths = [state.width(layer) for layer in layers]
    if state.format == "uniform" and any(bits in ENDS for bits, _ in widths):
        return loaded(data, residual, rows, numels, widths, lambda given: run(given, residual))
    return run(data, residual)


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
    state.bytes_exact += round(sum(segments.numel) * item * times)


def count_exact(state: State, data: Tensor, times: float | None = None) -> None:
    """Counts an exact exchange of `data`: `times` sends per element; None: those of an all-reduce."""
    times = _all_reduce_times(state) if times is None else times
    count(state, Segments([data.numel()], [0], [state.bucket]), data.element_size(), times)


def count_left_out(state: State, data: Tensor, layers: Sequence[Layer], travelling: Sequence[bool]) -> None:
    """Counts what an exact all-reduce would have sent for the layers that do not travel."""
    numel = sum(layer.numel for layer, travels in zip(layers, travelling, strict=True) if not travels)
    state.bytes_exact += round(numel * data.element_size() * _all_reduce_times(state))


def _all_reduce_times(state: State) -> float:
    """Each rank sends the others their parts and then its own sum."""
    return 2 * (state.group.size() - 1) / state.group.size()
