""" "Did you mean" suggestions for misspelled variables, options, modes, commands and operations."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(given: str, known: Iterable[str]) -> str:
    """The known name closest to `given`, ignoring case and separators; "" if none is close."""
    plain = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(given), plain, n=1, cutoff=0.7)
    return plain[found[0]] if found else ""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Text for a message, " (did you mean 'bench'?)"; "" if no known name is close."""
    name = closest(given, known)
    return f" (did you mean {name!r}?)" if name else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
