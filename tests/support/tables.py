"""Tables that tests fill (measured seconds, skipped bodies). They are printed at the end and written as JSON.

The files go to out/test-results/ (ignored by git) or to $ARK_TEST_RESULTS.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import pytest

_tables: dict[str, list[dict[str, Any]]] = {}


def results_folder() -> Path:
    folder = Path(os.environ.get("ARK_TEST_RESULTS", Path(__file__).resolve().parents[2] / "out" / "test-results"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def add(table: str, **row: Any) -> None:
    rows = _tables.setdefault(table, [])
    rows.append(row)
    content = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "machine": platform.platform(), "rows": rows}
    (results_folder() / f"{table}.json").write_text(json.dumps(content, indent=1, default=str) + "\n")


def _formatted(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    lines = ["  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return lines


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_all(reporter: pytest.TerminalReporter) -> None:
    for name, rows in _tables.items():
        reporter.section(name)
        for line in _formatted(rows):
            reporter.line(line)
