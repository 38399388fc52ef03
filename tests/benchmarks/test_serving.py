"""The benchmark of the serving examples: it runs an example, and shows what each contender did a second."""

from __future__ import annotations

import json
import subprocess
import sys
import time
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
    graphs = {**ROWS[0], "by": "reduce-overhead", "rate": 100.0}
    measured = about | {"gpus": "1 x a GPU", "rows": [*ROWS, graphs]}
    on_gpu = tables.serving({"serving_h200": measured}.__getitem__, "serving_h200")
    assert on_gpu.startswith("1 x a GPU, PyTorch 2.13, today; float32.")
    assert "| decoding, float32 | tokens/s | 50 | 80 | 100 | 120 | 2.40 | 1.20 |" in on_gpu, (
        "ark beside the faster mode"
    )


@pytest.mark.quick
def test_a_table_that_was_not_measured_says_how(tables: Any, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        return json.loads((tmp_path / f"{name}.json").read_text())

    told = tables.once_measured("python it.py", lambda load: tables.serving(load, "serving_cpu"))
    assert told(missing) == "Not measured yet: `python it.py`."
    assert tables.once_measured("python it.py", lambda load: "there")(missing) == "there"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER.parent / "examples"))
    from inference import compared

    return compared


def test_contenders_take_turns_and_rows_are_there_after_each(compared: Any, tmp_path: Path) -> None:
    """The median counts; a run that is ended leaves the turns that it had, and other comparisons' rows."""
    rows, called = tmp_path / "rows.json", list[str]()
    given = ["--device=cpu", "--times=9", "--beside=inductor", "--rows", str(rows)]
    rows.write_text('{"what": "before"}\n')

    def work(compiler: Any) -> Any:
        name = "eager" if compiler is None else compiler.backend

        def run() -> tuple[Any, int]:
            called.append(name)
            if called.count(name) == 6 and name == "ark":
                raise KeyboardInterrupt
            return 0, 1

        return run

    with pytest.raises(KeyboardInterrupt):
        compared.compare("title", "units/s", work, compared.arguments("").parse_args(given), lambda a, b: True)
    names = ["eager", "inductor", "ark"]
    assert called[:6] == ["eager"] * 2 + ["inductor"] * 2 + ["ark"] * 2, "the calls that compile"
    assert called[6:12] == names + names[::-1]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert found[0] == {"what": "before"} and [row["by"] for row in found[1:]] == names
    assert all(row["runs"] == 3 and row["right"] and row["rate"] > 0 for row in found[1:])


def test_no_turn_begins_after_the_seconds(compared: Any, tmp_path: Path) -> None:
    given = ["--device=cpu", "--times=1000000", "--seconds=0.2", "--rows", str(tmp_path / "rows.json")]
    slow = lambda compiler: lambda: (time.sleep(0.01), 1)  # noqa: E731
    assert compared.compare("title", "units/s", slow, compared.arguments("").parse_args(given), lambda a, b: True)
    found = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert [row["by"] for row in found] == ["eager", "ark"] and all(1 <= row["runs"] <= 10 for row in found)


ENDLESS = """
import pathlib, subprocess, sys, time
rows = pathlib.Path(sys.argv[sys.argv.index("--rows") + 1])
if "--quantize=int8" in sys.argv:
    row = '{"what": "decoding", "unit": "tokens/s", "by": "%s", "rate": 5.0, "runs": 2, "right": true}'
    rows.write_text("\\n".join(row % by for by in ("eager", "ark")))
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"])  # a compiler of its own
"""


def test_what_does_not_end_is_ended_and_keeps_its_rows(
    tables: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import serving

    (tmp_path / "decode_loop.py").write_text(ENDLESS)
    monkeypatch.setattr(serving, "EXAMPLES", tmp_path)
    for example, kept in (("int8", 2), ("int4", 0)):
        monkeypatch.setattr(sys, "argv", ["", "--seconds=2", "--only", example, "--output", str(tmp_path)])
        begin = time.monotonic()
        assert serving.main() == 0
        assert time.monotonic() - begin < 20
        found = json.loads((tmp_path / "serving_cpu.json").read_text())
        assert len(found["rows"]) == kept and found["ended_early"] == {example: "time"}
        assert found["left_out"] == ([] if kept else [example])
    assert "| decoding | tokens/s | 5 |  | 5 | 1.00 |  |" in capsys.readouterr().out


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
