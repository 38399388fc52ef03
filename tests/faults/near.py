"""The tests that a fault names: how they are built and run, and which of them failed."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from faults.tree import Tree

PRETENDED = ("shm/symmetric_memory_test", "collectives/cuda/registration_test", "compiler/runtime/step_memory_test")
SUITE = re.compile(r"^(TEST|TEST_F|TEST_P|TYPED_TEST)\((\w+)", re.MULTILINE)


class NoSuchTest(Exception):
    """A name matches no test: the list of faults must be corrected."""


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...] = ()  # names that can be run separately
    how: str = ""  # "failed", "crashed", "raced", "hung"; "": all passed
    log: str = field(default="", repr=False)


@dataclass(frozen=True)
class Program:
    """Some tests of a C++ test program."""

    kind: str  # plain, thread, address
    folder: str
    stem: str
    filter: str = ""

    def target(self) -> str:
        """Returns the program with the file's tests: one per top folder, and one on a driver without a GPU."""
        top = self.folder.split("/")[0]
        return "pretended_gpu_tests" if f"{self.folder}/{self.stem}" in PRETENDED else f"{top}_tests"

    def suites(self, tree: Path) -> str:
        """Returns the file's suites as a filter, including parametrized ones."""
        file = tree / "tests" / "csrc" / self.folder / f"{self.stem}.cpp"
        if not file.is_file():
            raise NoSuchTest(f"there is no {file.relative_to(tree)}")
        names = sorted({name for _, name in SUITE.findall(file.read_text(encoding="utf-8"))})
        return ":".join(pattern for name in names for pattern in (f"{name}.*", f"*/{name}.*"))

    def run(self, tree: Tree, limit_s: float, only: str = "", nightly: bool = False) -> Outcome:
        """Runs all of the program's tests, or those of the filter `only`. No C++ test is nightly."""
        program = tree.path / "build" / f"cpp-{self.kind}" / "tests" / self.target()
        chosen = only or self.filter or self.suites(tree.path)
        env = {**tree.environment(), "TSAN_OPTIONS": "die_after_fork=0"}
        code, log = tree.call(
            [str(program), f"--gtest_filter={chosen}", *([] if only else ["--gtest_fail_fast"])], env, limit_s
        )
        if re.search(r"Running 0 tests", log):
            raise NoSuchTest(f"{self.target()} has no test {chosen}")
        failed = tuple(dict.fromkeys(re.findall(r"^\[  FAILED  \] ([\w/]+\.[\w/]+)", log, re.MULTILINE)))
        if code == 0:
            return Outcome(log=log)
        if failed:
            return Outcome(failed, "failed", log)
        # A crash, the time limit, or a sanitizer's report: the test that had started last.
        raced = log.find("WARNING: ThreadSanitizer")
        begun = re.findall(r"^\[ RUN      \] ([\w/]+\.[\w/]+)", log[:raced] if raced >= 0 else log, re.MULTILINE)
        how = "hung" if code is None else "raced" if raced >= 0 else "crashed"
        return Outcome(tuple(begun[-1:]) or (chosen,), how, log)

    def __str__(self) -> str:
        return f"{'' if self.kind == 'plain' else self.kind + ':'}{self.folder}.{self.stem}"


@dataclass(frozen=True)
class Python:
    """Some pytest tests."""

    path: str
    expression: str = ""

    def run(self, tree: Tree, limit_s: float, nightly: bool = False) -> Outcome:
        chosen = [self.path, *(["-k", self.expression] if self.expression else [])]
        return run_python(tree, ["-x", *chosen], limit_s, nightly)

    def __str__(self) -> str:
        return self.path + (f" -k {shlex.quote(self.expression)}" if self.expression else "")


def run_python(tree: Tree, chosen: list[str], limit_s: float, nightly: bool) -> Outcome:
    """`chosen` has files, tests and pytest options."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *chosen]
    if nightly:
        command.append("--night")
    # Git does not know of the fault, so tests that depend on changed paths must run.
    code, log = tree.call(command, {**tree.environment(), "ARK_TEST_BASE": "none"}, limit_s)
    if code in (4, 5):
        raise NoSuchTest(f"pytest finds no {chosen}: {log[-500:]}")
    if code == 0:
        return Outcome(log=log)
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log, re.MULTILINE))
    how = "hung" if code is None else "failed" if failed else "crashed"
    return Outcome(failed or tuple(one for one in chosen if one.startswith("tests/")), how, log)


def parse(text: str) -> Program | Python:
    if text.startswith("tests/"):
        path, _, expression = text.partition(" -k ")
        return Python(path, expression.strip("'\""))
    kind, rest = "plain", text
    if text.startswith(("thread:", "address:")):
        kind, _, rest = text.partition(":")
    name, _, chosen = rest.partition(":")
    folder, dot, stem = name.rpartition(".")
    if not dot:
        raise NoSuchTest(f"{text!r} names neither a file of tests/csrc nor one of pytest")
    return Program(kind, folder, stem, chosen)
