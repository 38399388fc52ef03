"""Reads, merges and cuts the timelines of ARK_TRACE (csrc/compiler/inspect/trace.cpp writes them).

Every file describes its clock: ranks of one boot of one machine share CLOCK_MONOTONIC. Other files are shifted by the
difference of realtime and monotonic time when they were opened, which is as exact as the machines' clocks agree.
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LANE = 1000  # range of thread numbers for one caller and its workers


@dataclass
class Slice:
    name: str
    kind: str  # "wait", or the task's kind
    begin: float  # microseconds
    length: float
    worker: int
    arguments: dict[str, Any]

    @property
    def end(self) -> float:
        return self.begin + self.length


@dataclass
class Step:
    """One call of a region, with the activity of its workers."""

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
    def first(self) -> float:
        """When the first slice begins."""
        return min((one.begin for one in self.slices), default=self.begin)

    @property
    def workers(self) -> int:
        return 1 + max((one.worker for one in self.slices), default=0)


def read(path: Path) -> dict[str, Any]:
    """Reads one file, compressed if its name ends in .gz. Raises ValueError if it is not one of our timelines."""
    try:
        text = path.read_bytes()
        data: dict[str, Any] = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
        if data["otherData"]["made_by"] == "ark_torch" and isinstance(data["traceEvents"], list):
            return data
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is not a timeline that ARK_TRACE made")


def shift_of(about: dict[str, Any], first: dict[str, Any]) -> float:
    """Microseconds from a file's clock to the first one's."""
    if about["boot"] == first["boot"]:
        return 0.0
    shift: float = (about["realtime_ns"] - about["monotonic_ns"] - first["realtime_ns"] + first["monotonic_ns"]) / 1e3
    return shift


def merge(files: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges all files on the clock of the first, one process per rank. Raises ValueError if a file lacks a clock."""
    if any("boot" not in file["otherData"] for file in files):  # already merged, such as --timeline's
        if len(files) == 1:
            return files[0]
        raise ValueError("a timeline that --timeline wrote has no clock: give it alone, or the files of ARK_TRACE")
    first = files[0]["otherData"]
    events: list[dict[str, Any]] = []
    for number, file in enumerate(files):
        about = file["otherData"]
        shift = shift_of(about, first)
        for event in file["traceEvents"]:
            # Process ids may collide between machines or containers.
            moved = {**event, "pid": number + 1}
            if shift and "ts" in moved:
                moved["ts"] += shift
            events.append(moved)
        sorting = {"ph": "M", "pid": number + 1, "name": "process_sort_index", "args": {"sort_index": about["rank"]}}
        events.append(sorting)
    ranks = [file["otherData"]["rank"] for file in files]
    return {"displayTimeUnit": "ns", "otherData": {**first, "merged_ranks": ranks}, "traceEvents": events}


def write(path: Path, timeline: dict[str, Any]) -> None:
    """Compresses if the name ends in .gz, which Perfetto opens too; the output is deterministic."""
    text = json.dumps(timeline, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def timeline_of(steps: Sequence[Step]) -> dict[str, Any]:
    """A timeline of these steps: one process per rank, one thread per worker, times from the first step's start."""
    begin = min(step.begin for step in steps)
    events: list[dict[str, Any]] = []

    def say(pid: int, tid: int, what: str, **arguments: Any) -> None:
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments})

    def add(pid: int, worker: int, one: Slice) -> None:
        times = {"ts": round(one.begin - begin, 3), "dur": round(one.length, 3)}
        events.append(
            {"ph": "X", "pid": pid, "tid": worker + 1, "name": one.name, "cat": one.kind, **times}
            | {"args": {key: one.arguments[key] for key in ("task", "tile") if key in one.arguments}}
        )

    for number, step in enumerate(steps):
        pid = number + 1
        say(pid, 1, "process_name", name=f"rank {step.rank}")
        say(pid, 1, "process_sort_index", sort_index=step.rank)
        for worker in range(step.workers):
            say(pid, worker + 1, "thread_name", name=f"worker {worker}")
            say(pid, worker + 1, "thread_sort_index", sort_index=worker)
        add(pid, 0, Slice(step.region, "region", step.begin, step.length, 0, {}))
        for one in step.slices:
            add(pid, one.worker, one)
    ranks = [step.rank for step in steps]
    about = {"made_by": "ark_torch", "rank": ranks[0], "merged_ranks": ranks}
    return {"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}


def slice_of(event: dict[str, Any], shift: float = 0.0) -> tuple[int, Slice]:
    """An event's lane and slice."""
    lane, worker = divmod(event["tid"] - 1, LANE)
    return lane, Slice(event["name"], event["cat"], event["ts"] + shift, event["dur"], worker, event["args"])


def steps_of(merged: dict[str, Any]) -> list[Step]:
    """The calls in time order, each with its slices."""
    ranks = merged["otherData"].get("merged_ranks", [merged["otherData"]["rank"]])
    of_process = {number + 1: rank for number, rank in enumerate(ranks)}
    found: dict[tuple[int, int], list[Step]] = defaultdict(list)
    rest = []
    for event in merged["traceEvents"]:
        if event["ph"] != "X":
            continue
        lane, one = slice_of(event)
        if one.kind == "region":
            rank = of_process.get(event["pid"], event["pid"])
            step = Step(one.name, rank, one.begin, one.length, lane)
            found[event["pid"], lane].append(step)
        else:
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
