"""CUDA tensors of groups over several nodes: ark's kernels in each node and, between them, requests to a NIC.

The NIC is the pretended one (tests/support/pretended/verbs), which moves pinned host memory between processes; kernels,
request rings and the thread that posts are real. Nodes are pretended by ARK_NODE. Nothing is measured. The tasks of
compiled regions ask for requests of the same kind.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_gpu import WORLD, run, start
from support.launcher import Job
from support.pretended import verbs
from support.rank import Rank
from support.reference import assert_same_bits
from test_compile_ranks import compiled, on_one_kernel

Env = dict[str, str | None]
COUNTS = (1, 77, 5000, 1 << 18, (3 << 20) + 5)
PLACEMENTS: list[tuple[int, ...]] = [(0, 1)] + ([(0, 0, 1, 1), (0, 1, 0, 1)] if WORLD >= 4 else [])
# Nodes of 1 + 3 ranks and of 3 + 1, hence of one rail; of 2 + 3, with two.
UNEVEN: list[tuple[int, ...]] = [(0, 1, 1, 1), (0, 1, 0, 0)] if WORLD >= 4 else []
UNEVEN += [(0, 0, 1, 1, 1)] if WORLD >= 5 else []


def _named(placement: tuple[int, ...]) -> str:
    return ("uneven " if placement in UNEVEN else "") + str(placement)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return verbs.build(tmp_path_factory.mktemp("verbs"))


@pytest.fixture
def env(tmp_path: Path, library: str) -> Env:
    control = verbs.Control(tmp_path / "control")
    control.set(refuse_dma_buf=1)  # it could not write to real GPU memory
    return {
        "ARK_NET": "rdma",
        "ARK_RDMA_LIBRARY": library,
        "ARK_TEST_VERBS_CONTROL": str(control.path),
    }


def _begin(rank: Rank, placement: tuple[int, ...], timeout: float = 60.0) -> tuple[torch.device, Any]:
    os.environ["ARK_NODE"] = str(placement[rank.rank])
    device = start(rank)
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    return device, group


def _values(rank: int, count: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    # Small whole numbers: every order of adding gives the same bits.
    return ((torch.arange(count, device=device) * 7 + 13 * rank + seed) % 8).to(dtype)


def _all(size: int, count: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    return [_values(r, count, dtype, device, seed) for r in range(size)]


def _check(rank: Rank, device: torch.device, group: Any, count: int, dtype: torch.dtype, later: bool) -> None:
    me, size = rank.rank, rank.world_size
    inputs = _all(size, count, dtype, device)
    total = torch.stack([x.double() for x in inputs]).sum(0).to(dtype)

    def done(work: Any) -> None:
        if work is not None:
            work.wait()

    x = inputs[me].clone()
    done(dist.all_reduce(x, group=group, async_op=later))
    assert torch.equal(x, total), (count, dtype)
    x = inputs[me].clone()
    done(dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=later))
    assert torch.equal(x, torch.stack(inputs).amax(0)), (count, dtype)
    for root in range(size):
        x = inputs[me].clone()
        done(dist.broadcast(x, group_src=root, group=group, async_op=later))
        assert torch.equal(x, inputs[root]), (count, root)
        x = inputs[me].clone()
        done(dist.reduce(x, group_dst=root, group=group, async_op=later))
        assert torch.equal(x, total if me == root else inputs[me]), (count, root)
        outs = [torch.empty_like(x) for _ in range(size)] if me == root else None
        done(dist.gather(inputs[me], outs, group_dst=root, group=group, async_op=later))
        assert outs is None or all(torch.equal(a, b) for a, b in zip(outs, inputs, strict=True)), (count, root)
        x = torch.empty_like(inputs[me])
        done(dist.scatter(x, inputs if me == root else None, group_src=root, group=group, async_op=later))
        assert torch.equal(x, inputs[me]), (count, root)
    gathered = torch.empty(size * count, dtype=dtype, device=device)
    done(dist.all_gather_into_tensor(gathered, inputs[me], group=group, async_op=later))
    assert torch.equal(gathered, torch.cat(inputs)), count
    wide = _all(size, size * count, dtype, device)
    part = torch.empty(count, dtype=dtype, device=device)
    done(dist.reduce_scatter_tensor(part, wide[me], group=group, async_op=later))
    own = [x.chunk(size)[me] for x in wide]
    assert torch.equal(part, torch.stack([x.double() for x in own]).sum(0).to(dtype)), count
    swapped = torch.empty_like(wide[me])
    done(dist.all_to_all_single(swapped, wide[me], group=group, async_op=later))
    assert torch.equal(swapped, torch.cat(own)), count


def _collectives(rank: Rank, placement: tuple[int, ...]) -> str:
    device, group = _begin(rank, placement)
    for dtype in (torch.float32, torch.bfloat16):
        for count in COUNTS:
            _check(rank, device, group, count, dtype, later=count % 2 == 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        _check(rank, device, group, 4097, torch.float16, later=True)
    _check(rank, device, group, 1001, torch.int64, later=False)
    dist.barrier(group=group)
    return str(group._get_backend(torch.device("cuda")).cuda_carrier)


@pytest.mark.parametrize("placement", PLACEMENTS + UNEVEN, ids=_named)
def test_collectives(placement: tuple[int, ...], env: Env) -> None:
    assert run(_collectives, placement, world=len(placement), env=env) == ["ark"] * len(placement)


def _bits(rank: Rank, placement: tuple[int, ...], order: str, partials: str) -> str:
    """CUDA tensors have the bits of CPU tensors in the same group, whatever the settings, eagerly and in a graph."""
    os.environ.update(ARK_ORDER=order, ARK_PARTIALS=partials)
    device, group = _begin(rank, placement)
    me, size = rank.rank, rank.world_size
    premultiplied = dist._make_nccl_premul_sum(1 / (3 + me))
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.complex64):
        for count in (1, 777, 40_001, (1 << 20) + 3):
            values = torch.randn(count * size, generator=torch.Generator().manual_seed(count + me)) * 10.0 ** (me % 3)
            x = values[:count].to(dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, premultiplied):
                if dtype.is_complex and op == dist.ReduceOp.AVG:
                    continue
                got, wanted = x.to(device), x.clone()
                dist.all_reduce(got, op, group=group)
                dist.all_reduce(wanted, op, group=group)
                assert_same_bits(got.cpu(), wanted, f"all_reduce {dtype} {count} {op}")
                got, wanted = x.to(device), x.clone()
                dist.reduce(got, group_dst=size - 1, op=op, group=group)
                dist.reduce(wanted, group_dst=size - 1, op=op, group=group)
                assert_same_bits(got.cpu(), wanted, f"reduce {dtype} {count} {op}")
                whole = values.to(dtype)
                got, wanted = torch.empty(count, dtype=dtype, device=device), torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(got, whole.to(device), op, group=group)
                dist.reduce_scatter_tensor(wanted, whole, op, group=group)
                assert_same_bits(got.cpu(), wanted, f"reduce_scatter {dtype} {count} {op}")
    # More than the memory between the stages holds, so in slices.
    wanted = torch.randn((17 << 20) + 3, generator=torch.Generator().manual_seed(me)).bfloat16()
    got = wanted.to(device)
    dist.all_reduce(got, group=group)
    dist.all_reduce(wanted, group=group)
    assert_same_bits(got.cpu(), wanted, "slices")
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(100_003, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(static, group=group)
        dist.all_reduce(static, premultiplied, group=group)
    for seed in range(5):
        wanted = torch.randn(static.numel(), generator=torch.Generator().manual_seed(seed * size + me)).bfloat16()
        static.copy_(wanted)
        graph.replay()
        dist.all_reduce(wanted, group=group)
        dist.all_reduce(wanted, premultiplied, group=group)
        assert_same_bits(static.cpu(), wanted, f"replay {seed}")
    torch.cuda.synchronize()
    del graph
    return str(group._get_backend(torch.device("cuda")).cuda_carrier)


@pytest.mark.parametrize(("order", "partials"), [("node", "float32"), ("node", "input"), ("flat", "float32")])
@pytest.mark.parametrize("placement", PLACEMENTS + UNEVEN, ids=_named)
def test_sums_have_the_bits_of_cpu_groups(placement: tuple[int, ...], order: str, partials: str, env: Env) -> None:
    assert run(_bits, placement, order, partials, world=len(placement), env=env) == ["ark"] * len(placement)


def _graph(rank: Rank, placement: tuple[int, ...]) -> None:
    """Replays need no launch by the host: the device's counts go on, beside eager operations."""
    device, group = _begin(rank, placement)
    me, size, count = rank.rank, rank.world_size, (1 << 20) + 3
    x = torch.zeros(count, device=device)
    y = torch.zeros(size * 1000, device=device)
    dist.all_reduce(x, group=group)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(y, x[:1000], group=group)
        x.mul_(0.5)
    for time_ in range(30):
        x.copy_(_values(me, count, torch.float32, device, time_))
        graph.replay()
        total = torch.stack(_all(size, count, torch.float32, device, time_)).sum(0)
        assert torch.equal(x, total * 0.5), time_
        assert torch.equal(y, total[:1000].repeat(size)), time_
        if time_ % 10 == 5:
            dist.all_reduce(x, group=group)
            assert torch.equal(x, total * (0.5 * size))
    torch.cuda.synchronize()
    del graph


@pytest.mark.parametrize("placement", PLACEMENTS[:2] + UNEVEN, ids=_named)
def test_graphs(placement: tuple[int, ...], env: Env) -> None:
    run(_graph, placement, world=len(placement), env=env)


def _calls_until_it_fails(rank: Rank, device: torch.device, call: Callable[[], Any]) -> str:
    """Calls until the last rank, which does not call, is missed. Returns the error."""
    rank.report("running")
    if rank.rank == rank.world_size - 1:
        rank.wait_for("go")
        return ""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {rank.world_size - 1}|waited for|is gone") as raised:
        for _ in range(1000):
            call()
            torch.cuda.synchronize()
            time.sleep(0.05)
    assert time.monotonic() - began < 25
    assert torch.ones(4, device=device).sum().item() == 4  # the device goes on
    rank.report("ended")
    return str(raised.value)


def _lose_the_last(body: Callable[..., str], placement: tuple[int, ...], how: str, env: Env) -> list[str]:
    """The errors of the others."""
    last = len(placement) - 1
    with Job(body, len(placement), placement, how, destroy=False, env=env) as job:
        job.wait_all("running", timeout=120)
        if how == "killed":
            job.kill(last)
        for r in range(last):
            job.wait_event(r, "ended", timeout=60)
        if how == "late":
            job.go(last, "go")
        return [str(outcome.value) for outcome in job.finish(60, list(range(last)))]


def _alone(rank: Rank, placement: tuple[int, ...], how: str) -> str:
    device, group = _begin(rank, placement, timeout=8.0 if how == "late" else 60.0)
    x = torch.ones(1 << 20, device=device)
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    return _calls_until_it_fails(rank, device, lambda: dist.all_reduce(x, group=group))


@pytest.mark.parametrize("how", ["late", "killed"])
@pytest.mark.parametrize("placement", PLACEMENTS[:2] + UNEVEN[:1], ids=_named)
def test_a_peer_that_does_not_call(placement: tuple[int, ...], how: str, env: Env) -> None:
    assert all(_lose_the_last(_alone, placement, how, env))


def _layer(x: torch.Tensor, whole: torch.Tensor, weights: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Sums of what rounds, one after the other, and of a product of whole numbers."""
    total = funcol.all_reduce(x * 2, "sum", group)
    again = funcol.all_reduce(total * 0.5, "avg", group)
    return [-total, -again, -funcol.all_reduce(whole @ weights, "sum", group)]


def _in_regions(rank: Rank, placement: tuple[int, ...], dtype: torch.dtype) -> None:
    """The bits of collectives of their own, step by step, beside such and in a graph that outlives its region."""
    device, group = _begin(rank, placement)
    for rows, columns in ((1, 64), (1, 4096), (8, 5000)):
        generator = torch.Generator().manual_seed(rows * columns + rank.rank)
        weights = torch.randint(-1, 2, (256, columns), generator=generator).to(dtype).to(device)
        call, report = compiled(_layer)
        name = f"{dtype} {rows} x {columns}"
        x = torch.zeros(rows, columns, dtype=dtype, device=device)
        whole = torch.zeros(rows, 256, dtype=dtype, device=device)
        found: list[torch.Tensor] = []

        def fill(x: torch.Tensor = x, whole: torch.Tensor = whole, generator: torch.Generator = generator) -> None:
            x.copy_(torch.randn(x.shape, generator=generator).to(dtype))
            whole.copy_(torch.randint(-1, 2, whole.shape, generator=generator).to(dtype))

        def check(
            found: list[torch.Tensor],
            step: int,
            name: str = name,
            x: torch.Tensor = x,
            whole: torch.Tensor = whole,
            weights: torch.Tensor = weights,
        ) -> None:
            total, product = x * 2, whole @ weights
            dist.all_reduce(total, group=group)
            again = total * 0.5
            dist.all_reduce(again, dist.ReduceOp.AVG, group=group)
            dist.all_reduce(product, group=group)
            for i, (got, wanted) in enumerate(zip(found, (-total, -again, -product), strict=True)):
                assert_same_bits(got.cpu(), wanted.cpu(), f"{name}, step {step}, result {i}")

        for step in range(20):
            fill()
            if step % 5 == rank.rank:
                time.sleep(0.02)
            check(call(x, whole, weights, group), step)
        on_one_kernel(report)
        assert "all_reduce_between<" in report.graphs[0].pieces[0].region.source()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = call(x, whole, weights, group)
        del call, report
        torch._dynamo.reset()
        gc.collect()
        for step in range(10):
            fill()
            graph.replay()
            check(found, step)
        torch.cuda.synchronize()
        del graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_regions(placement: tuple[int, ...], dtype: torch.dtype, env: Env) -> None:
    run(_in_regions, placement, dtype, world=len(placement), env=env)


def _cut(rank: Rank, placement: tuple[int, ...]) -> str:
    """A graph's collective over uneven nodes runs between its regions. Returns why."""
    device, group = _begin(rank, placement)
    call, report = compiled(lambda x, group: -funcol.all_reduce(x * 2, "sum", group), {"choose": "ark", "minimum": 1})
    inputs = _all(rank.world_size, 5000, torch.float32, device)
    for _ in range(3):
        assert torch.equal(call(inputs[rank.rank], group), -2 * torch.stack(inputs).sum(0))
    return " ".join(str(one) for graph in report.graphs for one in graph.fallbacks)


@pytest.mark.parametrize("placement", UNEVEN[:1], ids=_named)
def test_regions_are_cut(placement: tuple[int, ...], env: Env) -> None:
    for why in run(_cut, placement, world=len(placement), env=env):
        assert "its nodes have unequal numbers of ranks" in why


def _alone_in_a_region(rank: Rank, placement: tuple[int, ...], how: str) -> str:
    device, group = _begin(rank, placement, timeout=8.0 if how == "late" else 60.0)
    call, _ = compiled(lambda x, group: -funcol.all_reduce(x * 2, "sum", group))
    x = torch.ones(5000, device=device)
    assert call(x, group).sum().item() == -10000 * rank.world_size
    return _calls_until_it_fails(rank, device, lambda: call(x, group))


@pytest.mark.parametrize("how", ["late", "killed"])
@pytest.mark.parametrize("placement", PLACEMENTS[:2], ids=str)
def test_a_region_whose_peer_does_not_call(placement: tuple[int, ...], how: str, env: Env) -> None:
    errors = _lose_the_last(_alone_in_a_region, placement, how, env)
    assert any("without the part of rank" in error for error in errors), errors
