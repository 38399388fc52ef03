"""The flight record of this process: its last operations, their states and times.

A failed collective writes it by itself where ARK_FLIGHT_DUMP is set; these functions take it at any other time, for
instance from a signal handler of a job that hangs. Read it with `ark flight`.
"""

from __future__ import annotations

import json
import os
from typing import Any, cast


def record() -> dict[str, Any]:
    """The record as a dictionary; its schema is documented in csrc/health/flight/flight_record_json.hpp."""
    from ark_torch import _C

    return cast("dict[str, Any]", json.loads(_C._flight_record_json()))


def dump(path: str | os.PathLike[str]) -> None:
    """Writes the record to `path` as JSON (readable by the owner alone), replacing what was there in one step."""
    from ark_torch import _C

    if not _C._flight_record_dump(os.fspath(path)):
        raise OSError(f"cannot write the flight record to {os.fspath(path)!r}: no such folder, not writable, or full")
