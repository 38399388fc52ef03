"""Synthetic flight records for tests, in the schema of csrc/health/flight/flight_record_json.cpp."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class RecordBuilder:
    """One rank's record. `call` and `message` append entries and update states and counters."""

    def __init__(self, rank: int, world: int, capacity: int = 2048) -> None:
        self.rank, self.capacity = rank, capacity
        self.groups: list[dict[str, Any]] = []
        self.entries: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.process = {"pid": 1000 + rank, "host": "h", "global_rank": rank, "world_size": world, "written_ns": 10**18}
        self.group("0", "default_pg", list(range(world)))

    def group(self, name: str, description: str, ranks: list[int], retired: bool = False) -> int:
        progress = {"last_scheduled": 0, "last_started": 0, "last_completed": 0}
        self.groups.append(
            {
                "id": len(self.groups),
                "name": name,
                "description": description,
                "rank": ranks.index(self.rank),
                "size": len(ranks),
                "global_ranks": ranks,
                "retired": retired,
                "collective": dict(progress),
                "p2p": dict(progress),
            }
        )
        return len(self.groups) - 1

    def _append(self, operation: str, state: str, is_p2p: bool, sequence: int, group: int, **fields: Any) -> None:
        shape_in, shape_out = fields.pop("shape"), fields.pop("out")
        created = 10**18 + 10**6 * (len(self.entries) + 1)
        self.entries.append(
            {
                "id": len(self.entries) + 1,
                "group": group,
                "operation": operation,
                "is_p2p": is_p2p,
                "sequence": 0 if is_p2p else sequence,
                "p2p_sequence": sequence if is_p2p else 0,
                "state": state,
                "peer": None,
                "tag": 0 if is_p2p else None,
                "root": None,
                "dtype": "float32",
                "output_dtype": "float32",
                "reduce_op": None,
                "input_bytes": 4 * math.prod(shape_in),
                "input_elements": math.prod(shape_in),
                "output_elements": math.prod(shape_out),
                "input_sizes": [shape_in],
                "output_sizes": [shape_out],
                "inputs": 1,
                "outputs": 1,
                "truncated": False,
                "timeout_ms": 1800000,
                "time_created_ns": created,
                "time_started_ns": None if state == "scheduled" else created,
                "time_ended_ns": created + 5000 if state in ("completed", "failed") else None,
                "duration_ns": 5000 if state in ("completed", "failed") else None,
                "error": "gave up" if state == "failed" else None,
                **fields,
            }
        )

    def call(
        self,
        operation: str = "all_reduce",
        shape: list[int] | None = None,
        state: str = "completed",
        group: int = 0,
        out: list[int] | None = None,
        **fields: Any,
    ) -> RecordBuilder:
        progress = self.groups[group]["collective"]
        progress["last_scheduled"] += 1
        progress["last_started"] += state != "scheduled"
        progress["last_completed"] += state == "completed"
        shape = [8] if shape is None else shape
        fields = {"shape": shape, "out": shape if out is None else out, **fields}
        self._append(operation, state, False, progress["last_scheduled"], group, **fields)
        return self

    def message(
        self,
        operation: str,
        peer: int,
        number: int,
        shape: list[int] | None = None,
        state: str = "completed",
        tag: int = 0,
    ) -> RecordBuilder:
        shape = [8] if shape is None else shape
        self._append(operation, state, True, number, 0, shape=shape, out=shape, peer=peer, tag=tag)
        return self

    def fail(self, error: str, peers: list[dict[str, Any]], peer: int | None = None) -> RecordBuilder:
        """Adds a failure noticed 0.5 ms after the last operation was called."""
        self.failures.append(
            {
                "time_ns": 10**18 + 10**6 * len(self.entries) + 5 * 10**5,
                "group": 0,
                "error": error,
                "peer": peer,
                "operation": "all_reduce",
                "sequence": self.groups[0]["collective"]["last_scheduled"],
                "frame": "",
                "peers": peers,
            }
        )
        return self

    def data(self) -> dict[str, Any]:
        return {
            "schema": "ark_flight_record",
            "version": "1.0",
            "process": self.process,
            "capacity": self.capacity,
            "recorded": len(self.entries),
            "dropped": 0,
            "groups": self.groups,
            "entries": self.entries[-self.capacity :],
            "failures": self.failures,
        }

    def write(self, folder: Path) -> Path:
        path = folder / f"flight_{self.rank}.json"
        path.write_text(json.dumps(self.data()), encoding="utf-8")
        return path


def peer(rank: int, enqueued: int, completed: int, lost: bool = False, waiting_on: int | None = None) -> dict[str, Any]:
    return {
        "rank": rank,
        "last_enqueued": enqueued,
        "last_started": enqueued,
        "last_completed": completed,
        "waiting_on": waiting_on,
        "operation": "",
        "lost": lost,
    }
