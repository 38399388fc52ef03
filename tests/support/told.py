"""Collects the lines that ark_torch logs in this process."""

from __future__ import annotations

import logging

from ark_torch.distributed import group as making


class Lines(logging.Handler):
    """Lines of groups, or of another logger, from INFO on."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.lines: list[str] = []
        log = logging.getLogger(other) if other else making.log
        if other:
            log.setLevel(logging.INFO)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def about(self, word: str) -> list[str]:
        return [line for line in self.lines if word in line]
