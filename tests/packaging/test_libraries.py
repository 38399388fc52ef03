"""A build that links a static libstdc++ is refused: two in a process break streams and exceptions."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from ark_torch import _C

pytestmark = pytest.mark.quick
REPO = Path(__file__).resolve().parents[2]


def test_libstdcxx_is_the_shared_one(tmp_path: Path) -> None:
    build: dict[str, Any] = runpy.run_path(str(REPO / "build_backend" / "ark_cmake.py"))
    check = build["check_libraries"]
    check.__globals__["BUILD"] = tmp_path
    folder = tmp_path / "ark_torch"
    folder.mkdir()
    built = folder / Path(_C.__file__).name
    shutil.copy(_C.__file__, built)
    check()
    built.write_bytes(built.read_bytes().replace(b"libstdc++.so.6", b"libother++.so6"))
    with pytest.raises(SystemExit, match="static-libstdc"):
        check()
