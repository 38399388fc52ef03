"""Compares predictions with measured rows not used for fitting, and summarizes the errors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ark_torch.simulation import fit, measured
from ark_torch.simulation.machine import Machine

NEAR = 0.15
LARGE = 1 << 20
Row = dict[str, Any]


def rows(results: Path, machines: Mapping[str, Machine]) -> list[Row]:
    """`error`: predicted / measured - 1."""
    made = []
    for row in measured.rows(results):
        if row.fitted:
            continue
        us = fit.predicted(machines[row.machine], row)
        made.append({
            "machine": row.machine, "operation": row.operation, "ranks": row.ranks, "bytes": row.bytes,
            "rail_gbit": row.rail_gbit, "engine": fit.engine_of(row), "source": row.source, "measured_us": row.us,
            "predicted_us": round(us, 3), "error": round(us / row.us - 1, 4),
        })  # fmt: skip
    return made


def near(rows: list[Row]) -> float:
    """The share of rows within NEAR."""
    return float(sum(abs(row["error"]) <= NEAR for row in rows) / max(1, len(rows)))


def summary(rows: list[Row]) -> list[Row]:
    """By machine, number of ranks and link: number of rows, share within NEAR, also of LARGE ones, median of |error|,
    worst row."""
    made = []
    places = dict.fromkeys((row["machine"], row["ranks"], row["rail_gbit"]) for row in rows)
    for machine, ranks, gbit in places:
        of = [row for row in rows if (row["machine"], row["ranks"], row["rail_gbit"]) == (machine, ranks, gbit)]
        made.append({
            "machine": machine, "ranks": ranks, "rail_gbit": gbit, "rows": len(of),
            "near": near(of), "near_large": near([row for row in of if row["bytes"] >= LARGE]),
            "median": statistics.median(abs(row["error"]) for row in of),
            "worst": max(of, key=lambda row: abs(row["error"])),
        })  # fmt: skip
    return made
