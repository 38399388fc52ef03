"""Times one operation over several backends in turns, and checks their results.

The backends take turns in a rotating order, so that other load affects all of them equally. A turn starts after a
barrier and an untimed call, and takes as long as its slowest rank; the median of the turns counts, and half their
interquartile range is the uncertainty. Outputs are poisoned before the first call and after the last turn, and both
results must be exactly right, element by element.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .operations import Call, Case, Operation

MAX_ITERATIONS = 2000
Binder = Callable[[Operation, Case, Tensor, Tensor], Call]


@dataclass(frozen=True)
class Timing:
    """One backend's results for one case, over all ranks; times in microseconds."""

    median: float
    best: float
    spread: float
    iterations: int
    rounds: int
    wrong: int
    error: str = ""


class Bench:
    """`control`: a group of PyTorch's own, over which the ranks agree on counts and combine their times."""

    def __init__(self, control: dist.ProcessGroup, binders: dict[str, Binder], rounds: int, seconds: float) -> None:
        self.control = control
        self.binders = binders
        self.rounds = rounds
        self.seconds = seconds

    def maximum(self, values: list[float]) -> list[float]:
        combined = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(combined, dist.ReduceOp.MAX, group=self.control)
        return list(combined.tolist())

    def run(self, operation: Operation, case: Case, backends: list[str]) -> dict[str, Timing]:
        x = case.input_of(case.rank, operation.input_elements(case))
        y = torch.empty(operation.output_elements(case), dtype=x.dtype)
        expected = operation.expected(case)
        calls = {name: self.binders[name](operation, case, x, y) for name in backends}
        wrong = dict.fromkeys(backends, 0)
        errors: dict[str, str] = {}

        def check(name: str) -> None:
            """One call on fresh data; a backend that fails on any rank is excluded from then on."""
            message = ""
            poison(operation, x, y)
            try:
                calls[name]()
            except Exception as error:  # any error goes into the table and must not stop other backends
                message = f"{type(error).__name__}: {error}".splitlines()[0]
            if self.maximum([float(message != "")])[0] > 0:
                errors[name] = message or "failed on another rank"
            elif expected is not None:
                wrong[name] += count_wrong(y, expected)

        for name in backends:
            check(name)
        alive = [name for name in backends if name not in errors]
        iterations = {name: self.iterations_for(calls[name]) for name in alive}
        rounds = self.rounds if not alive or min(iterations.values()) > 1 else max(3, self.rounds // 2)
        turns: dict[str, list[float]] = {name: [] for name in alive}
        for number in range(rounds):
            shift = number % len(alive) if alive else 0
            for name in alive[shift:] + alive[:shift]:
                turns[name].append(self.turn(calls[name], iterations[name]))
        for name in alive:
            check(name)

        wrong_everywhere = torch.tensor([wrong[name] for name in backends])
        dist.all_reduce(wrong_everywhere, group=self.control)
        timings = {}
        for name, count in zip(backends, wrong_everywhere.tolist(), strict=True):
            if name in errors:
                timings[name] = Timing(0.0, 0.0, 0.0, 0, 0, count, errors[name])
            else:
                slowest = torch.tensor(self.maximum(turns[name]), dtype=torch.float64)
                points = torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64)
                best, low, median, high = (slowest.quantile(points) * 1e6).tolist()
                timings[name] = Timing(median, best, (high - low) / 2, iterations[name], rounds, count)
        return timings

    def iterations_for(self, call: Call) -> int:
        """The number of calls in a turn, doubled until they take a quarter of it. The same on all ranks."""
        count = 1
        while True:
            elapsed = self.maximum([self.turn(call, count)])[0]  # of one call
            if elapsed * count >= self.seconds / 4 or count >= MAX_ITERATIONS:
                return int(min(MAX_ITERATIONS, max(1, round(self.seconds / elapsed))))
            count *= 2

    def turn(self, call: Call, iterations: int) -> float:
        """Seconds per call on this rank; all ranks start together."""
        dist.barrier(group=self.control)
        call()
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        return (time.perf_counter() - start) / iterations


def poison(operation: Operation, x: Tensor, y: Tensor) -> None:
    if operation.in_place:
        y.copy_(x)
    else:
        y.fill_(float("nan") if y.is_floating_point() else -99)


def count_wrong(result: Tensor, expected: Tensor) -> int:
    """Number of wrong elements (NaN, the poison, differs from all expected values)."""
    if torch.equal(result, expected):
        return 0
    return int((result != expected).sum())


def bind_to(group: dist.ProcessGroup) -> Binder:
    return lambda operation, case, x, y: operation.bind(case, group, x, y)


def bind_to_mpi(communicator: Any) -> Binder:
    """MPI works on the tensors' own memory through NumPy."""
    return lambda operation, case, x, y: operation.bind_mpi(case, communicator, x.numpy(), y.numpy())
