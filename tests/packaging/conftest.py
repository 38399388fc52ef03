"""Shared by the packaging tests: a new Python process for each script, and damaged copies of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Runs a script (or the interpreter's arguments) in an empty folder, without our variables unless given."""

    def run(script: str | list[str], path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: text for name, text in os.environ.items() if not name.startswith(("ARK_", "TORCH_DEVICE_"))}
        variables.update(environment)
        if path is not None:
            variables["PYTHONPATH"] = str(path)
        arguments = ["-c", script] if isinstance(script, str) else script
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture
def copied_package(tmp_path: Path) -> Callable[..., Path]:
    """Returns a folder for PYTHONPATH with a copy of the package, in which some files have other content."""

    def copy(**files: str) -> Path:
        folder = tmp_path / "copy"
        shutil.copytree(REPO / "ark_torch", folder / "ark_torch", ignore=shutil.ignore_patterns("__pycache__", "_C.*"))
        for name, text in files.items():
            (folder / "ark_torch" / f"{name}.py").write_text(text)
        return folder

    return copy
