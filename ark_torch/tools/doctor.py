"""`ark doctor`: what works on this machine, what does not, and why.

It is the first thing to run, and to attach to a report, when something fails, so it must not fail itself: it imports
only the standard library, an exception in a probe becomes a row, and anything that could crash the process (importing
PyTorch, the extension, the CUDA driver) runs in a child with a time limit. Exit code 0: collectives on CPU tensors
work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict

from ark_torch.tools._probes import FAIL, PROBES, WARN, Probe, Row


def run_probe(name: str, probe: Probe, needed: bool) -> list[Row]:
    """The probe's rows. If it raises, a row with the exception follows those already found."""
    rows: list[Row] = []
    try:
        for row in probe():
            rows.append(row)
    except Exception as error:
        advice = "this probe failed; the finding is the error itself"
        rows.append(Row(name, FAIL if needed else WARN, f"{type(error).__name__}: {error}", advice))
    return rows


def diagnose(probes: Iterable[tuple[str, Probe, bool]]) -> list[Row]:
    rows: list[Row] = []
    for name, probe, needed in probes:
        rows += run_probe(name, probe, needed)
    return rows


def cpu_works(rows: Iterable[Row]) -> bool:
    return all(row.state != FAIL for row in rows)


def as_table(rows: list[Row]) -> str:
    width = max(len(row.probe) for row in rows)
    lines = []
    for row in rows:
        first, *rest = row.found.splitlines() or [""]
        lines.append(f"{row.state:<4}  {row.probe:<{width}}  {first}")
        lines += [" " * (width + 8) + line for line in rest]
        if row.advice:
            lines.append(" " * (width + 8) + "-> " + row.advice)
    return "\n".join(lines)


def _links(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.ranks is not None and options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}: links are between two ranks or more")
    if options.heat_map and importlib.util.find_spec("matplotlib") is None:
        parser.error("--heat-map needs matplotlib: python -m pip install matplotlib")
    from ark_torch import _autoload
    from ark_torch.tools import links
    from ark_torch.tools.bench.launch import BenchmarkFailed

    _autoload.ready()
    try:
        return links.report(options.ranks, options.device, options.json, options.heat_map)
    except BenchmarkFailed as error:
        print(f"ark doctor --links: {error}", file=sys.stderr)
        return 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ark doctor",
        description="Check PyTorch, the extension, shared memory, compilers and GPUs of this machine, and run a small\n"
        "all_reduce of two processes. Each row says ok, info, warn or FAIL, and what to do about it.\n\n"
        "exit code: 0 when collectives on CPU tensors work, 1 otherwise",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--links", action="store_true", help="instead: measure what lies between every pair of ranks (tools/links.py)")
    add("--ranks", type=int, metavar="N", help="with --links: processes (default: one for each GPU; on CPU 2)")
    add("--device", choices=("cpu", "cuda"), help="with --links (default: cuda where there are two GPUs)")
    add("--heat-map", metavar="FILE", help="with --links: draw GB/s between all pairs (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.links:
        return _links(parser, options)
    if options.ranks is not None or options.device or options.heat_map:
        parser.error("--ranks, --device and --heat-map go with --links")
    started = time.monotonic()
    rows = diagnose(PROBES)
    works = cpu_works(rows)
    if options.json:
        seconds = round(time.monotonic() - started, 2)
        print(json.dumps({"cpu_works": works, "seconds": seconds, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(as_table(rows))
        print("\nCollectives on CPU tensors " + ("work." if works else "do not work: see the rows that say FAIL."))
    return 0 if works else 1
