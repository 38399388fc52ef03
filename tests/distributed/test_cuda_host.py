"""The host's side of CUDA tensors on a pretended device: who carries what, bad input, times. No kernel runs here.

NCCL is stood in for by a Recorder (support/pretended): what it carries is really carried, by a CPU group over the same
memory, and what ark's kernels would do is not done. So a result tells who carried it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import Job, run_ranks
from support.rank import Rank

import ark_torch
from ark_torch import _C
from ark_torch.distributed import group as making

pytestmark = [ark_only]
BIG, SMALL = 6144, 1536  # elements of float32; the table below gives NCCL what has 24 KB and more
FROM = 4 * BIG
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("all_gather", "broadcast", "all_to_all")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return pretended.build(tmp_path_factory.mktemp("pretended"))


class Lines(logging.Handler):
    """What people are told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        making.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def about(self, word: str) -> list[str]:
        return [line for line in self.lines if word in line]


def _table(size: int, names: tuple[str, ...] = REDUCING + MOVING) -> list[tuple[int, dict[str, int]]]:
    return [(size, {f"nccl_{name}_from": FROM for name in names})]


def _begin(
    rank: Rank, fails: bool = False, carrier: str = "nccl", **options: Any
) -> tuple[Any, pretended.Carriers, Lines]:
    """The world group on the pretended device, carriers for it, and what it tells people."""
    pretended.enter()
    pretended.device.set_device(rank.rank)
    lines = Lines()
    rank.init()
    inner = [dist.new_group() for _ in range(2)]
    carriers = pretended.Carriers(inner, fails and rank.rank == rank.world_size - 1, carrier)
    setattr(making, f"_make_{carrier}", carriers)
    making.dist.is_nccl_available = lambda: carrier == "nccl"
    given = ark_torch.Options()
    for name, value in options.items():
        setattr(given, name, value)
    group = dist.new_group(pg_options=given, timeout=timedelta(seconds=30))
    return group, carriers, lines


def _on(rank: Rank, values: Any) -> torch.Tensor:
    return pretended.on(rank.rank, torch.as_tensor(values, dtype=torch.float32))


def _host(tensor: torch.Tensor) -> torch.Tensor:
    """The host memory behind a pretended tensor."""
    return pretended.device.host(tensor)  # type: ignore[no-any-return]


def _all(rank: Rank, group: Any, count: int, async_op: bool = False) -> dict[str, bool]:
    """Every collective once, `count` elements in the tensor that the table looks at; name -> was it carried."""
    me, size = rank.rank, rank.world_size
    total, part = float(sum(r + 1 for r in range(size))), count // size
    done: dict[str, bool] = {}

    def wait(work: Any) -> None:
        if work is not None:
            work.wait()

    def note(name: str, tensor: torch.Tensor, expected: list[float]) -> None:
        # One value for each of `expected` equal pieces.
        pieces = [set(piece.tolist()) for piece in _host(tensor).flatten().chunk(len(expected))]
        done[name] = pieces == [{value} for value in expected]

    x = _on(rank, torch.full((count,), float(me + 1)))
    wait(dist.all_reduce(x, group=group, async_op=async_op))
    note("all_reduce", x, [total])
    x = _on(rank, torch.full((count,), float(me + 1)))
    wait(dist.reduce(x, 1, group=group, async_op=async_op))
    note("reduce", x, [total if me == 1 else float(me + 1)])
    if me != 1:
        done.pop("reduce")
    x = _on(rank, torch.arange(size).float().repeat_interleave(part))
    y = _on(rank, torch.full((part,), -1.0))
    wait(dist.reduce_scatter_tensor(y, x, group=group, async_op=async_op))
    note("reduce_scatter_tensor", y, [float(me * size)])
    y = _on(rank, torch.full((part,), -1.0))
    wait(dist.reduce_scatter(y, [_on(rank, torch.full((part,), 2.0)) for _ in range(size)], group=group))
    note("reduce_scatter", y, [2.0 * size])
    x, y = _on(rank, torch.full((part,), float(me))), _on(rank, torch.full((count,), -1.0))
    wait(dist.all_gather_into_tensor(y, x, group=group, async_op=async_op))
    note("all_gather_into_tensor", y, [float(r) for r in range(size)])
    outs = [_on(rank, torch.full((part,), -1.0)) for _ in range(size)]
    wait(dist.all_gather(outs, x, group=group, async_op=async_op))
    done["all_gather"] = [set(_host(out).tolist()) for out in outs] == [{float(r)} for r in range(size)]
    x = _on(rank, torch.full((count,), float(me)))
    wait(dist.broadcast(x, 1, group=group, async_op=async_op))
    note("broadcast", x, [1.0])
    if me == 1:
        done.pop("broadcast")
    x, y = _on(rank, torch.arange(size).float().repeat_interleave(part) + 10 * me), _on(rank, torch.zeros(count))
    wait(dist.all_to_all_single(y, x, group=group, async_op=async_op))
    note("all_to_all_single", y, [float(10 * r + me) for r in range(size)])
    y = _on(rank, torch.full((count,), -1.0))
    splits = [part] * size
    wait(dist.all_to_all_single(y, x, splits, splits, group=group, async_op=async_op))
    note("all_to_all_single, splits", y, [float(10 * r + me) for r in range(size)])
    return done


def _shares(rank: Rank, reduction: str, async_op: bool) -> None:
    group, carriers, lines = _begin(rank, reduction=reduction, cuda_dispatch=_table(rank.world_size))
    backend = group._get_backend(torch.device("cuda"))
    launches = pretended.driver.pretend_launches
    small = _all(rank, group, SMALL, async_op)
    assert not any(small.values()), small
    assert not carriers.made and backend.cuda_carrier == "ark", "made before it was needed"
    before = launches()
    big = _all(rank, group, BIG, async_op)
    sums = {name: carried for name, carried in big.items() if "reduce" in name}
    assert set(sums.values()) == {reduction == "fast"}, big
    assert not big.pop("all_to_all_single, splits"), "its counts may differ between ranks"
    assert all(carried for name, carried in big.items() if "reduce" not in name), big
    # What it carries waits for the peers by a kernel of ours first, and is on the current stream.
    calls = carriers.made[0].calls()
    assert len(carriers.made) == 1 and calls[0] == f"connect cuda:{rank.rank}", calls
    expected = ["_allgather_base", "allgather", "broadcast", "alltoall_base"]
    if reduction == "fast":
        expected = ["allreduce", "reduce", "_reduce_scatter_base", "reduce_scatter", *expected]
    assert calls[1:] == expected, calls
    assert backend.cuda_carried == len(expected)
    assert launches() - before >= 9, "a barrier or a kernel each"
    # Sizes that differ are not every rank's to see, and some here are below the table's.
    mine = BIG if rank.rank == 0 else 16
    uneven = [_on(rank, torch.zeros(BIG if r == 0 else 16)) for r in range(rank.world_size)]
    dist.all_gather(uneven, _on(rank, torch.ones(mine)), group=group)
    # Other reductions than sums of floating point numbers are never NCCL's.
    ints = pretended.on(rank.rank, torch.ones(2 * BIG, dtype=torch.int32))
    dist.all_reduce(ints, group=group)
    dist.all_reduce(_on(rank, torch.ones(BIG)), dist.ReduceOp.MAX, group=group)
    dist.all_reduce(_on(rank, torch.ones(BIG)), dist._make_nccl_premul_sum(2.0), group=group)
    assert backend.cuda_carried == len(expected) and carriers.made[0].calls()[1:] == expected
    told = lines.about("NCCL")
    assert len(told) == (1 if rank.rank == 0 else 0), told
    states = {entry["state"] for entry in ark_torch.flight_record()["entries"]}
    assert states == {"completed"}, states
    dist.destroy_process_group(group)
    assert carriers.made[0].calls()[-1] == "shutdown"


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_nccl_carries_what_the_table_gives_it(env: Any, reduction: str, async_op: bool) -> None:
    run_ranks(_shares, 2, reduction, async_op, env=env)


def _rank_0_decides(rank: Rank) -> None:
    mine = _table(rank.world_size) if rank.rank == 0 else []
    group, carriers, _ = _begin(rank, reduction="fast" if rank.rank == 0 else "exact", cuda_dispatch=mine)
    assert _all(rank, group, BIG)["all_reduce"]
    assert len(carriers.made) == 1


def test_rank_0_decides(env: Any) -> None:
    run_ranks(_rank_0_decides, 3, env=env)


def _coalesced(rank: Rank) -> None:
    group, carriers, _ = _begin(rank, cuda_dispatch=_table(rank.world_size))
    size = rank.world_size
    with dist._coalescing_manager(group=group, device=torch.device("cuda", rank.rank)):
        outputs = []
        for count in (BIG, SMALL):
            outputs.append(_on(rank, torch.full((count,), -1.0)))
            dist.all_gather_into_tensor(outputs[-1], _on(rank, torch.full((count // size,), 1.0)), group=group)
    assert set(_host(outputs[0]).tolist()) == {1.0} and set(_host(outputs[1]).tolist()) == {-1.0}
    assert carriers.made[0].calls()[1:] == ["_allgather_base"]


def test_coalesced_ones_are_decided_one_by_one(env: Any) -> None:
    run_ranks(_coalesced, 2, env=env)


def _capture(rank: Rank) -> None:
    group, carriers, _ = _begin(rank, cuda_dispatch=_table(rank.world_size))
    x = _on(rank, torch.full((BIG,), float(rank.rank)))
    capture = pretended.driver.pretend_capture
    capture(7)
    with pytest.raises(
        ValueError, match=r"first operation on CUDA tensors is under graph capture.*Call one collective"
    ):
        dist.broadcast(x, 0, group=group)
    capture(0)
    dist.all_reduce(_on(rank, torch.ones(SMALL)), group=group)
    capture(8)
    dist.broadcast(x, 0, group=group)
    assert not carriers.made, "ranks cannot meet under capture: ark's own carries it"
    capture(0)
    dist.broadcast(x, 0, group=group)
    capture(9)
    dist.broadcast(x, 0, group=group)
    capture(0)
    assert carriers.made[0].calls()[1:] == ["broadcast", "broadcast"]


def test_never_made_under_capture(env: Any) -> None:
    run_ranks(_capture, 2, env=env)


def _refused(rank: Rank) -> None:
    """One rank cannot connect: none uses it, all say so once and go on."""
    group, carriers, lines = _begin(rank, fails=True, cuda_dispatch=_table(rank.world_size))
    for _ in range(3):
        big = _all(rank, group, BIG)
        assert not any(big.values()), big
    assert carriers.made[0].calls()[1:] == []
    told = lines.about("NCCL")
    last = rank.world_size - 1
    assert len(told) == (1 if rank.rank == 0 else 0), told
    assert all(f"rank {last}: no transport between these GPUs" in line for line in told), told


def test_not_made_on_one_rank_is_used_on_none(env: Any) -> None:
    run_ranks(_refused, 3, env=env)


def _raises(rank: Rank) -> str:
    """NCCL fails on one rank in the midst: every rank is told."""
    group, carriers, _ = _begin(rank, cuda_dispatch=_table(rank.world_size))
    x = _on(rank, torch.ones(BIG))
    dist.broadcast(x, 0, group=group)
    dist.barrier()
    with pytest.raises(dist.DistBackendError) as caught:
        carriers.made[0].fail(rank.rank == 1)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            dist.broadcast(_on(rank, torch.ones(SMALL if rank.rank == 0 else BIG)), 0, group=group)
            time.sleep(0.05)
    if rank.rank == 0:
        until = time.monotonic() + 5
        while "abort" not in carriers.made[0].calls() and time.monotonic() < until:
            time.sleep(0.02)
        assert "abort" in carriers.made[0].calls(), "its kernels would wait for rank 1"
    return str(caught.value)


def test_nccl_that_fails_fails_the_group(env: Any) -> None:
    first, second = run_ranks(_raises, 2, env=env)
    assert "PyTorch's NCCL, which carries this operation, failed: unhandled cuda error" in second
    assert "rank 1 reported in broadcast" in first and "unhandled cuda error" in first


def _hangs(rank: Rank) -> str:
    """A peer dies while NCCL is made: the others hear of it at once."""
    group, carriers, _ = _begin(rank, cuda_dispatch=_table(rank.world_size))
    make = carriers.__class__.__call__

    def stuck(self: Any, *args: Any) -> Any:
        made = make(self, *args)
        made.hang(True)
        rank.report("inside")
        return made

    carriers.__class__.__call__ = stuck  # type: ignore[method-assign]
    dist.all_reduce(_on(rank, torch.ones(SMALL)), group=group)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.broadcast(_on(rank, torch.ones(BIG)), 0, group=group)
    carriers.made[0].hang(False)
    return str(caught.value)


def test_peer_lost_while_nccl_is_made(env: Any) -> None:
    with Job(_hangs, 2, env=env, destroy=False) as job:
        job.wait_all("inside")
        since = job.kill(1)
        outcome = job.finish(30, [0])[0]
        assert outcome.kind == "result" and "rank 1 is gone" in outcome.value, outcome.describe()
        assert outcome.ended - since < 10


def _out_of_reach(rank: Rank, who: int) -> None:
    """GPUs without peer access to each other: NCCL for the whole group, told once."""
    group, carriers, lines = _begin(rank)
    if rank.rank == who or who < 0:
        pretended.driver.pretend_reach(0)
    big = _all(rank, group, SMALL)
    assert all(big.values()), big
    backend = group._get_backend(torch.device("cuda"))
    assert backend.cuda_carrier == "nccl" and backend.cuda_carried == 0
    dist.barrier(group=group)
    assert carriers.made[0].calls()[-1] == "barrier"
    told = lines.about("carried by PyTorch's NCCL")
    assert len(told) == (1 if rank.rank == 0 else 0), told
    assert all("no peer access" in line for line in told), told


@pytest.mark.parametrize("who", [-1, 1], ids=["all", "one"])
def test_gpus_out_of_reach_are_carried(env: Any, who: int) -> None:
    run_ranks(_out_of_reach, 2, who, env=env)


def _many(rank: Rank) -> None:
    group, carriers, lines = _begin(rank)
    x = _on(rank, torch.full((8,), float(rank.rank + 1)))
    dist.all_reduce(x, group=group)
    assert set(_host(x).tolist()) == {45.0}
    assert len(carriers.made) == 1
    assert len(lines.about("a group of 9 ranks on one node; kernels are made for up to 8")) == (rank.rank == 0)


def test_more_ranks_than_kernels_are_made_for(env: Any) -> None:
    run_ranks(_many, 9, env=env)


def _nodes(rank: Rank) -> None:
    group, _, lines = _begin(rank, shared_memory=ark_torch.Options.SharedMemory.OFF)
    x = _on(rank, torch.full((8,), float(rank.rank + 1)))
    dist.all_reduce(x, group=group)
    assert set(_host(x).tolist()) == {3.0}
    assert len(lines.about("CUDA tensors are carried by PyTorch's NCCL: its ranks share no memory")) == (rank.rank == 0)


def _without_nccl(rank: Rank) -> None:
    """Gloo carries what ark cannot where there is no NCCL; as an entry of the table it would be none."""
    group, _, lines = _begin(rank, carrier="gloo", cuda_dispatch=_table(rank.world_size))
    big = _all(rank, group, BIG)
    assert not any(big.values()), big
    assert len(lines.about("this PyTorch has no NCCL")) == (rank.rank == 0), lines.lines
    pretended.driver.pretend_reach(0)
    other = dist.new_group()
    x = _on(rank, torch.full((8,), float(rank.rank + 1)))
    dist.all_reduce(x, group=other)
    assert set(_host(x).tolist()) == {3.0}
    assert other._get_backend(torch.device("cuda")).cuda_carrier == "gloo"
    assert len(lines.about("carried by PyTorch's Gloo")) == (rank.rank == 0), lines.lines


def test_without_nccl(env: Any) -> None:
    run_ranks(_without_nccl, 2, env=env)


def test_ranks_on_several_nodes_are_carried(env: Any) -> None:
    run_ranks(_nodes, 2, env=env)


BAD_MACHINES = {
    "compute capability": ("pretend_capability", 75, r"(?s)compute capability 7\.5.*8\.0"),
    "old driver": ("pretend_version", 11080, r"(?s)11\.8.*12\.4"),
}


def _bad_machine(rank: Rank, case: str, who: int) -> str:
    setter, value, _ = BAD_MACHINES[case]
    group, _, _ = _begin(rank)
    if who in (-1, rank.rank):
        getattr(pretended.driver, setter)(value)
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        dist.all_reduce(_on(rank, torch.ones(8)), group=group)
    assert time.monotonic() - began < 10, "the others wait for what will not come"
    with pytest.raises(type(caught.value)):
        dist.all_reduce(_on(rank, torch.ones(8)), group=group)
    host = torch.ones(8)
    dist.all_reduce(host, group=group)  # CPU tensors go on
    assert host[0].item() == rank.world_size
    return str(caught.value)


@pytest.mark.parametrize("who", [-1, 1], ids=["all", "one"])
@pytest.mark.parametrize("case", BAD_MACHINES)
def test_machines_that_will_not_do(env: Any, case: str, who: int) -> None:
    told = run_ranks(_bad_machine, 2, case, who, env=env)
    for rank, text in enumerate(told):
        assert re.search(BAD_MACHINES[case][2], text), text
        assert text.startswith(f"ark: [rank {rank}] all_reduce"), text


def _no_compiler(rank: Rank, who: int) -> str:
    """NVRTC that does not open is found at the first kernel, when the peers wait for this rank's already."""
    if who in (-1, rank.rank):
        os.environ["ARK_NVRTC"] = __file__
        os.environ["ARK_CACHE"] = str(rank.scratch / "cache")
    group, _, _ = _begin(rank)
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        while time.monotonic() - began < 20:
            dist.all_reduce(_on(rank, torch.ones(8)), group=group)
    assert time.monotonic() - began < 10
    return str(caught.value)


@pytest.mark.parametrize("who", [-1, 1], ids=["all", "one"])
def test_no_compiler(env: Any, who: int) -> None:
    told = run_ranks(_no_compiler, 2, who, env=env)
    assert all("no NVRTC" in text for text in told) and any("ARK_NVRTC" in text for text in told), told
    assert who < 0 or "rank 1" in told[0].partition("] ")[2], told


def _no_driver(rank: Rank) -> str:
    rank.init()
    pretended.enter(with_driver=False)
    pretended.device.set_device(rank.rank)
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(_on(rank, torch.ones(8)))
    return str(caught.value)


@pytest.mark.skipif(_C._has_cuda_driver(), reason="this machine has one")
def test_no_driver(env: Any) -> None:
    for rank, text in enumerate(run_ranks(_no_driver, 2, env=env)):
        assert text.startswith(f"ark: [rank {rank}] all_reduce") and "libcuda.so.1" in text, text
        assert "CPU tensors" in text, text


def _wrong_device(rank: Rank) -> None:
    """The device that init_process_group was given is the rank's; and every rank has one of its own."""
    pretended.enter()
    pretended.device.set_device(rank.rank)
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")  # checked by torch.distributed
    torch.accelerator.device_count = lambda: 16
    rank.init(device_id=torch.device("cuda", rank.rank))
    with pytest.raises(ValueError, match=r"is on cuda:5, but init_process_group was given device_id=cuda:\d.*Move"):
        dist.all_reduce(pretended.on(5, torch.ones(8)))
    dist.all_reduce(_on(rank, torch.ones(8)))
    dist.destroy_process_group()
    rank.init()
    with pytest.raises(ValueError, match=r"uses the same GPU as .*torch.cuda.set_device"):
        dist.all_reduce(pretended.on(3, torch.ones(8)))


def test_wrong_device(env: Any) -> None:
    run_ranks(_wrong_device, 2, env=env)


def _bad_input(rank: Rank) -> None:
    group, _, _ = _begin(rank)
    backend, me, other = group._get_backend(torch.device("cuda")), rank.rank, 1 - rank.rank
    here, there = _on(rank, torch.ones(8)), pretended.on(other, torch.ones(8))

    def refused(words: str, call: Any) -> None:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert str(caught.value).startswith(f"ark: [rank {me}] "), caught.value

    gathered = [_on(rank, torch.ones(8)), there]
    refused(
        rf"output\[1\] is on cuda:{other} but input\[0\] is on cuda:{me}",
        lambda: backend.allgather([gathered], [here]),
    )
    refused("is on cuda.* but .* on cpu", lambda: backend._reduce_scatter_base(_on(rank, torch.ones(4)), torch.ones(8)))
    dist.all_reduce(here, group=group)
    refused(
        rf"the tensor is on cuda:{other}, but this group uses cuda:{me}.*torch.cuda.set_device",
        lambda: backend.allreduce([there]),
    )
    refused(rf"cuda:{other}, but this group uses", lambda: backend.send([there], other, 0))
    early = backend.broadcast([here])
    pretended.driver.pretend_capture(5)
    # Under capture: what cannot be captured says so, and the capture goes on.
    refused("under graph capture for an operation that was issued before.*Wait for it before", early.wait)
    dist.all_reduce(here, group=group)
    pretended.driver.pretend_capture(0)
    early.wait()


def test_bad_input(env: Any) -> None:
    run_ranks(_bad_input, 2, env=env)


def _times(rank: Rank, timing: bool) -> None:
    group, _, _ = _begin(rank, timing=timing)
    backend = group._get_backend(torch.device("cuda"))
    x = _on(rank, torch.ones(8))
    works = [backend.allreduce([x]) for _ in range(3)]
    if timing:
        assert [work._get_duration() for work in works] == [1.5] * 3
    else:
        with pytest.raises(RuntimeError, match="ARK_TIMING=1"):
            works[0]._get_duration()
    record = ark_torch.flight_record()
    ours = next(g["id"] for g in record["groups"] if g["name"] == group.group_name)
    entries = [entry for entry in record["entries"] if entry["group"] == ours]
    assert [entry["state"] for entry in entries] == ["completed"] * 3
    for entry in entries:
        assert entry["time_ended_ns"] is not None
        if timing:  # as the device says, an event of the pretended one coming every 1.5 ms
            assert entry["duration_ns"] == 1_500_000, entry
            assert entry["time_created_ns"] <= entry["time_started_ns"] == entry["time_ended_ns"] - 1_500_000
        else:  # nobody knows when it began
            assert entry["duration_ns"] is None and entry["time_started_ns"] is None, entry
    # What runs is told as started, when somebody looks.
    pretended.device.lag(True)
    backend.allreduce([x])
    state = ark_torch.flight_record()["entries"][-1]
    assert state["state"] == "scheduled" and state["time_ended_ns"] is None, state
    pretended.device.lag(False)
    if not timing:
        group._enable_collectives_timing()
        work = backend.allreduce([x])
        assert work._get_duration() == 1.5


@pytest.mark.parametrize("timing", [True, False])
def test_times_of_the_device(env: Any, timing: bool) -> None:
    run_ranks(_times, 2, timing, env=env)
