"""Reading and merging the timelines that ARK_TRACE makes (csrc/plan/trace.cpp writes them).

Every file says of its clock what is needed: ranks of one boot of one machine share CLOCK_MONOTONIC, others are shifted
by what realtime and monotonic time differed when their files were opened, as exact as the machines' clocks agree.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LANE = 1000  # thread numbers of one caller and its workers


@dataclass
class Slice:
    name: str
    kind: str  # "wait", or the task's
    begin: float  # microseconds
    length: float
    worker: int
    arguments: dict[str, Any]

    @property
    def end(self) -> float:
        return self.begin + self.length


@dataclass
class Step:
    """One call of a region, with what its workers did."""

    region: str
    rank: int
    begin: float
    length: float
    lane: int
    slices: list[Slice] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.begin + self.length

    @property
    def workers(self) -> int:
        return 1 + max((one.worker for one in self.slices), default=0)


def read(path: Path) -> dict[str, Any]:
    """One file. ValueError where it is not a timeline of ours."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if data["otherData"]["made_by"] == "ark_torch" and isinstance(data["traceEvents"], list):
            return data
    except (UnicodeDecodeError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a timeline that ARK_TRACE made")


def merge(files: list[dict[str, Any]]) -> dict[str, Any]:
    """All files as one, on the clock of the first, a process a rank."""
    first = files[0]["otherData"]
    events: list[dict[str, Any]] = []
    for number, file in enumerate(files):
        about = file["otherData"]
        shift = 0.0
        if about["boot"] != first["boot"]:
            shift = (about["realtime_ns"] - about["monotonic_ns"] - first["realtime_ns"] + first["monotonic_ns"]) / 1e3
        for event in file["traceEvents"]:
            # Process numbers of several machines, or of containers, may be the same.
            moved = {**event, "pid": number + 1}
            if shift and "ts" in moved:
                moved["ts"] += shift
            events.append(moved)
        sorting = {"ph": "M", "pid": number + 1, "name": "process_sort_index", "args": {"sort_index": about["rank"]}}
        events.append(sorting)
    ranks = [file["otherData"]["rank"] for file in files]
    return {"displayTimeUnit": "ns", "otherData": {**first, "merged_ranks": ranks}, "traceEvents": events}


def steps_of(merged: dict[str, Any]) -> list[Step]:
    """The calls in order of time, each with its slices."""
    ranks = merged["otherData"].get("merged_ranks", [merged["otherData"]["rank"]])
    of_process = {number + 1: rank for number, rank in enumerate(ranks)}
    found: dict[tuple[int, int], list[Step]] = defaultdict(list)
    rest = []
    for event in merged["traceEvents"]:
        if event["ph"] != "X":
            continue
        lane, worker = divmod(event["tid"] - 1, LANE)
        if event["cat"] == "region":
            rank = of_process.get(event["pid"], event["pid"])
            step = Step(event["name"], rank, event["ts"], event["dur"], lane)
            found[event["pid"], lane].append(step)
        else:
            one = Slice(event["name"], event["cat"], event["ts"], event["dur"], worker, event["args"])
            rest.append(((event["pid"], lane), one))
    begins = {}
    for place, steps in found.items():
        steps.sort(key=lambda step: step.begin)
        begins[place] = [step.begin for step in steps]
    for place, one in rest:
        number = bisect_right(begins.get(place, []), one.begin) - 1
        if number >= 0:
            found[place][number].slices.append(one)
    return sorted((step for steps in found.values() for step in steps), key=lambda step: step.begin)
