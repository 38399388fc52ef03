"""Measures the dispatch of CUDA collectives when a group is first used on GPUs that the built-in one was not measured
on.

C++ asks `known()` on rank 0 while the ranks meet for the group's first operation on CUDA tensors; if nothing is known,
all ranks call `measure()` together (csrc/process_group/cuda/first_use.cpp). It is `ark tune --cuda` with few sizes and
a limit of time. Candidates are groups of their own over the same ranks, so the group itself is not used. All waits are
bounded, and whatever fails, the built-in values stay; ranks need not agree on that, because rank 0's numbers count.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from ark_torch import _dispatch_files
from ark_torch.tools import _tune_cuda
from ark_torch.tools._tune_cuda import NEVER, Field
from ark_torch.tools._tune_timers import call_of

log = logging.getLogger("ark_torch")

BUDGET_S = 3.0  # of measuring; what has begun is finished, and kernels that must be compiled come on top
PATIENCE = timedelta(seconds=20)  # with a peer that does not come
IDLE_S = 1.0  # for the work that the program has enqueued
MB = 1 << 20
LARGEST = 64 * MB
NEEDED = 2 << 30  # bytes of free GPU memory, for two groups, their buffers and the tensors
ROUNDS = 5
SIZES = {  # fields of the dispatch, in the order in which they are measured, and sizes of an operation
    "one_shot_to": tuple(1 << power for power in range(13, 22)),
    "chunks_from": (2 * MB, 8 * MB, 32 * MB, LARGEST),
    "bulk_from": (8 * MB, 24 * MB, LARGEST),
    "copy_engine_from": (8 * MB, 24 * MB, LARGEST),
    "all_gather_engine_from": (16 * MB, LARGEST),
}
ON_HOST = ("one_shot_to",)  # the only one of these that counts where the ranks share memory of the host
BULK = (9, 10, 11)  # major compute capabilities with bulk copies

_known: dict[tuple[str, int, str], dict[str, int]] = {}  # what this process has seen


def model_of(device: int) -> str:
    return torch.cuda.get_device_name(device)


def wish_of(options: Any) -> str:
    """ARK_DISABLE_P2P's value."""
    return "auto" if options.disable_p2p is None else str(int(options.disable_p2p))


def known(options: Any, device: int, ranks: int) -> dict[str, int] | None:
    """The numbers for this device, {} for the built-in ones; None: they are to be measured."""
    try:
        model = model_of(device)
        if _dispatch_files.is_built_in(model, ranks):
            return {}
        key = model, ranks, wish_of(options)
        if key not in _known:
            found = _dispatch_files.recall(*key, _fields(ranks))
            if found is None:
                return None
            _known[key] = found
        return _known[key]
    except Exception as error:  # a device that cannot be asked: the group's first operation says more
        log.debug("the dispatch of this GPU is not known: %s", error)
        return {}


def measure(options: Any, store: Any, rank: int, ranks: int, device: int) -> dict[str, int]:
    """Measures a dispatch on all ranks together; {}: the built-in values stay."""
    began = time.monotonic()
    model, wish = model_of(device), wish_of(options)
    together = None
    numbers: dict[str, int] = {}
    why = ""
    try:
        together = Apart(options, store, rank, ranks)
        numbers, why = _measured(together, device, began)
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0][:300]
    finally:
        if together is not None:
            together.close_all()
    _known[model, ranks, wish] = numbers  # other groups of as many ranks do not measure again
    if rank == 0:
        for_good = not why or (together is not None and together.carried)  # NCCL will carry this group again
        seconds = time.monotonic() - began
        note = {"measured": why or f"at first use, in {seconds:.1f} s"}
        path = _dispatch_files.remember(model, ranks, wish, _fields(ranks), numbers, note) if for_good else ""
        if why:
            log.info("dispatch for %d x %s: not measured (%s); the built-in one is used", ranks, model, why)
        else:
            kept = f"kept in {path}" if path else "not kept, since there is no cache folder"
            shown = ", ".join(f"{name} {_shown(number)}" for name, number in numbers.items())
            log.info("dispatch for %d x %s: measured in %.1f s (%s), %s", ranks, model, seconds, shown, kept)
    return numbers


def _fields(ranks: int) -> Collection[str]:
    from ark_torch import _C

    return _C._default_cuda_dispatch(ranks)


def _shown(number: int) -> str:
    return "never" if number == NEVER else f"{number >> 20} MB" if number >= MB else f"{number >> 10} KB"


class Apart:
    """Groups of the same ranks beside the one that is being made (Together)."""

    def __init__(self, options: Any, store: Any, rank: int, ranks: int) -> None:
        self.ranks = ranks
        self.carried = False  # ark cannot move CUDA tensors between these GPUs
        self._options, self._store, self._rank = options, store, rank
        self._open: list[Any] = []
        self._made = 0
        self._control = self.group({}, False)  # used with CPU tensors only

    def group(self, numbers: dict[str, int], fast: bool) -> Any:
        from torch.distributed import PrefixStore

        from ark_torch import _C

        options = self._options.__copy__()
        options.cuda_dispatch = [(self.ranks, numbers)]
        options.reduction = "fast" if fast else "exact"
        options.group_name = f"{options.group_name}/first use"
        options.debug = options.timing = False
        options.buffer_mb = min(options.buffer_mb, 2 * LARGEST // MB)
        options._timeout = min(options._timeout, PATIENCE)
        options.log = log.debug
        options.make_carrier = options.make_cuda_carrier = self._carry
        self._made += 1
        backend = _C.ProcessGroupArk(PrefixStore(str(self._made), self._store), self._rank, self.ranks, options)
        self._open.append(backend)
        return backend

    def _carry(self, *_: Any) -> Any:
        self.carried = True
        raise RuntimeError("ark does not carry this group")

    def close(self, backend: Any) -> None:
        self._open.remove(backend)
        backend.shutdown()

    def close_all(self) -> None:
        for backend in self._open[::-1]:
            self.close(backend)

    def slowest(self, values: Sequence[float]) -> list[float]:
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX  # type: ignore[assignment]
        every = torch.tensor(values, dtype=torch.float64)
        self._control.allreduce([every], options).wait()
        return every.tolist()

    def agree(self, why: str) -> bool:
        """Whether no rank has a reason to stop."""
        return self.slowest([float(bool(why))]) == [0.0]


def _measured(together: Apart, device: int, began: float) -> tuple[dict[str, int], str]:
    """The numbers, or why there are none."""
    why = why_not(device)
    if not together.agree(why):
        return {}, why or "another rank cannot"
    with own_stream(device):
        tensors = _tune_cuda.random_tensors(LARGEST)
        return search(together, fields_of(together, tensors, device), tensors, began), ""


@contextlib.contextmanager
def own_stream(device: int) -> Iterator[None]:
    """The program's streams may wait for peers, and its default one cannot be captured."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def why_not(device: int) -> str:
    """Why this rank cannot measure now; "" if it can."""
    free, _ = torch.cuda.mem_get_info(device)
    if free < NEEDED:
        return f"{free >> 20} MB of GPU memory are free, {NEEDED >> 20} MB needed"
    end = torch.cuda.current_stream(device).record_event()
    until = time.monotonic() + IDLE_S
    while not end.query():
        if time.monotonic() > until:
            return "the GPU is busy"
        time.sleep(0.001)
    return ""


def fields_of(together: Apart, tensors: Sequence[torch.Tensor], device: int) -> list[Field]:
    """The fields to measure, for the way that these GPUs have to each other."""
    probe = together.group({}, False)
    call_of("all_reduce", probe, tensors[0][:1024], tensors[1], together.ranks)()
    host = bool(probe.cuda_on_host)
    together.close(probe)
    bulk = torch.cuda.get_device_capability(device)[0] in BULK
    of = {field.name: field for field in _tune_cuda.FIELDS}
    names = [name for name in SIZES if (not host or name in ON_HOST) and (bulk or name != "bulk_from")]
    return [replace(of[name], sizes=SIZES[name]) for name in names]


def search(together: Any, fields: Sequence[Field], tensors: Sequence[torch.Tensor], began: float) -> dict[str, int]:
    """Measures the fields while there is time. The same numbers on all ranks, because they see the same times."""
    numbers: dict[str, int] = {}

    def over() -> bool:
        return time.monotonic() - began > BUDGET_S

    for field in fields:
        if together.slowest([float(over())]) != [0.0]:
            break
        base = {"bulk_from": NEVER, "copy_engine_from": NEVER} if field.name == "chunks_from" else {}
        times = _tune_cuda.measure(field, numbers | base, together, tensors, ROUNDS, over)
        if times is None:
            break
        numbers[field.name] = _tune_cuda.decide(field, together.ranks, *times)
    return numbers
