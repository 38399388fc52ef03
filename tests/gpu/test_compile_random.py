"""Random programs (tests/compile/random_graphs.py) as loop kernels on a GPU, compared with eager there and float64."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

from random_batches import batches, check_coverage

PROCESSES = max(2, min(16, (os.cpu_count() or 2) - 2))
PROGRAMS = 200
FIRST = int(os.environ.get("RANDOM_GRAPHS_SEED", "1"))


@pytest.mark.timeout(300)
def test_two_hundred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_COSTS", "assumed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are enough processes already
    each = -(-PROGRAMS // PROCESSES)
    seeds = range(FIRST, FIRST + PROCESSES)
    total = batches(tmp_path, seeds, each, PROCESSES, 240, ["--device", "cuda"])
    assert total["refused"] <= 0.1 * total["programs"], total
    check_coverage(total, each * PROCESSES)
