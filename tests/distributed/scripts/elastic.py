"""A rank that dies once. torchrun restarts all ranks on the same store. argv: folder for the markers, how to die."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import common
import torch
import torch.distributed as dist


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, world = common.start()
    (folder / f"attempt{attempt}-rank{rank}").touch()
    group = dist.new_group(list(range(world)))
    for step in range(20):
        tensor = torch.full((1000,), float(step))
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        assert tensor[0].item() == step * world * world
        if attempt == 0 and step == 10 and rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("dies once")
    assert attempt == 1, "the first attempt should have failed"
    common.finish()


if __name__ == "__main__":
    main()
