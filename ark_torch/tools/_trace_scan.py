"""Reads the steps of large timelines of ARK_TRACE. A step's slices are parsed when they are first asked for.

csrc/compiler/inspect/trace.cpp writes one event a line: a step's region, then its slices. So the lines of regions tell
where the steps are, and a regular expression finds when slices begin. Other files are parsed as a whole.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ark_torch.tools._trace_files import Slice, Step, merge, read, shift_of, slice_of, steps_of

_REGION = b'"cat":"region"'  # quotes inside a name are escaped
_BEGIN = re.compile(rb'"ts":([0-9.]+),"dur":')
_END = b"\n]}\n"


class _Part(Step):
    """A step of which the text of its slices is known."""

    def __init__(self, event: dict[str, Any], rank: int, lane: int, text: bytes, shift: float) -> None:
        self.region, self.rank, self.lane = event["name"], rank, lane
        self.begin, self.length = event["ts"] + shift, event["dur"]
        self._text, self._shift, self._first = text, shift, float("inf")
        self._spans: list[tuple[int, int]] = []

    def add(self, span: tuple[int, int], first: float) -> None:
        self._spans.append(span)
        self._first = min(self._first, first)

    @cached_property
    def slices(self) -> list[Slice]:  # type: ignore[override]
        text = b",".join(self._text[begin:end].strip(b",\n") for begin, end in self._spans)
        events = (event for event in json.loads(b"[" + text + b"]") if event["ph"] == "X")
        return [slice_of(event, self._shift)[1] for event in events]

    @property
    def first(self) -> float:
        return self._first if self._spans else self.begin


def scan(paths: Sequence[Path]) -> list[Step]:
    """As steps_of(merge()) of the files. Raises ValueError as read() and merge() do."""
    texts = [path.read_bytes() for path in paths]
    abouts = [about_of(text) for text in texts]
    if not all(abouts):
        return steps_of(merge([read(path) for path in paths]))
    found: list[Step] = []
    for text, about in zip(texts, abouts, strict=True):
        found += _steps(text, about["rank"], shift_of(about, abouts[0]))
    return sorted(found, key=lambda step: step.begin)


def about_of(text: bytes) -> dict[str, Any]:
    """What a file that was written line by line tells about itself; empty if it is another file."""
    line = text[: max(text.find(b"\n"), 0)]
    try:
        about: dict[str, Any] = json.loads(line.rstrip(b",") + b"]}")["otherData"]
        return about if about["made_by"] == "ark_torch" and "boot" in about and text.endswith(_END) else {}
    except (UnicodeDecodeError, ValueError, KeyError, TypeError):
        return {}


def _steps(text: bytes, rank: int, shift: float) -> list[Step]:
    """The steps of one file, lane by lane."""
    lanes: dict[int, list[_Part]] = defaultdict(list)
    chunks: list[tuple[_Part, int, int]] = []  # the lines behind each region's line
    at = text.find(_REGION)
    while at >= 0:
        begin, end = text.rindex(b"\n", 0, at) + 1, text.index(b"\n", at)
        event = json.loads(text[begin:end].rstrip(b","))
        step = _Part(event, rank, slice_of(event)[0], text, shift)
        lanes[step.lane].append(step)
        at = text.find(_REGION, end)
        chunks.append((step, end, text.rindex(b"\n", end, at) if at >= 0 else len(text) - len(_END)))
    begins = {}
    for lane, steps in lanes.items():
        steps.sort(key=lambda step: step.begin)
        begins[lane] = [step.begin for step in steps]
    for step, begin, end in chunks:
        starts = [float(one) + shift for one in _BEGIN.findall(text, begin, end)]
        if not starts:
            continue
        before, of_lane = begins[step.lane], lanes[step.lane]
        first = min(starts)
        numbers = {bisect_right(before, first), bisect_right(before, max(starts))}
        if len(numbers) == 1:  # all begin in the same step
            if (number := numbers.pop()) > 0:
                of_lane[number - 1].add((begin, end), first)
            continue
        for one in _BEGIN.finditer(text, begin, end):
            start = float(one[1]) + shift
            if (number := bisect_right(before, start)) > 0:
                line = text.rindex(b"\n", begin, one.start()), text.find(b"\n", one.end(), end)
                of_lane[number - 1].add((line[0], line[1] if line[1] >= 0 else end), start)
    return [step for steps in lanes.values() for step in steps]
