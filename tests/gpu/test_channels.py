"""Channels between two GPUs: every engine delivers what was put, and a peer that never comes is given up.

A C++ program does it (benchmarks/dma, which benchmarks/dma.py measures). Each case draws the depth of the ring, the
threads at both ends and the source of messages. The ring wraps around many times. The host compares every byte of every
message and checks that nothing else was written. Sums are of integers, which are exact in every format.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import start

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dma_program

BULK = ["bulk", "stream", "pull", "add_f32", "add_bf16", "add_f16"]  # TMA
ENGINES = ["store", "warp", "packet", "copy_engine", "proxy", *BULK]
SIZES = [16, 17, 47, 512, 1000, 8192, 8193, 65536, 65551, 1 << 20, (4 << 20) - 3, 4 << 20]
LIMIT_S = 100.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dma_program.build(tmp_path_factory.mktemp("channels"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_contents_and_a_stuck_peer(program: Path, engine: str) -> None:
    command = dma_program.command(program, mode="check", engines=engine, sizes=",".join(map(str, SIZES)), seed="7")
    done = subprocess.run(
        command, env=start.base_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    rows: list[dict[str, Any]] = [json.loads(text) for text in done.stdout.splitlines()]
    assert done.returncode == 0, f"{done.stderr}after {rows[-3:]}"
    if engine in BULK and torch.cuda.get_device_capability()[0] < 9:
        assert rows == [], "no TMA here"
        return
    contents = [row for row in rows if row["what"] == "contents"]
    assert len(contents) == len(SIZES) and all(row["engine"] == engine for row in contents)
    assert [row for row in contents if row["wrong"]] == []
    assert any(row["messages"] > 10 * row["depth"] for row in contents) or engine.startswith("add_")
    stuck = {row["alone"]: row for row in rows if row["what"] == "stuck"}
    assert set(stuck) == {"sender", "receiver"}
    for row in stuck.values():
        assert row["gave_up"] and not row["other_gave_up"], row
        assert row["limit_ms"] * 0.9 < row["ms"] < row["limit_ms"] + 5000, row
