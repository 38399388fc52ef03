"""Measures from which size on each of the CUDA algorithms is the faster one, on the GPUs of this machine.

Two candidates differ in one number of the dispatch: the algorithm is always taken, or never. Both run in turns in the
same processes and streams, each as a CUDA graph of several operations, and what counts is the slowest rank's median.
The size that is written is the one at which choosing by it costs least over all sizes, so that one noisy figure moves
nothing. What is not in `FIELDS` keeps its measured default.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NEVER = 2**64 - 1
ALWAYS = 0


@dataclass(frozen=True)
class Field:
    """One number of the dispatch, and at which sizes of an all_reduce it may matter."""

    name: str
    small_first: bool  # the algorithm is for sizes up to the number, not from it on
    of_a_part: bool  # it is compared with one rank's part of the tensor
    sizes: tuple[int, ...]


FIELDS = (
    Field("one_shot_to", True, False, tuple(1 << power for power in range(12, 22))),
    Field("chunks_from", False, True, tuple(1 << power for power in range(18, 29))),
    Field("copy_engine_from", False, False, tuple(1 << power for power in range(20, 30))),
)


def boundary(sizes: list[int], below: list[float], above: list[float]) -> int:
    """How many of the ascending sizes are best served by what `below` are the times of, and the rest by `above`."""
    costs = []
    for count in range(len(sizes) + 1):
        chosen = below[:count] + above[count:]
        costs.append(sum(math.log(time) for time in chosen))
    return costs.index(min(costs))


def decide(field: Field, ranks: int, without: list[float], always: list[float]) -> int:
    """The number for the dispatch, from the times of both candidates at the field's sizes."""
    sizes = [size // ranks if field.of_a_part else size for size in field.sizes]
    if field.small_first:
        count = boundary(sizes, always, without)
        return sizes[count - 1] if count else ALWAYS
    count = boundary(sizes, without, always)
    return sizes[count] if count < len(sizes) else NEVER


def _group(numbers: dict[str, int], ranks: int) -> Any:
    from ark_torch import _C
    from ark_torch.distributed.group import complete

    options = complete(_C.Options())
    options.cuda_dispatch = [(ranks, numbers)]
    return dist.new_group(backend="ark", pg_options=options)


class _Timer:
    """One candidate: graphs of several all_reduces of a size, made once."""

    def __init__(self, group: Any, tensor: torch.Tensor) -> None:
        self._group, self._tensor = group, tensor
        dist.all_reduce(tensor[:16], group=group)
        torch.cuda.synchronize()

    def prepare(self, size: int) -> None:
        self._calls = max(2, min(20, (64 << 20) // size))
        part = self._tensor[: size // self._tensor.element_size()]
        dist.all_reduce(part, group=self._group)  # kernels are loaded outside the graph
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(self._calls):
                dist.all_reduce(part, group=self._group)

    def microseconds(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        dist.barrier()
        self._graph.replay()
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / self._calls


def _measure(field: Field, numbers: dict[str, int], ranks: int, tensor: torch.Tensor, rounds: int) -> list[list[float]]:
    """Times at the field's sizes without the algorithm, and with it always."""
    values = (ALWAYS, NEVER) if field.small_first else (NEVER, ALWAYS)
    groups = [_group(numbers | {field.name: value}, ranks) for value in values]
    timers = [_Timer(group, tensor) for group in groups]
    found: list[list[float]] = [[], []]
    for size in field.sizes:
        times: list[list[float]] = [[], []]
        for index in range(2):
            timers[index].prepare(size)
        for _ in range(rounds):
            for index in range(2):
                times[index].append(timers[index].microseconds())
        medians = torch.tensor([statistics.median(each) for each in times], dtype=torch.float64)
        dist.all_reduce(medians, dist.ReduceOp.MAX)
        for index in range(2):
            found[index].append(float(medians[index]))
    torch.cuda.synchronize()
    del timers  # their graphs hold what the groups have captured
    for group in groups:
        dist.destroy_process_group(group)
    return found


def tune(rank: int, ranks: int, rendezvous: str, rounds: int, output: str) -> None:
    """One rank's part; rank 0 writes the file."""
    from ark_torch import _C

    torch.cuda.set_device(rank)
    dist.init_process_group("ark", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    say = print if rank == 0 else lambda *_: None
    numbers = _C._default_cuda_dispatch(ranks)
    tensor = torch.zeros(max(max(field.sizes) for field in FIELDS) // 2, dtype=torch.bfloat16, device="cuda")
    for field in FIELDS:
        without, always = _measure(field, numbers, ranks, tensor, rounds)
        numbers[field.name] = decide(field, ranks, without, always)
        say(f"{field.name}: {numbers[field.name] if numbers[field.name] != NEVER else 'never'}")
        for size, one, two in zip(field.sizes, without, always, strict=True):
            say(f"  {size:>10} bytes: {one:9.1f} us without, {two:9.1f} us with")
    if rank == 0:
        write(output, ranks, numbers)
        say(f"wrote {output}: use it with ARK_DISPATCH={output}")
    dist.barrier()
    dist.destroy_process_group()


def write(output: str, ranks: int, numbers: dict[str, int]) -> None:
    """Puts the rule into the file, beside what it holds for other sizes of groups and for CPU tensors."""
    table: dict[str, Any] = {}
    if os.path.exists(output):
        with open(output, encoding="utf-8") as file:
            table = json.load(file)
    others = [rule for rule in table.get("cuda", []) if rule["max_ranks"] != ranks]
    table["cuda"] = sorted([*others, {"max_ranks": ranks, **numbers}], key=lambda rule: int(rule["max_ranks"]))
    with open(output, "w", encoding="utf-8") as file:
        json.dump(table, file, indent=1)
