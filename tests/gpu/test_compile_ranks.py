"""Collectives inside loop kernels on GPUs: bits of eager ones, parallel models, graphs, streams, lost ranks."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from on_gpu import ENV, GPUS, WORLD, busy, go_on_without_the_last, run, same, start
from support.failures import TIMEOUT_S, record
from support.launcher import Job
from support.rank import Rank
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.model import Llama, LlamaConfig, shard  # in examples/

pytestmark = pytest.mark.timeout(300)
LOST_BOUND_S = 5.0


def compiled(call: Any, given: Any = None) -> tuple[Callable[..., Any], Any]:
    """Compiles to one region on the GPU, or raises; with `given` options, as they say."""
    from ark_torch.compile import backend, options
    from ark_torch.compile.report import Report

    torch._dynamo.reset()
    report, chosen = Report(), options.parse(None, {"choose": "ark", "fallback": False} if given is None else given)

    def compile_graph(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, chosen, report)

    return torch.compile(call, backend=compile_graph, dynamic=False), report


def on_one_kernel(report: Any) -> None:
    (graph,) = report.graphs
    (piece,) = graph.pieces
    assert piece.runs_on == "ark" and piece.region.resources["registers"] > 0, report


def every(x: Tensor, dtype: torch.dtype, group: Any) -> list[Tensor]:
    """Runs each collective between operators that do not round."""
    world = group.size()
    x = (x * 2).to(dtype)
    total = funcol.all_reduce(x, "sum", group)
    largest = funcol.all_reduce(total - x, "max", group)
    gathered = funcol.all_gather_tensor(x, 0, group)
    part = funcol.reduce_scatter_tensor(gathered, "sum", 0, group)
    moved = funcol.all_to_all_single(x, None, None, group)
    results = [-total, -largest, -gathered, -part, -moved, -funcol.all_reduce(x[:world, 0], "min", group)]
    if dtype.is_floating_point:
        results.append(-funcol.all_reduce(x, "avg", group))
    return results


def _forms(rank: Rank, dtype: torch.dtype) -> None:
    device = start(rank, timeout=40)
    group = dist.group.WORLD
    world = rank.world_size
    for rows, columns in ((1, 1), (1, 999), (2, 4096), (64, 4096)):
        call, report = compiled(every)
        for step in range(4):
            generator = torch.Generator().manual_seed(100 * step + rank.rank)
            x = torch.randint(-100, 100, (rows * world, columns), generator=generator).float()
            x = (x + (torch.randn(x.shape, generator=generator) if dtype.is_floating_point else 0)).to(device)
            got, wanted = call(x, dtype, group), every(x, dtype, group)
            for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
                same(a, b, f"{dtype} {rows} x {columns}, step {step}, result {i}")
        on_one_kernel(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.int32])
def test_the_bits_of_eager_collectives(dtype: torch.dtype) -> None:
    run(_forms, dtype)


def _pushed(rank: Rank, dtype: torch.dtype) -> None:
    """Products push parts to all ranks. A pass over the elements and the next product's head add them."""
    device = start(rank, timeout=40)
    group = dist.group.WORLD
    assert group is not None
    for rows, columns in ((1, 2048), (3, 1000)):
        generator = torch.Generator().manual_seed(rank.rank)
        first = torch.randn(columns, 512, generator=generator).to(dtype).to(device)
        then = torch.randn(96, columns, generator=generator).to(dtype).to(device)

        def sums(x: Tensor, first: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
            total = funcol.all_reduce(F.linear(x, first), "sum", group)
            return -total, F.linear(total * 0.5, then)

        call, report = compiled(sums)
        negative, _ = compiled(lambda a, b: -F.linear(a, b))
        for step in range(20):
            x = torch.randn(rows, 512, generator=generator).to(dtype).to(device)
            if step % 5 == rank.rank:
                busy(1)
            got, wanted = call(x, first, then), -negative(x, first)
            dist.all_reduce(wanted)
            same(got[0], -wanted, f"{dtype} {rows} x {columns}, step {step}")
            same(got[1], -negative(wanted * 0.5, then), f"{dtype} {rows} x {columns}, step {step}, the next product")
        on_one_kernel(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_bits_of_pushed_sums(dtype: torch.dtype) -> None:
    run(_pushed, dtype)


CONFIG = LlamaConfig(hidden=256, layers=2, heads=8, kv_heads=4, ffn=512, vocabulary=100, max_len=40, head_dim=32)


def small_llama(dtype: torch.dtype, device: torch.device) -> Llama:
    torch.manual_seed(3)
    return Llama(CONFIG).to(dtype).eval().requires_grad_(False).to(device)


def _llama(rank: Rank, dtype: torch.dtype, close: float) -> None:
    """Two models on one group, in turns; a prompt, then every position; the same bits on every rank."""
    device = start(rank, timeout=40)
    config, whole = CONFIG, small_llama(dtype, device)
    group = dist.group.WORLD
    assert group is not None
    calls = [compiled(shard(whole, group).to(device))[0] for _ in range(2)]
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, config.vocabulary, (1, 8), generator=generator)
    where = torch.arange(8)
    with torch.no_grad():
        while where[-1] < config.max_len - 1:
            logits = [call(ids.to(device), where.to(device)) for call in calls]
            wanted = whole(ids.to(device), where.to(device))
            assert (logits[0] - wanted).abs().max() < close * wanted.abs().max(), where
            assert torch.equal(*logits)
            alike = [torch.empty_like(logits[0]) for _ in range(rank.world_size)]
            dist.all_gather(alike, logits[0])
            assert all(torch.equal(other, logits[0]) for other in alike)
            ids, where = torch.randint(0, config.vocabulary, (1, 1), generator=generator), where[-1:] + 1


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_tensor_parallel_llama(dtype: torch.dtype, close: float) -> None:
    run(_llama, dtype, close)


def _measured(rank: Rank) -> Any:
    """Products and their sums of few rows, and of more than are left to Inductor unmeasured."""
    device = start(rank, timeout=100)
    group, chosen = dist.group.WORLD, []
    for rows in (4, 512):
        generator = torch.Generator().manual_seed(rows)
        x, w, v = (
            torch.randn(*shape, generator=generator).div(16).to(device, torch.bfloat16)
            for shape in ((rows, 1024), (1024, 1024), (1024, 512))
        )

        def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            return funcol.all_reduce(torch.tanh(x @ w), "sum", group) @ v

        call, report = compiled(step, {"wait": True})
        got = call(x, w, v)
        torch.testing.assert_close(got, step(x, w, v), atol=0.05, rtol=0.05)
        choice = report.graphs[0].choice
        assert choice is not None and {"ark", "inductor"} <= set(choice.us) and len(choice.replay_us) > 1, choice
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = call(x, w, v)
        graph.replay()
        torch.testing.assert_close(again, got, atol=0.05, rtol=0.05)
        chosen.append((choice.runs_on, choice.replays_on, dict(choice.us), dict(choice.replay_us)))
    print(chosen, flush=True)
    return chosen


def test_ranks_choose_together() -> None:
    every_rank = run(_measured)
    assert all(one == every_rank[0] for one in every_rank)


def _for_long(rank: Rank, steps: int) -> float:
    """Greedy decoding many times, one launch per step. The final positions are compared with eager mode."""
    device = start(rank, timeout=40)
    whole, group = small_llama(torch.float32, device), dist.group.WORLD
    assert group is not None and steps % CONFIG.max_len == 0
    model = shard(whole, group).to(device)

    def decode(ids: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model(ids, where)
        return logits.argmax(-1, keepdim=True), (where + 1) % CONFIG.max_len, logits

    call, report = compiled(decode)
    ids, where = torch.ones(1, 1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    given = [ids]
    with torch.no_grad():
        call(ids, where)
        torch.cuda.synchronize()
        began = time.monotonic()
        for _ in range(steps):
            ids, where, logits = call(ids, where)
            given.append(ids)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
        on_one_kernel(report)
        tokens = torch.cat(given, 1)
        alike = [torch.empty_like(tokens) for _ in range(rank.world_size)]
        dist.all_gather(alike, tokens)
        assert all(torch.equal(other, tokens) for other in alike)
        last = tokens[:, steps - CONFIG.max_len : steps]
        torch.testing.assert_close(logits, whole(last, torch.arange(CONFIG.max_len, device=device)), rtol=0, atol=1e-4)
    return seconds


@pytest.mark.parametrize("world", [world for world in (2, 4) if world <= max(GPUS, WORLD)])
def test_ten_thousand_steps(world: int) -> None:
    assert max(run(_for_long, 10_000, world=world, timeout=120)) < 30


def _step(x: Tensor, base: Tensor, group: Any) -> Tensor:
    """Gives another result at every step on every rank. Products are exact."""
    total = funcol.all_reduce(x, "sum", group)
    total = funcol.all_reduce(total + 1, "max", group)
    return total * 0.125 + x * 0.25 + base


def _many(rank: Rank, steps: int) -> None:
    """Beside eager collectives, on two streams and in a graph, all in issue order."""
    device = start(rank, timeout=40)
    group = dist.group.WORLD
    call, report = compiled(_step)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(rank.rank)).to(device)
    wanted, got = x.clone(), x.clone()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    beside = torch.ones(100, device=device)
    for step in range(steps):
        wanted = _step(wanted, x, group) + 0
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if step % 50 == rank.rank:
                busy(1)
            got = call(got, x, group)
        torch.cuda.current_stream().wait_stream(stream)
        got.record_stream(torch.cuda.current_stream())
        if step % 7 == 0:
            work = dist.all_reduce(beside, dist.ReduceOp.AVG, async_op=True)
            assert work is not None
            work.wait()
        if step % 100 == 99:
            same(got, wanted, f"step {step}")
    on_one_kernel(report)
    assert beside.tolist() == [1.0] * 100
    graph, held = torch.cuda.CUDAGraph(), x.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        held.copy_(call(held, x, group))
        held.copy_(call(held, x, group))
    held.copy_(x)
    wanted = x.clone()
    for step in range(20):
        graph.replay()
        if step % 3 == 0:
            held.copy_(call(held, x, group))
        for _ in range(2 + (step % 3 == 0)):
            wanted = _step(wanted, x, group) + 0
    same(held, wanted, "replays")
    region = weakref.ref(report.graphs[0].pieces[0].region)
    del call, report
    torch._dynamo.reset()
    gc.collect()
    assert region() is None
    for _ in range(5):
        graph.replay()
        for _ in range(2):
            wanted = _step(wanted, x, group) + 0
    same(held, wanted, "replays of a region that is gone")


def test_a_thousand_steps() -> None:
    run(_many, 1000)


def _other(rank: Rank) -> list[str]:
    """Ranks that compiled different sizes get an error. With the same sizes they continue."""
    device = start(rank, timeout=40)
    group = dist.group.WORLD
    with pytest.raises(dist.DistBackendError) as raised:
        x = torch.ones(100 + rank.rank, device=device)
        compiled(_step)[0](x, x, group)
    call, _ = compiled(_step)
    x = torch.ones(10, device=device)
    assert torch.equal(call(x, x, group), x * ((rank.world_size + 1) * 0.125 + 1.25))
    return [str(raised.value)]


def test_ranks_that_compiled_something_else() -> None:
    for (text,) in run(_other):
        assert "compiled a region with other collectives" in text, text


def _for_ever(rank: Rank, how: str) -> float:
    """Runs loop kernels with collectives until a rank is lost, then continues with the rest."""
    device = start(rank, timeout=120)
    group = dist.group.WORLD
    assert group is not None
    base = torch.ones(1000, device=device)
    same_rows = torch.eye(1000, device=device)

    def pushed(x: Tensor, base: Tensor, group: Any) -> Tensor:
        return funcol.all_reduce(F.linear(x[None], same_rows), "sum", group)[0] * 0.125 + base

    step = pushed if how == "killed, pushing" else _step
    call, _ = compiled(step)
    x = base + rank.rank
    for _ in range(3):
        x = call(x, base, group)
    torch.cuda.synchronize()
    if how == "stopped":  # only a time limit can tell stopped from slow
        group.set_timeout(timedelta(seconds=TIMEOUT_S))
        dist.barrier()
    rank.report("running")
    try:
        while True:
            x = call(x, base, group)
            torch.cuda.synchronize()
    except dist.DistBackendError as error:
        rank.report("raised", str(error))
    total = go_on_without_the_last(rank, device)
    group = dist.group.WORLD
    again, report = compiled(step)
    same(again(base + rank.rank, base, group), step(base + rank.rank, base, group), "in the new group")
    on_one_kernel(report)
    return total


@pytest.mark.parametrize("how", ["killed", "stopped", "killed, pushing"])
def test_a_lost_rank_is_named(how: str) -> None:
    """The error names the waiting task, within seconds. The context still works, with loop kernels in a new group."""
    victim = WORLD - 1
    with Job(_for_ever, WORLD, how, env=ENV) as job:
        job.wait_all("running", 120)
        time.sleep(0.3)
        since = job.stop(victim) if how == "stopped" else job.kill(victim)
        seconds = []
        for survivor in range(victim):
            text = job.wait_event(survivor, "raised", timeout=60)
            seconds.append(time.monotonic() - since)
            assert f"rank {victim}" in text.partition("] ")[2], text
            assert "all_reduce" in text and "worker" in text and "task" in text, text
        record("2" if how == "stopped" else "1", f"CUDA loop kernel, {how}", f"{LOST_BOUND_S} s", seconds)
        assert max(seconds) < LOST_BOUND_S
        outcomes = job.finish(60, list(range(victim)))
        assert [o.kind for o in outcomes] == ["result"] * victim, [o.describe() for o in outcomes]
        assert [o.value for o in outcomes] == [sum(range(victim))] * victim


def _paused(rank: Rank) -> None:
    """A rank is stopped for longer than the group's limit, then continues: none hangs, and all can meet again."""
    device = start(rank, timeout=120)
    call, _ = compiled(_step)
    name = "0"  # of the first group and of its successor: the region is the same
    base = torch.ones(1000, device=device)
    x = call(base + rank.rank, base, name)
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=TIMEOUT_S))
    dist.barrier()
    rank.report("running")
    with pytest.raises(dist.DistBackendError):
        while True:
            x = call(x, base, name)
            torch.cuda.synchronize()
    rank.report("raised")
    dist.destroy_process_group()
    rank.init(timeout=60)
    same(call(base + rank.rank, base, name), _step(base + rank.rank, base, name), "in the new group")


def test_a_stopped_rank_that_goes_on() -> None:
    victim = WORLD - 1
    with Job(_paused, WORLD, env=ENV) as job:
        job.wait_all("running", 120)
        time.sleep(0.3)
        job.stop(victim)
        for survivor in range(victim):
            job.wait_event(survivor, "raised", timeout=60)
        job.resume(victim)
        job.values(60)
