"""Converts flight records to the pickles of PyTorch's analyzer: `torchfrtrace DIR`, version 2.10 of its format.

The analyzer assumes NCCL, so the conversion adapts the records:
- Names become NCCL's ("nccl:all_reduce"); it rejects others.
- It compares states and sizes literally: sizes that it cannot judge (lists of tensors, all_to_all) become element
  counts, and `failed` becomes the state reached before. Calls after the group's failure are dropped.
- It takes sends and receives for calls that all ranks join: each direction of each pair becomes its own group of two,
  "<group>:p2p <source>-><destination>".
- It drops old entries by record id, which ranks do not share: they are cut here per group, and ids are renumbered.
- It requires a file per rank: a killed rank's entries are reconstructed from the other ranks' records.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ark_torch.tools.flight_analysis import Job, message_number, messages
from ark_torch.tools.flight_dumps import Dump, DumpError, Operation, Progress

VERSION = "2.10"

_NAMES = {
    "all_reduce_sparse": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "monitored_barrier": "all_reduce_barrier",
}
_SAME = "all_reduce broadcast reduce all_gather reduce_scatter gather scatter all_to_all send recv"
_KNOWN = {*_SAME.split(), "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", *_NAMES.values()}
_GATHERS = {"all_gather", "_all_gather_base", "all_gather_into_tensor_coalesced"}
_SCATTERS = {"reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"}

_DTYPES = {
    "bool": "Bool",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}

Entry = dict[str, Any]


def _dtype(name: str | None) -> str:
    return "Byte" if name is None else _DTYPES.get(name, name[:1].upper() + name[1:])


def _state(operation: Operation) -> str:
    if operation.state != "failed":
        return operation.state
    return "scheduled" if operation.time_started_ns is None else "started"


def _sizes(operation: Operation, name: str, group_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Input and output sizes in the form that the analyzer checks; never an empty list, which it would index."""
    if name == "all_reduce_barrier":
        return [[1]], [[1]]
    count_in, count_out = operation.input_elements, operation.output_elements
    inputs = operation.input_sizes if operation.input_sizes and not operation.truncated else [[count_in]]
    outputs = operation.output_sizes if operation.output_sizes and not operation.truncated else [[count_out]]
    if name in _GATHERS:
        whole = count_out == count_in * group_size
        return [[count_in]] if len(inputs) > 1 else inputs, [[group_size, count_in]] if whole else [[count_out]]
    if name in _SCATTERS:
        whole = count_in == count_out * group_size
        return [[group_size, count_out]] if whole else [[count_in]], [[count_out]] if len(outputs) > 1 else outputs
    if name == "all_to_all":
        return [[count_in]], [[count_out]]
    return inputs, outputs


def _entry(operation: Operation, dump: Dump) -> Entry:
    group = dump.groups[operation.group]
    name = _NAMES.get(operation.operation, operation.operation)
    if name not in _KNOWN:
        raise DumpError(f"{dump.path}: operation {operation.operation!r} is unknown to PyTorch's analyser")
    inputs, outputs = _sizes(operation, name, len(group.ranks))
    ended = operation.time_ended_ns if operation.state == "completed" else None
    return {
        "record_id": 0,
        "pg_id": zlib.crc32(group.name.encode()),
        "process_group": (group.name, group.description or "undefined"),
        "collective_seq_id": operation.sequence,
        "p2p_seq_id": operation.p2p_sequence,
        "op_id": operation.id,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": operation.time_created_ns,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": [_dtype(operation.dtype)] * len(inputs),
        "output_dtypes": [_dtype(operation.output_dtype)] * len(outputs),
        "state": _state(operation),
        "time_discovered_started_ns": operation.time_started_ns,
        "time_discovered_completed_ns": ended,
        "duration_ms": None if ended is None or operation.duration_ns is None else operation.duration_ns / 1e6,
        "retired": operation.state in ("completed", "failed"),
        "timeout_ms": operation.timeout_ms,
        "is_p2p": False,
        "frames": [],
    }


def _first_common(job: Job, group: str) -> int:
    """The first sequence number that is still in every rank's ring."""
    first = 1
    for dump in job.dumps.values():
        if dump.wrapped and group in dump.groups:
            kept = [op.sequence for op in dump.operations if op.group == group and not op.is_p2p]
            first = max(first, min(kept) if kept else dump.groups[group].collective.scheduled + 1)
    return first


class _Files:
    """The contents of one pickle per rank."""

    def __init__(self) -> None:
        self.entries: dict[int, list[Entry]] = {}
        self.config: dict[int, dict[str, dict[str, str]]] = {}
        self.status: dict[int, dict[str, dict[str, str]]] = {}

    def group(self, rank: int, name: str, description: str, ranks: tuple[int, ...], progress: Progress) -> None:
        shown = {"name": name, "desc": description or "undefined", "ranks": str(list(ranks))}
        self.config.setdefault(rank, {})[name] = shown
        self.entries.setdefault(rank, [])
        self.status.setdefault(rank, {})[name] = {
            "last_enqueued_collective": str(progress.scheduled),
            "last_started_collective": str(progress.started),
            "last_completed_collective": str(progress.completed),
        }


def _stand_in(job: Job, files: _Files, group: str, first: int) -> None:
    """Reconstructs entries for the group's members that left no record."""
    rows = job.collectives(group)
    done = max((s for s, row in rows.items() if any(op.state == "completed" for op in row.values())), default=0)
    for rank in job.groups[group].ranks:
        if rank in job.dumps:
            continue
        # Without a report: this rank took part in every collective that others completed.
        seen = job.progress(group).get(rank)
        progress = seen.progress if seen else Progress(done, done, done)
        gone = rank in job.blamed(group) or (seen is not None and seen.lost)
        files.group(rank, group, job.groups[group].description, job.groups[group].ranks, progress)
        for sequence, row in rows.items():
            other, model = next(iter(row.items()))
            finished = sequence <= progress.completed or all(op.state == "completed" for op in row.values())
            # A lost rank never joins the collective that it died in; without that entry the analyzer names the rank.
            if first <= sequence <= progress.scheduled and (finished or not gone):
                state = "completed" if finished else "started"
                files.entries[rank].append({**_entry(model, job.dumps[other]), "state": state, "retired": False})


def _add_messages(job: Job, files: _Files) -> list[str]:
    """Adds sends and receives, each direction of a pair as a group of two; returns notes on omissions."""
    notes = []
    for (group, source, target, tag), sides in messages(job).items():
        name = f"{group}:p2p {source}->{target}" + (f" tag {tag}" if tag else "")
        first = 1
        numbered: list[tuple[int, int, Operation]] = []
        unknown = False
        for rank, side in zip((source, target), sides, strict=True):
            wrapped = rank in job.dumps and job.dumps[rank].wrapped
            numbers = [message_number(side, index, wrapped) for index in range(len(side))]
            unknown |= None in numbers or (wrapped and not side)
            if wrapped and side:
                first = max(first, numbers[0] or 1)
            numbered += [(rank, number or 0, op) for number, op in zip(numbers, side, strict=True)]
        if unknown:
            notes.append(f"{name}: left out, the record no longer tells which message is which")
            continue
        # One rank has no record: completed operations had a counterpart; the incomplete ones remain and name it.
        absent = not {source, target} <= job.dumps.keys()
        pair = tuple(sorted((source, target)))
        for rank in pair:
            files.group(rank, name, "send/recv", pair, Progress())
        arrow = f"{pair.index(source)}->{pair.index(target)}", f"{pair.index(target)}<-{pair.index(source)}"
        for rank, number, operation in numbered:
            if number < first or (absent and operation.state == "completed"):
                continue
            entry = _entry(operation, job.dumps[rank])
            entry["process_group"] = (name, "send/recv")
            entry["pg_id"] = zlib.crc32(name.encode())
            entry["collective_seq_id"] = entry["p2p_seq_id"] = number
            entry["profiling_name"] += f" {arrow[0] if operation.operation == 'send' else arrow[1]}"
            # The analyzer compares a send's input with a receive's output.
            sizes = [[operation.input_elements or operation.output_elements]]
            entry["input_sizes"] = entry["output_sizes"] = sizes
            files.entries[rank].append(entry)
    return notes


def convert(dumps: Mapping[int, Dump]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The object to pickle for each rank, and notes on what was reconstructed or omitted."""
    job = Job(dumps)
    files = _Files()
    notes = []
    for name, group in job.groups.items():
        first = _first_common(job, name)
        if first > 1:
            notes.append(f"group {name}: analysed from sequence {first}, older operations are lost on some rank")
        for rank, dump in job.dumps.items():
            if name in dump.groups:
                files.group(rank, name, group.description, group.ranks, dump.groups[name].collective)
                for operation in dump.operations:
                    skipped = operation.is_p2p or operation.sequence < first or job.too_late(rank, operation)
                    if operation.group == name and not skipped:
                        files.entries[rank].append(_entry(operation, dump))
        _stand_in(job, files, name, first)
    notes += _add_messages(job, files)
    made_up = sorted(files.entries.keys() - job.dumps.keys())
    if made_up:
        notes.append(f"no record of rank(s) {', '.join(map(str, made_up))}: made up from what the other ranks saw")

    pickles: dict[int, dict[str, Any]] = {}
    for rank, entries in sorted(files.entries.items()):
        entries.sort(key=lambda entry: entry["time_created_ns"])
        for index, entry in enumerate(entries):
            entry["record_id"] = index
        pickles[rank] = {
            "version": VERSION,
            "comm_lib_version": "ark",
            "pg_config": files.config[rank],
            "pg_status": files.status[rank],
            "nccl_comm_state": {},
            "entries": entries,
        }
    return pickles, notes


def write(pickles: Mapping[int, Mapping[str, Any]], folder: Path, prefix: str) -> list[Path]:
    """Writes one file per rank with the analyzer's naming: the prefix, then the rank."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank, content in pickles.items():
        path = folder / f"{prefix}{rank}"
        path.write_bytes(pickle.dumps(content))
        written.append(path)
    return written
