"""The outcome of a rank, and the error that reports all outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Outcome:
    """The outcome of one rank."""

    rank: int
    kind: str = "running"  # result, error, exit, lost (ended without a report), killed (by the test)
    value: Any = None
    exit_code: int | None = None
    ended: float = 0.0  # time.monotonic() when its result or error arrived, otherwise when it ended
    events: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def message(self) -> str:
        return self.value["message"] if self.kind == "error" else ""

    def describe(self) -> str:
        text = f"--- rank {self.rank}: {self.kind}, exit code {self.exit_code}\n"
        if self.kind == "error":
            text += self.value["traceback"]
        return text + (f"  its output ends:\n{self.log[-6000:]}" if self.log else "")


class RanksFailed(AssertionError):
    """At least one rank did not return a value."""

    def __init__(self, reason: str, outcomes: list[Outcome]) -> None:
        super().__init__(reason + "\n" + "\n".join(o.describe() for o in outcomes if o.kind != "result"))
        self.outcomes = outcomes
