"""What one fault is: the file, the text that it replaces, and the tests nearest to it.

A test is named as one of
  "dma.packet_test"                    the suites of tests/csrc/dma/packet_test.cpp, built plainly
  "dma.packet_test:Packets.Messages*"  those of them that a GoogleTest filter takes
  "thread:dma.packet_test"             the same under ThreadSanitizer; "address:..." under the other sanitizers
  "tests/tools/test_flight.py"         a pytest file; also with "::test_name", or " -k EXPRESSION" behind it
Those that take the least time stand first: the first one that fails has caught the fault, and the rest is not run.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT_S = 300.0  # of one test named, building aside; a fault that makes it hang is caught by this


@dataclass(frozen=True)
class Fault:
    name: str  # "part.what"
    file: str
    old: str  # stands in the file exactly once
    new: str
    why: str  # what a user or an invariant loses
    tests: tuple[str, ...]
    limit_s: float = LIMIT_S

    @property
    def part(self) -> str:
        return self.name.split(".")[0]

    @property
    def compiles(self) -> bool:
        """Whether anything must be built again."""
        return not self.file.endswith(".py")

    def applied(self, text: str) -> str:
        """`text` with the fault. ValueError where the pattern has gone stale."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its pattern stands {found} times in {self.file}, not once: {self.old!r}")
        if self.old == self.new:
            raise ValueError(f"{self.name}: it changes nothing")
        return text.replace(self.old, self.new)


def fault(name: str, file: str, old: str, new: str, why: str, *tests: str, limit_s: float = LIMIT_S) -> Fault:
    return Fault(name, file, old, new, why, tests, limit_s)
