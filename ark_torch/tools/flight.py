"""`ark flight show` and `ark flight convert`: analyze flight records.

A process writes a record when a collective fails (ARK_FLIGHT_DUMP) or on request (ark_torch.distributed.flight.dump).
Pass the files of all ranks, or their folder. `show` reports which rank is behind and which operations do not match;
`convert` writes the format of PyTorch's own analyzer (torchfrtrace).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from ark_torch.tools import flight_convert
from ark_torch.tools.flight_analysis import Job, mismatches, stragglers, unpaired
from ark_torch.tools.flight_dumps import Dump, DumpError, Operation, load

DESCRIPTION = """\
Read the flight records of all ranks of a job: what each rank's groups did last. A failed collective writes one where
ARK_FLIGHT_DUMP names a path; ark_torch.distributed.flight.dump() does at any time.

exit code: 0, 1 when `show` finds something wrong, 2 when the files cannot be used
"""
EXAMPLES = """\
examples:
  ARK_FLIGHT_DUMP=/tmp/job/ torchrun ...    write records on failure
  ark flight show /tmp/job                  which rank is behind, and which operations do not match
  ark flight convert /tmp/job -o out        then: torchfrtrace out --prefix ark_rank_
"""


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for index, row in enumerate(rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if index == 0:
            yield "  " + "  ".join("-" * width for width in widths)


def _time(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def _cell(operation: Operation | None) -> str:
    if operation is None:
        return "-"
    took = "" if operation.duration_ns is None else f" {operation.duration_ns / 1e6:.3f} ms"
    return f"{operation.title} {operation.state}{took}"


def _processes(dumps: dict[int, Dump]) -> Iterator[str]:
    rows = [["rank", "host", "process", "operations", "older lost", "written"]]
    for rank, dump in dumps.items():
        lost = ("yes" if dump.wrapped else "no") + (f", {dump.dropped} updates given up" if dump.dropped else "")
        rows.append([str(rank), dump.host, str(dump.pid), str(len(dump.operations)), lost, _time(dump.written_ns)])
    yield from _table(rows)


def _failures(dumps: dict[int, Dump]) -> Iterator[str]:
    for rank, dump in dumps.items():
        for failure in dump.failures:
            yield f"rank {rank} at {_time(failure.time_ns)}: {failure.error}"
            if failure.frame:
                yield f"  called from {failure.frame}"


def _progress(job: Job, group: str) -> Iterator[str]:
    rows = [["rank", "scheduled", "started", "completed", "waits for", "note"]]
    for rank, seen in job.progress(group).items():
        notes = ["process ended"] if seen.lost else []
        notes += [] if seen.by == rank else [f"no record; as rank {seen.by} saw"]
        numbers = [str(n) for n in (seen.progress.scheduled, seen.progress.started, seen.progress.completed)]
        waiting = "" if seen.waiting_on is None else f"rank {seen.waiting_on}"
        rows.append([str(rank), *numbers, waiting, "; ".join(notes)])
    yield from _table(rows)


def _operations(job: Job, group: str, last: int) -> Iterator[str]:
    """The group's last `last` operations: one line if all ranks agree, else one per rank."""
    rows = job.collectives(group)
    ranks = [rank for rank in job.dumps if group in job.dumps[rank].groups]
    for sequence in list(rows)[-last:]:
        cells = {rank: _cell(rows[sequence].get(rank)) for rank in ranks}
        if len({cell.partition(" ms")[0].rpartition(" ")[0] for cell in cells.values()}) == 1 and len(ranks) > 1:
            yield f"  {sequence}  all: {cells[ranks[0]]}"
        else:
            for rank in ranks:
                yield f"  {sequence}  rank {rank}: {cells[rank]}"


def show(dumps: dict[int, Dump], last: int) -> tuple[list[str], bool]:
    """The report, and whether it contains a problem."""
    job = Job(dumps)
    findings: list[str] = []
    lines = ["Processes", *_processes(dumps)]
    failures = list(_failures(dumps))
    if failures:
        lines += ["", "Failures", *(f"  {line}" for line in failures)]
    for name, group in job.groups.items():
        described = f" ({group.description})" if group.description else ""
        lines += ["", f"Group {name}{described}, ranks {', '.join(map(str, group.ranks))}", *_progress(job, name)]
        if job.collectives(name):
            lines += ["", f"  last operations (of {len(job.collectives(name))} kept)", *_operations(job, name, last)]
        if not group.retired:
            found = (*mismatches(job, name), *stragglers(job, name))
            findings += [f"group {name}{described}: {text}" for text in found]
    findings += unpaired(job)
    none = "none: every rank has called the same operations and finished them"
    lines += ["", "Findings", *(f"  {text}" for text in findings or [none])]
    return lines, bool(findings)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ark flight",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|convert")
    for command, what in (("show", "print a merged report of all ranks"), ("convert", "write files for torchfrtrace")):
        sub = commands.add_parser(command, help=what, description=what[0].upper() + what[1:] + ".")
        sub.add_argument("files", nargs="+", metavar="FILE", help="records of the ranks, or folders of them")
    add = commands.choices["show"].add_argument
    add("--last", type=int, default=8, metavar="N", help="operations shown for each group (default: %(default)s)")
    add = commands.choices["convert"].add_argument
    add("--output", "-o", type=Path, required=True, metavar="DIR", help="folder to write to")
    add("--prefix", default="ark_rank_", metavar="TEXT", help="of the files' names (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        dumps = load(options.files)
        if options.command == "show":
            lines, found = show(dumps, max(options.last, 1))
            print("\n".join(lines))
            return 1 if found else 0
        pickles, notes = flight_convert.convert(dumps)
        written = flight_convert.write(pickles, options.output, options.prefix)
    except DumpError as error:
        print(f"flight: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {len(written)} files; now run: torchfrtrace {options.output} --prefix {options.prefix}")
    return 0
