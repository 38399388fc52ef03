"""`ark doctor --links`: real ranks, the output of nvidia-smi, and verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ark_torch.tools import doctor, links
from ark_torch.tools._links_rank import combined

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-63\t0\t\tN/A
GPU1\tNV18\t X \tPHB\tSYS\t0-63\t0\t\tN/A
GPU2\tSYS\tPHB\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def _found(kind: str = "cuda", **row: Any) -> dict[str, Any]:
    places = [
        {"rank": r, "host": "one", "device": f"cuda:{r}" if kind == "cuda" else "cpu", "name": "H200", "numa": 0}
        for r in range(2)
    ]
    pair = {"from": 0, "to": 1, "right": True, "right_back": True, "latency_us": 2.0, "gb_per_s": 100.0}
    pair |= {"gb_per_s_back": 90.0, "gb_per_s_both": 80.0, "peer_access": True, "path": ""}
    return {"kind": kind, "carrier": "ark", "places": places, "pairs": [pair | row]}


def test_what_nvidia_smi_says() -> None:
    found = links.nvidia_links(TOPOLOGY)
    assert (found[0, 1], found[1, 2], found[0, 2], found[2, 2]) == ("NV18", "PHB", "SYS", "X")
    assert links.nvidia_links("no devices") == {}


def test_paths() -> None:
    known = links.nvidia_links(TOPOLOGY)
    found = _found()
    (row,) = found["pairs"]
    assert links.path_of(found, row, known) == "18 NVLinks"
    assert links.path_of(found, row | {"peer_access": False}, known) == "18 NVLinks, no peer access"
    assert links.path_of(found, row, {}) == "unknown"
    found["places"][1]["device"] = "cuda:2"
    assert links.path_of(found, row, known) == "PCIe (SYS)"
    found["places"][1]["host"], found["carrier"] = "two", "nccl"
    assert links.path_of(found, row, known) == "network (nccl)"


def test_verdicts() -> None:
    assert links.verdict_of(_found()) == ("use ark: it carries this group itself.", True)
    text, well = links.verdict_of(_found(right_back=False))
    assert not well and "peer access lies" in text and "1->0" in text and "0->1" not in text
    text, well = links.verdict_of(_found("cpu", right=False))
    assert not well and "0->1" in text
    host = {"shared_bytes": 32 << 20, "on_host": "device 0 has no peer access to device 1, of rank 1"}
    text, well = links.verdict_of(_found() | host)
    assert well and "32 MB of it pinned for each rank: device 0 has no peer access" in text
    lie = "peer access from GPU 0 (rank 0) to GPU 1 (rank 1) claims to work, but values do not arrive"
    text, well = links.verdict_of(_found() | host | {"on_host": lie})
    assert not well and lie in text
    text, well = links.verdict_of(_found("cuda") | {"carrier": "nccl"})
    assert well and "nccl carries this group's GPU tensors" in text


def test_a_table_names_what_collides_and_what_is_wrong() -> None:
    for row, note in (
        ({"gb_per_s_both": 50.0}, "the two ways collide"),
        ({"right": False}, "wrong values"),
        ({}, "90.00"),
    ):
        found = _found(**row)
        found["verdict"], _ = links.verdict_of(found)
        assert note in links.as_table(found)


def test_the_longer_time_of_both_ranks_counts() -> None:
    one = {"right": [True, False], "latency_us": 3.0, "there": 5.0, "back": 6.0, "both": 4.0}
    two = {"right": [True, True], "latency_us": 2.0, "there": 4.0, "back": 7.0, "both": 4.5}
    row = combined(0, 1, [one, two])
    assert (row["right"], row["right_back"]) == (True, False)
    figures = [row[key] for key in ("latency_us", "gb_per_s", "gb_per_s_back", "gb_per_s_both")]
    assert figures == [3.0, 4.0, 6.0, 4.0]


def test_two_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "links.png"
    assert doctor.main(["--links", "--device", "cpu", "--json", "--heat-map", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["pairs"]
    assert row["right"] and row["right_back"] and row["path"] == "shared memory" and row["latency_us"] > 0
    assert min(row["gb_per_s"], row["gb_per_s_back"], row["gb_per_s_both"]) > 0
    assert [place["rank"] for place in found["places"]] == [0, 1] and found["well"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.nightly
def test_under_torchrun() -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "ark_torch"]
    done = subprocess.run(
        [*run, "doctor", "--links", "--device", "cpu"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shared memory") == 3 and "1 - 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--links", "--ranks", "1"], "--ranks is 1"), (["--ranks", "2"], "go with --links")],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(arguments)
    assert ended.value.code == 2 and text in capsys.readouterr().err
