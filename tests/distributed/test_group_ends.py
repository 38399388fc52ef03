"""How a group ends and what follows: destroy and init again, abort, shutdown, work in flight, fork."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only, backend_of, total
from support.launcher import Job, run_ranks
from support.rank import Rank


def _again(rank: Rank) -> None:
    """Destroys and creates groups of the same name in one process, on one store."""
    from support.processes import open_descriptors

    counts = []
    for _ in range(6):
        rank.init()
        group = dist.new_group([0, 1])
        assert total(group, rank.rank + 1.0) == 3 and total(None, 1.0) == 2
        dist.destroy_process_group(group)
        assert total(None, 1.0) == 2, "the world outlives a destroyed subgroup"
        dist.destroy_process_group()
        assert not dist.is_initialized()
        gc.collect()
        counts.append(len(open_descriptors()))
    assert counts[-1] <= counts[1] + 6, f"descriptors grow: {counts}"  # the job's own store clients: one per init


@pytest.mark.quick
def test_destroy_and_init_again() -> None:
    run_ranks(_again, 2)


def _same_store(rank: Rank) -> None:
    """The store survives, as in torchrun's restart. The second incarnation must not see the first one's keys."""
    store = rank.store("survivor")
    for incarnation in range(3):
        rank.init(store=dist.PrefixStore(f"attempt{incarnation}", store))
        assert total(None, 2.0) == 4
        dist.destroy_process_group()


@pytest.mark.quick
def test_one_store_many_incarnations() -> None:
    run_ranks(_same_store, 2)


def _abort(rank: Rank) -> float:
    """abort() from another thread releases a rank that waits for a peer that never calls."""
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
    backend = backend_of(group)
    backend.shutdown()
    backend.shutdown()  # a second call does nothing
    with pytest.raises(RuntimeError, match=r"(?i)shut ?down|closed"):
        group.allreduce([torch.ones(3)]).wait()
    backend.abort()
    dist.destroy_process_group()
    rank.init()
    assert total(None, 1.0) == rank.world_size


@ark_only
def test_a_closed_group_says_so() -> None:
    run_ranks(_closed, 2)


def _pending_at_destroy(rank: Rank) -> None:
    """destroy completes work in flight, because shutdown() must drain it."""
    rank.init()
    tensor = torch.full((3_000_000,), 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    dist.destroy_process_group()
    work.wait()
    assert tensor[-1].item() == rank.world_size


@ark_only
def test_destroy_drains_what_is_in_flight() -> None:
    run_ranks(_pending_at_destroy, 2)


def _concurrent_creation(rank: Rank) -> None:
    """Many groups are created and destroyed while another thread keeps a group busy."""
    rank.init()
    busy = dist.new_group(list(range(rank.world_size)))
    stop = threading.Event()
    steps: list[int] = []
    failures: list[BaseException] = []

    def keep_busy() -> None:
        # All ranks run the same number of steps, because each step agrees on whether to stop.
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
        assert total(group, 1.0) == rank.world_size
        dist.destroy_process_group(group)
    stop.set()
    thread.join()
    if failures:
        raise failures[0]
    assert set(steps) == {rank.world_size}


def test_groups_come_and_go_beside_a_busy_one() -> None:
    run_ranks(_concurrent_creation, 2)


def _fork_after_init(rank: Rank) -> str:
    """A forked child does not own the group. It gets an error instead of a hang, and the parent continues."""
    rank.init()
    assert total(None, 1.0) == rank.world_size
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
    assert total(None, 1.0) == rank.world_size, "the parent's group still works"
    return text.decode()


@ark_only
def test_a_forked_child_is_told() -> None:
    for text in run_ranks(_fork_after_init, 2):
        assert "fork" in text, text
