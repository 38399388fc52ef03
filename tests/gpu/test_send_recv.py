"""send and recv of CUDA tensors: no pattern deadlocks, pairs keep their order, refusals are clear."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpu import GPUS, busy, run, same, start
from support.rank import Rank
from support.reference import ALL_DTYPES, make_input

COUNTS = (0, 1, 1023, 65537, (6 << 20) + 3)  # the last one far exceeds any ring


def _pairs(rank: Rank) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    to, source = (me + 1) % world, (me - 1) % world
    for seed, dtype in enumerate(ALL_DTYPES):
        for count in COUNTS[:4]:
            got = make_input(dtype, count, 99, me).to(device)
            works = [dist.isend(make_input(dtype, count, seed, me).to(device), to), dist.irecv(got, source)]
            for work in works if me % 2 else reversed(works):
                work.wait()
            same(got, make_input(dtype, count, seed, source), f"{dtype} {count}")
    # Strided on both sides, with blocking calls.
    wide = torch.zeros(1000, 2, device=device)
    if me % 2 == 0:
        sent = make_input(torch.float32, 2000, 1, me).to(device).view(1000, 2)[:, 1]
        if to != me and to % 2 == 1:
            dist.send(sent, to)
    elif source % 2 == 0:
        dist.recv(wide[:, 0], source)
        same(wide[:, 0], make_input(torch.float32, 2000, 1, source).view(1000, 2)[:, 1], "strided")
        assert not wide[:, 1].any()


def test_pairs() -> None:
    run(_pairs)


def _all_sends_first(rank: Rank) -> None:
    """All ranks send large messages to all before any receives; then the reverse; then in a batch."""
    device = start(rank)
    world, me = rank.world_size, rank.rank
    others = [r for r in range(world) if r != me]
    for count in COUNTS:
        for pattern in ("sends first", "receives first", "batch", "batch reversed"):
            sent = {r: make_input(torch.float32, count, r, me).to(device) for r in others}
            got = {r: torch.full((count,), float("nan"), device=device) for r in others}
            if pattern.startswith("batch"):
                ops = [dist.P2POp(dist.isend, sent[r], r) for r in others]
                ops += [dist.P2POp(dist.irecv, got[r], r) for r in others]
                works = dist.batch_isend_irecv(ops[:: -1 if "reversed" in pattern else 1])
            elif pattern == "sends first":
                works = [dist.isend(sent[r], r) for r in others] + [dist.irecv(got[r], r) for r in others]
            else:
                works = [dist.irecv(got[r], r) for r in others] + [dist.isend(sent[r], r) for r in others]
            for work in works:
                work.wait()
            for r in others:
                same(got[r], make_input(torch.float32, count, me, r), f"{pattern} {count} from {r}")


@pytest.mark.parametrize("queues", [None, "1"])  # one hardware queue for all streams, as Megatron sets it
def test_everybody_to_everybody(queues: str | None) -> None:
    run(_all_sends_first, own=True, env={"CUDA_DEVICE_MAX_CONNECTIONS": queues})


def _order(rank: Rank) -> None:
    """Messages of a pair arrive in order, whatever runs beside them and however late their contents are."""
    device = start(rank)
    world, me = rank.world_size, rank.rank
    to, source = (me + 1) % world, (me - 1) % world
    got, works = [], []
    for step in range(60):
        if step % 10 == me:
            busy(3)
        tensor = torch.full((1 + step * 1009,), float(1000 * me + step), device=device)
        works.append(dist.isend(tensor, to, tag=step))
        reduced = torch.ones(100, device=device)
        dist.all_reduce(reduced, async_op=step % 2 == 0)
        got.append(torch.empty(1 + step * 1009, device=device))
        works.append(dist.irecv(got[-1], source, tag=59 - step))  # tags are ignored, as with NCCL
    for work in works:
        work.wait()
    for step, tensor in enumerate(got):
        assert tensor[0].item() == tensor[-1].item() == 1000 * source + step, f"message {step}"


def test_order_beside_collectives() -> None:
    run(_order)


def _pipeline(rank: Rank) -> float:
    """Forward and backward through the ranks. Each waits for the previous one, and a send is the first use of CUDA."""
    device = start(rank)
    world, me = rank.world_size, rank.rank
    value = torch.zeros(10_000, device=device)
    for step in range(30):
        if me > 0:
            dist.recv(value, me - 1)
        else:
            value.fill_(float(step))
        value += 1
        if me < world - 1:
            dist.send(value, me + 1)
            dist.recv(value, me + 1)
        if me > 0:
            dist.send(value, me - 1)
        assert value[0].item() == value[-1].item() == step + world
    return value[0].item()


def test_pipeline() -> None:
    run(_pipeline)


def _captured(rank: Rank, count: int) -> None:
    device = start(rank)
    world, me = rank.world_size, rank.rank
    to, source = (me + 1) % world, (me - 1) % world
    dist.all_reduce(torch.ones(1, device=device))
    sent, got = torch.zeros(count, device=device), torch.zeros(count, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, got, source)]):
            work.wait()
        dist.all_reduce(got)
    for replay in range(6):
        if replay % world == me:
            busy(3)  # the others' ends of its messages wait
        sent.fill_(float(me + replay))
        graph.replay()
        expected = float(sum(r + replay for r in range(world)))
        assert got.unique().tolist() == [expected], f"replay {replay}"


@pytest.mark.parametrize("count", [5000, (3 << 20) + 1])  # without and with a rendezvous
def test_captured(count: int) -> None:
    run(_captured, count)


def _to_oneself(rank: Rank) -> None:
    device = start(rank)
    me, world = rank.rank, rank.world_size
    sent = [make_input(torch.float32, 1000 + k, k, me).to(device) for k in range(2)]
    got = [torch.zeros(1000 + k, device=device) for k in range(2)]
    beside = torch.zeros(5, device=device)
    receives = [dist.P2POp(dist.irecv, tensor, me) for tensor in got]
    sends = [dist.P2POp(dist.isend, tensor, me) for tensor in sent]
    others = [
        dist.P2POp(dist.isend, torch.full((5,), float(me), device=device), (me + 1) % world),
        dist.P2POp(dist.irecv, beside, (me - 1) % world),
    ]
    for batch in ([*sends, *receives], [receives[0], *others, sends[0], sends[1], receives[1]]):
        for tensor in got:
            tensor.zero_()
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        for k in range(2):
            same(got[k], sent[k], f"message {k} to oneself")
    assert beside.tolist() == [float((me - 1) % world)] * 5
    # The batch's work covers them: issued on one stream, awaited on another. Parameters are sent like other tensors.
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    source = make_input(torch.float32, 1 << 20, 5, me).to(device)
    for with_others in (False, True):
        copy = torch.zeros(1 << 20, device=device, requires_grad=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            busy()
            sent_late = torch.nn.Parameter(source * 1)
            ends = [dist.P2POp(dist.isend, sent_late, me), dist.P2POp(dist.irecv, copy, me)]
            works = dist.batch_isend_irecv([*ends, *others] if with_others else ends)
        assert len(works) == 1
        with torch.cuda.stream(two):
            works[0].wait()
            read = copy.detach().clone()
        two.synchronize()
        assert works[0].is_completed() and works[0].is_success()
        same(read, source, f"to oneself, waited for on another stream, with others: {with_others}")
        assert copy.grad_fn is None and copy.is_leaf
    # The two ends are on different streams, the later one is issued first.
    copy = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        with torch.cuda.stream(one):
            busy()
            sent_late = source * 1
            dist.isend(sent_late, me)
        with torch.cuda.stream(two):
            dist.irecv(copy, me)
    manager.wait()
    same(copy, source, "the ends on two streams")
    with pytest.raises(ValueError, match=rf"a send to this rank, {me}, has no counterpart in the batch"):
        dist.batch_isend_irecv(sends[:1])
    with pytest.raises(ValueError, match=rf"dst is this rank, {me}. Send to it and receive from it in one"):
        dist.isend(sent[0], me)
    dist.barrier()


def test_to_oneself() -> None:
    run(_to_oneself)


def _refusals(rank: Rank) -> None:
    device = start(rank)
    me = rank.rank
    tensor = torch.ones(4, device=device)
    with pytest.raises(ValueError, match=rf"\[rank {me}\] recv: src is not given.*Name the source"):
        dist.recv(tensor)
    with pytest.raises(ValueError, match=rf"\[rank {me}\] .*output\[1\] is on cpu but .* is on {device}"):
        dist.all_gather([tensor.clone(), torch.ones(4)] * (rank.world_size // 2), tensor)
    dist.all_reduce(tensor)
    if GPUS > 1:
        elsewhere = torch.ones(4, device=torch.device("cuda", (device.index + 1) % GPUS))
        with pytest.raises(ValueError, match=rf"\[rank {me}\] all_reduce: the tensor is on {elsewhere.device}, but"):
            dist.all_reduce(elsewhere)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [rank.world_size**2] * 4, "the group is usable after refusals"


def test_refusals() -> None:
    run(_refusals)
