"""Random programs (random_graphs.py) on ark, eager and in float64: 100 in `make test`, 2,000 with new seeds at night.

Seeds are fixed, so that a run of `make test` is the same every time; RANDOM_GRAPHS_SEED begins the nightly run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from random_batches import batches, check_coverage


@pytest.mark.limit(900)
def test_hundred(tmp_path: Path) -> None:
    check_coverage(batches(tmp_path, range(1, 5), 25), 100)


@pytest.mark.nightly
@pytest.mark.limit(6 * 3600)
def test_two_thousand(tmp_path: Path) -> None:
    first = int(os.environ.get("RANDOM_GRAPHS_SEED", "0")) or int(time.time())
    print(f"RANDOM_GRAPHS_SEED={first}")
    check_coverage(batches(tmp_path, range(first, first + 50), 40), 2000)
