"""Files of dispatches that were measured at first use: kept once, and ignored where they cannot be trusted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ark_torch import _dispatch_files as files
from ark_torch.distributed.group import load_dispatch

pytestmark = pytest.mark.quick
MODEL, FIELDS = "NVIDIA RTX 4090", ("one_shot_to", "chunks_from")
NUMBERS = {"one_shot_to": 1 << 15, "chunks_from": 2**64 - 1}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    assert files.recall(MODEL, 2, "auto", FIELDS) is None
    return Path(files.remember(MODEL, 2, "auto", FIELDS, NUMBERS, {"measured": "now"}))


def test_a_file_is_a_table(kept: Path) -> None:
    assert files.recall(MODEL, 2, "auto", FIELDS) == NUMBERS
    assert load_dispatch(str(kept)) == ([], [(2, NUMBERS)])
    assert files.kept([MODEL]) == [str(kept)] and files.kept(["NVIDIA L4"]) == []
    for other in ((MODEL, 3, "auto"), (MODEL, 2, "1"), ("NVIDIA RTX 4080", 2, "auto")):
        assert files.recall(*other, FIELDS) is None, other


def test_the_first_one_stays(kept: Path) -> None:
    files.remember(MODEL, 2, "auto", FIELDS, {"one_shot_to": 1}, {})
    assert files.recall(MODEL, 2, "auto", FIELDS) == NUMBERS
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize(
    "what",
    [
        {"ark": "0.0.1"},
        {"format": 0},
        {"model": "NVIDIA RTX-4090"},  # the same file name
        {"cuda": [{"max_ranks": 4, "one_shot_to": 1}]},
        {"cuda": [{"max_ranks": 2, "one_shot_until": 1}]},
        {"cuda": [{"max_ranks": 2, "one_shot_to": -1}]},
        {"cuda": [{"max_ranks": 2, "one_shot_to": 2**64}]},
        {"cuda": [{"max_ranks": 2, "one_shot_to": True}]},
        {"cuda": []},
        {"cuda": None},
    ],
)
def test_what_does_not_fit_is_ignored_and_replaced(kept: Path, what: dict[str, object]) -> None:
    kept.write_text(json.dumps(json.loads(kept.read_text()) | what))
    assert files.recall(MODEL, 2, "auto", FIELDS) is None
    files.remember(MODEL, 2, "auto", FIELDS, NUMBERS, {})
    assert files.recall(MODEL, 2, "auto", FIELDS) == NUMBERS


@pytest.mark.parametrize("text", ["", "{", "[]", "7"])
def test_a_broken_file_is_ignored(kept: Path, text: str) -> None:
    kept.write_text(text)
    assert files.recall(MODEL, 2, "auto", FIELDS) is None and files.kept([MODEL]) == []


def test_a_file_that_others_may_write_is_ignored(kept: Path) -> None:
    kept.chmod(0o622)
    assert files.recall(MODEL, 2, "auto", FIELDS) is None


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "folder", lambda: None)
    assert files.remember(MODEL, 2, "auto", FIELDS, NUMBERS, {}) == "" and files.kept([MODEL]) == []
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(files, "folder", lambda: blocked / "dispatch")
    assert (
        files.remember(MODEL, 2, "auto", FIELDS, NUMBERS, {}) == "" and files.recall(MODEL, 2, "auto", FIELDS) is None
    )


def test_what_the_built_in_one_was_measured_on() -> None:
    assert files.is_built_in("NVIDIA H100 80GB HBM3", 2) and files.is_built_in("NVIDIA H200", 4)
    assert not files.is_built_in("NVIDIA H200", 8) and not files.is_built_in("NVIDIA A100-SXM4-40GB", 2)
