"""Tells waiting users on stderr, after some seconds, what is being compiled."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

AFTER_S = 5.0


@contextlib.contextmanager
def shown(what: str) -> Iterator[None]:
    """Prints `what` once the body has taken AFTER_S seconds."""

    def say() -> None:
        print(f"ark_torch: {what}; the next run of the program takes it from the cache.", file=sys.stderr, flush=True)

    timer = threading.Timer(AFTER_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
