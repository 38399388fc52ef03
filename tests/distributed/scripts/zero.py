"""Compares ZeroRedundancyOptimizer under DDP with Adam in one process; consolidated state; uneven inputs (join)."""

from __future__ import annotations

import common
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4


def main() -> None:
    rank, world = common.start()
    alone = common.train_alone(STEPS, lambda m: torch.optim.Adam(m.parameters(), lr=1e-2))
    for overlap in (False, True):
        model = DDP(common.make_model(), gradient_as_bucket_view=overlap)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=1e-2, parameters_as_bucket_view=overlap
        )
        for step in range(STEPS):
            x, y = (common.mine(t, rank, world) for t in common.batch(step))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        common.assert_same_weights(model.module.state_dict(), alone, tolerance=1e-4)
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    model = DDP(common.make_model())
    done = 0
    with model.join():
        for step in range(3 + 2 * rank):
            x, y = common.batch(step)
            nn.functional.mse_loss(model(x), y).backward()
            done += 1
    assert done == 3 + 2 * rank
    common.finish()


if __name__ == "__main__":
    main()
