"""Reads and checks flight records written by the extension (schema: csrc/health/flight/flight_record_json.cpp).

A dump is one process's last operations. Files come from machines that just failed, so every field is checked before
use, and an error names the file and the problem. Standard library only: works without PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA, MAJOR = "ark_flight_record", 1


class DumpError(ValueError):
    """A file is not a flight record, or files do not belong together."""


@dataclass(frozen=True)
class Progress:
    """Last sequence numbers; 0: none yet."""

    scheduled: int = 0
    started: int = 0
    completed: int = 0


@dataclass(frozen=True)
class Group:
    name: str
    description: str
    rank: int
    ranks: tuple[int, ...]  # global ranks, in rank order
    retired: bool
    collective: Progress

    def to_global(self, rank: int | None) -> int | None:
        return self.ranks[rank] if rank is not None and 0 <= rank < len(self.ranks) else None


@dataclass
class Operation:
    """One entry; `group` is the group's name and `peer` a rank within it."""

    id: int
    group: str
    operation: str
    is_p2p: bool
    sequence: int
    p2p_sequence: int
    state: str
    peer: int | None
    tag: int
    root: int | None
    dtype: str | None
    output_dtype: str | None
    reduce_op: str | None
    input_elements: int
    output_elements: int
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    truncated: bool
    timeout_ms: int
    time_created_ns: int
    time_started_ns: int | None
    time_ended_ns: int | None
    duration_ns: int | None
    error: str | None

    @property
    def title(self) -> str:
        """For example "all_reduce SUM float32 [8, 4]"."""
        sizes = self.input_sizes if self.operation != "recv" else self.output_sizes
        shape = ", ".join(str(size) for size in sizes) + (", ..." if self.truncated else "")
        root = "" if self.root is None else f"root {self.root}"
        return " ".join(part for part in (self.operation, self.reduce_op or "", self.dtype or "", root, shape) if part)


@dataclass(frozen=True)
class Peer:
    """A rank's progress as another rank saw it in shared memory."""

    rank: int  # in the group
    progress: Progress
    waiting_on: int | None
    operation: str
    lost: bool


@dataclass(frozen=True)
class Failure:
    time_ns: int
    group: str | None
    error: str
    peer: int | None  # the rank to blame, within the group
    operation: str
    sequence: int
    frame: str
    peers: tuple[Peer, ...]


@dataclass
class Dump:
    path: Path
    rank: int
    host: str
    pid: int
    written_ns: int
    wrapped: bool  # older operations existed
    dropped: int
    groups: dict[str, Group]
    operations: list[Operation]  # oldest first
    failures: list[Failure] = field(default_factory=list)


def _get(holder: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = holder.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise DumpError(f"{where}: {key!r} is {value!r}; a flight record has {kind} there")
    return value


def _optional(holder: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    return None if holder.get(key) is None else _get(holder, key, kind, where)


def _progress(holder: Mapping[str, Any], where: str, scheduled: str = "last_scheduled") -> Progress:
    keys = (scheduled, "last_started", "last_completed")
    return Progress(*(_get(holder, key, int, where) for key in keys))


def _sizes(holder: Mapping[str, Any], key: str, where: str) -> list[list[int]]:
    sizes = _get(holder, key, list, where)
    if not all(isinstance(size, list) and all(isinstance(dim, int) for dim in size) for size in sizes):
        raise DumpError(f"{where}: {key!r} is {sizes!r}; a flight record has lists of integers there")
    return list(sizes)


def _operation(entry: Mapping[str, Any], group: str, where: str) -> Operation:
    number = {key: _get(entry, key, int, where) for key in ("id", "sequence", "p2p_sequence", "time_created_ns")}
    maybe = {key: _optional(entry, key, int, where) for key in ("time_started_ns", "time_ended_ns", "duration_ns")}
    counts = {key: _get(entry, key, int, where) for key in ("input_elements", "output_elements", "timeout_ms")}
    texts = {key: _optional(entry, key, str, where) for key in ("dtype", "output_dtype", "reduce_op", "error")}
    return Operation(
        group=group,
        operation=_get(entry, "operation", str, where),
        is_p2p=_get(entry, "is_p2p", bool, where),
        state=_get(entry, "state", str, where),
        peer=_optional(entry, "peer", int, where),
        tag=_optional(entry, "tag", int, where) or 0,
        root=_optional(entry, "root", int, where),
        input_sizes=_sizes(entry, "input_sizes", where),
        output_sizes=_sizes(entry, "output_sizes", where),
        truncated=_get(entry, "truncated", bool, where),
        **number,
        **maybe,
        **counts,
        **texts,
    )


def _failure(entry: Mapping[str, Any], names: Mapping[int, str], where: str) -> Failure:
    peers = tuple(
        Peer(
            rank=_get(peer, "rank", int, where),
            progress=_progress(peer, where, "last_enqueued"),
            waiting_on=_optional(peer, "waiting_on", int, where),
            operation=_get(peer, "operation", str, where),
            lost=_get(peer, "lost", bool, where),
        )
        for peer in _get(entry, "peers", list, where)
    )
    group = _optional(entry, "group", int, where)
    return Failure(
        time_ns=_get(entry, "time_ns", int, where),
        group=None if group is None else names.get(group),
        error=_get(entry, "error", str, where),
        peer=_optional(entry, "peer", int, where),
        operation=_get(entry, "operation", str, where),
        sequence=_get(entry, "sequence", int, where),
        frame=_get(entry, "frame", str, where),
        peers=peers,
    )


def parse(data: object, path: Path) -> Dump:
    """One process's record. Of groups that share a name (recreated after a destroy) the newest counts."""
    where = str(path)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise DumpError(f"{where}: not a flight record (schema is not {SCHEMA!r})")
    version = _get(data, "version", str, where)
    if version.split(".")[0] != str(MAJOR):
        raise DumpError(f"{where}: schema version {version}, but this tool reads {MAJOR}.x: use that ark_torch's")
    process = _get(data, "process", dict, where)
    rank = _get(process, "global_rank", int, where)
    if rank < 0:  # written before the group was ready: only the file name has the rank
        digits = re.search(r"(\d+)(\.json)?$", path.name)
        if digits is None:
            raise DumpError(f"{where}: holds no rank and its name ends in none: rename it to NAME_<rank>.json")
        rank = int(digits[1])

    groups: dict[str, Group] = {}
    names: dict[int, str] = {}  # names of the groups that count
    for item in _get(data, "groups", list, where):
        group = Group(
            name=_get(item, "name", str, where),
            description=_get(item, "description", str, where),
            rank=_get(item, "rank", int, where),
            ranks=tuple(_get(item, "global_ranks", list, where)),
            retired=_get(item, "retired", bool, where),
            collective=_progress(_get(item, "collective", dict, where), where),
        )
        known = groups.get(group.name)
        if known is None or known.retired or not group.retired:
            names = {key: name for key, name in names.items() if name != group.name}
            names[_get(item, "id", int, where)] = group.name
            groups[group.name] = group

    entries = _get(data, "entries", list, where)
    operations = [_operation(entry, names[entry["group"]], where) for entry in entries if entry.get("group") in names]
    return Dump(
        path=path,
        rank=rank,
        host=_get(process, "host", str, where),
        pid=_get(process, "pid", int, where),
        written_ns=_get(process, "written_ns", int, where),
        wrapped=_get(data, "recorded", int, where) > len(entries),
        dropped=_get(data, "dropped", int, where),
        groups=groups,
        operations=operations,
        failures=[_failure(entry, names, where) for entry in _get(data, "failures", list, where)],
    )


def load(paths: Iterable[str | Path]) -> dict[int, Dump]:
    """Dumps by global rank. A folder stands for its *.json files; of several dumps of one rank the newest counts."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DumpError(f"no *.json files in {', '.join(map(str, paths)) or 'nothing'}")
    dumps: dict[int, Dump] = {}
    for file in files:
        try:
            dump = parse(json.loads(file.read_text(encoding="utf-8")), file)
        except OSError as error:
            raise DumpError(f"{file}: {error.strerror}") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DumpError(f"{file}: not JSON ({error})") from error
        if dump.rank not in dumps or dumps[dump.rank].written_ns < dump.written_ns:
            dumps[dump.rank] = dump
    return dict(sorted(dumps.items()))
