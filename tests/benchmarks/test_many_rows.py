"""The benchmark of models with many rows, on small ones: regions of ark, errors beside float32, and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support import start
from support.scripts import changed

FOLDER = start.TESTS.parent / "benchmarks"
MODELS = ["clip text, batch 8", "gpt2-xl prefill 512", "llama-1b decode, batch 4"]


@changed("many_rows.py")
def test_small_models_are_measured(tmp_path: Path) -> None:
    def run(*models: str, ways: tuple[str, ...] = ("ark",)) -> tuple[list[dict], str]:
        command = [sys.executable, str(FOLDER / "many_rows.py"), "--device", "as-cuda", "--only", *models]
        done = subprocess.run(
            [*command, "--ways", *ways, "--turns", "2", "--output", str(tmp_path)],
            env=start.base_environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return json.loads((tmp_path / "many_rows_rehearsal.json").read_text())["rows"], done.stdout

    run(MODELS[0], ways=("ark", "inductor", "ark, default"))
    rows, told = run(*MODELS[1:])
    assert [row["model"] for row in rows] == MODELS, "rows of before are kept, in the order of the table"
    for row in rows:
        assert row["regions"] == 1 and not row["fallbacks"] and not row["left_out"], row
        assert 0 < row["error"]["ark"] < 0.05 and row["microseconds"]["ark"]["median"] > 0
        assert f"| {row['model']}, {row['dtype']} | " in told
    first, *others = rows
    assert all(row["ratio"] is None and "chosen" not in row for row in others)
    assert first["chosen"] in (["ark"], ["inductor"], ["eager"]) and first["ratio_by_default"] > 0
    assert f"By default, beside the quicker of Inductor's: {MODELS[0]}: " in told
