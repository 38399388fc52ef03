"""The list of faults for tests/mutations.py: each still applies, and its tests exist."""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest
from faults import FAULTS
from faults.fault import fault
from faults.near import NoSuchTest, Program, Python, parse


@pytest.mark.quick
def test_every_fault_applies_and_its_tests_are_there() -> None:
    assert mutations.check(FAULTS) == []
    assert len(FAULTS) >= 40


@pytest.mark.quick
def test_faults_are_in_every_part() -> None:
    folders = {"/".join(one.file.split("/")[:2]) for one in FAULTS}
    parts = ("collectives", "dma", "shm", "health", "jit", "compiler", "process_group")
    wanted = {f"csrc/{part}" for part in parts}
    wanted |= {f"ark_torch/{part}" for part in ("kernels", "compile", "distributed", "tools")}
    assert wanted <= folders


@pytest.mark.quick
def test_what_is_wrong_with_a_list_is_told(tmp_path: Path) -> None:
    (tmp_path / "code.cpp").write_text("a < b; a < b;")
    listed = [
        fault("x.stale", "code.cpp", "b < a", "a", "", "tests/none.py"),
        fault("x.twice", "code.cpp", "a < b", "a", "", "tests/none.py"),
        fault("x.twice", "missing.cpp", "a", "b", "", "tests/none.py"),
        fault("x.alike", "code.cpp", "; a", "; a", "", "tests/none.py"),
        fault("x.untested", "code.cpp", "; a", "; b", ""),
        fault("x.nowhere", "code.cpp", "; a", "; b", "", "folder.no_test", "tests/none.py"),
    ]
    wrong = "\n".join(mutations.check(listed, tmp_path))
    for word in (
        "stands twice",
        "0 times",
        "2 times",
        "missing.cpp",
        "changes nothing",
        "names no test",
        "no_test.cpp",
    ):
        assert word in wrong
    assert (tmp_path / "code.cpp").read_text() == "a < b; a < b;"


@pytest.mark.quick
def test_names_of_tests() -> None:
    assert parse("dma.packet_test") == Program("plain", "dma", "packet_test")
    assert parse("thread:a.b_test:Suite.*:Other.*") == Program("thread", "a", "b_test", "Suite.*:Other.*")
    assert parse("a.b_test:Suite.*:Other.*") == Program("plain", "a", "b_test", "Suite.*:Other.*")
    assert parse("tests/x.py::test_y -k 'a and b'") == Python("tests/x.py::test_y", "a and b")
    with pytest.raises(NoSuchTest):
        parse("packet_test")
    filters = Program("plain", "collectives/cpu", "communicator_test").suites(mutations.ROOT)
    assert {"Collectives.*", "*/Collectives.*", "Failure.*"} <= set(filters.split(":"))
