"""Models at real sizes on a GPU (compile_real_sizes.py): errors against float64, the same bits, text as eager's.

Each in a process of its own, a few at a time: compiling them takes longer than running them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from compile_real_sizes import CASES
from support import tables

SCRIPT = Path(__file__).resolve().parent / "compile_real_sizes.py"
AT_ONCE = max(1, min(5, (os.cpu_count() or 1) // 3))  # each takes some 20 GB of the GPU's memory at its worst
LIMIT_S = 170.0

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    folder = tmp_path_factory.mktemp("caches")

    def run(name: str) -> Done:
        environment = {**os.environ, "ARK_COSTS": "assumed", "ARK_CACHE": str(folder), "OMP_NUM_THREADS": "2"}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "4", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        command = [sys.executable, str(SCRIPT), name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run, name) for name in CASES}


@pytest.mark.limit(2 * LIMIT_S)
@pytest.mark.parametrize("name", CASES)
def test_right(runs: dict[str, Future[Done]], name: str) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    tables.add("real sizes", model=name, **json.loads(done.stdout.splitlines()[-1]))
