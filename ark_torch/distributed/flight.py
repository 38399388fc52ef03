"""The flight record of this process: its last operations, their states and times.

A failed collective writes it automatically if ARK_FLIGHT_DUMP is set. These functions take it at any other time, for
example from a signal handler of a hanging job. `ark flight` reads the files.
"""

from __future__ import annotations

import json
import os
from typing import Any, cast


def record() -> dict[str, Any]:
    """The record as a dictionary; csrc/health/flight/flight_record_json.cpp documents its schema."""
    from ark_torch import _C

    return cast("dict[str, Any]", json.loads(_C._flight_record_json()))


def dump(path: str | os.PathLike[str]) -> None:
    """Writes the record to `path` as JSON (readable only by the owner), atomically replacing an existing file."""
    from ark_torch import _C

    if not _C._flight_record_dump(os.fspath(path)):
        raise OSError(f"cannot write the flight record to {os.fspath(path)!r}: no such folder, not writable, or full")
