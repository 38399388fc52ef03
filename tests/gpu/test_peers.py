"""Peer access: GPUs with tested peer access, values that get lost, and groups through host memory."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from native import KERNELS
from on_gpu import WORLD, factor, op, run, same, start
from support.rank import Rank
from support.reference import make_input, supported
from support.told import Lines

import ark_torch

HOST = {"ARK_DISABLE_P2P": "1"}


def _backend(device: torch.device, group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(device)


def _tested(rank: Rank) -> None:
    lines = Lines()
    device = start(rank)
    groups = [None, dist.new_group(), dist.new_group([0, 1])]
    for group in groups[: 3 if rank.rank < 2 else 2]:
        tensor = make_input(torch.float32, 5000, 1, rank.rank)
        on_device = tensor.to(device)
        dist.all_reduce(on_device, group=group)
        dist.all_reduce(tensor, group=group)
        same(on_device, tensor, "all_reduce")
        backend = _backend(device, group)
        assert backend.cuda_carrier == "ark" and backend.cuda_on_host == "", backend.cuda_on_host
    assert not lines.about("memory of the host") and not lines.about("claims to work"), lines.lines


@pytest.mark.parametrize("wish", ["auto", "0"])
def test_peers_memory_is_used_where_values_arrive(wish: str) -> None:
    run(_tested, env={"ARK_DISABLE_P2P": wish}, own=True)


@pytest.mark.parametrize("ranks", sorted({2, WORLD}))
def test_values_that_go_astray_are_found(native_programs: Path, ranks: int) -> None:
    def verdicts(liar: int) -> list[str]:
        done = subprocess.run(
            [native_programs / "peers", str(ranks), str(liar), KERNELS],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()

    assert verdicts(-1) == ["arrive"] * ranks
    for liar in (0, ranks - 1):
        victim = ranks - 1 if liar != ranks - 1 else ranks - 2
        words = rf"peer access from GPU {liar} \(rank {liar}\) to GPU {victim} \(rank {victim}\) claims to work, but "
        for text in verdicts(liar):
            assert re.search(words + "values do not arrive: 512 of 512 words by stores are missing", text), text


def _through_the_host(rank: Rank, refused: str) -> None:
    lines = Lines()
    device = start(rank)
    dist.all_reduce(torch.ones(1, device=device))
    backend = _backend(device)
    assert backend.cuda_carrier == "ark" and refused in backend.cuda_on_host
    assert 0 < backend.cuda_shared_bytes * rank.world_size <= 64 << 20
    assert len(lines.about("pinned for each rank")) == (rank.rank == 0), lines.lines


def test_on_the_host_little_memory_is_pinned() -> None:
    run(_through_the_host, "as ARK_DISABLE_P2P asks", env=HOST, own=True)


def _sums(rank: Rank) -> None:
    """All sizes of packets and chunks, dtypes and operations, many times, because counters only grow."""
    device = start(rank)
    counts = (1, 1023, 65537, (1 << 20) + 3, (9 << 20) + 5)
    dtypes = (torch.bfloat16, torch.float32, torch.int64)
    for dtype, count, name in itertools.product(dtypes, counts, ("SUM", "AVG", "MAX", "PREMUL_SUM")):
        if not supported(dtype, name) or (count > 1 << 20 and name != "SUM"):
            continue
        values = make_input(dtype, count, 7, rank.rank)
        expected = values.clone()
        dist.all_reduce(expected, op(name, rank.rank))
        for repeat in range(3):
            tensor = values.to(device)
            dist.all_reduce(tensor, op(name, rank.rank))
            same(tensor, expected, f"{dtype} {name} {count} repeat {repeat}")
    assert factor(1) != factor(0)


def test_sums_through_the_host() -> None:
    run(_sums, env=HOST, own=True)


def _moves(rank: Rank) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    for count in (1, 4099, (3 << 20) + 1):
        values = make_input(torch.float32, count * world, 3, me)
        one = values[:count].clone()
        outputs: list[list[torch.Tensor]] = []
        for where in (torch.device("cpu"), device):
            given, part = values.to(where), one.to(where)
            gathered, exchanged, scattered = torch.zeros_like(given), torch.zeros_like(given), torch.zeros_like(part)
            dist.all_gather_into_tensor(gathered, part)
            dist.all_to_all_single(exchanged, given)
            dist.reduce_scatter_tensor(scattered, given)
            sent = part.clone()
            dist.broadcast(sent, world - 1)
            got = torch.zeros_like(part)
            both = [dist.P2POp(dist.isend, part, (me + 1) % world), dist.P2POp(dist.irecv, got, (me - 1) % world)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            outputs.append([gathered, exchanged, scattered, sent, got])
        for expected, found, what in zip(*outputs, ("gather", "exchange", "scatter", "broadcast", "send"), strict=True):
            same(found, expected, f"{what} of {count}")
    dist.barrier()


def test_moves_through_the_host() -> None:
    run(_moves, env=HOST, own=True)


def _captured(rank: Rank) -> None:
    device = start(rank)
    tensors = [torch.zeros(count, device=device) for count in (1000, 3 << 20)]
    for tensor in tensors:  # the first one connects the ranks and loads kernels
        dist.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for replay in range(5):
        expected = []
        for tensor in tensors:
            values = make_input(torch.float32, tensor.numel(), replay, rank.rank)
            tensor.copy_(values)
            dist.all_reduce(values)
            expected.append(values)
        graph.replay()
        for tensor, values in zip(tensors, expected, strict=True):
            same(tensor, values, f"replay {replay}")


def test_graphs_through_the_host() -> None:
    run(_captured, env=HOST, own=True)


def _compressed(rank: Rank) -> None:
    device = start(rank)
    for count in (4096, (1 << 20) + 512):
        values = make_input(torch.float32, count, 5, rank.rank)
        found = ark_torch.distributed.compressed_all_reduce(values.to(device), bits=8)
        same(found, ark_torch.distributed.compressed_all_reduce(values, bits=8), f"compressed {count}")


def test_compressed_sums_through_the_host() -> None:
    run(_compressed, env=HOST, own=True)


def _beside_nccl(rank: Rank) -> None:
    """In a group on host memory NCCL carries all_gathers of some sizes, as it does by default without peer access."""
    device = start(rank)
    options = ark_torch.Options()
    options.disable_p2p = True
    options.cuda_dispatch = [(8, {"nccl_all_gather_from": 128 << 10, "nccl_all_gather_to": 8 << 20})]
    group = dist.new_group(pg_options=options)
    for count, carried in ((1000, 0), (1 << 19, 1), (4 << 20, 1), (1 << 19, 2)):  # float32 elements over all ranks
        values = make_input(torch.float32, count // rank.world_size, 9, rank.rank)
        expected = torch.zeros(values.numel() * rank.world_size)
        found = expected.to(device)
        dist.all_gather_into_tensor(expected, values, group=group)
        dist.all_gather_into_tensor(found, values.to(device), group=group)
        same(found, expected, f"all_gather of {count}")
        assert _backend(device, group).cuda_carried == carried, count
    assert _backend(device, group).cuda_on_host


def test_nccl_beside_memory_of_the_host() -> None:
    run(_beside_nccl, own=True)
