"""Measurements from benchmarks/results, split into rows for fitting and rows for validation.

No row serves for both. For each operation and number of ranks every second size is fitted (of four sizes or fewer, the
first and the last). Between namespaces the faster link is fitted, and the slower one predicted at all sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ark_torch.simulation.collective import OPERATIONS

GPU, CPU, NODES = "h200", "processes", "namespaces"
CALLS = (1 << 20, 9, 2)  # of processes, back to back: up to this size, beyond
NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
         "all_to_all_single": "all_to_all"}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    machine: str
    operation: str
    ranks: int
    bytes: int  # of the larger side
    us: float
    source: str  # file name
    fitted: bool = False
    engine: str | None = None  # overrides the tables
    dispatch: dict[str, int] = field(default_factory=dict)
    rail_gbit: float = 0.0
    calls: int = 1


def load(results: Path, name: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    return made


def _alternating(rows: list[dict[str, Any]]) -> set[int]:
    """The sizes for fitting."""
    sizes = sorted({int(row["bytes"]) for row in rows})
    return {sizes[0], sizes[-1]} if len(sizes) <= 4 else set(sizes[::2])


def _groups(rows: Iterable[dict[str, Any]], *keys: str) -> Iterator[list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    yield from found.values()


def rows(results: Path) -> list[Measured]:
    return [*_gpus(results), *_dispatch(results), *_groups_of_processes(results)]


def _gpus(results: Path) -> Iterator[Measured]:
    for ranks in (2, 4):
        name = f"collectives_{ranks}_h200"
        every = [
            row
            for row in load(results, name)["rows"]
            # Rows with `measured` are older than the others, and than the dispatch.
            if row["operation"] in OPERATIONS and row.get("dtype", "bfloat16") == "bfloat16" and "measured" not in row
        ]
        for group in _groups(every, "operation"):
            fit = _alternating(group)
            for row in group:
                # The engines of four GPUs' large all_reduces are fitted where they are measured one by one.
                elsewhere = ranks == 4 and row["operation"] == "all_reduce" and row["bytes"] >= 16 << 20
                yield Measured(
                    GPU, row["operation"], ranks, row["bytes"], row["graph_us"]["ark"], f"{name}.json",
                    row["bytes"] in fit and not elsewhere,
                )  # fmt: skip


def _dispatch(results: Path) -> Iterator[Measured]:
    """All_reduces of four GPUs, for each engine alone; bulk by 32 blocks, the default."""
    every = load(results, "dispatch_4_h200")["rows"]
    for contender, engine in (("ark_rings", "rings"), ("ark_engine", "copy_engine"), ("ark_bulk32", "bulk")):
        of = [row for row in every if row["contender"] == contender]
        fit = _alternating(of)
        for row in of:
            rings = "chunks" if row["bytes"] // row["ranks"] >= 8 << 20 else "lines"
            yield Measured(
                GPU, row["operation"], row["ranks"], row["bytes"], row["alone_us"], "dispatch_4_h200.json",
                row["bytes"] in fit, rings if engine == "rings" else engine,
            )  # fmt: skip


def _groups_of_processes(results: Path) -> Iterator[Measured]:
    """The least turns, called back to back."""
    data = load(results, "simulate_groups")
    fastest = max((gbit(row) for row in data["rows"]), default=0.0)
    for group in _groups(data["rows"], "rate", "ranks", "operation"):
        fit = _alternating(group)
        for row in group:
            rate = gbit(row)
            yield Measured(
                NODES if rate else CPU, NAMES.get(row["operation"], row["operation"]), row["ranks"], row["bytes"],
                row["us"], "simulate_groups.json", row["bytes"] in fit and rate in (0.0, fastest), rail_gbit=rate,
                calls=CALLS[1 if row["bytes"] <= CALLS[0] else 2],
            )  # fmt: skip


def gbit(row: dict[str, Any]) -> float:
    """Gbit/s of a row's link; 0 in one node."""
    return float(row["rate"].removesuffix("gbit") or 0)
