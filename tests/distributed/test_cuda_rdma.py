"""CUDA tensors of groups over several nodes with RDMA between them: on a pretended device and a pretended NIC.

The kernels between nodes run here, played by the CPU within their launch (tests/csrc/support/between_player.hpp): so
values go through the request rings, the thread that posts, queue pairs and signals, as they will on a machine with
both. Kernels within a node do not run, so each node has one rank.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.groups import ark_only
from support.launcher import Job, run_ranks
from support.pretended import verbs
from support.pretended.groups import BIG, Summing, begin, every, host, on_rank
from support.rank import Rank
from support.reference import assert_same_bits
from torch._subclasses import FakeTensor, FakeTensorMode

from ark_torch import _jit

pytestmark = [ark_only]

Env = dict[str, str | None]


@pytest.fixture
def control(tmp_path: Path) -> verbs.Control:
    return verbs.Control(tmp_path / "control")


@pytest.fixture
def env(pretended_gpu: Env, pretended_verbs: str, control: verbs.Control) -> Env:
    return {
        **pretended_gpu,
        "ARK_NET": "rdma",
        "ARK_RDMA_LIBRARY": pretended_verbs,
        "ARK_RDMA_TIMEOUT": "13",
        "ARK_TEST_VERBS_CONTROL": str(control.path),
    }


def _start(rank: Rank, node: int | None = None, timeout: float = 30) -> tuple[Any, Any, Any]:
    """begin(), with a group that takes its options from the environment."""
    os.environ["ARK_NODE"] = str(rank.rank if node is None else node)
    _, carriers, lines = begin(rank)
    return dist.new_group(timeout=timedelta(seconds=timeout)), carriers, lines


def _carried_by(carriers: pretended.Carriers) -> list[str]:
    return [call for made in carriers.made for call in made.calls() if call not in ("shutdown",)]


def _every(rank: Rank, count: int, direct: bool) -> tuple[list[str], dict[str, bool], str]:
    group, carriers, lines = _start(rank)
    pretended.driver.pretend_dma_buf(int(direct), 100)
    done = every(rank, group, count)
    done |= {f"{name}, async": right for name, right in every(rank, group, count, True).items()}
    for _ in range(20):  # the device's counts go on
        x = on_rank(rank, torch.full((count,), float(rank.rank + 1)))
        dist.all_reduce(x, group=group)
        done["again"] = done.get("again", True) and set(host(x).tolist()) == {float(sum(range(1, rank.world_size + 1)))}
    dist.barrier(group=group, device_ids=[rank.rank])
    backend = group._get_backend(torch.device("cuda"))
    assert backend.cuda_carrier == "ark"
    told = "".join(lines.about("CUDA tensors are carried by ark's kernels in each node and RDMA between them"))
    return _carried_by(carriers), done, told


@pytest.mark.by_day("2-245760-False", "3-12288-True")
@pytest.mark.parametrize(("ranks", "count", "direct"), [(2, 60, True), (2, 40 * BIG, False), (3, 2 * BIG, True)])
def test_every_collective(ranks: int, count: int, direct: bool, env: Env, control: verbs.Control) -> None:
    control.set(refuse_dma_buf=int(not direct))
    outcomes = run_ranks(_every, ranks, count, direct, env=env)
    for rank, (carried, done, told) in enumerate(outcomes):
        assert all(done.values()), (rank, done)
        # Only what has splits is NCCL's.
        assert {call.split()[0] for call in carried} == {"alltoall_base"}, carried
        assert bool(told) == (rank == 0)
    told = outcomes[0][2]
    assert ("from and to GPU memory (dma-buf)" in told) == direct, told
    assert ("through pinned memory of the host (" in told) == (not direct), told


def _stages(rank: Rank, nodes: tuple[int, ...]) -> tuple[str, list[str], int, list[str]]:
    group, carriers, lines = _start(rank, nodes[rank.rank])
    every(rank, group, BIG // rank.world_size * rank.world_size)  # without the kernels in a node values are not right
    dist.barrier(group=group, device_ids=[rank.rank])
    carrier = group._get_backend(torch.device("cuda")).cuda_carrier
    return carrier, _carried_by(carriers), pretended.driver.pretend_launches(), lines.about("RDMA between them, here")


@pytest.mark.by_day("(0, 1, 0, 1)", "(0, 1, 1)")
@pytest.mark.parametrize(
    ("nodes", "plan"),
    [
        pytest.param((0, 0, 1, 1), "2 nodes (2 + 2 ranks), 2 rails", id="(0, 0, 1, 1)"),
        pytest.param((0, 1, 0, 1), "2 nodes (2 + 2 ranks), 2 rails", id="(0, 1, 0, 1)"),
        pytest.param((0, 1, 1), "2 nodes (1 + 2 ranks), 1 rail", id="(0, 1, 1)"),
        pytest.param((0, 1, 0, 2, 0, 2), "3 nodes (3 + 1 + 2 ranks), 1 rail", id="(0, 1, 0, 2, 0, 2)"),
    ],
)
def test_nodes_of_several_ranks_have_stages_in_them(nodes: tuple[int, ...], plan: str, env: Env) -> None:
    outcomes = run_ranks(_stages, len(nodes), nodes, env=env)
    for rank, (carrier, carried, launches, told) in enumerate(outcomes):
        assert carrier == "ark" and {call.split()[0] for call in carried} == {"alltoall_base"}
        assert launches > 10 and len(told) == (rank == 0)
        assert rank > 0 or f"on {plan}" in told[0]
        uneven = "compiled regions are cut at its collectives: its nodes have unequal numbers of ranks"
        assert rank > 0 or (uneven in told[0]) == ("2 + 2 ranks" not in plan), told


def _by_nccl(rank: Rank, nodes: tuple[int, ...]) -> tuple[str, list[str]]:
    group, carriers, lines = _start(rank, nodes[rank.rank])
    x = on_rank(rank, torch.full((8,), 1.0))
    dist.all_reduce(x, group=group)
    assert set(host(x).tolist()) == {float(rank.world_size)}
    assert len(carriers.made) == 1
    return group._get_backend(torch.device("cuda")).cuda_carrier, lines.about("carried by PyTorch's NCCL")


def test_without_rdma_nccl_has_all(env: Env) -> None:
    for changed, nodes, reason in (
        ({"ARK_NET": "gloo"}, (0, 1), "no RDMA: "),
        ({"ARK_NET": "auto"}, (0, 1), "ARK_NET=rdma would take RDMA between nodes"),
    ):
        outcomes = run_ranks(_by_nccl, len(nodes), nodes, env={**env, **changed})
        assert [carrier for carrier, _ in outcomes] == ["nccl"] * len(nodes)
        assert reason in outcomes[0][1][0], outcomes


def _one_has_no_memory(rank: Rank) -> tuple[str, list[str]]:
    group, _, lines = _start(rank)
    if rank.rank == 1:
        # The first mappings are of the node's own arena: here all of this process fail.
        pretended.driver._ZN3ark4test13fail_mappingsEi(1000)
    x = on_rank(rank, torch.full((8,), 1.0))
    dist.all_reduce(x, group=group)
    assert set(host(x).tolist()) == {2.0}
    return group._get_backend(torch.device("cuda")).cuda_carrier, lines.about("carried by PyTorch's NCCL")


def test_what_one_rank_lacks_leaves_all_to_nccl(env: Env) -> None:
    outcomes = run_ranks(_one_has_no_memory, 2, env=env)
    assert [carrier for carrier, _ in outcomes] == ["nccl", "nccl"]
    assert "rank 1: " in outcomes[0][1][0], outcomes


def _sums(rank: Rank, order: str, partials: str) -> list[torch.Tensor]:
    """Sums of halves on CUDA and on CPU tensors, and what the plan says. One rank a node: one order for all."""
    os.environ.update(ARK_ORDER=order, ARK_PARTIALS=partials)
    group, carriers, _ = _start(rank)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for count in (1, 777, 20001):
            values = torch.randn(count, generator=torch.Generator().manual_seed(count + rank.rank)) * 10.0**rank.rank
            premultiplied = dist._make_nccl_premul_sum(1 / (3 + rank.rank))
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, premultiplied):
                x, wanted = pretended.on(rank.rank, values.to(dtype)), values.to(dtype)
                dist.all_reduce(x, op, group=group)
                dist.all_reduce(wanted, op, group=group)
                assert_same_bits(host(x), wanted, f"{dtype} {count} {op}")
                found.append(wanted)
    assert group._get_backend(torch.device("cuda")).cuda_carrier == "ark" and not _carried_by(carriers)
    return found


def test_sums_have_the_bits_of_cpu_groups(env: Env) -> None:
    one = run_ranks(_sums, 3, "node", "float32", env=env)
    flat = run_ranks(_sums, 3, "flat", "input", env=env)
    for x, y in zip([x for found in one for x in found], [y for found in flat for y in found], strict=True):
        assert torch.equal(x, y)


def _other_settings(rank: Rank, nodes: tuple[int, ...], variable: str, value: str) -> str:
    if rank.rank == 1:
        os.environ[variable] = value
    group, _, _ = _start(rank, nodes[rank.rank])
    x = on_rank(rank, torch.full((8,), 1.0))
    with pytest.raises(RuntimeError, match="ranks disagree: rank") as raised:
        dist.all_reduce(x, group=group)
    return str(raised.value)


@pytest.mark.parametrize(("variable", "value"), [("ARK_ORDER", "flat"), ("ARK_PARTIALS", "input")])
def test_all_ranks_have_the_same_settings(variable: str, value: str, env: Env) -> None:
    for told in run_ranks(_other_settings, 4, (0, 0, 1, 1), variable, value, env=env):
        assert f"({variable})" in told, told


def _compiled(
    rank: Rank, nodes: tuple[int, ...], carried: bool, collectives: list[tuple[str, str, int]]
) -> list[tuple[str, list[bool]]]:
    """Cuts graphs of products around a collective. Returns what falls back, and which pieces are ark's."""
    from ark_torch.compile import capture
    from ark_torch.compile.options import parse
    from ark_torch.compile.report import GraphReport

    group, _, _ = _start(rank, nodes[rank.rank])
    if carried:
        dist.all_reduce(on_rank(rank, torch.full((8,), 1.0)), group=group)
    mode = FakeTensorMode()
    functional, aten = torch.ops._c10d_functional, torch.ops.aten
    found = []
    for name, reduce_op, side in collectives:
        graph = torch.fx.Graph()

        def value(node: torch.fx.Node, rows: int = side, columns: int = side) -> torch.fx.Node:
            meta = torch.empty(rows, columns, device="meta")
            node.meta["val"] = FakeTensor(mode, meta, torch.device("cuda", rank.rank))
            return node

        x = value(graph.placeholder("x"))
        before = value(graph.call_function(aten.mm.default, (x, x)))
        rows = side
        if name == "all_reduce":
            started = value(graph.call_function(functional.all_reduce.default, (before, reduce_op, group.group_name)))
        else:
            rows = side * rank.world_size
            gather = functional.all_gather_into_tensor.default
            started = value(graph.call_function(gather, (before, rank.world_size, group.group_name)), rows)
        ended = value(graph.call_function(functional.wait_tensor.default, (started,)), rows)
        after = value(graph.call_function(aten.mm.default, (ended, x)), rows)
        graph.output((after,))
        report = GraphReport()
        options = parse(None, {"minimum": 1})
        builder = capture.cut(torch.fx.GraphModule(torch.nn.Module(), graph), options, report)
        found.append((" ".join(str(one) for one in report.fallbacks), [piece.ark for piece in builder._pieces]))
    return found


@pytest.mark.parametrize("carried", [False, True], ids=["unused", "carried"])
def test_regions_take_sums_of_such_a_group_and_are_cut_at_the_rest(carried: bool, env: Env) -> None:
    collectives = [
        ("all_reduce", "sum", 64, ""),
        ("all_reduce", "avg", 64, ""),
        ("all_reduce", "max", 64, "they add, not max"),
        ("all_reduce", "sum", 512, "they add up to 512 KB, not 1024"),
        ("all_gather", "", 64, "they have all_reduce, not all_gather"),
    ]
    for found in run_ranks(_compiled, 2, (0, 1), carried, [one[:3] for one in collectives], env=env):
        for (fallbacks, pieces), (*_, why) in zip(found, collectives, strict=True):
            assert pieces == ([True, False, True] if why else [True]), (fallbacks, pieces, why)
            assert why in fallbacks and bool(fallbacks) == bool(why), fallbacks
            assert not why or "a collective on a group over several nodes" in fallbacks, fallbacks


def test_regions_over_uneven_nodes_are_cut(env: Env) -> None:
    for found in run_ranks(_compiled, 3, (0, 0, 1), True, [("all_reduce", "sum", 64)], env=env):
        ((fallbacks, pieces),) = found
        assert pieces == [True, False, True], pieces
        assert "tasks do not reach: its nodes have unequal numbers of ranks" in fallbacks, fallbacks


@pytest.mark.parametrize(
    ("nodes", "changed", "why"),
    [
        ((0, 1), {"ARK_NET": "gloo"}, "no RDMA between them"),
        ((0, 0, 1), {}, "unequal numbers of ranks"),
        ((0, 0, 1, 1), {"ARK_ORDER": "flat"}, "sums in another order"),
    ],
    ids=["gloo", "uneven", "flat"],
)
def test_groups_whose_nodes_regions_do_not_reach(nodes: tuple[int, ...], changed: Env, why: str, env: Env) -> None:
    for reached, told in run_ranks(_reached, len(nodes), nodes, env={**env, **changed}):
        assert reached == 0 and why in told


def _reached(rank: Rank, nodes: tuple[int, ...]) -> tuple[int, str]:
    group, _, _ = _start(rank, nodes[rank.rank])
    dist.all_reduce(torch.ones(8), group=group)  # none leaves while another still joins
    return group._get_backend(torch.device("cuda")).regions_over_nodes()  # type: ignore[no-any-return]


def _regions(rank: Rank, direct: bool) -> None:
    """Regions whose loop kernel, played by the CPU, sums over nodes; between the group's own collectives."""
    _jit.configure()
    group, _, _ = _start(rank)
    pretended.driver.pretend_dma_buf(int(direct), 100)
    size = rank.world_size

    def check(region: Summing, elements: int, times: int) -> None:
        values = [(torch.arange(elements) * 7 + 13 * r) % 1009 + 0.5 for r in range(size)]
        for again in range(times):
            region.values.copy_(values[rank.rank] + again)
            pretended.driver.pretend_loop_sum(elements * 4)
            assert region() == 1
            pretended.driver.pretend_loop_sum(0)
            wanted = values[0] + again
            for value in values[1:]:
                wanted += value + again
            assert torch.equal(host(region.given), wanted), (elements, again)

    counts = (1, 5000, 40_000)  # one, two and ten chunks
    regions = [Summing(rank, group, count, size) for count in counts]
    for _ in range(2):
        for region, count in zip(regions, counts, strict=True):
            check(region, count, 5)
            x = on_rank(rank, torch.full((count,), 1.0))
            dist.all_reduce(x, group=group)
            assert set(host(x).tolist()) == {float(size)}
    del regions[0]  # its window is let go when the next region meets
    late = Summing(rank, group, 77, size)
    pretended.driver.pretend_capture(7)
    with pytest.raises(ValueError, match="first call with this group is under graph capture"):
        late()
    check(regions[0], 5000, 3)
    pretended.driver.pretend_capture(0)
    check(late, 77, 3)
    with pytest.raises(dist.DistBackendError, match="compiled a region with other collectives"):
        Summing(rank, group, 100 + rank.rank, size)()
    check(late, 77, 3)
    assert late.fell == 0
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match="there is no process group"):
        late()


@pytest.mark.by_day("2-True")
@pytest.mark.parametrize(("ranks", "direct"), [(2, True), (3, False)])
def test_regions_sum_over_nodes(ranks: int, direct: bool, env: Env) -> None:
    run_ranks(_regions, ranks, direct, env=env)


def _otherwise(rank: Rank, when: str) -> None:
    _jit.configure()
    group, _, _ = _start(rank)
    if when == "region":
        dist.all_reduce(on_rank(rank, torch.full((8,), 1.0)), group=group)
    region = Summing(rank, group, 5000, 2)
    if rank.rank == 1:
        pretended.driver._ZN3ark4test13fail_mappingsEi(1000)
    assert [region(), region()] == [0, 0] and region.fell == 2
    assert group._get_backend(torch.device("cuda")).cuda_carrier == ("ark" if when == "region" else "nccl")


@pytest.mark.by_day("region")
@pytest.mark.parametrize("when", ["group", "region"])
def test_a_rank_without_memory_lets_all_run_otherwise(when: str, env: Env) -> None:
    """For the group's own stage between nodes, or for that of a region."""
    run_ranks(_otherwise, 2, when, env=env)


def _left_alone_in_a_region(rank: Rank, how: str) -> tuple[float, str]:
    _jit.configure()
    group, _, _ = _start(rank, timeout=2 if how == "timeout" else 60)
    region = Summing(rank, group, 5000, 2)
    pretended.driver.pretend_loop_sum(20000)
    assert region() == 1
    rank.report("running")
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0, ""
    began = time.monotonic()
    words = "waited for rank 1 until" if how == "timeout" else r"rank 1 is gone|failed with rank 1|RDMA with rank 1 "
    with pytest.raises(RuntimeError, match=words) as raised:
        for _ in range(1000):
            region()
            time.sleep(0.02)
    took = time.monotonic() - began
    rank.report("ended")
    return took, str(raised.value)


@pytest.mark.by_day("killed")
@pytest.mark.parametrize("how", ["timeout", "killed"])
def test_what_ends_a_region(how: str, env: Env) -> None:
    with Job(_left_alone_in_a_region, 2, how, destroy=False, env=env) as job:
        job.wait_all("running")
        if how == "killed":
            time.sleep(1)  # rank 0 has sent what it can, and only waits
            job.kill(1)
        job.wait_event(0, "ended", timeout=30)
        if how == "timeout":
            job.go(1, "go")
        for outcome in job.finish(30, [0]):
            assert outcome.value is not None and outcome.value[0] < 15
            assert "left task 0 (all_reduce, here, worker 0) without the part of rank 1" in outcome.value[1]


def _alone(rank: Rank, how: str) -> tuple[float, str]:
    """Rank 1 does not call: it is killed, or just stays away. Or the link is down for both."""
    group, _, _ = _start(rank, timeout=2 if how == "timeout" else 60)
    x = on_rank(rank, torch.full((BIG,), 1.0))
    dist.all_reduce(x, group=group)
    rank.report("running")
    if how in ("killed before", "link") or rank.rank == 1:  # what it sends meets a peer that is gone, or a link that is
        rank.wait_for("go")
    if how != "link" and rank.rank == 1:
        return 0.0, ""
    began = time.monotonic()
    words = {
        "timeout": "a kernel on this rank's GPU waited for rank 1 until",
        "killed": r"rank 1 is gone|failed with rank 1|RDMA with rank 1 ",
        "killed before": r"rank 1 is gone|failed with rank 1|RDMA with rank 1 ",
        "link": r"RDMA with rank \d over \w+ failed: the peer's NIC did not answer",
    }
    with pytest.raises(RuntimeError, match=words[how]) as raised:
        for _ in range(1000):
            dist.all_reduce(x, group=group)
            time.sleep(0.02)
    took = time.monotonic() - began
    rank.report("ended")
    return took, str(raised.value)


@pytest.mark.by_day("killed", "link")
@pytest.mark.parametrize("how", ["timeout", "killed", "killed before", "link"])
def test_what_ends_a_collective(how: str, env: Env, control: verbs.Control) -> None:
    with Job(_alone, 2, how, destroy=False, env=env) as job:
        job.wait_all("running")
        others = [0, 1] if how == "link" else [0]
        if how == "killed":
            time.sleep(1)  # rank 0 has sent what it can, and only waits
            job.kill(1)
        if how == "killed before":
            job.kill(1)
            job.go(0, "go")
        if how == "link":
            control.set(link_down=1)
            job.go_all("go")
        for r in others:
            job.wait_event(r, "ended", timeout=30)
        if how == "timeout":
            job.go(1, "go")
        for outcome in job.finish(30, others):
            assert outcome.value is not None and outcome.value[0] < 15
