"""Runs batches of random programs (random_runner.py) in separate processes, several at a time.

A crash then becomes a failure that shows the program. Compiling takes most of the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def batch(folder: Path, seed: int, count: int, limit_s: float, more: Sequence[str] = ()) -> dict[str, Any]:
    """Runs `count` programs in a process and returns its counts. Raises AssertionError with the program that failed.

    `more` are further arguments of the runner.
    """
    program = folder / f"program-{seed}.py"
    environment = {
        **os.environ,
        "ARK_CACHE": str(folder / f"cache-{seed}"),
        "ARK_OPTIMISE": "1",  # compiling takes most of the time
        "MALLOC_PERTURB_": "1",  # fills fresh memory with garbage
        "RANDOM_PROGRAM": str(program),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    command = [sys.executable, str(HERE / "random_runner.py"), str(seed), str(count), *more]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"seed {seed} is not done after {limit_s} s; it was at\n{_text(program)}") from None
    if done.returncode < 0:
        raise AssertionError(f"seed {seed}: signal {-done.returncode} in\n{_text(program)}\n{done.stderr[-4000:]}")
    assert done.returncode == 0, f"seed {seed} fails\n{done.stdout[-2000:]}\n{done.stderr[-12000:]}"
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else "(no program yet)"


def batches(
    folder: Path, seeds: Iterable[int], count: int, at_once: int = 2, limit_s: float = 1200, more: Sequence[str] = ()
) -> Counter[str]:
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [pool.submit(batch, folder, seed, count, limit_s, more) for seed in seeds]
        try:
            results = [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    total: Counter[str] = Counter()
    for counts in results:
        total.update({name: n for name, n in counts.items() if isinstance(n, int)})
    print(dict(total))
    return total


def check_coverage(total: Counter[str], programs: int) -> None:
    """Checks that ark ran the programs: nearly all have a region, and most of their operators are in one."""
    assert total["programs"] >= 0.95 * programs, total
    assert total["on ark"] >= 0.85 * total["programs"], total
    assert total["ark's operators"] >= 8 * total["programs"], total
