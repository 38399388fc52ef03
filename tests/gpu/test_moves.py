"""Data-moving collectives on CUDA tensors, coalesced and functional forms, objects and sparse tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import LARGE, SMALL, SPREAD, WORLD, run, same, start
from support.layouts import Placed, poison
from support.rank import Rank
from support.reference import ALL_DTYPES, make_input

WORLDS = sorted({1, 2, WORLD} if WORLD > 1 else {1})
each_world = pytest.mark.parametrize("world", WORLDS)


def _fresh(count: int, dtype: torch.dtype, layout: str, device: torch.device) -> Placed:
    return Placed(poison(torch.empty(count, dtype=dtype)), layout, device)


def _moving(rank: Rank) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    grid = itertools.product(ALL_DTYPES, SMALL + LARGE[:1], ("plain", "offset", "strided"))
    for seed, (dtype, count, layout) in enumerate(grid):
        root = seed % world
        every = [make_input(dtype, count, seed, r) for r in range(world)]
        what = f"{dtype} {count} {layout}, root {root}"

        sent = Placed(every[me] if me == root else poison(torch.empty(count, dtype=dtype)), layout, device)
        dist.broadcast(sent.tensor, root)
        _check(sent, every[root], "broadcast " + what)

        mine = Placed(every[me], layout, device)
        outputs = [_fresh(count, dtype, layout, device) for _ in range(world)]
        dist.all_gather([output.tensor for output in outputs], mine.tensor)
        for r, output in enumerate(outputs):
            _check(output, every[r], f"all_gather {what} [{r}]")

        outputs = [_fresh(count, dtype, layout, device) for _ in range(world)] if me == root else []
        dist.gather(mine.tensor, [output.tensor for output in outputs] if me == root else None, dst=root)
        for r, output in enumerate(outputs):
            _check(output, every[r], f"gather {what} [{r}]")

        output = _fresh(count, dtype, layout, device)
        inputs = [Placed(values, layout, device).tensor for values in every] if me == root else None
        dist.scatter(output.tensor, inputs, src=root)
        _check(output, every[me], "scatter " + what)
        same(mine.tensor, every[me], "input changed, " + what)


def _check(placed: Placed, expected: torch.Tensor, what: str) -> None:
    same(placed.tensor, expected, what)
    placed.check(what)


@each_world
def test_broadcast_gather_and_scatter(world: int) -> None:
    run(_moving, world=world)


def _all_gather_into_tensor(rank: Rank) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    for seed, (dtype, count) in enumerate(itertools.product(ALL_DTYPES, SMALL + LARGE)):
        mine, expected = make_input(dtype, count, seed, me), poison(torch.empty(world * count, dtype=dtype))
        dist.all_gather_into_tensor(expected, mine)
        whole = _fresh(world * count, dtype, "offset", device)
        dist.all_gather_into_tensor(whole.tensor, mine.to(device))
        _check(whole, expected, f"all_gather_into_tensor {dtype} {count}")
        # As FSDP2 calls it: the input is this rank's part of the output.
        flat = poison(torch.empty(world * count, dtype=dtype, device=device))
        part = flat.narrow(0, me * count, count)
        part.copy_(mine)
        dist.all_gather_into_tensor(flat, part)
        same(flat, expected, f"all_gather_into_tensor {dtype} {count} in place")


@each_world
def test_all_gather_into_tensor(world: int) -> None:
    run(_all_gather_into_tensor, world=world)


def _all_to_all(rank: Rank) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    for seed, (dtype, count) in enumerate(itertools.product(SPREAD, SMALL + LARGE[:1])):
        what = f"all_to_all {dtype} {count}"
        mine = make_input(dtype, count * world, seed, me)
        expected, output = torch.empty_like(mine), poison(torch.empty_like(mine, device=device))
        dist.all_to_all_single(expected, mine)
        dist.all_to_all_single(output, mine.to(device))
        same(output, expected, what)
        # In place, and with rows: rank s sends (s + 2 d + seed) % 5 rows to rank d, possibly none.
        inplace = mine.to(device)
        dist.all_to_all_single(inplace, inplace)
        same(inplace, expected, what + " in place")
        rows = [[(s + 2 * d + seed) % 5 * (1 if count < 9 else 97) for d in range(world)] for s in range(world)]
        ins, outs = rows[me], [rows[s][me] for s in range(world)]
        source = make_input(dtype, 3 * sum(ins), seed, me).view(-1, 3)
        expected = torch.empty(sum(outs), 3, dtype=dtype)
        output = poison(torch.empty(sum(outs), 3, dtype=dtype, device=device))
        dist.all_to_all_single(expected, source, outs, ins)
        dist.all_to_all_single(output, source.to(device), outs, ins)
        same(output, expected, what + " rows")
        results = [poison(torch.empty(n, 3, dtype=dtype, device=device)) for n in outs]
        dist.all_to_all(results, [part.to(device) for part in source.split(ins)])
        for got, want in zip(results, expected.split(outs), strict=True):
            same(got, want, what + " list")


@each_world
def test_all_to_all(world: int) -> None:
    run(_all_to_all, world=world)


# -- coalesced forms, objects, sparse


def _coalesced(rank: Rank) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    tensors = [make_input(torch.float32, n, n, me) for n in (1, 17, 70001)]
    copies = [tensor.to(device) for tensor in tensors]
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        for copy in copies:
            dist.all_reduce(copy)
    manager.wait()
    for tensor, copy in zip(tensors, copies, strict=True):
        dist.all_reduce(tensor)
        same(copy, tensor, f"coalesced all_reduce {tensor.numel()}")
    outputs = [torch.full((n * world,), float("nan"), device=device) for n in (3, 1025)]
    inputs = [make_input(torch.float32, n, 1, me) for n in (3, 1025)]
    with dist._coalescing_manager(device=device):
        for output, given in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, given.to(device))
    for output, n in zip(outputs, (3, 1025), strict=True):
        same(output, torch.cat([make_input(torch.float32, n, 1, r) for r in range(world)]), "coalesced all_gather")
    # Functional collectives, as DTensor calls them.
    import torch.distributed._functional_collectives as functional

    mine = make_input(torch.float32, 12 * world, 4, me)
    expected = mine.clone()
    dist.all_reduce(expected)
    same(functional.all_reduce(mine.to(device), "sum", dist.group.WORLD), expected, "functional all_reduce")
    part = functional.reduce_scatter_tensor(mine.to(device), "sum", 0, dist.group.WORLD)
    same(part, expected[12 * me : 12 * (me + 1)], "functional reduce_scatter")
    same(functional.all_gather_tensor(part, 0, dist.group.WORLD), expected, "functional all_gather")


@each_world
def test_coalesced_and_functional(world: int) -> None:
    run(_coalesced, world=world)


def _objects_and_sparse(rank: Rank) -> None:
    device = start(rank)
    gathered: list[Any] = [None] * rank.world_size
    dist.all_gather_object(gathered, {"rank": rank.rank, "tensor": torch.ones(3, device=device)})
    assert [entry["rank"] for entry in gathered] == list(range(rank.world_size))
    indices = torch.tensor([[0, rank.rank + 1, 9]])
    sparse = torch.sparse_coo_tensor(indices, make_input(torch.float32, 3, 1, rank.rank), (10,))
    expected = sparse.clone()
    dist.all_reduce(expected)
    on_device = sparse.to(device)
    dist.all_reduce(on_device)
    same(on_device.to_dense(), expected.to_dense(), "sparse all_reduce")
    factor = torch.full((1,), 0.5, device=device)
    tensor = torch.ones(5, device=device)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
    assert tensor.tolist() == [0.5 * rank.world_size] * 5
    assert on_device.device == device


@each_world
def test_objects_sparse_tensors_and_tensor_factors(world: int) -> None:
    run(_objects_and_sparse, world=world)
