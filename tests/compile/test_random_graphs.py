"""Random programs (random_graphs.py) on ark, eager and in float64: 4 in `make test`, 2,000 with new seeds at night.

Seeds are fixed, so that each `make test` is the same. RANDOM_GRAPHS_SEED sets the first seed of the nightly run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from random_batches import batches, check_coverage


@pytest.mark.by_day("4")
@pytest.mark.parametrize("programs", [4, 20])
def test_fixed_ones(tmp_path: Path, programs: int) -> None:
    check_coverage(batches(tmp_path, [1], programs), programs)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(50))
def test_two_thousand(tmp_path: Path, part: int) -> None:
    """In parts of 40, so that shards share them."""
    first = int(os.environ.get("RANDOM_GRAPHS_SEED", "0")) or int(time.time())
    print(f"RANDOM_GRAPHS_SEED={first}")
    check_coverage(batches(tmp_path, [first + part], 40), 40)
