"""ARK_DUMP_PASSES: files with the state of each region after each pass of the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ark_torch  # noqa: F401
from ark_torch import _C


def test_a_file_for_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_DUMP_PASSES", str(tmp_path / "passes"))
    torch._dynamo.reset()
    step = torch.compile(lambda x: torch.relu(x + 1).sum(1), backend="ark", options={"choose": "ark", "threads": 2})
    x = torch.randn(64, 32)
    with torch.no_grad():
        torch.testing.assert_close(step(x), torch.relu(x + 1).sum(1))
    dumped = sorted(path.name.partition(".")[2] for path in (tmp_path / "passes").iterdir())
    of_all = [name for name, on, _ in _C.plan.passes() if on == "all"]
    assert [name.partition("_")[2].removesuffix(".txt") for name in dumped] == of_all
    [last] = (tmp_path / "passes").glob("*_verify.txt")
    assert "writes value" in last.read_text() and " tasks (" in last.read_text()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ARK_DUMP_PASSES", str(tmp_path / "file"))
    torch._dynamo.reset()
    step = torch.compile(lambda x: x * 2 + 1, backend="ark", options={"choose": "ark", "fallback": False})
    with pytest.raises(Exception, match="ARK_DUMP_PASSES"), torch.no_grad():
        step(torch.randn(64, 32))
