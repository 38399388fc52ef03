"""The benchmark of the serving examples: it runs an example, and shows what each contender did a second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import start

FOLDER = start.TESTS.parent / "benchmarks"
ROWS = [
    {"example": "decode", "what": "decoding, float32", "unit": "tokens/s", "by": by, "rate": rate}
    for by, rate in (("eager", 50.0), ("inductor", 80.0), ("ark", 120.0))
] + [{"example": "encode", "what": "sentences", "unit": "sentences/s", "by": "ark", "rate": 7.0}]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import doc_tables

    return doc_tables


@pytest.mark.quick
def test_tables_of_the_documents(tables: Any) -> None:
    about = {
        "machine": {"cpu": "a CPU", "cores": 2, "load_before": 0.1},
        "versions": {"torch": "2.13", "python": "3.11"},
        "date": "today",
        "dtype": "float32",
        "rows": ROWS,
    }
    text = tables.serving({"serving_cpu": about}.__getitem__, "serving_cpu")
    assert text.startswith("a CPU, 2 cores, PyTorch 2.13, Python 3.11, today, load before 0.1; float32.")
    assert "| decoding, float32 | tokens/s | 50 | 80 | 120 | 2.40 | 1.50 |" in text
    assert text.endswith("| sentences | sentences/s |  |  | 7 |  |  |")
    on_gpu = tables.serving({"serving_h200": about | {"gpus": "1 x a GPU"}}.__getitem__, "serving_h200")
    assert on_gpu.startswith("1 x a GPU, PyTorch 2.13, today; float32.")


@pytest.mark.quick
def test_a_table_that_was_not_measured_says_how(tables: Any, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        return json.loads((tmp_path / f"{name}.json").read_text())

    told = tables.once_measured("python it.py", lambda load: tables.serving(load, "serving_cpu"))
    assert told(missing) == "Not measured yet: `python it.py`."
    assert tables.once_measured("python it.py", lambda load: "there")(missing) == "there"


@pytest.mark.changed("benchmarks/serving.py", "examples/inference/*", "examples/decode_loop.py")
def test_an_example_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "serving.py"), "--size", "tiny", "--only", "int8", "--beside"]
    done = subprocess.run(
        [*command, "--times", "1", "--output", str(tmp_path)],
        env=start.base_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "serving_cpu.json").read_text())
    assert found["size"] == "tiny" and found["dtype"] == "float32" and found["left_out"] == []
    assert [(row["example"], row["by"], row["right"]) for row in found["rows"]] == [
        ("int8", "eager", True),
        ("int8", "ark", True),
    ]
    assert all(row["rate"] > 0 for row in found["rows"]) and "| decoding, int8 | tokens/s |" in done.stdout
