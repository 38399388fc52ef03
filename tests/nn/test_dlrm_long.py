"""A thousand steps of the example's DLRM: the MLPs' replicas stay bit-identical, and a run repeats bit for bit."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch.nn.parallel import DistributedDataParallel

pytestmark = [ark_only, pytest.mark.nightly]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def digest(tensors: Any) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _train(rank: Rank, sharding: str, steps: int) -> tuple[str, str, float, float]:
    """Returns digests of the MLPs and of this rank's tables, and the AUC before and after."""
    sys.path.insert(0, str(EXAMPLES))
    import dlrm

    rank.init()
    torch.set_num_threads(1)
    me, world = rank.rank, rank.world_size
    rows = [min(count, 60) for count in dlrm.CATEGORIES]
    data = dlrm.Clicks(rows, 60 * world, 3, torch.device("cpu"))
    model = dlrm.Dlrm(
        rows, argparse.Namespace(seed=3, dim=8, width=16, sharding=sharding, lr=0.05, capture=False), dist.group.WORLD
    )
    rest = DistributedDataParallel(model.rest)
    model.rest = rest.module
    optimizer = torch.optim.Adagrad(model.rest.parameters(), lr=0.05)
    before = dlrm.held_out_auc(model, data, me, world)
    for step in range(steps):
        batch = dlrm.share(data.batch(step), me, world)
        loss = dlrm.train_step(lambda dense, bags: rest(dense, model.bags(bags)), optimizer, batch)
        assert loss.isfinite(), step
        if step % 100 == 99:
            digests: list[Any] = [None] * world
            dist.all_gather_object(digests, digest(model.rest.parameters()))
            assert len(set(digests)) == 1, f"the MLPs differ after step {step}: {digests}"
    after = dlrm.held_out_auc(model, data, me, world)
    tables = [value for table in model.bags.tables.values() for value in (table.weight, table.sum)]
    return digest(model.rest.parameters()), digest(tables), before, after


@pytest.mark.parametrize("sharding, world", [("table_wise", 2), ("row_wise", 3)])
def test_a_thousand_steps(sharding: str, world: int) -> None:
    first, second = (run_ranks(_train, world, sharding, 1000, timeout=280) for _ in range(2))
    assert first == second, "two runs differ"
    assert len({tables for _, tables, _, _ in first}) == world
    for _, _, before, after in first:
        assert 0.4 < before < 0.6 and after > before + 0.1
