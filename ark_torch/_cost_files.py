"""What work costs on a GPU, measured by `ark tune --costs`: files in the cache folder that plans of loop kernels use.

A file (_kept_files.py) is for a GPU model and its number of multiprocessors: `costs` holds figures by the names of
each_cost() and each_tile_cost() in csrc/compiler/schedule/targets.hpp, `caches` fields of CacheCosts (plan.hpp). What
is absent keeps its built-in value, measured on an H100 and an H200. A file that does not parse, has figures that no
machine has, or was written by another version, is ignored. Standard library only, because the doctor reads them where
PyTorch is missing.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ark_torch import _dispatch_files, _kept_files
from ark_torch._version import __version__

FORMAT = 1
LEAST, MOST = 1e-7, 1e10  # of a figure: is_plausible() in csrc/compiler/schedule/targets.cpp
CACHES: dict[str, type] = {"kept_bytes": int, "plain_where_near": bool, "states_first": bool, "reused_last": bool}


@dataclass(frozen=True)
class Record:
    """A GPU's figures. Without any: the built-in ones."""

    costs: Mapping[str, float] = field(default_factory=dict)
    caches: Mapping[str, Any] = field(default_factory=dict)
    measured: str = ""  # date

    @property
    def told(self) -> str:
        """For reports: where the figures come from."""
        return f"measured {self.measured}" if self.measured else ""


def is_built_in(model: str) -> bool:
    """Whether the built-in figures were measured on such a GPU."""
    return any(known in model for known in _dispatch_files.MEASURED)


def path_of(model: str, multiprocessors: int) -> Path | None:
    where = _kept_files.folder("costs")
    return None if where is None else where / f"{_kept_files.name_of(model)}-{multiprocessors}.json"


def _sound(table: Mapping[str, Any], model: str, multiprocessors: int) -> bool:
    if [table["format"], table["ark"], table["model"]] != [FORMAT, __version__, model]:
        return False
    costs, caches = table["costs"], table["caches"]
    return (
        table["multiprocessors"] == multiprocessors
        and isinstance(table["measured"], str)
        and all(type(one) is float and math.isfinite(one) and LEAST <= one <= MOST for one in costs.values())
        and all(type(one) is CACHES[name] for name, one in caches.items())
        and caches.get("kept_bytes", 0) >= 0
    )


def read(path: Path, model: str, multiprocessors: int) -> Record | None:
    table = _kept_files.read(path)
    try:
        if table is None or not _sound(table, model, multiprocessors):
            return None
        return Record(dict(table["costs"]), dict(table["caches"]), table["measured"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def recall(model: str, multiprocessors: int) -> Record | None:
    """None: nothing that can be used was measured."""
    path = path_of(model, multiprocessors)
    return None if path is None else read(path, model, multiprocessors)


def kept(model: str) -> list[str]:
    """Paths of the files that plans for GPUs of this model may find."""
    where = _kept_files.folder("costs")
    if where is None or not where.is_dir():
        return []
    found = []
    for path in sorted(where.glob(f"{_kept_files.name_of(model)}-*.json")):
        count = path.stem.rpartition("-")[2]
        if count.isdecimal() and read(path, model, int(count)) is not None:
            found.append(str(path))
    return found


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def remember(
    model: str, multiprocessors: int, record: Record, about: Mapping[str, Any], path: Path | None = None
) -> str:
    """Writes the file in place of an earlier one, since the user asked for it. Returns its path, or "" if it cannot be
    kept. `about`: notes for people. `path`: elsewhere than in the cache folder."""
    path = path or path_of(model, multiprocessors)
    if path is None:
        return ""
    table = {
        "format": FORMAT,
        "ark": __version__,
        "model": model,
        "multiprocessors": multiprocessors,
        "measured": record.measured,
        **about,
        "costs": {name: float(value) for name, value in record.costs.items()},
        "caches": dict(record.caches),
    }
    return _kept_files.write(path, table, lambda: False)
