"""Dispatches of CUDA collectives that were measured at first use: which GPU models need one, and files in the cache.

A file holds one rule, for a GPU model and a number of ranks, and is a dispatch table as ARK_DISPATCH takes it. Files
appear atomically and only their owner may write them; one that does not parse, or that another version wrote, is
ignored. Standard library only, because the doctor reads them where PyTorch is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ark_torch import _jit, env
from ark_torch._version import __version__

FORMAT = 1
MEASURED = ("H100", "H200")  # GPU models that the built-in dispatch was measured on
MEASURED_RANKS = 4  # ... by up to this many ranks


def is_built_in(model: str, ranks: int) -> bool:
    """Whether the built-in dispatch was measured on such GPUs."""
    return ranks <= MEASURED_RANKS and any(known in model for known in MEASURED)


def folder() -> Path | None:
    """None if nothing is kept."""
    cache = env.read().cache or _jit.default_cache()
    return Path(cache) / "dispatch" if cache else None


def path_of(model: str, ranks: int, wish: str) -> Path | None:
    """`wish` is ARK_DISABLE_P2P's value: it decides whose memory the numbers are for."""
    where = folder()
    name = re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-") or "GPU"
    return None if where is None else where / f"{name}-{ranks}-p2p-{wish}.json"


def recall(model: str, ranks: int, wish: str, fields: Collection[str]) -> dict[str, int] | None:
    """The numbers of an earlier measurement, none of them for the built-in values; None: there was none."""
    path = path_of(model, ranks, wish)
    if path is None:
        return None
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        table = json.loads(path.read_text(encoding="utf-8"))
        if [table["format"], table["ark"], table["model"]] != [FORMAT, __version__, model]:
            return None
        (rule,) = table["cuda"]
        if rule.pop("max_ranks") != ranks:
            return None
        sound = all(name in fields and type(value) is int and 0 <= value < 1 << 64 for name, value in rule.items())
        return dict(rule) if sound else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem[:40]}", dir=path.parent)  # for its owner only
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(table, file, indent=1)
            if recall(model, ranks, wish, fields) is None:
                os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError:
        return ""
    return str(path)


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
