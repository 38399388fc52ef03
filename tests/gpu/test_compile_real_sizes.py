"""Models at real sizes on a GPU (compile_real_sizes.py): errors against float64, equal bits, eager's text.

Each runs in a separate process, a few at a time, because compiling takes longer than running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from compile_real_sizes import CASES
from support import tables

SCRIPT = Path(__file__).resolve().parent / "compile_real_sizes.py"
AT_ONCE = max(1, min(5, (os.cpu_count() or 1) // 3))  # each takes up to about 20 GB of GPU memory
LIMIT_S = 170.0

Done = subprocess.CompletedProcess[str]


@pytest.mark.timeout(3 * LIMIT_S)
def test_right(tmp_path: Path) -> None:
    def run(name: str) -> Done:
        environment = {**os.environ, "ARK_COSTS": "assumed", "ARK_CACHE": str(tmp_path), "OMP_NUM_THREADS": "2"}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "4", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        command = [sys.executable, str(SCRIPT), name]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = dict(zip(CASES, pool.map(run, CASES), strict=True))
    wrong = {name: done for name, done in runs.items() if done.returncode != 0}
    for name, done in runs.items():
        if name not in wrong:
            tables.add("real sizes", model=name, **json.loads(done.stdout.splitlines()[-1]))
    assert not wrong, "\n".join(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}" for name, done in wrong.items())
