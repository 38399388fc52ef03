"""Dispatches of CUDA collectives that were measured at first use: which GPU models need one, and files in the cache.

A file (_kept_files.py) holds one rule, for a GPU model and a number of ranks, and is a dispatch table as ARK_DISPATCH
takes it. One that does not parse, or that another version wrote, is ignored. Standard library only, because the doctor
reads them where PyTorch is missing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ark_torch import _kept_files
from ark_torch._version import __version__

FORMAT = 1
MEASURED = ("H100", "H200")  # GPU models that built-in figures were measured on
MEASURED_RANKS = 4  # ... by up to this many ranks


def is_built_in(model: str, ranks: int) -> bool:
    """Whether the built-in dispatch was measured on such GPUs."""
    return ranks <= MEASURED_RANKS and any(known in model for known in MEASURED)


def folder() -> Path | None:
    """None if nothing is kept."""
    return _kept_files.folder("dispatch")


def path_of(model: str, ranks: int, wish: str) -> Path | None:
    """`wish` is ARK_DISABLE_P2P's value: it decides whose memory the numbers are for."""
    where = folder()
    return None if where is None else where / f"{_kept_files.name_of(model)}-{ranks}-p2p-{wish}.json"


def recall(model: str, ranks: int, wish: str, fields: Collection[str]) -> dict[str, int] | None:
    """The numbers of an earlier measurement, none of them for the built-in values; None: there was none."""
    path = path_of(model, ranks, wish)
    table = None if path is None else _kept_files.read(path)
    if table is None:
        return None
    try:
        if [table["format"], table["ark"], table["model"]] != [FORMAT, __version__, model]:
            return None
        (rule,) = table["cuda"]
        if rule.pop("max_ranks") != ranks:
            return None
        sound = all(name in fields and type(value) is int and 0 <= value < 1 << 64 for name, value in rule.items())
        return dict(rule) if sound else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remember(
    model: str, ranks: int, wish: str, fields: Collection[str], numbers: Mapping[str, int], about: Mapping[str, Any]
) -> str:
    """Writes the file; one that recall() accepts stays. Returns its path, or "" if it cannot be kept. `about`: notes
    for people."""
    path = path_of(model, ranks, wish)
    if path is None:
        return ""
    rule = {"max_ranks": ranks, **numbers}
    table = {"format": FORMAT, "ark": __version__, "model": model, **about, "cuda": [rule]}
    return _kept_files.write(path, table, lambda: recall(model, ranks, wish, fields) is not None)


def kept(models: Collection[str]) -> list[str]:
    """Paths of the files for these models."""
    where = folder()
    if where is None or not where.is_dir():
        return []
    found = []
    for path in sorted(where.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            table = json.loads(path.read_text(encoding="utf-8"))
            if table["model"] in models and table["ark"] == __version__:
                found.append(str(path))
    return found
