"""Collectives over copy engines: unchanged bits, in graphs, on registered memory, and in failures.

The dispatch here uses them from small sizes on. A small buffer has small slots, so that tensors of a few MB need many
pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import ENV, WORLD, device_of, go_on_without_the_last, run, same
from support.failures import SLACK_S, TIMEOUT_S, record
from support.launcher import Job
from support.rank import Rank

import ark_torch
from ark_torch.distributed import register
from ark_torch.distributed.group import complete
from ark_torch.memory import pool

FROM = 64 << 10
NUMBERS = {
    "one_shot_to": 0,
    "copy_engine_from": FROM,
    "reduce_scatter_engine_from": FROM,
    "all_gather_engine_from": FROM,
    "broadcast_engine_from": FROM,
    "all_to_all_engine_from": FROM,
}
IN_LINE = ", in line"  # eager all_reduces on the caller's stream only
COUNTS = (33_000, 1_000_003, 3 << 20)  # of one rank's part


def _options(in_line: bool = False) -> Any:
    options = complete(ark_torch.Options())
    options.cuda_dispatch = [(8, NUMBERS | {"in_line_to": 1 << 30 if in_line else 0})]
    options.buffer_mb = 8 * WORLD * (WORLD - 1) + 1
    return options


def _start(rank: Rank, in_line: bool = False, **options: Any) -> torch.device:
    device = device_of(rank)
    torch.cuda.set_device(device)
    if in_line:
        torch.cuda.set_stream(torch.cuda.Stream())  # copy engines do not use the default stream
    rank.init(pg_options=_options(in_line), **options)
    return device


def _random(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _calls(rank: Rank, n: int) -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """Returns calls on an output and an input of n elements per rank."""
    world, me = rank.world_size, rank.rank
    share = [n * 2 // world // (1 + (me + to) % 3) for to in range(world)]  # the same from both ends
    return {
        "all_reduce": lambda o, i: dist.all_reduce(o),
        "all_reduce, average": lambda o, i: dist.all_reduce(o, dist.ReduceOp.AVG),
        "reduce_scatter": lambda o, i: dist.reduce_scatter_tensor(o[:n], i),
        "all_gather": lambda o, i: dist.all_gather_into_tensor(o, i[:n]),
        "all_gather, in place": lambda o, i: dist.all_gather_into_tensor(o, o[me * n : (me + 1) * n]),
        "broadcast": lambda o, i: dist.broadcast(o, world - 1),
        "all_to_all": dist.all_to_all_single,
        "all_to_all, unequal": lambda o, i: dist.all_to_all_single(o[: sum(share)], i[: sum(share)], share, share),
    }


def _check(rank: Rank, out: torch.Tensor, source: torch.Tensor, what: str, captured: bool) -> None:
    n = out.numel() // rank.world_size
    for number, (name, call) in enumerate(_calls(rank, n).items()):
        outs, sources = (_random(out.numel(), out.dtype, 100 * number + 10 * k + rank.rank) for k in range(2))
        source.copy_(sources)
        out.copy_(outs)
        if captured:
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(out, source)
                call(out, source)  # twice in one graph
            out.copy_(outs)
            graph.replay()
            out.copy_(outs)
            graph.replay()
            call(outs, sources)
            if name.startswith("all_reduce"):
                call(outs, sources)
        else:
            call(out, source)
            call(outs, sources)
        same(out, outs, f"{name}, {what}, {out.numel()} of {out.dtype}")
        dist.barrier()


def _plain(rank: Rank, captured: bool, in_line: bool) -> None:
    device = _start(rank, in_line)
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(16, device=device))
    small = backend.cuda_shared_bytes
    dist.all_reduce(torch.ones(1 << 20, device=device))
    idle = backend.cuda_shared_bytes
    assert idle > small, "the machine gives copy engines no memory: others would carry what is tested here"
    for count in COUNTS:
        for dtype in (torch.float32, torch.bfloat16):
            memory = [torch.empty(count * rank.world_size + 1, dtype=dtype, device=device) for _ in range(2)]
            for at in (0, 1):  # 1: not aligned
                out, source = (tensor[at : at + count * rank.world_size] for tensor in memory)
                _check(rank, out, source, f"at {at}{', in a graph' if captured else ''}", captured)
    assert backend.cuda_shared_bytes == idle, "all share the memory that the first has brought"


@pytest.mark.parametrize(
    ("captured", "in_line"), [(False, False), (False, True), (True, False)], ids=["eager", "in line", "graph"]
)
def test_same_bits(captured: bool, in_line: bool) -> None:
    run(_plain, captured, in_line, own=True)


def _registered(rank: Rank) -> None:
    device = _start(rank)
    most = max(COUNTS) * rank.world_size + 64
    with torch.cuda.use_mem_pool(pool(device)):
        memory, other = (torch.empty(most, device=device) for _ in range(2))
    register(memory)
    plain = torch.empty(most, device=device)
    for count in COUNTS:
        for at in (0, 16, 3):
            out = memory[at : at + count * rank.world_size]
            for captured in (False, True):
                _check(rank, out, plain[: out.numel()], f"registered, at {at}", captured)
        _check(rank, plain[: out.numel()], other[: out.numel()], "beside registered memory", False)


def test_registered_outputs() -> None:
    run(_registered, own=True)


def _misplaced(rank: Rank, copying: bool) -> str:
    device = _start(rank)
    with torch.cuda.use_mem_pool(pool(device)):
        memory = torch.zeros(1 << 22, device=device)
    register(memory)
    at = 1024 if rank.rank == rank.world_size - 1 else 0
    tensor = memory[at : at + (1 << 20)].fill_(1.0)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        while time.monotonic() - began < 20:
            dist.all_reduce(tensor)
            tensor.cpu() if copying else torch.cuda.synchronize()
    assert time.monotonic() - began < 5, "long before the timeout"
    assert torch.full((1000,), 2.0, device=device).sum().item() == 2000, "the device goes on"
    return str(caught.value)


@pytest.mark.parametrize("copying", [False, True], ids=["synchronize", "copy"])
def test_outputs_at_different_places_are_an_error(copying: bool) -> None:
    with Job(_misplaced, WORLD, copying, env=ENV, destroy=False) as job:
        values = job.values(90)
    assert any("another place of registered memory" in value for value in values), values


def _loop(rank: Rank, operation: str, how: str) -> float:
    """Runs the operation until it fails, then reports and continues without the victim, the last rank."""
    in_line = operation.endswith(IN_LINE)
    device = _start(rank, in_line, timeout=120)
    n = (1 if in_line else 8) << 20  # in line: no slot is used twice
    out, source = (torch.ones(n * rank.world_size, device=device) for _ in range(2))
    call = _calls(rank, n)[operation.removesuffix(IN_LINE)]
    call(out, source)
    torch.cuda.synchronize()
    group = dist.new_group(pg_options=_options(), timeout=timedelta(seconds=TIMEOUT_S)) if how == "stop" else None
    if group is not None:
        dist.all_reduce(out, group=group)
        torch.cuda.synchronize()
    rank.report("running")
    try:
        while True:
            if group is None:
                call(out, source)
            else:
                dist.all_reduce(out.fill_(1.0), group=group)
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device)


LOST_IN = ("all_reduce", f"all_reduce{IN_LINE}", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "stop")


@pytest.mark.parametrize("operation", LOST_IN)
def test_lost_rank(operation: str) -> None:
    victim, stops = WORLD - 1, operation == "stop"
    with Job(_loop, WORLD, "all_reduce" if stops else operation, "stop" if stops else "kill", env=ENV) as job:
        job.wait_all("running", timeout=120)
        time.sleep(0.3)
        since = job.stop(victim) if stops else job.kill(victim)
        seconds = []
        for survivor in range(victim):
            text = job.wait_event(survivor, "raised", timeout=60)
            seconds.append(time.monotonic() - since)
            assert f"rank {victim}" in text.partition("] ")[2], text
        bound = TIMEOUT_S + SLACK_S if stops else 5.0
        record("2" if stops else "1", f"CUDA copy engines, {operation}", f"{bound} s", seconds)
        assert max(seconds) < bound
        outcomes = job.finish(60, list(range(victim)))
        assert [o.value for o in outcomes] == [sum(range(victim))] * victim, [o.describe() for o in outcomes]


def _in_a_copy(rank: Rank, how: str) -> float:
    """The last rank stays away from a collective. The others copy its result to pageable memory."""
    in_line = how.endswith(IN_LINE)
    device = _start(rank, in_line, timeout=120)
    tensor = torch.ones((2 if in_line else 8) << 20, device=device)
    dist.all_reduce(tensor)
    away = how.startswith("away")
    group = dist.new_group(pg_options=_options(in_line), timeout=timedelta(seconds=TIMEOUT_S)) if away else None
    dist.all_reduce(tensor, group=group)
    tensor.cpu()
    if rank.rank == rank.world_size - 1:
        rank.report("running")
        time.sleep(600)  # until it is killed
    dist.all_reduce(tensor, group=group)
    rank.report("running")
    tensor.cpu()  # returns, with arbitrary data
    rank.report("copied")
    try:
        dist.all_reduce(tensor, group=group)
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    return go_on_without_the_last(rank, device)


@pytest.mark.parametrize("how", ["killed", "away", f"away{IN_LINE}"])
def test_lost_while_the_others_copy_to_the_host(how: str) -> None:
    victim = WORLD - 1
    bound = 5.0 if how == "killed" else TIMEOUT_S + SLACK_S
    with Job(_in_a_copy, WORLD, how, env=ENV) as job:
        job.wait_all("running", timeout=120)
        time.sleep(0.5)
        since = job.kill(victim) if how == "killed" else time.monotonic()
        seconds = []
        for survivor in range(victim):
            job.wait_event(survivor, "copied", timeout=60)
            text = job.wait_event(survivor, "raised", timeout=60)
            seconds.append(time.monotonic() - since)
            assert f"rank {victim}" in text.partition("] ")[2], text
        record("1" if how == "killed" else "2", f"CUDA copy engines, {how}, in a copy", f"{bound} s", seconds)
        assert max(seconds) < bound
        if how != "killed":
            job.kill(victim)
        outcomes = job.finish(60, list(range(victim)))
        assert [o.value for o in outcomes] == [sum(range(victim))] * victim, [o.describe() for o in outcomes]
