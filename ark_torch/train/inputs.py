"""Batches: their identity, their copies on the device, and the static tensors that a graph reads.

A host tensor is copied on a separate stream into one of two staging buffers while the device still runs earlier steps;
the step's stream then copies it to where the graph reads it. An event orders the reuse of a staging buffer after the
copy out of it; the replaying stream writes the static tensors. A call returns when the host's tensors have been read,
so the caller may refill them at once.

loss() may ask for gradients of a batch tensor, which makes that a leaf that autograd protects from being written. So
every step gets views of its own, and the tensors behind them stay writable.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Key = tuple[Hashable, ...]


@dataclass
class Batch:
    """One or several batches as flat leaves and their structure."""

    tensors: list[Tensor]
    trained: list[bool]  # whether the caller's tensors require gradients
    leaves: list[Any]  # _TENSOR marks the tensors
    spec: Any
    key: Key

    def filled(self, tensors: list[Tensor]) -> Any:
        """The same batch with views of other tensors, which are leaves of a step's graph where it asks for that."""
        rest = (
            tensor.detach().requires_grad_() if trained else tensor.detach()
            for tensor, trained in zip(tensors, self.trained, strict=True)
        )
        return pytree.tree_unflatten([next(rest) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


_TENSOR = object()
SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def read(batch: Any, shown: tuple[bool, bool]) -> Batch:
    """Flattens the steps' lists of micro-batches; `shown`: whether the caller's batch has each of the two list levels.

    Raises TypeError naming a leaf that is neither a tensor nor a constant.
    """
    with_paths, spec = pytree.tree_flatten_with_path(batch)
    tensors: list[Tensor] = []
    trained: list[bool] = []
    leaves: list[Any] = []
    key: list[Hashable] = [str(spec)]
    for path, leaf in with_paths:
        if isinstance(leaf, Tensor):
            if leaf.layout in SPARSE:
                raise TypeError(
                    f"ark: train.capture: batch{_place(path, shown)} is a sparse tensor ({leaf.layout}), whose parts "
                    "change their sizes: pass its indices and values, and make it in loss(), or pass a dense tensor."
                )
            tensors.append(leaf.detach())
            trained.append(leaf.requires_grad)
            leaves.append(_TENSOR)
            key.append((leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.layout, leaf.requires_grad))
            continue
        if not _is_constant(leaf):
            hint = (
                "dict(batch)" if isinstance(leaf, Mapping) else "tensors, numbers, strings and None, in lists and dicts"
            )
            place = _place(path, shown)
            raise TypeError(f"ark: train.capture: batch{place} is a {type(leaf).__name__}: pass {hint}.")
        leaves.append(leaf)
        # NaN equals nothing, 0.0 equals -0.0, and slices have no hash before Python 3.12: their texts tell them apart.
        key.append((type(leaf).__name__, repr(leaf) if isinstance(leaf, (float, complex, slice)) else leaf))
    return Batch(tensors, trained, leaves, spec, tuple(key))


def split(batch: Any, steps: int, accumulate: int) -> list[Sequence[Any]]:
    """The micro-batches of each step. Raises ValueError if the batch is no list of them."""
    batches = [batch]
    if steps > 1:
        if not isinstance(batch, (list, tuple)) or not 1 <= len(batch) <= steps:
            raise ValueError(f"ark: train.capture: steps={steps}: pass a list of 1 to {steps} batches.")
        batches = list(batch)
    if accumulate == 1:
        return [[one] for one in batches]
    for one in batches:
        is_list = isinstance(one, (list, tuple))
        if not is_list or len(one) != accumulate:
            has = f"has {len(one)}" if is_list else f"is a {type(one).__name__}"
            remedy = "pass a list"
            if is_list and len(one) < accumulate:
                remedy = (
                    "leave out the rest of a dataset (drop_last=True), or close() this step and train the rest by "
                    f"capture(..., accumulate={max(1, len(one))})"
                )
            raise ValueError(
                f"ark: train.capture: accumulate={accumulate}: a batch is a list of so many micro-batches, and this "
                f"one {has}: {remedy}."
            )
    return [list(one) for one in batches]


def _place(path: Any, shown: tuple[bool, bool]) -> str:
    """Where in the caller's batch a leaf is."""
    return str(pytree.keystr(tuple(part for level, part in enumerate(path) if level >= 2 or shown[level])))


def _is_constant(leaf: Any) -> bool:
    return leaf is None or isinstance(
        leaf, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, slice, torch.Size)
    )


class Mover:
    """Copies tensors to a device, and waits until the host's have been read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._read: Any = None  # recorded when the host's tensors of this call have been read

    def moved(self, tensors: list[Tensor], user: Any = None) -> list[Tensor]:
        """The tensors on the device, in memory that the stream `user` may keep using; device tensors as they are."""
        if self._stream is None or all(t.device == self._device for t in tensors):
            return [t.to(self._device) for t in tensors]
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = [t if t.device == self._device else t.to(self._device, non_blocking=True) for t in tensors]
            self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(self._stream)
        current.wait_stream(self._stream)
        for before, after in zip(tensors, there, strict=True):
            if after is not before:
                after.record_stream(user or current)
        return there

    def staged(self, tensors: list[Tensor], into: Static) -> None:
        """Copies into a graph's static tensors."""
        if self._stream is None:
            for fixed, tensor in zip(into.tensors, tensors, strict=True):
                fixed.copy_(tensor)
            return
        current = torch.cuda.current_stream(self._device)
        far = [n for n, t in enumerate(tensors) if t.device.type == "cpu"]
        sources = list(tensors)
        slot = into.next_slot()
        if far:
            buffers = into.staging(slot, far)
            if slot not in into.consumed:
                self._stream.wait_stream(current)  # earlier users of that memory may still run
            else:
                self._stream.wait_event(into.consumed[slot])
            with torch.cuda.stream(self._stream):
                for n in far:
                    buffers[n].copy_(tensors[n], non_blocking=True)
                    sources[n] = buffers[n]
                self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._read.record(self._stream)
            current.wait_event(self._read)
        for fixed, source in zip(into.tensors, sources, strict=True):
            fixed.copy_(source, non_blocking=True)
        if far:
            into.consumed[slot] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            into.consumed[slot].record(current)

    def wait(self) -> None:
        """Waits until the host's tensors of the last call have been read."""
        if self._read is not None:
            self._read.synchronize()
            self._read = None


class Static:
    """The tensors from which a graph reads its batch, and their staging buffers."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.tensors = [torch.empty_like(t, device=device, requires_grad=False) for t in batch.tensors]
        self._batch = replace(batch, tensors=[])  # not the first call's tensors
        self.consumed: dict[int, Any] = {}
        self._staging: dict[tuple[int, int], Tensor] = {}
        self._turn = 0

    def views(self) -> Any:
        """The batch for one run of the step."""
        return self._batch.filled(self.tensors)

    def next_slot(self) -> int:
        self._turn ^= 1
        return self._turn

    def staging(self, slot: int, which: list[int]) -> dict[int, Tensor]:
        for n in which:
            if (slot, n) not in self._staging:
                self._staging[slot, n] = torch.empty_like(self.tensors[n])
                self.consumed.pop(slot, None)
        return {n: self._staging[slot, n] for n in which}
