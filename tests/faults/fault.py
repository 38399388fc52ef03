"""One fault: the file, the text that it replaces, and the nearest tests.

A test is named as one of
  "dma.packet_test"                    the suites of tests/csrc/dma/packet_test.cpp, built plainly
  "dma.packet_test:Packets.Messages*"  those of them that match a GoogleTest filter
  "thread:dma.packet_test"             the same under ThreadSanitizer; "address:..." under the other sanitizers
  "tests/tools/test_flight.py"         a pytest file; also with "::test_name", or followed by " -k EXPRESSION"
The fastest tests come first: the first one that fails has caught the fault, and the rest does not run.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S = 300.0  # per test named, without building; catches a fault that makes it hang


@dataclass(frozen=True)
class Fault:
    name: str  # "part.what"
    file: str
    old: str  # occurs in the file exactly once
    new: str
    why: str  # the effect on a user or an invariant
    tests: tuple[str, ...]
    limit_s: float = LIMIT_S

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    @property
    def compiles(self) -> bool:
        """Whether anything must be rebuilt."""
        return not self.file.endswith(".py")

    def applied(self, text: str) -> str:
        """Returns `text` with the fault. Raises ValueError if the pattern is stale."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its pattern stands {found} times in {self.file}, not once: {self.old!r}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: it changes nothing")
        return text.replace(self.old, self.new)


def fault(name: str, file: str, old: str, new: str, why: str, *tests: str, limit_s: float = LIMIT_S) -> Fault:
    return Fault(name, file, old, new, why, tests, limit_s)
