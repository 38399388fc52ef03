"""The doctor gives a complete report on this machine, and no failing probe can crash it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import child

from ark_torch import _cost_files, _dispatch_files, _support
from ark_torch.tools import _probe_cuda, _probes, doctor


def report(*arguments: str, **environment: str) -> tuple[int, dict]:
    users = {name: text for name, text in os.environ.items() if name != "CXX" and not name.startswith("ARK_")}
    done = subprocess.run(
        [sys.executable, "-m", "ark_torch", "doctor", "--json", *arguments],
        env={**users, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def rows_of(answer: dict, probe: str) -> list[dict]:
    return [row for row in answer["rows"] if row["probe"] == probe]


def test_this_machine_works() -> None:
    code, answer = report()
    assert code == 0 and answer["cpu_works"], answer
    assert rows_of(answer, "all_reduce")[0]["state"] == "ok"
    assert {"ark_torch", "system", "python", "pytorch", "extension", "memfd", "cores"} <= {
        row["probe"] for row in answer["rows"]
    }


@pytest.mark.nightly
def test_a_jobs_nodes_are_told() -> None:
    """Each rank of a job, as torchrun starts them, says the plan; outside a job the row says how to see it."""
    code = "from ark_torch.tools import _probes; [row] = _probes.nodes(); print(row.state, row.found)"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    plain = {
        name: text for name, text in os.environ.items() if not name.startswith(("ARK_", "RANK", "WORLD_", "MASTER"))
    }
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ARK_NET": "gloo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**plain, **job, "RANK": str(rank), "ARK_NODE": str(rank // 2)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all(text == "ok 2 nodes (2 + 1 ranks), 1 rail, gloo between them\n" for text in said), said
    alone = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, timeout=60)
    assert alone.stdout == "info not in a job: `torchrun ... -m ark_torch doctor` shows a job's plan\n", alone


@pytest.mark.nightly
def test_broken_path_costs_the_compiler_row_only() -> None:
    code, answer = report(PATH="/nonexistent")
    assert code == 0, answer
    assert rows_of(answer, "compiler")[0]["state"] == "warn"


@pytest.mark.nightly
def test_bad_environment_value_is_a_finding() -> None:
    code, answer = report(ARK_SPIN_US="soon", ARK_TIMNG="1")
    assert code == 1
    states = [row["state"] for row in rows_of(answer, "environment")]
    assert states == ["FAIL", "warn"]
    assert rows_of(answer, "environment")[1]["found"] == "ARK_TIMNG is not a variable of ark_torch"
    assert rows_of(answer, "environment")[1]["advice"] == "did you mean ARK_TIMING?"
    assert "ARK_SPIN_US='soon'" in rows_of(answer, "environment")[0]["advice"]


@pytest.mark.changed(
    "ark_torch/tools/doctor.py", "ark_torch/tools/_probe*", "ark_torch/_support.py", "ark_torch/__init__.py"
)
def test_runs_where_pytorch_does_not_fit(python, copied_package) -> None:
    folder = copied_package(_build_info='TORCH_VERSION = "2.10.0"\n')
    done = python(["-m", "ark_torch", "doctor", "--json"], path=folder)
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and not answer["cpu_works"]
    assert rows_of(answer, "extension")[0]["state"] == "FAIL"
    row = rows_of(answer, "extension")[0]
    assert "--force-reinstall" in row["advice"] and "torch==2.10.*" in row["advice"]
    assert f"built for PyTorch 2.10.0, now {torch.__version__}: an installation since has replaced it" in row["found"]


@pytest.mark.quick
def test_who_may_have_replaced_pytorch(monkeypatch) -> None:
    class Package:
        def __init__(self, name: str, *requires: str) -> None:
            self.metadata, self.version, self.requires = {"Name": name}, "1.2", list(requires)

    installed = [
        Package("torchvision", "numpy", "torch==2.14.1"),
        Package("old-style", "torch (<3,>=2.14) ; python_version > '3'"),
        Package("any", "torch", "torchmetrics>=1"),
        Package("asked-for-never", "torch>=2; extra == 'gpu'"),
        Package("ark-torch", "torch==2.13.*"),
    ]
    monkeypatch.setattr(_support.importlib.metadata, "distributions", lambda: installed)
    assert _support.requirers() == ["old-style 1.2 (torch<3,>=2.14)", "torchvision 1.2 (torch==2.14.1)"]


@pytest.mark.quick
@pytest.mark.parametrize("needed", [True, False])
def test_a_probe_that_raises_is_a_row(needed: bool) -> None:
    def breaks() -> Iterator[_probes.Row]:
        yield _probes.Row("half", _probes.OK, "found before")
        raise OSError("no such luck")

    def fine() -> Iterator[_probes.Row]:
        yield _probes.Row("fine", _probes.OK, "still asked")

    rows = doctor.diagnose([("half", breaks, needed), ("fine", fine, True)])
    assert [row.found for row in rows] == ["found before", "OSError: no such luck", "still asked"]
    assert doctor.cpu_works(rows) is not needed
    assert "no such luck" in doctor.as_table(rows)


@pytest.mark.quick
def test_a_child_that_crashes_or_hangs_is_told() -> None:
    assert _probes.child("-c", "import os; os.abort()") == (False, "killed by signal 6")
    assert _probes.child("-c", "import time; time.sleep(60)", seconds=0.5) == (False, "no answer within 0 s")
    assert _probes.child("-c", "raise SystemExit('because')") == (False, "because")


@pytest.mark.quick
def test_cuda_rows_without_a_driver(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(_probe_cuda.ctypes, "CDLL", missing)
    rows = _probe_cuda.driver_rows() + _probe_cuda.nvrtc_rows()
    assert [(row["probe"], row["state"]) for row in rows] == [("cuda driver", "info"), ("nvrtc", "info")]


class FakeDriver:
    """Three GPUs, of which 0 and 2 cannot reach each other. Every other call succeeds."""

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = 3
            if name == "cuDeviceCanAccessPeer":
                arguments[0]._obj.value = int({arguments[1], arguments[2]} != {0, 2})
            return 0

        return call


@pytest.mark.quick
def test_cuda_rows_name_pairs_without_peer_access(monkeypatch) -> None:
    monkeypatch.setattr(_probe_cuda.ctypes, "CDLL", lambda name: FakeDriver())
    rows = _probe_cuda.driver_rows()
    assert [row["probe"] for row in rows] == ["cuda driver", "gpu 0", "gpu 1", "gpu 2", "peer access"]
    assert rows[-1]["state"] == "warn" and rows[-1]["found"] == "missing: 0->2 2->0"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wish", "missing", "words"),
    [
        ("auto", False, "tested by values when a group first uses it"),
        ("0", False, "untested"),
        ("0", True, "PyTorch's NCCL carries CUDA tensors"),
        (
            "auto",
            True,
            r"(\d+) MB of it pinned for each of 4 ranks, (\d+) MB a group; PyTorch's NCCL for 1024 KB to 6 MB \(s",
        ),
        ("1", True, r"(\d+) MB of it pinned for each of 4 ranks, (\d+) MB a group$"),
        ("1", False, r"(\d+) MB of it pinned for each of 4 ranks, (\d+) MB a group$"),
    ],
)
def test_what_lies_between_gpus_is_told(monkeypatch, wish: str, missing: bool, words: str) -> None:
    monkeypatch.setattr(_probes, "child", child.played)
    monkeypatch.setenv("ARK_DISABLE_P2P", wish)
    (row,) = _probes.between_gpus(4, missing)
    found = re.search(words, row.found)
    assert found, row
    if found.groups():
        each, group = map(int, found.groups())
        assert each > 0 and 4 * each == group <= 64


@pytest.mark.parametrize(
    "models, table, words",
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "", "measured on H100 and H200$"),
        (["NVIDIA H200", "NVIDIA A100-SXM4-40GB"], "", "none was made for NVIDIA A100-SXM4-40GB: groups measure one"),
        (["NVIDIA A100-SXM4-40GB"] * 2, "table.json", ""),
    ],
)
def test_a_dispatch_that_was_measured_elsewhere_is_told(monkeypatch, tmp_path, models, table, words: str) -> None:
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    if table:
        (tmp_path / table).write_text("{}")
    monkeypatch.setenv("ARK_DISPATCH", table and str(tmp_path / table))
    rows = list(_probes.thresholds(models))
    assert len(rows) == (words != "")
    for row in rows:
        assert re.search(words, row.found) and ("ark tune --cuda" in row.advice) == ("none was made" in row.found), row


@pytest.mark.quick
def test_a_dispatch_of_first_use_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    (row,) = _probes.thresholds(["NVIDIA L40S"])
    assert "groups measure one in 3 s at first use" in row.found
    monkeypatch.setenv("ARK_TUNE", "0")
    (row,) = _probes.thresholds(["NVIDIA L40S"])
    assert "ARK_TUNE=0 leaves it so" in row.found
    path = _dispatch_files.remember("NVIDIA L40S", 2, "auto", ["one_shot_to"], {"one_shot_to": 4096}, {})
    (row,) = _probes.thresholds(["NVIDIA L40S"])
    assert row.found == f"measured at first use for NVIDIA L40S: {path}"


@pytest.mark.quick
def test_costs_of_a_gpu_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    assert not list(_probes.costs_of(["NVIDIA H200"])), "the built-in figures are its own"
    (row,) = _probes.costs_of({"NVIDIA L40S"})
    assert row.found.endswith("on NVIDIA L40S: as on H100 and H200") and "ark tune --costs" in row.advice
    path = _cost_files.remember("NVIDIA L40S", 142, _cost_files.Record({"task_us": 0.5}, {}, "now"), {})
    (row,) = _probes.costs_of(["NVIDIA L40S"])
    assert row.found.endswith(path) and not row.advice
    Path(path).write_text("{}")
    (row,) = _probes.costs_of(["NVIDIA L40S"])
    assert "as on H100" in row.found


@pytest.mark.quick
def test_doctor_imports_the_standard_library_only() -> None:
    script = (
        "import sys; sys.argv = ['-m', 'doctor']; sys.orig_argv = ['python', '-m', 'ark_torch', 'doctor']; "
        "import ark_torch.tools.doctor; "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False False", done.stderr
