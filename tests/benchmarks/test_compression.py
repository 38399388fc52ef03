"""The benchmarks of compressed gradients at a small size: runs, rows, a picture, and earlier runs that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import start
from support.groups import ark_only

pytestmark = [pytest.mark.changed("benchmarks/compression_*"), ark_only]
FOLDER = start.TESTS.parent / "benchmarks"
TINY = ["--seeds=1", "--steps=4", "--layers=1", "--width=16", "--batch=2"]


def _run(script: str, folder: Path, *options: str, name: str = "") -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / script), "--output", str(folder), *options]
    done = subprocess.run(
        command, env=start.base_environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads((folder / f"{name or script.removesuffix('.py')}.json").read_text()))


def test_accuracy(tmp_path: Path, leaves_nothing: None) -> None:
    pytest.importorskip("matplotlib")
    first = _run("compression_accuracy.py", tmp_path, *TINY, "--ways", "1 bit", "exact")
    assert [row["way"] for row in first["summary"]] == ["exact", "1 bit"]
    exact, one = first["summary"]
    assert exact["bytes"] == 1.0 and 0.03 < one["bytes"] < 0.5 and one["from_exact"] == one["loss"] - exact["loss"] != 0
    again = _run("compression_accuracy.py", tmp_path, *TINY, "--ways", "4 bits")
    assert [run["way"] for run in again["runs"]] == ["exact", "4 bits", "1 bit"]
    assert again["runs"][0] == first["runs"][0] and again["command"].count("--ways") == 2
    other = _run("compression_accuracy.py", tmp_path, *TINY[:1], "--steps=3", *TINY[2:], "--ways", "exact")
    assert len(other["runs"]) == 1, "runs of other lengths are mixed"
    assert (tmp_path / "compression_accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_accuracy_of_digits_goes_on_where_it_was_stopped(tmp_path: Path, leaves_nothing: None) -> None:
    def run(*options: str) -> dict[str, Any]:
        return _run("compression_accuracy.py", tmp_path, "--task", "digits", *TINY, *options, name="compression_digits")

    first = run("--ways", "exact", "--evaluate-every=2")
    assert [step for step, _ in first["runs"][0]["held_out"]] == [0, 2, 4]
    both = run("--ways", "exact", "4 bits", "--evaluate-every=4", "--resume")
    assert both["runs"][0] == first["runs"][0], "run again"
    exact, four = both["summary"]
    assert 0 <= exact["accuracy"] <= 1 and four["bytes"] < 0.7 and four["from_exact"] is not None


def test_bytes_are_those_in_the_documents(tmp_path: Path, leaves_nothing: None) -> None:
    """They do not depend on the machine."""
    rows = _run("compression_bytes.py", tmp_path)["rows"]
    stored = json.loads((FOLDER / "results" / "compression_bytes.json").read_text())["rows"]
    assert rows == stored
    everything, low_rank, frozen, cut_off = rows
    assert low_rank["sent"] < 0.1 * everything["sent"] and cut_off["sent"] < 1.01 * frozen["sent"]
