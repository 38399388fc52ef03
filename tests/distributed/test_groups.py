"""Groups: making, nesting, splitting, merging, naming, closing, and making them again.

PyTorch's module-level split_group, monitored_barrier and sequence numbers refuse third-party backends by
name, so those go through the group object, which is where a program would reach them as well.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank
from support.reference import assert_same_bits, make_input, reduce

ark_only = pytest.mark.skipif(BACKEND != "ark", reason="what only ark promises")


def _backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def _total(group: Any, value: float) -> float:
    tensor = torch.full((3,), value)
    dist.all_reduce(tensor, group=group)
    assert tensor.unique().numel() == 1
    return tensor[0].item()


def _subgroups(rank: Rank) -> None:
    rank.init()
    world, me = rank.world_size, rank.rank
    for size in range(1, world + 1):
        for members in itertools.combinations(range(world), size):
            group = dist.new_group(list(members))
            if me in members:
                assert dist.get_rank(group) == members.index(me) and dist.get_world_size(group) == size
                assert _total(group, 10.0**me) == sum(10.0**r for r in members)
                tensor = torch.full((2,), float(me))
                dist.broadcast(tensor, src=members[-1], group=group)
                assert tensor[0].item() == members[-1]
                got = [torch.empty(1) for _ in members]
                dist.all_gather(got, torch.tensor([float(me)]), group=group)
                assert [x.item() for x in got] == list(members)
            else:
                assert group is dist.GroupMember.NON_GROUP_MEMBER
    backwards = dist.new_group(list(reversed(range(world))), use_local_synchronization=False)
    assert _total(backwards, 1.0) == world
    lone = dist.new_group([me], use_local_synchronization=True)
    assert _total(lone, me + 1.0) == me + 1.0


@pytest.mark.quick
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_subgroup(world: int) -> None:
    run_ranks(_subgroups, world)


def _split(rank: Rank) -> None:
    """ProcessGroup.split_group, twice nested; ranks outside get None, as with NCCL."""
    world_group = rank.init()
    me = rank.rank
    backend = _backend(world_group)
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
    assert _total(None, 1.0) == 4, "the parent still works"
    # All of them at once.
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
    """split_group deep-copies the parent's options: they are bound and can be copied."""
    world_group = rank.init(timeout=47)
    options = _backend(world_group).options
    for made in (copy.copy(options), copy.deepcopy(options)):
        assert made is not options and made._timeout == timedelta(seconds=47)
    assert list(options.global_ranks_in_group) in ([], list(range(rank.world_size)))
    group = dist.new_group([1, 0])
    assert list(_backend(group).options.global_ranks_in_group) == [0, 1]
    # What new_group calls on the ranks outside when device_id was given.
    _backend(world_group).perform_nocolor_split(torch.device("cpu"))


@pytest.mark.quick
@ark_only
def test_options_can_be_copied() -> None:
    run_ranks(_options, 2)


def _mesh(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank.init()
    me = rank.rank
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    assert _total(line.get_group("all"), 1.0) == 4
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert _total(square.get_group("tp"), 10.0**me) == sum(10.0**r for r in (me // 2 * 2, me // 2 * 2 + 1))
    assert _total(square.get_group("dp"), 10.0**me) == sum(10.0**r for r in (me % 2, me % 2 + 2))
    flat = square[("dp", "tp")]._flatten("both")
    assert _total(flat.get_group(), 1.0) == 4
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert [_total(cube.get_group(name), 1.0) for name in ("pp", "dp", "tp")] == [2, 1, 2]
    assert cube["tp"].get_local_rank() == me % 2


def test_device_mesh_of_one_two_and_three_dimensions() -> None:
    run_ranks(_mesh, 4)


def _again(rank: Rank) -> None:
    """Destroy and init again in one process; groups of the same name on one store."""
    from support.processes import open_descriptors

    counts = []
    for _ in range(6):
        rank.init()
        group = dist.new_group([0, 1])
        assert _total(group, rank.rank + 1.0) == 3 and _total(None, 1.0) == 2
        dist.destroy_process_group(group)
        assert _total(None, 1.0) == 2, "the world outlives a destroyed subgroup"
        dist.destroy_process_group()
        assert not dist.is_initialized()
        gc.collect()
        counts.append(len(open_descriptors()))
    assert counts[-1] <= counts[1] + 6, f"descriptors grow: {counts}"  # the job's own store clients: one an init


@pytest.mark.quick
def test_destroy_and_init_again() -> None:
    run_ranks(_again, 2)


def _same_store(rank: Rank) -> None:
    """The store survives, as under torchrun's restart: the second incarnation must not meet the first's keys."""
    store = rank.store("survivor")
    for incarnation in range(3):
        rank.init(store=dist.PrefixStore(f"attempt{incarnation}", store))
        assert _total(None, 2.0) == 4
        dist.destroy_process_group()


@pytest.mark.quick
def test_one_store_many_incarnations() -> None:
    run_ranks(_same_store, 2)


def _sequence_numbers(rank: Rank) -> None:
    """Through the backend: ProcessGroup's own method refuses third parties by their type."""
    backend = _backend(rank.init())
    backend._set_sequence_number_for_group()
    first = backend._get_sequence_number_for_group()
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    last = backend._get_sequence_number_for_group()
    assert last - first == 6, f"{first} -> {last} after six operations"
    other = dist.new_group([0, 1])
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2), group=other)
    assert backend._get_sequence_number_for_group() == before, "a group counts its own operations"
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, last)
    assert everyone == [last, last], "the ranks agree"


@pytest.mark.quick
@ark_only
def test_sequence_numbers() -> None:
    run_ranks(_sequence_numbers, 2)


def _set_timeout(rank: Rank) -> float:
    group = rank.init(timeout=600)
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    group.set_timeout(timedelta(seconds=1))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        dist.all_reduce(torch.ones(3))
    rank.report("raised")
    return time.monotonic() - started


@ark_only
def test_set_timeout_is_obeyed() -> None:
    with Job(_set_timeout, 2, destroy=False) as job:
        job.wait_event(0, "raised", timeout=30)
        job.go(1, "go")
        took = job.finish(30)[0].value
    assert took is not None and 0.9 <= took < 6


def _monitored(rank: Rank, missing: list[int], wait_all: bool) -> str:
    group = rank.init()
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=wait_all)
    if rank.rank in missing:
        rank.wait_for("go")
        return ""
    try:
        group.monitored_barrier(timedelta(seconds=2), wait_all_ranks=wait_all)
    except RuntimeError as error:
        rank.report("raised", str(error))
        return str(error)
    raise AssertionError("the barrier passed without everybody")


@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_the_missing(wait_all: bool) -> None:
    missing = [1, 3]
    with Job(_monitored, 4, missing, wait_all, destroy=False) as job:
        text = job.wait_event(0, "raised", timeout=40)
        job.wait_event(2, "raised", timeout=40)
        for rank in missing:
            job.go(rank, "go")
        job.finish(40)
    named = [str(r) for r in range(1, 4) if str(r) in text.replace("2000", "").replace("2 s", "")]
    assert "1" in named and (not wait_all or "3" in named), text


def _hooks(rank: Rank) -> None:
    group = rank.init()
    seen: list[Any] = []
    group._register_on_completion_hook(lambda info: seen.append((info.op_type, info.seq, info.active_duration)))
    assert group._has_hooks()
    for _ in range(4):
        dist.all_reduce(torch.ones(10))
    work = dist.broadcast(torch.ones(10), 0, async_op=True)
    work.wait()
    group._wait_for_pending_works()
    deadline = time.monotonic() + 10
    while len(seen) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(seen) == 5, seen
    assert [str(kind).rpartition(".")[2] for kind, _, _ in seen] == ["ALLREDUCE"] * 4 + ["BROADCAST"]
    sequence = [number for _, number, _ in seen]
    assert sequence == sorted(set(sequence))


@ark_only
def test_completion_hooks() -> None:
    run_ranks(_hooks, 2)


def _abort(rank: Rank) -> float:
    """abort() from another thread frees a rank that waits for a peer that never comes."""
    group = rank.init(timeout=300)
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    threading.Timer(0.5, group.abort).start()
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        assert "abort" in str(error).lower(), error
        took = time.monotonic() - started
    else:
        raise AssertionError("all_reduce returned although rank 1 never came")
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    rank.report("aborted")
    return took


@ark_only
def test_abort_frees_a_waiting_rank() -> None:
    with Job(_abort, 2, destroy=False) as job:
        job.wait_event(0, "aborted", timeout=20)
        job.go(1, "go")
        took = job.finish(20)[0].value
    assert took is not None and took < 3


def _closed(rank: Rank) -> None:
    group = rank.init()
    dist.barrier()
    backend = _backend(group)
    backend.shutdown()
    backend.shutdown()  # twice is harmless
    with pytest.raises(RuntimeError, match=r"(?i)shut ?down|closed"):
        group.allreduce([torch.ones(3)]).wait()
    backend.abort()
    dist.destroy_process_group()
    rank.init()
    assert _total(None, 1.0) == rank.world_size


@ark_only
def test_a_closed_group_says_so() -> None:
    run_ranks(_closed, 2)


def _pending_at_destroy(rank: Rank) -> None:
    """destroy with work in flight drains it (shutdown() must drain)."""
    rank.init()
    tensor = torch.full((3_000_000,), 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    work.wait()
    assert tensor[-1].item() == rank.world_size


@ark_only
def test_destroy_drains_what_is_in_flight() -> None:
    run_ranks(_pending_at_destroy, 2)


def _detail(rank: Rank) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in PyTorch's checker."""
    import torch.distributed._functional_collectives as funcol

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    rank.init()
    world, me = rank.world_size, rank.rank
    assert _total(None, 1.0) == world
    outs = [torch.empty(4) for _ in range(world)]
    dist.all_gather(outs, torch.full((4,), float(me)))
    assert [x[0].item() for x in outs] == list(range(world))
    part = torch.empty(5)
    dist.reduce_scatter_tensor(part, torch.ones(5 * world))
    assert part.tolist() == [float(world)] * 5
    dist.barrier()
    got = funcol.all_gather_tensor(torch.full((2,), float(me)), 0, dist.group.WORLD) + 0
    assert got.tolist() == [float(r) for r in range(world) for _ in range(2)]
    got = funcol.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, dist.group.WORLD) + 0
    assert got.tolist() == [float(world)] * 2
    group = dist.new_group(list(range(world)))
    assert _total(group, 2.0) == 2 * world
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def test_debug_detail() -> None:
    run_ranks(_detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def _get_error(rank: Rank) -> None:
    group = rank.init()
    backend = _backend(group)
    assert str(backend.get_error()).rpartition(".")[2] == "SUCCESS"
    group.set_timeout(timedelta(seconds=0.5))
    if rank.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1))
        assert str(backend.get_error()).rpartition(".")[2] != "SUCCESS"
        rank.report("done")
    else:
        rank.wait_for("go")


@ark_only
def test_get_error() -> None:
    with Job(_get_error, 2, destroy=False) as job:
        job.wait_event(0, "done", timeout=30)
        job.go(1, "go")
        outcomes = job.finish(30)
    assert [o.kind for o in outcomes] == ["result", "result"], outcomes


def _names_and_flags(rank: Rank) -> None:
    group = rank.init(group_name="", pg_options=None)
    backend = _backend(group)
    assert backend.name() == BACKEND and dist.get_backend() == BACKEND
    assert backend.rank() == rank.rank and backend.size() == rank.world_size
    assert backend is _backend(group)
    assert not backend.supports_time_estimate, "time estimation is off"
    assert group._get_backend(torch.device("cpu")) is group._get_backend(torch.device("cuda")), "one instance for both"


@pytest.mark.quick
@ark_only
def test_names_and_flags() -> None:
    run_ranks(_names_and_flags, 2)


def _mixed_backends(rank: Rank) -> None:
    """A world of "cpu:gloo,cuda:ark" or "cpu:ark"; ark groups beside gloo groups."""
    rank.init(backend=f"cpu:{BACKEND}")
    assert _total(None, 1.0) == rank.world_size
    plain = dist.new_group(list(range(rank.world_size)), backend="gloo")
    assert _total(plain, 3.0) == 3 * rank.world_size
    dist.destroy_process_group()
    rank.init(backend=f"cpu:gloo,cuda:{BACKEND}")
    assert _total(None, 1.0) == rank.world_size
    dist.destroy_process_group()
    rank.init(backend="gloo")
    ark = dist.new_group(list(range(rank.world_size)), backend=BACKEND)
    assert _total(ark, 3.0) == 3 * rank.world_size and _total(None, 1.0) == rank.world_size


@pytest.mark.quick
@ark_only
def test_beside_other_backends() -> None:
    run_ranks(_mixed_backends, 2)


def _merge(rank: Rank) -> None:
    """Two groups of one become a group of two (where the base class has merge)."""
    store = rank.store("merge")
    rank.init(rank=0, world_size=1, store=dist.PrefixStore(f"alone{rank.rank}", store))
    lone = dist.group.WORLD
    assert _total(None, 5.0) == 5
    merged = lone.merge_remote_group(dist.PrefixStore("merged", store), 2, timedelta(seconds=30), "merged", "both")
    tensor = torch.full((4,), 1.0)
    merged.allreduce([tensor]).wait()
    assert merged.size() == 2 and tensor.tolist() == [2.0] * 4
    assert _total(None, 5.0) == 5
    merged.shutdown()


@ark_only
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "merge_remote_group"), reason="this PyTorch has no merge")
def test_merge() -> None:
    run_ranks(_merge, 2)


def _shrink(rank: Rank) -> None:
    """Without rank 2; the excluded rank does not take part."""
    group = rank.init()
    backend = _backend(group)
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


def _concurrent_creation(rank: Rank) -> None:
    """Many groups, created and destroyed while another thread keeps a group busy."""
    rank.init()
    busy = dist.new_group(list(range(rank.world_size)))
    stop = threading.Event()
    steps: list[int] = []
    failures: list[BaseException] = []

    def keep_busy() -> None:
        # Everybody does the same number of steps: the count is agreed on in each of them.
        try:
            while True:
                flag = torch.tensor([1.0 if stop.is_set() else 0.0, 1.0])
                dist.all_reduce(flag, group=busy)
                steps.append(int(flag[1].item()))
                if flag[0].item() == rank.world_size:
                    return
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=keep_busy)
    thread.start()
    for _ in range(15):
        group = dist.new_group(list(range(rank.world_size)))
        assert _total(group, 1.0) == rank.world_size
        dist.destroy_process_group(group)
    stop.set()
    thread.join()
    if failures:
        raise failures[0]
    assert set(steps) == {rank.world_size}


def test_groups_come_and_go_beside_a_busy_one() -> None:
    run_ranks(_concurrent_creation, 2)


def _disabled(rank: Rank) -> str:
    rank.init()
    assert _total(None, 1.0) == rank.world_size
    return type(_backend(dist.group.WORLD)).__name__


@ark_only
def test_ark_disable_hands_the_group_to_gloo() -> None:
    with Job(_disabled, 2, env={"ARK_DISABLE": "1"}) as job:
        assert all("Gloo" in name for name in job.values())
        logs = [o.log for o in job.outcomes]
    assert sum("ARK_DISABLE" in log for log in logs) >= 1, logs
    assert all(log.count("ARK_DISABLE") <= 1 for log in logs), "one log line"


def _fork_after_init(rank: Rank) -> str:
    """A forked child does not own the group: it is told so instead of hanging; the parent goes on."""
    rank.init()
    assert _total(None, 1.0) == rank.world_size
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "no error"
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            text = str(error)
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    started = time.monotonic()
    text = b""
    while part := os.read(read_end, 4096):
        text += part
    os.waitpid(pid, 0)
    assert time.monotonic() - started < 10
    assert _total(None, 1.0) == rank.world_size, "the parent's group still works"
    return text.decode()


@ark_only
def test_a_forked_child_is_told() -> None:
    for text in run_ranks(_fork_after_init, 2):
        assert "fork" in text, text
