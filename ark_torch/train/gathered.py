"""Registered memory for the parameters that fully_shard gathers: copy engines write there, in place.

A gather into other memory goes by rings, whose blocks take multiprocessors from computation. fully_shard allocates the
output of each gather anew and drops it once it is copied out; its streams are then ordered so that an allocator may
give the memory to the next gather on the same stream. The slots here are used in the same way: a slot is free when
nobody holds the tensor that it gave out. All ranks run the same program, so they take the same slots in the same order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

from ark_torch.train.agreement import ark_backend

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
except ImportError:  # before 2.11: nothing is installed
    AllGather = object  # type: ignore[assignment,misc]

MOST = 4  # slots of one size: prefetching asks for two or three


class _Slot:
    """Memory of one gather."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._held: StorageWeakRef | None = None

    def is_free(self) -> bool:
        return self._held is None or bool(self._held.expired())  # type: ignore[no-untyped-call]

    def give(self, dtype: torch.dtype) -> Tensor:
        """The memory as a tensor with a storage of its own, which ends with the last tensor that uses it."""
        alias = dlpack.from_dlpack(dlpack.to_dlpack(self.memory))  # type: ignore[no-untyped-call]
        self._held = StorageWeakRef(alias.untyped_storage())  # type: ignore[no-untyped-call]
        return alias.view(dtype)


class Slots:
    """The slots of one group, by stream and size."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._slots: dict[tuple[int, int], list[_Slot]] = {}
        self._refused = False  # the group registers nothing
        self.grows = True  # not while a graph is captured

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A tensor of registered memory; None if this gather gets none, on all ranks. A new slot is collective."""
        size = count * dtype.itemsize
        if self._refused or not self._is_wanted(size, device):
            return None
        slots = self._slots.setdefault((self._stream(device), size), [])
        slot = next((one for one in slots if one.is_free()), None)
        if slot is None:
            if len(slots) >= MOST or not self.grows:
                return None
            memory = self._registered(size, device)
            if memory is None:
                self._refused = True
                return None
            slot = _Slot(memory)
            slots.append(slot)
        return slot.give(dtype)

    def close(self) -> None:
        """Ends the registrations, collectively; no graph that uses the memory may be replayed afterwards."""
        for slots in self._slots.values():
            for slot in slots:
                self._deregister(slot.memory)
        self._slots.clear()
        self._refused = True

    # ---- What a device does

    def _is_wanted(self, size: int, device: torch.device) -> bool:
        """Whether copy engines would gather into registered memory. Not before the group's first operation."""
        backend = ark_backend(self._group, device.type)
        numbers = backend.cuda_dispatch if backend is not None else {}
        return bool(numbers) and size // self._group.size() >= numbers["registered_all_gather_engine_from"]

    def _stream(self, device: torch.device) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def _registered(self, size: int, device: torch.device) -> Tensor | None:
        from ark_torch import memory
        from ark_torch.distributed import register

        with torch.cuda.use_mem_pool(memory.pool(device), device):
            made = torch.empty(size, dtype=torch.uint8, device=device)
        return made if register(made, self._group) else None

    def _deregister(self, made: Tensor) -> None:
        from ark_torch.distributed import deregister

        deregister(made, self._group)


class _AllGather(AllGather):
    """fully_shard's own gather, into a slot."""

    def __init__(self, own: Any, slots: Slots) -> None:
        self._own, self._slots = own, slots

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        taken = self._slots.take(math.prod(int(one) for one in size), dtype, device)
        if taken is not None:
            return taken
        allocated: Tensor = self._own.allocate(size, dtype=dtype, device=device)
        return allocated

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._own(output_tensor, input_tensor, group=group, async_op=async_op)


class InPlace:
    """Replaces the gathers of FSDP modules, as long as it is not closed."""

    def __init__(self, modules: Sequence[Any], slots: type[Slots] = Slots) -> None:
        from ark_torch.distributed.compression.fsdp2 import parameter_groups

        self._before: list[tuple[Any, Any]] = []
        self._slots: dict[Any, Slots] = {}
        for module in modules if AllGather is not object else ():
            groups = parameter_groups(module)
            own = groups[0]._all_gather_comm if len(groups) == 1 and hasattr(groups[0], "_all_gather_comm") else None
            if type(own).__name__ != "DefaultAllGather":  # somebody's own, or several meshes
                continue
            group = groups[0]._all_gather_process_group
            if group not in self._slots:
                self._slots[group] = slots(group)
            module.set_custom_all_gather(_AllGather(own, self._slots[group]))
            self._before.append((module, own))

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """While a graph is captured, when ranks cannot meet: gathers take slots that there are, or other memory."""
        for slots in self._slots.values():
            slots.grows = False
        try:
            yield
        finally:
            for slots in self._slots.values():
                slots.grows = True

    def close(self) -> None:
        """Collective."""
        for module, own in self._before:
            module.set_custom_all_gather(own)
        for slots in self._slots.values():
            slots.close()
        self._before.clear()
