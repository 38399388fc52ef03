"""Object collectives, the monitored barrier and a work queue in the store, launched by torchrun."""

from __future__ import annotations

from datetime import timedelta

import common
import torch
import torch.distributed as dist


def main() -> None:
    rank, world = common.start()
    gathered: list[object] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "tensor": torch.full((3,), float(rank))})
    assert [x["rank"] for x in gathered] == list(range(world))  # type: ignore[index]
    shared: list[object] = [f"from {rank}", rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == ["from 1", 1]
    got: list[object] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(world)] if rank == 0 else None, src=0)
    assert got == [f"for {rank}"]
    everything: list[object] | None = [None] * world if rank == 0 else None
    dist.gather_object("x" * (rank + 1), everything, dst=0)
    assert everything is None or everything == ["x" * (r + 1) for r in range(world)]
    if world > 1:
        if rank == 0:
            dist.send_object_list(["hello", 5], dst=1)
        elif rank == 1:
            received: list[object] = [None, None]
            dist.recv_object_list(received, src=0)
            assert received == ["hello", 5]
    group = dist.group.WORLD
    assert group is not None
    group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    common.finish()


if __name__ == "__main__":
    main()
