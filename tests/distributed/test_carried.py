"""Groups over several nodes with Gloo between them: the sizes at which algorithms change, and how groups fail.

A placement is the node of every rank: (0, 0, 1) has two ranks on one node and one on another. Ranks pretend to be there
(ARK_NODE). test_namespaces.py does the same with real ones.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.grid import CARRIERS, cases, factor_of, op_of
from support.groups import ark_only
from support.launcher import Job, run_ranks
from support.rank import Rank
from support.reference import as_bytes, assert_same_bits, make_input, reduce

pytestmark = [ark_only]


def by_night(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.nightly, id="-".join(map(str, case)))


GLOO = CARRIERS["gloo"]
Placement = tuple[int, ...]
# Sizes in bytes around the limits: zero, one message (for one rank, and for the ranks of a node), sent whole, one
# chunk, several chunks with unequal parts.
SIZES = (0, 4, 320, 324, 328, 484, 488, 964, 968, 972, 13108, 21836, 512 << 10, (1 << 20) + 4, (5 << 20) + 12)


def on_nodes(rank: Rank, placement: Placement, **options: Any) -> Any:
    """Creates the world with this rank on its node of the placement. () keeps all ranks on this machine."""
    if placement:
        os.environ["ARK_NODE"] = str(placement[rank.rank])
    return rank.init(**options)


def _sizes(rank: Rank, placement: Placement, sizes: tuple[int, ...]) -> None:
    """Runs every collective at every size, in float32, whose bits reveal the order of additions."""
    on_nodes(rank, placement)
    me, world = rank.rank, rank.world_size
    for size in sizes:
        count = size // 4
        inputs = [
            torch.randn(count, generator=torch.Generator().manual_seed(size * 10 + r)) * 10.0 ** (r % 3)
            for r in range(world)
        ]
        total = reduce(inputs, "SUM", nodes=placement)
        x = inputs[me].clone()
        dist.all_reduce(x)
        assert torch.equal(x, total), size
        for root in {0, world - 1, size % world}:
            x = inputs[me].clone()
            dist.reduce(x, root)
            assert torch.equal(x, total if me == root else inputs[me]), (size, root)
            x = inputs[root].clone() if me == root else torch.full((count,), -1.0)
            dist.broadcast(x, root)
            assert torch.equal(x, inputs[root]), (size, root)
            gathered = [torch.empty(count) for _ in range(world)] if me == root else None
            dist.gather(inputs[me], gathered, root)
            assert gathered is None or all(map(torch.equal, gathered, inputs)), (size, root)
            x = torch.empty(count)
            dist.scatter(x, inputs if me == root else None, root)
            assert torch.equal(x, inputs[me]), (size, root)
        outs = [torch.empty(count) for _ in range(world)]
        dist.all_gather(outs, inputs[me])
        assert all(map(torch.equal, outs, inputs)), size
        x = torch.empty(count)
        dist.reduce_scatter(x, [inputs[me] * (1 + r) for r in range(world)])
        assert torch.equal(x, reduce([one * (1 + me) for one in inputs], "SUM", nodes=placement)), size
        # Uneven: rank s sends count // (1 + d) of its elements to rank d.
        splits = [count // (1 + d) for d in range(world)]
        sent = torch.cat([inputs[me][:n] for n in splits])
        received = torch.empty(splits[me] * world)
        dist.all_to_all_single(received, sent, [splits[me]] * world, splits)
        assert torch.equal(received, torch.cat([one[: splits[me]] for one in inputs])), size
        dist.barrier()


@pytest.mark.by_day("2")
@pytest.mark.parametrize("world", [2, 3])
def test_sizes(world: int) -> None:
    run_ranks(_sizes, world, (), SIZES, env=GLOO)


TWO, UNEVEN, STAR, MIXED = (0, 0, 1, 1), (0, 0, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 2, 1)
placements = pytest.mark.parametrize(
    "placement",
    [TWO, UNEVEN, by_night(STAR), by_night(MIXED), by_night((0, 1, 2, 2))],
    ids=lambda placement: "".join(map(str, placement)),
)


@pytest.mark.by_day("00111")
@placements
def test_sizes_on_nodes(placement: Placement) -> None:
    run_ranks(_sizes, len(placement), placement, SIZES)


# Sizes of a block. 8, 3 or 2 blocks with their sizes fit in a first message up to 104, 304 and 468 bytes, one block up
# to 968. Blocks are aggregated up to 16 KB. All of these are mixed with empty and large blocks.
BLOCKS = (0, 4, 104, 108, 304, 308, 468, 472, 968, 972, 16_384, 16_388, 200_000)


def _blocks(rank: Rank, placement: Placement) -> None:
    """all_to_all with a different size for each block, as tensor and as list; gather and scatter of each size."""
    on_nodes(rank, placement)
    me, world = rank.rank, rank.world_size
    for turn in range(len(BLOCKS)):
        counts = [[BLOCKS[(turn + 3 * s + d) % len(BLOCKS)] // 4 for d in range(world)] for s in range(world)]
        block = lambda s, d: torch.arange(counts[s][d], dtype=torch.int32) + 1000 * (world * s + d)  # noqa: B023, E731
        sent, expected = [block(me, d) for d in range(world)], [block(s, me) for s in range(world)]
        received = torch.full((sum(map(len, expected)),), -1, dtype=torch.int32)
        dist.all_to_all_single(received, torch.cat(sent), list(map(len, expected)), list(map(len, sent)))
        assert torch.equal(received, torch.cat(expected)), turn
        # PyTorch rejects a list of empty tensors, so each has one extra element.
        grown = [torch.cat([one, torch.ones(1, dtype=torch.int32)]) for one in sent]
        outs = [torch.empty(len(one) + 1, dtype=torch.int32) for one in expected]
        dist.all_to_all(outs, grown)
        assert all(torch.equal(out[:-1], one) and out[-1] == 1 for out, one in zip(outs, expected, strict=True)), turn
        even, root = torch.full((BLOCKS[turn] // 4,), me, dtype=torch.int32), turn % world
        gathered = [torch.empty_like(even) for _ in range(world)] if me == root else None
        dist.gather(even, gathered, root)
        assert gathered is None or all((one == r).all() for r, one in enumerate(gathered)), turn
        blocks = [torch.full_like(even, 7 + r) for r in range(world)] if me == root else None
        dist.scatter(even, blocks, root)
        assert (even == 7 + me).all(), turn


@pytest.mark.by_day("(0, 1, 1, 1, 0, 2)", "(0, 1, 1, 1, 1, 1, 1, 1, 1)")
@pytest.mark.parametrize("placement", [TWO, UNEVEN, (0, *[1] * 8), by_night(STAR), (0, 1, 1, 1, 0, 2)], ids=str)
def test_blocks_on_nodes(placement: Placement) -> None:
    run_ranks(_blocks, len(placement), placement)


def _messages(rank: Rank, placement: Placement, expected: dict[int, tuple[int, ...]]) -> None:
    """Counts messages by bytes per block: rank 0's in an all_to_all, all ranks' in a gather and in a scatter."""
    backend = on_nodes(rank, placement)._get_backend(torch.device("cpu"))
    world = rank.world_size
    for bytes_, counts in expected.items():
        x, many = torch.ones(bytes_, dtype=torch.uint8), torch.ones(bytes_ * world, dtype=torch.uint8)
        found = []
        for call in (
            lambda: dist.all_to_all_single(torch.empty_like(many), many),  # noqa: B023
            lambda: dist.gather(x, list(many.chunk(world)) if rank.rank == 0 else None),  # noqa: B023
            lambda: dist.scatter(x, list(many.chunk(world)) if rank.rank == 0 else None),  # noqa: B023
        ):
            before = backend.messages_between_nodes
            call()
            found.append(backend.messages_between_nodes - before)
        dist.barrier()
        sums = torch.tensor(found)
        dist.all_reduce(sums)
        assert rank.rank > 0 or (found[0], *sums[1:].tolist()) == counts, (bytes_, found, sums)


@pytest.mark.parametrize(
    "placement, expected",
    [
        (TWO, {4: (2, 2, 2), 2000: (4, 6, 6)}),  # one by one
        # One by one, they would be 3, 6 and 6 in an all_to_all, and 3 and 9 in a gather or scatter.
        ((0, 0, 0, 1, 1, 1), {4: (1, 3, 3), 2000: (2, 3, 9), 20_000: (4, 9, 9)}),
        # A node of 8: 8, 16 and 16 in an all_to_all; 8 and 24 in a gather or scatter.
        ((0, *[1] * 8), {4: (1, 8, 1), 2000: (2, 3, 3), 20_000: (9, 24, 24)}),
    ],
    ids=["2+2", "3+3", "1+8"],
)
def test_messages_between_nodes(placement: Placement, expected: dict[int, tuple[int, ...]]) -> None:
    run_ranks(_messages, len(placement), placement, expected)


def _every_type(rank: Rank, placement: Placement, counts: tuple[int, ...]) -> None:
    """Checks every dtype and operation bit for bit: whole, in chunks, and scattered."""
    on_nodes(rank, placement)
    me, world = rank.rank, rank.world_size
    factors = [factor_of(r) for r in range(world)]
    for count in counts:
        for dtype, op in cases():
            inputs = [make_input(dtype, count, 5, r) for r in range(world)]
            expected = reduce(inputs, op, factors, placement)
            what = f"{dtype} {op} {count}"
            x = inputs[me].clone()
            dist.all_reduce(x, op_of(op, me))
            assert_same_bits(x, expected, f"all_reduce {what}")
            x = inputs[me].clone()
            dist.reduce(x, 1, op_of(op, me))
            assert_same_bits(x, expected if me == 1 else inputs[me], f"reduce {what}")
            part = torch.empty(count, dtype=dtype)
            turned = [[*inputs[r:], *inputs[:r]] for r in range(world)]  # turned[r][q] is what r sends to q
            dist.reduce_scatter(part, turned[me], op_of(op, me))
            wanted = reduce([turned[r][me] for r in range(world)], op, factors, placement)
            assert_same_bits(part, wanted, f"reduce_scatter {what}")


@pytest.mark.parametrize("placement", [TWO, by_night(UNEVEN), by_night(MIXED)], ids=str)
def test_every_type_on_nodes(placement: Placement) -> None:
    run_ranks(_every_type, len(placement), placement, (7, 40_001), timeout=200)


def _one_order(rank: Rank) -> None:
    """Exact operations do not depend on nodes: the result is that of one machine, in several groups in turn."""
    for placement in ((), TWO, (0, 1, 1, 1)):
        on_nodes(rank, placement)
        x = make_input(torch.int64, 90_001, 3, rank.rank)
        dist.all_reduce(x)
        assert torch.equal(x, reduce([make_input(torch.int64, 90_001, 3, r) for r in range(4)], "SUM"))
        dist.destroy_process_group()
        os.environ.pop("ARK_NODE", None)


def test_integers_do_not_know_nodes() -> None:
    run_ranks(_one_order, 4)


def _sums(rank: Rank, count: int) -> dict[str, torch.Tensor]:
    """Runs everything that adds, with inputs whose sums reveal their order."""
    found, me, world = {}, rank.rank, rank.world_size
    inputs = torch.randn(count * world, generator=torch.Generator().manual_seed(me)) * 10.0 ** (me % 3)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for op in ("SUM", "AVG", "PREMUL_SUM"):
            if dtype is torch.complex64 and op == "AVG":
                continue
            x = inputs[:count].to(dtype)
            dist.all_reduce(x, op_of(op, me))
            found[f"all_reduce {dtype} {op}"] = x
            x = inputs[:count].to(dtype)
            dist.reduce(x, 1, op_of(op, me))
            found[f"reduce {dtype} {op}"] = x
            x = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(x, inputs.to(dtype), op_of(op, me))
            found[f"reduce_scatter {dtype} {op}"] = x
    return found


def _flat_order(rank: Rank, placement: Placement) -> None:
    """ARK_ORDER=flat gives the bits of a single node. Without it some differ."""
    counts = (0, 1, 777, 1_100_003)  # the last one takes two chunks
    found = []
    for where, order in (((), "node"), (placement, "flat"), (placement, "node")):
        os.environ["ARK_ORDER"] = order
        backend = on_nodes(rank, where)._get_backend(torch.device("cpu"))
        assert (", order flat" in backend.plan) == (order == "flat"), backend.plan
        found.append([_sums(rank, count) for count in counts])
        dist.destroy_process_group()
        os.environ.pop("ARK_NODE", None)
    one, flat, by_node = found
    for count, expected, got in zip(counts, one, flat, strict=True):
        for what, x in expected.items():
            assert_same_bits(got[what], x, f"{what} {count}")
    assert not torch.equal(one[-1]["all_reduce torch.float32 SUM"], by_node[-1]["all_reduce torch.float32 SUM"])


@pytest.mark.by_day("(0, 1, 1, 1)")
@pytest.mark.parametrize(
    "placement", [(0, 1, 0, 1), (0, 1, 1, 1), by_night(UNEVEN), by_night(MIXED), by_night(TWO)], ids=str
)
def test_flat_order_has_the_bits_of_one_node(placement: Placement) -> None:
    run_ranks(_flat_order, len(placement), placement)


def _rounded_partials(rank: Rank, placement: Placement) -> None:
    """ARK_PARTIALS=input rounds each node's sum. Types that are not wider in float32 do not know it."""
    os.environ["ARK_PARTIALS"] = "input"
    backend = on_nodes(rank, placement)._get_backend(torch.device("cpu"))
    assert ", partials input" in backend.plan, backend.plan
    me, world = rank.rank, rank.world_size
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.float32):
        for count in (1, 777, 1_100_003):
            inputs = [
                (torch.randn(count, generator=torch.Generator().manual_seed(r)) * 10.0 ** (r % 3)).to(dtype)
                for r in range(world)
            ]
            of_nodes = [
                reduce([inputs[r] for r in range(world) if placement[r] == node], "SUM")
                for node in dict.fromkeys(placement)
            ]
            wanted = reduce(of_nodes, "SUM")
            exact = reduce(inputs, "SUM", nodes=placement)
            assert torch.equal(as_bytes(wanted), as_bytes(exact)) == (dtype is torch.float32 or count == 1)
            x = inputs[me].clone()
            dist.all_reduce(x)
            assert_same_bits(x, wanted, f"all_reduce {dtype} {count}")
            x = inputs[me].clone()
            dist.reduce(x, 1)
            assert_same_bits(x, wanted if me == 1 else inputs[me], f"reduce {dtype} {count}")


@pytest.mark.parametrize("placement", [(0, 1, 0, 1, 1), by_night((0, 0, 1, 1, 1))], ids=str)
def test_partials_of_the_inputs_type(placement: Placement) -> None:
    run_ranks(_rounded_partials, len(placement), placement)


def _other_order(rank: Rank) -> None:
    os.environ["ARK_ORDER"] = "node" if rank.rank == 1 else "flat"
    on_nodes(rank, TWO)
    with pytest.raises(RuntimeError, match=r"ranks disagree.*SUM, order flat"):
        dist.all_reduce(torch.ones(5))
    with pytest.raises(RuntimeError, match="ranks disagree"):
        dist.barrier()


def test_all_ranks_have_one_order() -> None:
    run_ranks(_other_order, 4)


def _subgroups(rank: Rank) -> None:
    """Groups within a node share memory. A group over several nodes gets its own plan."""
    world = on_nodes(rank, UNEVEN)
    plan = world._get_backend(torch.device("cpu")).plan
    parcels = ", all_to_all and gather aggregated per node up to 16 KB a pair, gloo between them"
    assert plan == "2 nodes (2 + 3 ranks), 2 rails" + parcels, plan
    for members, expected in (
        ([2, 3, 4], ""),
        ([1, 2], "2 nodes (1 + 1 ranks), 1 rail, gloo between them"),
        ([4, 0, 3], "2 nodes (1 + 2 ranks), 1 rail, gloo between them"),
    ):
        group = dist.new_group(members)
        if rank.rank in members:
            backend = group._get_backend(torch.device("cpu"))
            assert backend.plan == expected and backend.shares_memory == (not expected)
            for count in (3, 100_000):
                x = torch.full((count,), float(rank.rank))
                dist.all_reduce(x, group=group)
                assert x.unique().tolist() == [sum(members)]
        dist.barrier()


def test_subgroups() -> None:
    run_ranks(_subgroups, 5)


def _beside(rank: Rank) -> None:
    """The user's messages, whatever their tag, do not mix with collectives."""
    rank.init()
    peer = 1 - rank.rank
    for tag in (0, 2**31 - 17):
        got = torch.empty(5000)
        messages = [dist.isend(torch.full((5000,), 1.0 + rank.rank), peer, tag=tag), dist.irecv(got, peer, tag=tag)]
        x = torch.ones(200_000)
        dist.all_reduce(x)
        assert x.unique().tolist() == [2.0]
        for message in messages:
            message.wait()
        assert got.unique().tolist() == [1.0 + peer]
    with pytest.raises(ValueError, match=r"tag is 2147483647.*Use a tag below 2147483632"):
        dist.isend(torch.ones(1), peer, tag=2**31 - 1)


def test_messages_beside_collectives() -> None:
    run_ranks(_beside, 2, env=GLOO)


def _disagree(rank: Rank, placement: Placement, call: str) -> None:
    """Rank 1 calls something else. All ranks get an error soon, also on other nodes."""
    on_nodes(rank, placement)
    odd = rank.rank == 1
    with pytest.raises(RuntimeError, match=r"ranks disagree: rank \d called .*, rank \d called"):
        dist.barrier()  # a slow rank is still in it while the others disagree, and hears of that here
        if call == "size":
            dist.all_reduce(torch.ones(70_000 if odd else 3))
        elif call == "large":
            dist.all_reduce(torch.ones(700_000 if odd else 600_000))
        elif call == "root":
            dist.broadcast(torch.ones(90_000), 1 if odd else 0)
        elif odd:
            dist.all_gather([torch.empty(3) for _ in range(rank.world_size)], torch.ones(3))
        else:
            dist.barrier()
        dist.barrier()  # a root that need not wait could go on alone, and gets the error here
    with pytest.raises(RuntimeError, match="ranks disagree"):
        dist.barrier()
    rank.report("heard")


@pytest.mark.by_day("(0, 1)-size", "(0, 0, 1, 1)-size", "(0, 0, 1, 1)-large", "(0, 0, 1, 1)-root", "(0, 0, 1, 1)-kind")
@pytest.mark.parametrize("call", ["size", "large", "root", "kind"])
@pytest.mark.parametrize("placement", [(0, 1), TWO, by_night((0, 1, 1, 0)), by_night(UNEVEN)], ids=str)
def test_ranks_that_disagree(placement: Placement, call: str) -> None:
    run_ranks(_disagree, len(placement), placement, call)


def _broken_promise(rank: Rank) -> None:
    on_nodes(rank, TWO)
    splits = [5000, 5000, 5000, 4000 if rank.rank == 0 else 5000]  # rank 0 sends rank 3 less than it expects
    with pytest.raises(RuntimeError, match=r"rank 0 sends 16000 bytes to rank 3.*20000"):
        dist.all_to_all_single(torch.empty(20_000), torch.ones(sum(splits)), [5000] * 4, splits)
        dist.barrier()


def test_a_broken_promise() -> None:
    run_ranks(_broken_promise, 4)


def _alone(rank: Rank, placement: Placement, how: str, quiet: int) -> float:
    """One rank does not call: it is stopped, killed, or calls abort()."""
    group = on_nodes(rank, placement, timeout=4.0 if how == "timeout" else 60.0)
    dist.barrier()
    rank.report("running")
    if rank.rank == quiet:
        if how == "abort":
            rank.wait_for("abort")  # all ranks are past the first operation
            time.sleep(0.5)
            group.abort()
        rank.wait_for("go")
        return 0.0
    began = time.monotonic()
    words = {
        "abort": rf"abort\(\) was called on rank {quiet}",
        "timeout": "timed out after 4000 ms|failed to hear in 4000 ms|gloo, which carries this group",
        "killed": f"rank {quiet} is gone|failed with rank {quiet}",
    }
    with pytest.raises(RuntimeError, match=words[how]):
        dist.all_reduce(torch.ones(300_000))
    took = time.monotonic() - began
    with pytest.raises(RuntimeError):
        dist.barrier()
    rank.report("ended")
    return took


@pytest.mark.by_day("(0, 1)-1-killed", "(0, 0, 1, 1)-0-timeout", "(0, 0, 1, 1)-3-abort", "(0, 0, 1, 1)-3-killed")
@pytest.mark.parametrize("how", ["abort", "timeout", "killed"])
@pytest.mark.parametrize(
    "placement, quiet", [((0, 1), 1), (TWO, 0), (TWO, 3), by_night(UNEVEN, 4), by_night((0, 1, 1, 1), 0)], ids=str
)
def test_what_ends_a_collective(placement: Placement, quiet: int, how: str) -> None:
    world = len(placement)
    with Job(_alone, world, placement, how, quiet, destroy=False) as job:
        job.wait_all("running")
        if how == "killed":
            time.sleep(0.3)
            job.kill(quiet)
        elif how == "abort":
            job.go(quiet, "abort")
        others = [r for r in range(world) if r != quiet]
        for r in others:
            job.wait_event(r, "ended", timeout=20)
        if how != "killed":
            job.go(quiet, "go")
        for outcome in job.finish(20, others):
            assert outcome.value is not None and outcome.value < 10


def _beside_a_stopped_one(rank: Rank, placement: Placement, stopped: int) -> None:
    on_nodes(rank, placement, timeout=3.0)
    dist.barrier()
    rank.report("running")
    rank.wait_for("go")
    with pytest.raises(RuntimeError, match=rf"(waiting for|ms from) rank {stopped}\b"):
        dist.all_reduce(torch.ones(300_000))


@pytest.mark.parametrize(
    "placement, stopped", [(TWO, 3), by_night(TWO, 0), by_night((0, 1), 1), by_night(UNEVEN, 4)], ids=str
)
def test_a_stopped_rank_is_named_on_every_node(placement: Placement, stopped: int) -> None:
    """Also by ranks that wait for a rank that waits for it: the stopped rank's own node finds out."""
    with Job(_beside_a_stopped_one, len(placement), placement, stopped, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.3)
        job.stop(stopped)
        others = [r for r in range(len(placement)) if r != stopped]
        for r in others:
            job.go(r, "go")
        for outcome in job.finish(20, others):
            assert outcome.kind == "result", outcome.value


def _leaves_early(rank: Rank) -> None:
    """A root leaves once its message is sent. The other rank receives it later, and only then misses the root."""
    rank.init()
    x = torch.full((3,), 1.0 + rank.rank)
    if rank.rank == 1:
        dist.broadcast(x, 1)
        return
    rank.wait_for("go")
    dist.broadcast(x, 1)
    assert x.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match=r"rank 1|gloo, which carries this group"):
        dist.barrier()


def test_a_rank_that_leaves_early() -> None:
    with Job(_leaves_early, 2, env=GLOO) as job:
        job.wait_outcomes([1], 20)
        time.sleep(0.2)  # lets the end of its connection be noticed
        job.go(0, "go")
        job.values(20)
