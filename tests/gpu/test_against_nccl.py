"""Random small operations on ark and on NCCL in the same processes must have equal bits (random_operations.py).

ARK_TEST_OPERATIONS=100000 makes a long run; ARK_TEST_SEED chooses another plan.
"""

from __future__ import annotations

import os
import time

import pytest
from on_gpu import WORLD, run, start
from random_operations import Runner
from random_plan import make_groups
from support import tables
from support.rank import Rank

OPERATIONS = int(os.environ.get("ARK_TEST_OPERATIONS", "4000"))


def _random(rank: Rank, seed: int, operations: int) -> tuple[int, float]:
    device = start(rank)
    runner = Runner(device, make_groups("nccl", device), seed)
    begun = time.monotonic()
    done = runner.run(operations)
    return done, time.monotonic() - begun


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", sorted({2, WORLD}))
def test_random_operations(world: int, seed: int) -> None:
    seed = int(os.environ.get("ARK_TEST_SEED", str(seed)))
    values = run(_random, seed, OPERATIONS, world=world, timeout=500)
    for done, seconds in values:
        assert done > OPERATIONS // 3, "subgroups leave a rank most of the plan"
        tables.add("against_nccl", ranks=world, seed=seed, operations=done, s=seconds, per_s=done / seconds)
