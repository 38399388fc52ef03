"""What was measured on this machine, kept in the cache folder as JSON: dispatches of collectives, costs of GPUs.

Files appear atomically, and what others than their owner may write is not read. The first process to measure wins, so
that all processes of a machine decide alike. Standard library only, because the doctor reads them where PyTorch is
missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ark_torch import _jit, env


def folder(subject: str) -> Path | None:
    """None if nothing is kept."""
    cache = env.read().cache or _jit.default_cache()
    return Path(cache) / subject if cache else None


def name_of(model: str) -> str:
    """A GPU's model as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", model).strip("-") or "GPU"


def read(path: Path) -> dict[str, Any] | None:
    """The file's object; None: there is no file, it is no JSON object, or others may write it."""
    try:
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return None
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return table if isinstance(table, dict) else None


def write(path: Path, table: Mapping[str, Any], there: Callable[[], bool]) -> str:
    """Writes the file unless `there` says that a sound one is there. Returns its path, or "" if it cannot be kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem[:40]}", dir=path.parent)  # for its owner only
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(table, file, indent=1)
            if not there():
                os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except OSError:
        return ""
    return str(path)
