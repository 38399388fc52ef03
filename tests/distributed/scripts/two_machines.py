"""One rank of a group whose members may not share memory. Compares every operation with the bit-exact reference."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.reference import assert_same_bits, join, make_input, reduce
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

# The machine of every rank, as assigned by test_namespaces.py.
NODES = [int(node) for node in os.environ["ARK_TEST_PLACEMENT"].split(",")]


def collectives(rank: int, world: int, group: Any) -> None:
    """`rank` and `world` are those in the group. Its members are a prefix or suffix of the world, in order."""
    base = dist.get_global_rank(group, 0)
    nodes = [NODES[dist.get_global_rank(group, r)] for r in range(world)]

    def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
        return reduce(inputs, op, nodes=nodes)

    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)):
        count = 1 + 1009 * seed
        inputs = [make_input(dtype, count, seed, r) for r in range(world)]
        wide = [make_input(dtype, count * world, seed, r) for r in range(world)]
        for op in ("SUM", "MAX"):
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
            assert_same_bits(tensor, reduced(inputs, op), f"all_reduce {dtype} {op}")
        tensor = inputs[rank].clone()
        dist.reduce(tensor, base, group=group)
        if rank == 0:
            assert_same_bits(tensor, reduced(inputs, "SUM"), f"reduce {dtype}")
        tensor = inputs[rank].clone()
        dist.broadcast(tensor, base + world - 1, group=group)
        assert_same_bits(tensor, inputs[-1], f"broadcast {dtype}")
        outs = [torch.empty(count, dtype=dtype) for _ in range(world)]
        dist.all_gather(outs, inputs[rank], group=group)
        for got, want in zip(outs, inputs, strict=True):
            assert_same_bits(got, want, f"all_gather {dtype}")
        flat = torch.empty(count * world, dtype=dtype)
        dist.all_gather_into_tensor(flat, inputs[rank], group=group)
        assert_same_bits(flat, join(inputs), f"all_gather_into_tensor {dtype}")
        part = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(part, wide[rank], group=group)
        assert_same_bits(part, reduced(wide, "SUM")[count * rank : count * (rank + 1)], f"reduce_scatter {dtype}")
        dist.reduce_scatter(part, [x.clone() for x in wide[rank].split(count)], group=group)
        assert_same_bits(part, reduced(wide, "SUM")[count * rank : count * (rank + 1)], f"reduce_scatter list {dtype}")
        dist.gather(inputs[rank], outs if rank == 0 else None, base, group=group)
        if rank == 0:
            assert_same_bits(outs[-1], inputs[-1], f"gather {dtype}")
        dist.scatter(part, inputs if rank == 0 else None, base, group=group)
        assert_same_bits(part, inputs[rank], f"scatter {dtype}")
        moved = torch.empty(count * world, dtype=dtype)
        dist.all_to_all_single(moved, wide[rank], group=group)
        assert_same_bits(moved, join([w[count * rank : count * (rank + 1)] for w in wide]), f"all_to_all {dtype}")
        dist.all_to_all(
            [torch.empty(count, dtype=dtype) for _ in range(world)], list(wide[rank].split(count)), group=group
        )
        work = dist.all_reduce(inputs[rank].clone(), group=group, async_op=True)
        assert work is not None
        work.wait()
        strided = inputs[rank].repeat_interleave(2)[::2]
        dist.all_reduce(strided, group=group)
        assert_same_bits(strided, reduced(inputs, "SUM"), f"strided {dtype}")
    # Large tensors, in chunks.
    for dtype, count in ((torch.float32, 700_001), (torch.bfloat16, 300_001), (torch.int64, 200_003)):
        inputs = [make_input(dtype, count, 77, r) for r in range(world)]
        for op in ("SUM", "MAX", "AVG"):
            if op == "AVG" and not dtype.is_floating_point:
                continue
            tensor = inputs[rank].clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
            assert_same_bits(tensor, reduced(inputs, op), f"large all_reduce {dtype} {op}")
        flat = torch.empty(count * world, dtype=dtype)
        dist.all_gather_into_tensor(flat, inputs[rank], group=group)
        assert_same_bits(flat, join(inputs), f"large all_gather {dtype}")
    dist.barrier(group=group)
    sparse = torch.eye(6).to_sparse()
    dist.all_reduce(sparse, group=group)
    assert torch.equal(sparse.to_dense(), torch.eye(6) * world)
    assert (funcol.all_reduce(torch.ones(3), "sum", group) + 0).tolist() == [float(world)] * 3
    assert (funcol.all_gather_tensor(torch.ones(2), 0, group) + 0).numel() == 2 * world
    after, before = base + (rank + 1) % world, base + (rank - 1) % world
    if world > 1:
        sent = dist.isend(torch.full((70_000,), float(rank)), after, group=group, tag=3)
        got = torch.empty(70_000)
        dist.recv(got, before, group=group, tag=3)
        sent.wait()
        assert got.unique().tolist() == [float((rank - 1) % world)]
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((9,), float(rank)), after, group),
                dist.P2POp(dist.irecv, got[:9], before, group),
            ]
        )
        for one in works:
            one.wait()
        assert got[:9].tolist() == [float((rank - 1) % world)] * 9


def main() -> None:
    rank, world = common.start()
    if os.environ.get("ARK_TEST_INIT_ONLY"):
        return
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    print(f"shares_memory={backend.shares_memory} plan={backend.plan}", flush=True)
    collectives(rank, world, dist.group.WORLD)
    group = dist.new_group(list(range(world)))
    collectives(rank, world, group)
    sides = [[r for r in range(world) if NODES[r] == node] for node in sorted(set(NODES))]
    if len(sides) > 1 and world > 2:
        groups = [dist.new_group(side) for side in sides]
        for side, one in zip(sides, groups, strict=True):
            if rank in side:
                collectives(side.index(rank), len(side), one)
                assert one._get_backend(torch.device("cpu")).shares_memory, "a side shares memory"
    if world > 1 and rank == 0:
        got = torch.empty(3)
        sources = sorted(dist.recv(got, None) for _ in range(world - 1))
        assert sources == list(range(1, world))
    elif world > 1:
        dist.send(torch.ones(3), 0)
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, rank)
    assert gathered == list(range(world))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    model = DDP(common.make_model())
    x, y = (common.mine(t, rank, world) for t in common.batch(0, 4 * world))
    nn.functional.mse_loss(model(x), y).backward()
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert future.wait()[0].item() == 2 * world
    dist.group.WORLD.set_timeout(timedelta(seconds=50))
    dist.destroy_process_group(group)
    common.finish()


if __name__ == "__main__":
    main()
