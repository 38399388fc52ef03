"""Groups: creating, nesting, options, meshes, splitting, merging, shrinking, and use beside other backends.

PyTorch's module-level split_group refuses third-party backends by name, so the tests use the group object, as a program
would.
"""

from __future__ import annotations

import copy
import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only, backend_of, total
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input, reduce


def _subgroups(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for size in range(1, world + 1):
        for members in itertools.combinations(range(world), size):
            group = dist.new_group(list(members))
            if me in members:
                assert dist.get_rank(group) == members.index(me) and dist.get_world_size(group) == size
                assert total(group, 10.0**me) == sum(10.0**r for r in members)
                tensor = torch.full((2,), float(me))
                dist.broadcast(tensor, src=members[-1], group=group)
                assert tensor[0].item() == members[-1]
                got = [torch.empty(1) for _ in members]
                dist.all_gather(got, torch.tensor([float(me)]), group=group)
                assert [x.item() for x in got] == list(members)
            else:
                assert group is dist.GroupMember.NON_GROUP_MEMBER
    backwards = dist.new_group(list(reversed(range(world))), use_local_synchronization=False)
    assert total(backwards, 1.0) == world
    lone = dist.new_group([me], use_local_synchronization=True)
    assert total(lone, me + 1.0) == me + 1.0


@pytest.mark.by_day("3")
@pytest.mark.quick
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_subgroup(world: int) -> None:
    run_ranks(_subgroups, world)


def _many(rank: Rank) -> None:
    group = rank.init(timeout=60)
    assert total(group, float(rank.rank)) == sum(range(rank.world_size))
    got = [torch.empty(3) for _ in range(rank.world_size)]
    dist.all_gather(got, torch.full((3,), float(rank.rank)))
    assert torch.stack(got).sum(1).tolist() == [3.0 * r for r in range(rank.world_size)]


@pytest.mark.nightly
def test_sixty_four_ranks() -> None:
    run_ranks(_many, 64, timeout=120)


def _split(rank: Rank) -> None:
    """ProcessGroup.split_group, nested twice. Ranks outside get None, as with NCCL."""
    world_group = rank.init()
    me = rank.rank
    backend = backend_of(world_group)
    assert backend.supports_splitting, "DeviceMesh asks this"
    low = world_group.split_group([0, 1], timeout=timedelta(seconds=30), group_name="low", group_desc="first half")
    high = world_group.split_group([2, 3], timeout=timedelta(seconds=30), group_name="high", group_desc="second half")
    mine = low if me < 2 else high
    assert mine is not None and mine.size() == 2 and mine.rank() == me % 2
    tensor = torch.full((1000,), float(me))
    mine.allreduce([tensor]).wait()
    assert tensor[5].item() == (1.0 if me < 2 else 5.0)
    lone = mine.split_group([0], group_name=f"lone{me // 2}")
    if me % 2 == 0:
        one = torch.full((2,), 4.0)
        lone.allreduce([one]).wait()
        assert one.tolist() == [4.0, 4.0]
    assert total(None, 1.0) == 4, "the parent still works"
    # All groups at the same time.
    works = [mine.allreduce([tensor]), world_group.allreduce([torch.ones(5)])]
    for work in works:
        work.wait()
    for group in (lone if me % 2 == 0 else None, mine):
        if group is not None:
            group.shutdown()


@pytest.mark.quick
@ark_only
def test_split_group() -> None:
    run_ranks(_split, 4)


def _options(rank: Rank) -> None:
    """split_group deep-copies the parent's options, so they must be bound and copyable."""
    world_group = rank.init(timeout=47)
    options = backend_of(world_group).options
    for made in (copy.copy(options), copy.deepcopy(options)):
        assert made is not options and made._timeout == timedelta(seconds=47)
    assert list(options.global_ranks_in_group) in ([], list(range(rank.world_size)))
    group = dist.new_group([1, 0])
    assert list(backend_of(group).options.global_ranks_in_group) == [0, 1]
    alone = dist.new_group([rank.rank], use_local_synchronization=True)
    assert backend_of(alone).options.global_rank == rank.rank, "dumps are named after it"
    # new_group calls this on ranks outside if device_id was given.
    backend_of(world_group).perform_nocolor_split(torch.device("cpu"))


@pytest.mark.quick
@ark_only
def test_options_can_be_copied() -> None:
    run_ranks(_options, 2)


def _mesh(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank.init()
    me = rank.rank
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    assert total(line.get_group("all"), 1.0) == 4
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert total(square.get_group("tp"), 10.0**me) == sum(10.0**r for r in (me // 2 * 2, me // 2 * 2 + 1))
    assert total(square.get_group("dp"), 10.0**me) == sum(10.0**r for r in (me % 2, me % 2 + 2))
    flat = square[("dp", "tp")]._flatten("both")
    assert total(flat.get_group(), 1.0) == 4
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert [total(cube.get_group(name), 1.0) for name in ("pp", "dp", "tp")] == [2, 1, 2]
    assert cube["tp"].get_local_rank() == me % 2


def test_device_mesh_of_one_two_and_three_dimensions() -> None:
    run_ranks(_mesh, 4)


def _mixed_backends(rank: Rank) -> None:
    """A world of "cpu:gloo,cuda:ark" or "cpu:ark", and ark groups beside gloo groups."""
    rank.init(backend=f"cpu:{BACKEND}")
    assert total(None, 1.0) == rank.world_size
    plain = dist.new_group(list(range(rank.world_size)), backend="gloo")
    assert total(plain, 3.0) == 3 * rank.world_size
    dist.destroy_process_group()
    world = rank.init(backend=f"cpu:gloo,cuda:{BACKEND}")
    inner = dist.new_group([1, 0])
    for group in (world, inner):
        assert backend_of(group).name() == "gloo"
        assert group._get_backend(torch.device("cuda")).name() == BACKEND
        assert total(group, 1.0) == rank.world_size
        dist.barrier(group=group)
    seen: list[int] = [-1] * rank.world_size
    dist.all_gather_object(seen, rank.rank)
    assert seen == list(range(rank.world_size))
    dist.destroy_process_group()
    rank.init(backend="gloo")
    ark = dist.new_group(list(range(rank.world_size)), backend=BACKEND)
    assert total(ark, 3.0) == 3 * rank.world_size and total(None, 1.0) == rank.world_size


@pytest.mark.quick
@ark_only
def test_beside_other_backends() -> None:
    run_ranks(_mixed_backends, 2)


def _beside_nccl(rank: Rank) -> None:
    """CPU tensors use ark, CUDA tensors NCCL. Without a GPU the incomplete group is removed without a trace."""
    names = f"cpu:{BACKEND},cuda:nccl"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank.rank % torch.cuda.device_count())
        group = rank.init(backend=names)
        assert group._get_backend(torch.device("cuda")).name() == "nccl"
    else:
        with pytest.raises((RuntimeError, ValueError), match="NCCL"):  # this PyTorch has no NCCL, or there is no GPU
            rank.init(backend=names)
        if dist.is_initialized():
            dist.destroy_process_group()
        group = rank.init(backend=f"cpu:{BACKEND}")
    assert backend_of(group).name() == BACKEND
    assert total(None, 1.0) == rank.world_size


@ark_only
def test_beside_nccl() -> None:
    run_ranks(_beside_nccl, 2)


def _merge(rank: Rank) -> None:
    """Two groups of one rank become a group of two (if the base class has merge)."""
    store = rank.store("merge")
    rank.init(rank=0, world_size=1, store=dist.PrefixStore(f"alone{rank.rank}", store))
    lone = dist.group.WORLD
    assert total(None, 5.0) == 5
    merged = lone.merge_remote_group(dist.PrefixStore("merged", store), 2, timedelta(seconds=30), "merged", "both")
    tensor = torch.full((4,), 1.0)
    merged.allreduce([tensor]).wait()
    assert merged.size() == 2 and tensor.tolist() == [2.0] * 4
    assert total(None, 5.0) == 5
    merged.shutdown()


@ark_only
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="this PyTorch has no merge")
def test_merge() -> None:
    run_ranks(_merge, 2)


def _shrink(rank: Rank) -> None:
    """Removes rank 2, which does not take part."""
    group = rank.init()
    backend = backend_of(group)
    assert backend.supports_shrinking
    dist.barrier()
    if rank.rank == 2:
        return
    smaller = backend.shrink([2])
    assert smaller.size() == 3 and smaller.rank() == [0, 1, None, 2][rank.rank]
    tensor = make_input(torch.float32, 999, 1, smaller.rank())
    smaller.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert_same_bits(tensor, reduce([make_input(torch.float32, 999, 1, r) for r in range(3)], "SUM"), "shrunk")
    smaller.shutdown()


@ark_only
@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d.Backend, "shrink"), reason="this PyTorch has no shrink")
def test_shrink() -> None:
    run_ranks(_shrink, 4)


def _disabled(rank: Rank) -> str:
    rank.init()
    assert total(None, 1.0) == rank.world_size
    return type(backend_of(dist.group.WORLD)).__name__


@ark_only
def test_ark_disable_hands_the_group_to_gloo() -> None:
    with Job(_disabled, 2, env={"ARK_DISABLE": "1"}) as job:
        assert all("Gloo" in name for name in job.values())
        logs = [o.log for o in job.outcomes]
    assert sum("ARK_DISABLE" in log for log in logs) >= 1, logs
    assert all(log.count("ARK_DISABLE") <= 1 for log in logs), "one log line"
