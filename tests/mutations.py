"""Inserts small faults into the code one by one and runs the nearest tests against each: `make test-mutations`.

    python tests/mutations.py [--only REGEX] [--tier gate|all] [--json FILE] [--list | --check]

Faults are in tests/faults/, one file per part of the code. Each is inserted into a copy of the project
(build/mutations), built, run against the tests that it names until one fails, and removed. A hang or a crash counts as
noticed; a failed build is an error of the list. At the end the tests that noticed run once more without any fault,
because a test that always fails notices nothing. Exit code: 0 if all were noticed, 1 if some were not, 2 for errors.

--tier gate counts what `make test` runs, all also what is nightly (and AddressSanitizer's programs).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import FAULTS
from faults.fault import Fault
from faults.near import NoSuchTest, Outcome, Program, Python, parse, run_python
from faults.tree import ROOT, BuildFailed, Tree
from support import processes


@dataclass
class Result:
    """The result of one fault."""

    fault: Fault
    caught_by: list[str] = field(default_factory=list)  # tests, each "NAME how"
    by: Program | Python | None = None
    failed: tuple[str, ...] = ()
    how: str = ""
    ran: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return "error" if self.error else "caught" if self.by is not None else "survived"

    def record(self) -> dict[str, Any]:
        kept = {"name": self.fault.name, "file": self.fault.file, "why": self.fault.why, "outcome": self.outcome}
        if self.by is not None:
            kept |= {"by": str(self.by), "failed": list(self.failed), "how": self.how}
        kept |= {"ran": self.ran, "seconds": round(self.seconds, 1)}
        return kept | ({"error": self.error} if self.error else {})


def check(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """Returns errors of the list: stale patterns, missing files and tests."""
    wrong = [f"{name} stands twice" for name in sorted({f.name for f in faults}) if _count(faults, name) > 1]
    for fault in faults:
        try:
            fault.applied((root / fault.file).read_text(encoding="utf-8"))
            if not fault.tests:
                raise ValueError(f"{fault.name}: it names no test")
            for near in map(parse, fault.tests):
                if isinstance(near, Program):
                    near.suites(root)
                elif not (root / near.path.split("::")[0]).is_file():
                    raise NoSuchTest(f"there is no {near.path}")
        except (OSError, ValueError) as error:
            wrong.append(str(error))
        except NoSuchTest as error:
            wrong.append(f"{fault.name}: {error}")
    return wrong


def _count(faults: Sequence[Fault], name: str) -> int:
    return sum(fault.name == name for fault in faults)


def build_for(tree: Tree, near: Program | Python) -> None:
    if isinstance(near, Program):
        tree.build_programs(near.kind, [near.target()])
    else:
        tree.build_extension()


def try_fault(tree: Tree, fault: Fault, tier: str) -> Result:
    """Inserts the fault, runs its tests until one fails, and removes it."""
    result = Result(fault)
    begin = time.monotonic()
    built: set[str] = set()
    try:
        with tree.with_fault(fault):
            for text in fault.tests:
                near = parse(text)
                if isinstance(near, Program) and near.kind == "address" and tier == "gate":
                    continue
                kind = near.target() + near.kind if isinstance(near, Program) else "extension"
                if kind not in built and (fault.compiles or isinstance(near, Program)):
                    build_for(tree, near)
                    built.add(kind)
                outcome = near.run(tree, fault.limit_s, nightly=tier == "all")
                result.ran.append(text)
                if outcome.how:
                    result.by, result.failed, result.how = near, outcome.failed, outcome.how
                    break
    except (BuildFailed, NoSuchTest, ValueError) as error:
        result.error = str(error)
    result.seconds = time.monotonic() - begin
    return result


def confirm(tree: Tree, results: Sequence[Result], tier: str) -> None:
    """Tests that noticed a fault must pass without one. Otherwise the result becomes an error."""
    caught = [result for result in results if result.by is not None]
    programs: dict[Program, list[Result]] = {}
    python: list[Result] = []
    for result in caught:
        if isinstance(result.by, Program):
            programs.setdefault(replace(result.by, filter=""), []).append(result)
        else:
            python.append(result)
    for program, noticed in programs.items():
        tree.build_programs(program.kind, [program.target()])
        names = sorted({name for result in noticed for name in result.failed})
        _blame(noticed, program.run(tree, _limit(noticed), ":".join(names)))
    if python:
        tree.build_extension()
        ids = sorted({name for result in python for name in result.failed})
        _blame(python, run_python(tree, ids, _limit(python), nightly=tier == "all"))


def _limit(results: Sequence[Result]) -> float:
    return sum(result.fault.limit_s for result in results)


def _blame(results: Sequence[Result], outcome: Outcome) -> None:
    for result in results:
        wrong = sorted(set(result.failed) & set(outcome.failed))
        if outcome.how and wrong:
            result.error = f"{', '.join(wrong)} {outcome.how} without the fault, too: {outcome.log[-500:]}"
            say(f"{result.fault.name}: {result.error}")


def say(text: str) -> None:
    print(text, flush=True)


def shown(result: Result) -> str:
    what = {"survived": "SURVIVED", "error": "ERROR"}.get(result.outcome, "caught")
    line = f"{what:<9}{result.fault.name:<44}{result.seconds:>6.0f} s  "
    if result.error:
        return line + result.error
    if result.by is None:
        return line + result.fault.why
    names = " ".join(re.sub(r"^tests/(\w+/)+", "", name) for name in result.failed[:2])
    return line + f"{result.by} ({result.how}: {names})"


def report(results: Sequence[Result], tier: str) -> dict[str, Any]:
    counts = {what: sum(r.outcome == what for r in results) for what in ("caught", "survived", "error")}
    return {
        "schema": "ark_mutations",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": platform.machine(),
        "tier": tier,
        **counts,
        "faults": [result.record() for result in results],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/mutations.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose name has this")
    parser.add_argument("--tier", choices=("gate", "all"), default="gate", help="which tests count (default gate)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    parser.add_argument("--check", action="store_true", help="look whether all of them still apply and end")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutations", help="where the copy lies")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if re.search(options.only, fault.name)]
    if options.list:
        for fault in faults:
            say(f"{fault.name:<44}{fault.file}: {fault.why}")
        return 0
    for problem in (wrong := check(faults)):
        say(problem)
    if wrong or options.check:
        say(f"{len(faults)} faults, {len(wrong)} of them wrong")
        return 2 if wrong else 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # like Ctrl-C: tests end with us
    processes.become_subreaper()
    tree = Tree(options.folder.resolve())
    tree.refresh()
    tree.build_extension()
    results: list[Result] = []
    for fault in faults:
        results.append(try_fault(tree, fault, options.tier))
        say(shown(results[-1]))
        if options.json:
            options.json.write_text(json.dumps(report(results, options.tier), indent=1) + "\n", encoding="utf-8")
    confirm(tree, results, options.tier)
    if options.json:
        options.json.write_text(json.dumps(report(results, options.tier), indent=1) + "\n", encoding="utf-8")
    counts = report(results, options.tier)
    say(f"{counts['caught']} caught, {counts['survived']} survived, {counts['error']} errors")
    return 2 if counts["error"] else 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
