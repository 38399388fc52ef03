"""Measures the size from which each CUDA algorithm is faster on this machine's GPUs (`ark tune --cuda`).

Two candidates differ in one number of the dispatch: they always or never take the algorithm. They alternate in the same
processes and streams, each as a CUDA graph of several operations; the slowest rank's median counts. The chosen size
minimizes the total cost over all sizes, so that one noisy value cannot move it. Numbers not in `FIELDS` keep their
measured defaults. Copy engines serve computation that runs in parallel, so they are timed together with matrix products
of equal duration. NCCL has no share until it comes last, against the choices made before; it may be faster in a range
of sizes. It adds in other orders, so its numbers for sums apply only with reduction="fast".
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ark_torch.tools._tune_timers import Products, Timer, Together, call_of

NEVER = 2**64 - 1
ALWAYS = 0
LARGE = tuple(1 << power for power in range(22, 29))
GAIN = 1.1  # minimum gain of a sum in any order over rank order that is reported
WORTH = 1.03  # minimum product of the gains for which NCCL gets a share


@dataclass(frozen=True)
class Field:
    """One number of the dispatch, and the sizes of an operation at which it may matter."""

    name: str
    small_first: bool  # the algorithm is for sizes up to the number, not from it
    of_a_part: bool  # compared with one rank's part of the tensor
    sizes: tuple[int, ...]
    operation: str = "all_reduce"
    nccl: bool = False
    beside: bool = False  # timed together with matrix products
    registered: bool = False

    @property
    def sums(self) -> bool:
        return "reduce" in self.operation


FIELDS = (
    Field("one_shot_to", True, False, tuple(1 << power for power in range(12, 22))),
    Field("chunks_from", False, True, tuple(1 << power for power in range(18, 29))),
    Field("bulk_from", False, False, tuple(1 << power for power in range(22, 30)), beside=True),
    Field("copy_engine_from", False, False, tuple(1 << power for power in range(22, 30)), beside=True),
    Field("reduce_scatter_engine_from", False, True, LARGE, "reduce_scatter", beside=True),
    Field("bulk_move_from", False, True, LARGE, "all_gather", beside=True),
    Field("all_gather_engine_from", False, True, LARGE, "all_gather", beside=True),
    Field("broadcast_engine_from", False, False, LARGE, "broadcast", beside=True),
    Field("all_to_all_engine_from", False, True, LARGE, "all_to_all", beside=True),
    Field("landings_from", False, False, tuple(1 << power for power in range(19, 28)), "broadcast", registered=True),
    *(
        Field(f"nccl_{operation}_from", False, False, tuple(1 << power for power in range(18, 29)), operation, True)
        for operation in ("all_gather", "broadcast", "all_to_all", "all_reduce", "reduce", "reduce_scatter")
    ),
)

# Other numbers fixed while a field is measured: all_to_all relies on another operation to allocate copy-engine memory,
# rings never carry what copy engines do, and transfers by copy engines or relay do not land.
OTHERS = {
    "all_to_all_engine_from": {"broadcast_engine_from": ALWAYS},
    "bulk_from": {"copy_engine_from": NEVER},
    "bulk_move_from": {"all_gather_engine_from": NEVER},
    "landings_from": {"broadcast_engine_from": NEVER, "relay_from": NEVER},
}


def boundary(sizes: list[int], below: list[float], above: list[float]) -> int:
    """How many of the smallest sizes should use `below`; the rest use `above` (times at ascending sizes)."""
    costs = []
    for count in range(len(sizes) + 1):
        chosen = below[:count] + above[count:]
        costs.append(sum(math.log(time) for time in chosen))
    return costs.index(min(costs))


def decide(field: Field, ranks: int, without: list[float], always: list[float]) -> int:
    """The dispatch's number, from both candidates' times at the field's sizes."""
    sizes = [size // ranks if field.of_a_part else size for size in field.sizes]
    if field.small_first:
        count = boundary(sizes, always, without)
        return sizes[count - 1] if count else ALWAYS
    count = boundary(sizes, without, always)
    return sizes[count] if count < len(sizes) else NEVER


def share(field: Field, without: list[float], always: list[float]) -> dict[str, int]:
    """NCCL's range of sizes, from and to ones at which it was measured to be faster."""
    sizes, upper = field.sizes, field.name.removesuffix("_from") + "_to"
    faster = [math.log(ours / theirs) for ours, theirs in zip(without, always, strict=True)]
    best, gain = None, math.log(WORTH)
    for first in range(len(sizes)):
        for last in range(first, len(sizes)):
            if sum(faster[first : last + 1]) > gain:
                best, gain = (first, last), sum(faster[first : last + 1])
    if best is None:
        return {field.name: NEVER, upper: NEVER}
    first, last = best
    return {field.name: sizes[first], upper: NEVER if last == len(sizes) - 1 else sizes[last]}


def gains(field: Field, without: list[float], always: list[float]) -> dict[str, float]:
    """The sizes at which a sum in any order gains more than a tenth: bytes -> speedup."""
    if not (field.nccl and field.sums):
        return {}
    times = zip(field.sizes, without, always, strict=True)
    return {str(size): round(ours / theirs, 2) for size, ours, theirs in times if ours > GAIN * theirs}


def _registered(tensors: Sequence[torch.Tensor], size: int, backends: Sequence[Any]) -> list[torch.Tensor]:
    """Copies of these tensors, cut to `size` bytes, registered with both groups."""
    from ark_torch import memory

    with torch.cuda.use_mem_pool(memory.pool()):
        made = [tensor[: size // tensor.element_size()].clone() for tensor in tensors]
    for backend in backends:
        for tensor in made:
            backend._register_memory(tensor)
    return made


def random_tensors(size: int) -> list[torch.Tensor]:
    """Two of these many bytes; the program's random numbers stay as they are."""
    source = torch.Generator("cuda").manual_seed(1)
    return [torch.rand(size // 2, device="cuda", dtype=torch.bfloat16, generator=source) for _ in range(2)]


def measure(
    field: Field,
    numbers: dict[str, int],
    together: Together,
    tensors: Sequence[torch.Tensor],
    rounds: int,
    over: Callable[[], bool] = lambda: False,
) -> list[list[float]] | None:
    """Times at the field's sizes without the algorithm, and with it. `over` ends it between sizes on all ranks, as soon
    as any has it; then there are no times."""
    values = (ALWAYS, NEVER) if field.small_first else (NEVER, ALWAYS)
    others = OTHERS.get(field.name, {})
    groups = [together.group(numbers | others | {field.name: value}, field.nccl) for value in values]
    if field.name == "all_to_all_engine_from":
        for group in groups:  # creates the memory
            call_of("broadcast", group, tensors[0], tensors[1], together.ranks)()
    if field.registered:
        tensors = _registered(tensors, max(field.sizes), groups)
    timers = [Timer(together, group, field.operation, tensors) for group in groups]
    products = Products() if field.beside else None
    found: list[list[float]] = [[], []]
    late = False
    for size in field.sizes:
        for timer in timers:
            timer.prepare(size)
        if products is not None:
            (alone,) = together.slowest([max(timer.whole() for timer in timers)])
            products.last(alone)
        times = [[timer.microseconds(products) for timer in timers] for _ in range(rounds)]
        *medians, late_somewhere = together.slowest(
            [*(statistics.median(own) for own in zip(*times, strict=True)), float(over())]
        )
        for index in range(2):
            found[index].append(medians[index])
        if late := bool(late_somewhere) and size != field.sizes[-1]:
            break
    for timer in timers:
        timer.close()
    for group in groups:
        together.close(group)
    return None if late else found


class World:
    """All ranks of the job (Together)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._groups: dict[Any, Any] = {}

    def group(self, numbers: dict[str, int], fast: bool) -> Any:
        from ark_torch import _C
        from ark_torch.distributed.group import complete

        options = complete(_C.Options())
        options.cuda_dispatch = [(self.ranks, numbers)]
        options.reduction = "fast" if fast else "exact"
        group = dist.new_group(backend="ark", pg_options=options)
        backend = group._get_backend(torch.device("cuda"))
        self._groups[backend] = group
        return backend

    def close(self, backend: Any) -> None:
        dist.destroy_process_group(self._groups.pop(backend))

    def slowest(self, values: Sequence[float]) -> list[float]:
        every = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return every.tolist()


def tune(rank: int, ranks: int, rendezvous: str, rounds: int, output: str, only: Sequence[str] = ()) -> None:
    """One rank's part; rank 0 writes the file. `only`: names of fields to tune; others keep their defaults."""
    from ark_torch import _C

    torch.cuda.set_device(rank)
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]  # the default one cannot be captured
    dist.init_process_group("ark", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    world = World(ranks)
    say = print if rank == 0 else lambda *_: None
    numbers = _C._default_cuda_dispatch(ranks)
    fields = [field for field in FIELDS if not only or field.name in only]
    tensors = random_tensors(max(max(field.sizes) for field in fields))
    faster: dict[str, dict[str, float]] = {}
    for field in fields:
        times = measure(field, numbers, world, tensors, rounds)
        assert times is not None  # there is no limit of time
        without, always = times
        found = share(field, without, always) if field.nccl else {field.name: decide(field, ranks, without, always)}
        numbers |= found
        if gained := gains(field, without, always):
            faster[field.operation] = gained
        for name, number in found.items():
            say(f"{name}: {number if number != NEVER else 'never' if name == field.name else 'no bound'}")
        for size, one, two in zip(field.sizes, without, always, strict=True):
            say(f"  {size:>10} bytes: {one:9.1f} us without, {two:9.1f} us with")
    for line in told(ranks, faster):
        say(line)
    if rank == 0:
        write(output, ranks, numbers, faster)
        say(f"wrote {output}: use it with ARK_DISPATCH={output}")
    dist.barrier()
    dist.destroy_process_group()


def told(ranks: int, faster: dict[str, dict[str, float]]) -> list[str]:
    """Messages about what reduction="fast" would gain."""
    lines = []
    for operation, sizes in faster.items():
        shown = ", ".join(f"{(gain - 1) * 100:.0f}% at {int(size) / (1 << 20):g} MB" for size, gain in sizes.items())
        lines.append(f'reduction="fast" would gain for {operation} on {ranks} GPUs: {shown}')
    return lines


def write(output: str, ranks: int, numbers: dict[str, int], faster: dict[str, dict[str, float]] | None = None) -> None:
    """Writes the rule to the file; keeps its rules for other group sizes and for CPU tensors."""
    table: dict[str, Any] = {}
    if os.path.exists(output):
        with open(output, encoding="utf-8") as file:
            table = json.load(file)
    others = [rule for rule in table.get("cuda", []) if rule["max_ranks"] != ranks]
    table["cuda"] = sorted([*others, {"max_ranks": ranks, **numbers}], key=lambda rule: int(rule["max_ranks"]))
    kept = [rule for rule in table.get("fast", []) if rule["ranks"] != ranks]
    table["fast"] = [*kept, {"ranks": ranks, "gains": faster}] if faster else kept
    with open(output, "w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)
