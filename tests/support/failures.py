"""Shared by the tests of the failure table (tests/distributed/test_failures_*.py): bounds, messages, measurements.

Each test adds its measurements to the table "failures", which is printed at the end and written as JSON. Times run from
the signal to the arrival of the survivor's error in the test process.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from support import tables
from support.outcome import Outcome

KILL_BOUND_S = 1.0  # time to notice a killed local peer
TIMEOUT_S = 2.0
SLACK_S = 5.0  # a timeout of T is reported between T and T + SLACK_S


def record(row: str, case: str, bound: str, seconds: list[float] | float, message: str = "") -> None:
    values = seconds if isinstance(seconds, list) else [seconds]
    tables.add(
        "failures", row=row, case=case, bound=bound, slowest_s=max(values), message=message.partition("\n")[0][:160]
    )


def check_message(outcome: Outcome, guilty: int | None, operation: str) -> str:
    """Checks that the survivor raised and its message names the rank, the operation, its number and a remedy."""
    assert outcome.kind == "error", outcome.describe()
    assert "RuntimeError" in outcome.value["bases"], outcome.value["bases"]
    text = outcome.message.splitlines()[0]
    assert text.startswith(f"ark: [rank {outcome.rank}] "), text
    if guilty is not None:
        assert re.search(rf"\brank {guilty}\b", text.partition("] ")[2]), f"does not name rank {guilty}: {text}"
    assert re.search(rf"\b{operation} #\d+", text), f"does not name {operation} and its number: {text}"
    assert len(re.findall(r"\. [A-Z][^.]+\.", text)) >= 1, f"no remedy: {text}"
    return text


def flight_dumps(folder: Path) -> dict[int, Any]:
    found = {}
    for path in folder.glob("record*"):
        number = re.search(r"(\d+)\.json$", path.name)
        if number:
            found[int(number.group(1))] = json.loads(path.read_text())
    return found
