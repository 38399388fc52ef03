"""What all exchanges of the same layers have in common, computed once.

A training step that launches its kernels one by one is bound by the host, so a hook's host time is lost time. A plan
holds what depends only on the layers, their bits and the tensor's type and device. State drops its plans when bits
change; a plan of another type or device is replaced when it is next asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.distributed.compression.between import Nodes
from ark_torch.distributed.compression.functional import _coded_bytes
from ark_torch.distributed.compression.layers import Layer
from ark_torch.distributed.compression.loading import ENDS
from ark_torch.distributed.compression.state import COMPRESSED_DTYPES, State
from ark_torch.distributed.compression.watch import Slot

MOST_PLANS = 4096  # which layers travel may differ from step to step


@dataclass
class Segments:
    """Layers in the operators' form. Adjacent exact layers form one segment; empty layers are dropped."""

    numel: list[int]
    bits: list[int]
    bucket: list[int]

    @property
    def exact(self) -> bool:
        return not any(self.bits)

    @cached_property
    def elements(self) -> int:
        return sum(self.numel)

    @cached_property
    def _coded_and_exact(self) -> tuple[int, int]:
        """Bytes of codes and scales, and number of exact elements."""
        each = list(zip(self.numel, self.bits, self.bucket, strict=True))
        coded = sum(_coded_bytes(numel, bits, bucket) for numel, bits, bucket in each if bits)
        return coded, sum(numel for numel, bits, _ in each if not bits)

    def bytes_of(self, item: int) -> int:
        """Bytes sent: codes and scales, or the elements themselves (`item` bytes each)."""
        coded, exact = self._coded_and_exact
        return coded + exact * item


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


@dataclass(frozen=True, eq=False)
class Plan:
    """Layers that travel together in one tensor."""

    layers: list[Layer]
    key: tuple[int, ...]  # the layers' ids
    numels: list[int]  # elements of each layer in a row of the data
    dtype: torch.dtype
    device: torch.device
    widths: list[tuple[int, int]]
    segments: Segments
    compresses: bool  # False: the group's gradients are exact, whatever the bits
    exact: bool  # whether the layers are, or the type is not one that can be compressed
    clips: bool  # whether a layer has so few bits that outliers are clipped
    slot: Slot | None  # where the device notes a NaN or Inf; None on the CPU
    part: Plan | None = None  # where="between": what this rank exchanges with its rail, in float32

    def fits(self, data: Tensor) -> bool:
        return self.dtype is data.dtype and self.device == data.device


def plan_of(
    state: State,
    layers: Sequence[Layer],
    data: Tensor,
    numels: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """The plan of exchanging `layers` in `data`. Collective in a group's first call (State.begin).

    `numels`: elements of each layer in a row of the data, where these are not the layers' own (FSDP's shares).
    """
    key = tuple(map(id, layers))
    plan = state.plans.get(key)
    if plan is not None and plan.fits(data) and (numels is None or plan.numels == numels):
        return plan
    shares = numels is not None
    numels = [layer.numel for layer in layers] if numels is None else list(numels)
    widths = [state.width(layer) for layer in layers]
    segments = segments_of(widths, numels, state.bucket)
    compresses = state.begin(group or state.group, data.device)
    exact = segments.exact or data.dtype not in COMPRESSED_DTYPES
    nodes = state.nodes if compresses and not shares else None
    part = None if nodes is None else _part_of(state, nodes, layers, numels, data.device)
    noted, noted_numels = (layers, numels) if part is None else (part.layers, part.numels)
    slot = state.watch.slot(noted, noted_numels) if data.is_cuda and compresses and not exact else None
    plan = Plan(
        list(layers), key, numels, data.dtype, data.device, widths, segments, compresses, exact,
        clips=_clips(state, widths), slot=slot, part=None if part is None else replace(part, slot=slot),
    )  # fmt: skip
    _keep(state, key, plan)
    return plan


def _part_of(state: State, nodes: Nodes, layers: Sequence[Layer], numels: Sequence[int], device: torch.device) -> Plan:
    """The layers, and pieces of layers, in this rank's part."""
    begin, end = nodes.held(sum(numels))
    held, counts, at = [], [], 0
    for layer, numel in zip(layers, numels, strict=True):
        count = min(at + numel, end) - max(at, begin)
        at += numel
        if count > 0:
            held.append(layer)
            counts.append(count)
    widths = [state.width(layer) for layer in held]
    segments = segments_of(widths, counts, state.bucket)
    return Plan(
        held, tuple(map(id, held)), counts, torch.float32, device, widths, segments, True, segments.exact,
        clips=_clips(state, widths), slot=None,
    )  # fmt: skip


def _clips(state: State, widths: Sequence[tuple[int, int]]) -> bool:
    return state.format == "uniform" and any(bits in ENDS for bits, _ in widths)


def plan_of_bucket(state: State, parameters: Sequence[Tensor], data: Tensor) -> Plan:
    """The plan of a bucket of DDP. Raises ValueError if a parameter is not of the state's module."""
    key = tuple(map(id, parameters))  # the state keeps parameters and layers alive, so no id is used twice
    plan = state.plans.get(key)
    if plan is None or not plan.fits(data):
        plan = plan_of(state, [state.layers.of(parameter) for parameter in parameters], data)
        _keep(state, key, plan)
    return plan


def _keep(state: State, key: tuple[int, ...], plan: Plan) -> None:
    if len(state.plans) >= MOST_PLANS:
        state.plans.clear()
        state.watch.slots.clear()
    state.plans[key] = plan
