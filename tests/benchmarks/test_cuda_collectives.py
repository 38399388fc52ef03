"""The benchmark of collectives on GPUs, on CPU tensors: its dtypes and sizes, its checks, and who reads its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_collectives
import headline_tables
import pytest
import torch
from cuda_contenders import Row
from support import start
from support.scripts import changed

from ark_torch.simulation import measured

FOLDER = start.TESTS.parent / "benchmarks"


def run(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / "cuda_collectives.py"), "--device", "cpu", "--ranks", "2", *options]
    done = subprocess.run(
        [*command, "--output", str(folder / "out.json")],
        env=start.base_environment(), capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return report


@changed("cuda_collectives.py")
def test_dtypes_and_sizes(tmp_path: Path, leaves_nothing: None) -> None:
    operations = ["all_reduce", "reduce_scatter", "all_to_all"]
    sizes = ["--sizes", "1000", "40000", "80000", "--eager-to", "40000"]
    report = run(tmp_path, "--operations", *operations, "--dtypes", "bfloat16", "float32", *sizes)
    rows = report["rows"]
    assert [(row["operation"], row["dtype"], row["bytes"]) for row in rows] == [
        (operation, dtype, size)
        for operation in operations
        for dtype in ("bfloat16", "float32")
        for size in (1000, 40000, 80000)
    ]
    for row in rows:
        assert row["wrong"] == 0 and row["graph_us"].keys() == {"ark", "gloo"} and row["ratio"] > 0, row
        assert row["eager_us"].keys() == (row["graph_us"].keys() if row["bytes"] <= 40000 else set()), row
    table = cuda_collectives.table(report)
    assert "; bfloat16 and float32, microseconds" in table
    assert table.count("\n| all_reduce | float32 | 2 |") == table.count("\n| all_reduce | bfloat16 | 2 |") == 3
    columns = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert columns == {10}, table


@changed("cuda_collectives.py")
def test_one_dtype_in_any_order_of_sums(tmp_path: Path, leaves_nothing: None) -> None:
    few = ["--operations", "all_reduce", "--sizes", "1000", "--reduction", "fast"]
    assert [row["dtype"] for row in run(tmp_path, *few)["rows"]] == ["bfloat16"]
    report = run(tmp_path, *few, "--dtypes", "float32")
    assert [(row["dtype"], row["wrong"]) for row in report["rows"]] == [("float32", 0)]
    assert "; float32, microseconds" in cuda_collectives.table(report)
    assert "\n| all_reduce | 2 |" in cuda_collectives.table(report)


@pytest.mark.quick
@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_wrong_elements_are_counted(
    operation: str, dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(out: torch.Tensor, seed: torch.Tensor, group: Any) -> None:
        out.copy_(seed)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    row = Row(operation, 4000, 0, 1, {"ark": None, "gloo": None}, (), reduction, dtype, "cpu")
    whole = row.results["ark"]
    assert whole.dtype == dtype and whole.numel() * dtype.itemsize == 4000
    row.calls = {"ark": lambda: None, "gloo": lambda: None}
    assert row.wrong() == 0

    def spoil() -> None:
        whole[5] *= 1 + 4 * torch.finfo(dtype).eps
        whole[7] *= -1

    row.calls["ark"] = spoil
    assert row.wrong() == 2


@pytest.mark.quick
def test_files_of_several_dtypes_and_of_before(tmp_path: Path) -> None:
    """Pages and the simulator read the rows of bfloat16 only, as those of files without dtypes."""

    def load(name: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((FOLDER / "results" / f"{name}.json").read_text())
        return report

    def both(name: str) -> dict[str, Any]:
        report = load(name)
        if "collectives" in name and "multicast" in report:
            slow = [{**row, "dtype": "float32", "graph_us": {"ark": 1e9, "nccl": 1e9}} for row in report["rows"]]
            report["rows"] = slow + [{"dtype": "bfloat16", **row} for row in report["rows"]]
        return report

    before = load("collectives_4_h200")
    before["rows"] = [{key: row[key] for key in row if key != "dtype"} for row in before["rows"]]
    with_dtypes = {**before, "rows": [{**row, "dtype": "bfloat16"} for row in before["rows"]]}
    assert cuda_collectives.table(before) == cuda_collectives.table(with_dtypes)
    assert len(both("collectives_4_h200")["rows"]) == 2 * len(before["rows"])
    assert headline_tables.collectives(both) == headline_tables.collectives(load)
    for name in ("collectives_2_h200", "collectives_4_h200"):
        (tmp_path / f"{name}.json").write_text(json.dumps(both(name)))
    assert list(measured._gpus(tmp_path)) == list(measured._gpus(FOLDER / "results"))
