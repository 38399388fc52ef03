"""The configuration of one benchmark run, sent from the command line to the ranks as JSON, and the list of sizes."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

OPERATION_NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)
REDUCTIONS = ("sum", "min", "max")
# dtype: (largest whole number drawn, divisor). Sums over 16 ranks stay exact.
DTYPES = {
    "float32": (1 << 19, 1024),
    "float64": (1 << 30, 1024),
    "bfloat16": (8, 4),
    "float16": (64, 16),
    "int32": (1 << 26, 1),
}
UNITS = {"": 1, "B": 1, "K": 1 << 10, "KB": 1 << 10, "M": 1 << 20, "MB": 1 << 20, "G": 1 << 30, "GB": 1 << 30}


@dataclass(frozen=True)
class Config:
    world: int
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    backends: tuple[str, ...]  # the first is the reference for the others
    mpi: bool
    dtype: str = "float32"
    redop: str = "sum"
    rounds: int = 7
    batch_seconds: float = 0.03  # duration of one backend's turn; at least one call
    timeout_seconds: float = 120.0
    overhead: bool = False  # also time the empty backend
    goals: bool = False  # report this project's goals

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Config:
        values: dict[str, Any] = json.loads(text)
        for name in ("operations", "sizes", "backends"):
            values[name] = tuple(values[name])
        return Config(**values)


def parse_size(text: str) -> int:
    """Bytes of '4', '64K', '1M', '256MB'; ValueError for anything else."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?B?)", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write bytes or a unit of 1024, such as 4, 64K, 1M, 256M")
    return int(match[1]) * UNITS[match[2]]


def sizes_between(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """smallest, smallest * factor, ..., and finally largest."""
    if smallest > largest:
        raise ValueError(f"the smallest size, {smallest} bytes, is above the largest, {largest} bytes")
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def show_size(size: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
