"""The benchmark of quantised weights on a one-layer model: one region for each form, correct and reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support import start
from support.scripts import changed

FOLDER = start.TESTS.parent / "benchmarks"


@changed("low_bits.py")
def test_a_decoding_step_of_each_form(tmp_path: Path) -> None:
    options = ["--size", "tiny", "--backends", "ark", "--turns", "2", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "low_bits.py"), *options],
        env=start.base_environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "low_bits_tiny_cpu.json").read_text())["rows"]
    assert [row["form"] for row in rows] == ["bfloat16", "int8", "float8", "int4"]
    for row in rows:
        assert row["regions"] == 1 and row["error"] < 0.02 and row["microseconds"]["median"] > 0, row
        assert bool(row["weights"]) == (row["form"] != "bfloat16")
        assert row["form"] in done.stdout
