"""Random programs (random_graphs.py) on ark, eager and in float64: 20 in `make test`, 2,000 with new seeds at night.

Seeds are fixed, so that a run of `make test` is the same every time; RANDOM_GRAPHS_SEED begins the nightly run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from random_batches import batches, check_coverage


def test_twenty(tmp_path: Path) -> None:
    check_coverage(batches(tmp_path, [1], 20), 20)


@pytest.mark.nightly
@pytest.mark.limit(1800)
@pytest.mark.parametrize("part", range(50))
def test_two_thousand(tmp_path: Path, part: int) -> None:
    """Parts of 40, so that shards share them."""
    first = int(os.environ.get("RANDOM_GRAPHS_SEED", "0")) or int(time.time())
    print(f"RANDOM_GRAPHS_SEED={first}")
    check_coverage(batches(tmp_path, [first + part], 40), 40)
