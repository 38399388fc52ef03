"""Which files a benchmark is made of, for tests that run by day when one of these changed."""

from __future__ import annotations

import re

import pytest

from support.start import TESTS

BENCHMARKS = TESTS.parent / "benchmarks"


def parts_of(*names: str) -> list[str]:
    """Returns these files of benchmarks/ and all that they import from there."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        imported = re.findall(r"^(?:from|import) (\w+)", (BENCHMARKS / name).read_text(), re.MULTILINE)
        waiting += [f"{module}.py" for module in imported if (BENCHMARKS / f"{module}.py").exists()]
    return [f"benchmarks/{name}" for name in sorted(found)]


def changed(*names: str) -> pytest.MarkDecorator:
    """The marker `changed` with all of these."""
    return pytest.mark.changed(*parts_of(*names))
