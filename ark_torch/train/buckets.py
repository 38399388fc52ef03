"""Gradients in flat buckets, averaged over the ranks as soon as a bucket's last gradient is ready.

The first step runs without buckets to find the order of gradients. The ranks then agree on rank 0's order and on which
parameters have no gradient on any rank (those stay without one). From then on each parameter's gradient is a view into
a bucket. When a bucket's last gradient is ready, one operator copies all of them from autograd's tensors to their
views, and the all_reduce follows on a high-priority stream. Accumulating in place would instead zero and read the
views. A gradient as large as a bucket is not copied: it is averaged where autograd left it, unless buckets lie in
registered memory: there larger messages gain more than copies cost (docs/measurements.md).

The last buckets may still be averaged while the optimizer already updates the parameters of all others (late(),
finish()).

Invariant: all ranks reduce buckets in the same order, whatever the order of gradients, and each step reduces each
bucket once. Hooks do nothing outside a step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ark_torch.train.agreement import Agreement, ark_backend
from ark_torch.train.compressed import CompressedSums
from ark_torch.train.models import Subject

ALIGNMENT = 512  # bytes; bucket alignment, for copies of any width
DIRECT = 24 << 20  # bytes of a gradient that is averaged in place: below, one all_reduce for several is sooner
DIRECT_OF_REGISTERED = 1 << 62  # the same where buckets lie in registered memory: none is
LATE = 0.25  # most of all bytes for which the optimizer waits apart


def registers(group: Any, device: torch.device) -> bool:
    """Whether buckets can lie in registered memory: ark carries the group's CUDA tensors."""
    return device.type == "cuda" and ark_backend(group, "cuda") is not None


def direct_from(group: Any, device: torch.device, wants_registered: bool, limit: int) -> int:
    """Bytes from which a gradient is averaged in place. `limit`: those of a bucket."""
    if wants_registered and registers(group, device):
        return DIRECT_OF_REGISTERED
    return min(limit, DIRECT)


class Bucket:
    """Consecutive parameters in gradient order, of one dtype."""

    def __init__(self, direct: bool = False) -> None:
        self.members: list[int] = []
        self.bytes = 0
        self.direct = direct  # the gradient itself, not a copy
        self.flat = torch.empty(0)
        self.left = 0  # members whose gradient is not ready yet
        self.complete = False


class Buckets:
    """The gradients of a model's parameters, and their averages over a group."""

    def __init__(
        self,
        subject: Subject,
        agreement: Agreement,
        limit_bytes: int,
        registered: bool,
    ) -> None:
        named = subject.averaged()
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._group, self._agreement = subject.group, agreement
        self.sums = CompressedSums(subject.compression) if subject.compression is not None else None
        self._limit, self._wants_registered = limit_bytes, registered
        self._device = self._parameters[0].device
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._views: dict[int, Tensor] = {}
        self._of: dict[int, Bucket] = {}  # parameter -> its bucket
        self.buckets: list[Bucket] = []
        self.registered = False
        self._built = False
        self._order: list[int] = []  # order of gradients in the first step
        self._active = self._last = False
        self._came: set[int] = set()
        self._next = 0  # the next bucket to reduce
        self._late_from = 0  # the first of the last buckets
        self._unfinished = False  # those may still run
        self._sooner: Any = None  # the event after all others
        self._in_place: set[int] = set()  # addresses of gradients that this step averages in place
        self._works: list[tuple[Any, Tensor]] = []
        self._divides = False  # whether the group cannot average, so that gradients are divided
        self._storages: dict[torch.dtype, Tensor] = {}
        self._planned: tuple[list[int], set[int]] = ([], set())  # the order of gradients, and those averaged in place
        hook = self._came_for
        self._handles = [
            parameter.register_post_accumulate_grad_hook(hook(number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    # ---- A step

    def begin(self, last: bool) -> None:
        """Called before a micro-batch's forward pass; `last`: its backward pass completes the gradients."""
        self._active, self._last = True, last
        self._came.clear()
        self._in_place.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.left, bucket.complete = len(bucket.members), False

    def end(self, waits: bool = True) -> None:
        """Called after the backward pass: averages the rest, and makes the current stream wait for all averages, or
        only for those of parameters that are not late()."""
        self._active = False
        if not self._last:
            return
        if not self._built:
            self._build()
        for bucket in self.buckets:
            if not bucket.complete:
                self._complete(bucket)
        self._launch()
        if waits or self._late_from == 0:
            self.finish()
        elif self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._sooner)
            self._unfinished = True
        else:
            late = len(self.buckets) - self._late_from
            self._wait_for(len(self._works) - late)
            self._unfinished = True

    def late(self) -> list[torch.nn.Parameter]:
        """Parameters whose averages have not been waited for."""
        if not self._unfinished:
            return []
        return [self._parameters[number] for bucket in self.buckets[self._late_from :] for number in bucket.members]

    def finish(self) -> None:
        """Makes the current stream wait for all averages."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._wait_for(len(self._works))
        self._unfinished = False

    def _wait_for(self, count: int) -> None:
        """Waits for the first works (on CPUs)."""
        for work, flat in self._works[:count]:
            work.wait()
            if self._divides:
                flat.div_(self._agreement.ranks)
        del self._works[:count]

    @property
    def direct(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradients are averaged where autograd left them."""
        return [self._parameters[bucket.members[0]] for bucket in self.buckets if bucket.direct]

    def abandon(self) -> None:
        """Discards the state of a step that failed."""
        self._active = False
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._works.clear()
        self._unfinished = False

    def close(self) -> None:
        """Removes the hooks; gradients stay in place. Collective if the memory is registered."""
        for handle in self._handles:
            handle.remove()
        if self.registered:
            from ark_torch.distributed import deregister

            for storage in self._storages.values():
                deregister(storage, self._group)
            self.registered = False

    def _came_for(self, number: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._active:
                self._one_more(number)

        return hook

    @torch.no_grad()
    def _one_more(self, number: int) -> None:
        if not self._built:
            if number not in self._came:
                self._came.add(number)
                if number not in self._order:
                    self._order.append(number)
            return
        if number in self._came:
            raise RuntimeError(
                f"ark: train.capture: the gradient of {self._names[number]!r} came twice in one backward pass: use "
                "torch.utils.checkpoint with use_reentrant=False, and one backward pass for each micro-batch."
            )
        self._came.add(number)
        bucket = self._of.get(number)
        if bucket is None:
            raise RuntimeError(
                f"ark: [rank {self._agreement.rank}] train.capture: {self._names[number]!r} had no gradient in the "
                "first step on any rank and has one now: let the first batch use every parameter, or capture() again."
            )
        bucket.left -= 1
        if bucket.left == 0:
            self._complete(bucket)
            self._launch()

    def _complete(self, bucket: Bucket) -> None:
        """Moves all available gradients into the bucket; gradients missing on this rank count as zero."""
        bucket.complete = True
        if bucket.direct:
            if self._last:
                bucket.flat = self._in_place_of(bucket.members[0])
            return
        into, gradients = [], []
        for number in bucket.members:
            parameter, view = self._parameters[number], self._views[number]
            if parameter.grad is None:
                if self._last:
                    view.zero_()
            elif (local := _local(parameter.grad, parameter)).data_ptr() != view.data_ptr():
                into.append(view)
                gradients.append(local)
            else:
                continue
            if parameter.grad is not None or self._last:
                parameter.grad = _as_gradient(view, parameter)
        if into:
            torch._foreach_copy_(into, gradients)

    def _in_place_of(self, number: int) -> Tensor:
        """The gradient's memory. It must belong to the gradient alone, because the sum is written there."""
        parameter = self._parameters[number]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif not _is_alone(gradient) or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        if gradient.data_ptr() in self._in_place:
            raise RuntimeError(
                f"ark: train.capture: the gradient of {self._names[number]!r} has the memory of another one, and had "
                "its own in the first step: capture() again."
            )
        self._in_place.add(gradient.data_ptr())
        parameter.grad = gradient
        return gradient.as_strided((gradient.numel(),), (1,))

    def _launch(self) -> None:
        """Reduces the complete buckets, in the order shared by all ranks."""
        while self._last and self._next < len(self.buckets) and self.buckets[self._next].complete:
            bucket = self.buckets[self._next]
            self._next += 1
            if self._stream is None:
                self._average(bucket)
                continue
            if self._next == self._late_from + 1:
                self._sooner = self._stream.record_event()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._average(bucket)

    def _average(self, bucket: Bucket) -> None:
        flat = bucket.flat
        if self.sums is not None and self.sums.average(flat, [self._parameters[n] for n in bucket.members]):
            return
        work = self._reduce(flat)
        if self._stream is None:
            self._works.append((work, flat))
        elif self._divides:
            flat.div_(self._agreement.ranks)

    def _reduce(self, flat: Tensor) -> Any:
        op = dist.ReduceOp.SUM if self._divides else dist.ReduceOp.AVG
        return dist.all_reduce(flat, op, self._group, async_op=self._stream is None)

    # ---- The plan

    def _build(self) -> None:
        """After the first step's backward pass: agrees on the order, lays out the buckets, copies the gradients."""
        present = [p.grad is not None for p in self._parameters]
        sparse = [
            n for n, p in zip(self._names, self._parameters, strict=True) if p.grad is not None and p.grad.is_sparse
        ]
        mine = [self._order, present, sparse[:1], self._candidates()]
        told = [json.loads(text) for text in self._agreement.share(json.dumps(mine))]
        for rank, (_, _, names, _) in enumerate(told):
            if names:
                raise ValueError(
                    f"ark: train.capture: the gradient of {names[0]!r} is sparse on rank {rank}: buckets are dense; "
                    "make the embedding with sparse=False."
                )
        anywhere = {n for _, has, _, _ in told for n, there in enumerate(has) if there}
        order = [n for n in told[0][0] if n in anywhere]
        order += [n for n in reversed(range(len(self._parameters))) if n in anywhere and n not in set(order)]
        self._planned = order, set(told[0][3]).intersection(*(direct for *_, direct in told))
        self._plan(*self._planned)
        self._allocate()
        self._divides = not self._can_average()
        if self.sums is not None:
            self.sums.begin(self._device)
        for bucket in self.buckets:
            bucket.complete = False
        self._built = True

    def resize(self, limit_bytes: int) -> None:
        """Other buckets of the same gradients, between two steps; not after a graph was captured that is still used."""
        self._limit = limit_bytes
        if not self._built:
            return
        self.buckets.clear()
        self._of.clear()
        self._views.clear()
        self._plan(*self._planned)
        self._allocate()

    def _candidates(self) -> list[int]:
        """Parameters whose gradients could be averaged in place on this rank, by what the first step has left."""
        if self.sums is not None:
            return []  # codes are of buckets
        gradients = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        users = Counter(_local(g, g).untyped_storage().data_ptr() for g in gradients)
        least = direct_from(self._group, self._device, self._wants_registered, self._limit)

        def fits(parameter: torch.nn.Parameter) -> bool:
            if isinstance(parameter, DTensor) or not _dense(parameter):
                return False
            if parameter.nbytes < least:
                return False
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                return False
            return gradient is None or (_is_alone(gradient) and users[gradient.untyped_storage().data_ptr()] == 1)

        return [number for number, parameter in enumerate(self._parameters) if fits(parameter)]

    def _plan(self, order: list[int], direct: set[int]) -> None:
        """A bucket is closed when it has reached the limit; its last gradient decides its place in the order."""
        still_open: dict[torch.dtype, Bucket] = {}
        for number in order:
            parameter = self._parameters[number]
            if number in direct:
                self._of[number] = bucket = Bucket(direct=True)
                bucket.members, bucket.bytes = [number], parameter.nbytes
                self.buckets.append(bucket)
                continue
            bucket = still_open.setdefault(parameter.dtype, Bucket())
            bucket.members.append(number)
            bucket.bytes += _local(parameter, parameter).nbytes
            self._of[number] = bucket
            if bucket.bytes >= self._limit:
                self.buckets.append(still_open.pop(parameter.dtype))
        place = {number: at for at, number in enumerate(order)}
        self.buckets += sorted(still_open.values(), key=lambda bucket: place[bucket.members[-1]])
        self.buckets.sort(key=lambda bucket: place[bucket.members[-1]])
        self._late_from = max(0, len(self.buckets) - 1)
        late, most = 0, LATE * sum(bucket.bytes for bucket in self.buckets)
        for index in reversed(range(1, len(self.buckets))):
            late += self.buckets[index].bytes
            if late > most:
                break
            self._late_from = index

    def _allocate(self) -> None:
        """One tensor per dtype, sliced into buckets, so that there is one registration.

        It has room for the gaps between buckets of any size (resize()).
        """
        copied = [bucket for bucket in self.buckets if not bucket.direct]
        for dtype in dict.fromkeys(self._parameters[bucket.members[0]].dtype for bucket in copied):
            buckets = [one for one in copied if self._parameters[one.members[0]].dtype == dtype]
            step = max(1, ALIGNMENT // dtype.itemsize)
            sizes = [-(-one.bytes // dtype.itemsize // step) * step for one in buckets]
            if dtype not in self._storages:
                self._storages[dtype] = self._storage(sum(sizes) + step * len(self._parameters), dtype)
            storage = self._storages[dtype]
            at = 0
            for bucket, size in zip(buckets, sizes, strict=True):
                bucket.flat = storage[at : at + bucket.bytes // dtype.itemsize]
                self._lay(bucket)
                at += size

    def _lay(self, bucket: Bucket) -> None:
        at = 0
        for number in bucket.members:
            like = _local(self._parameters[number], self._parameters[number]).detach()
            part = bucket.flat[at : at + like.numel()]
            self._views[number] = (
                part.as_strided(like.shape, like.stride(), part.storage_offset())
                if _dense(like)
                else part.view(like.shape)
            )
            at += like.numel()

    def _storage(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, gaps included; mappable by the group's ranks if ark carries CUDA tensors."""
        if self._wants_registered and registers(self._group, self._device):
            from ark_torch import memory
            from ark_torch.distributed import register

            with torch.cuda.use_mem_pool(memory.pool(self._device), self._device):
                storage = torch.zeros(count, dtype=dtype, device=self._device)
            self.registered = register(storage, self._group)
            return storage
        return torch.zeros(count, dtype=dtype, device=self._device)

    def _can_average(self) -> bool:
        """Gloo cannot average; it raises before anything is sent, on all ranks."""
        try:
            dist.all_reduce(torch.zeros(1, device=self._device), dist.ReduceOp.AVG, self._group)
        except (RuntimeError, ValueError):
            return False
        return True


def _is_alone(gradient: Tensor) -> bool:
    """Whether the gradient's memory holds nothing else."""
    return gradient.untyped_storage().nbytes() == gradient.nbytes and _dense(gradient)


def _dense(tensor: Tensor) -> bool:
    """Whether the strides fill the memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _local(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part; a gradient with other placements than its parameter is redistributed first."""
    if isinstance(parameter, DTensor):
        assert isinstance(tensor, DTensor)
        if tensor.placements != parameter.placements:
            tensor = tensor.redistribute(placements=parameter.placements)
        return tensor._local_tensor
    return tensor


def _as_gradient(view: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return view
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())
