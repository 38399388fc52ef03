"""The failure table, rows 8 to 10: odd tensors, a store that dies, exhausted memory and descriptors."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import processes
from support.failures import SLACK_S, TIMEOUT_S, check_message, record
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank

pytestmark = pytest.mark.skipif(BACKEND != "ark", reason="the failure table is ark's promise")


# -- row 8: odd tensors (the details are in test_reductions.py, test_data_movement.py and test_bad_input.py)


def _odd(rank: Rank) -> None:
    rank.init()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    strided = torch.ones(10)[::2]
    dist.all_reduce(strided)
    assert strided.tolist() == [2.0] * 5
    raw = torch.zeros(41, dtype=torch.uint8)
    unaligned = raw[1:].view(torch.uint8)
    unaligned.fill_(3)
    dist.all_reduce(unaligned)
    assert unaligned.tolist() == [6] * 40 and raw[0] == 0
    dist.all_reduce(torch.empty(0))
    with pytest.raises(ValueError, match="meta"):
        backend.allreduce([torch.empty(3, device="meta")])


@pytest.mark.quick
def test_row_8_odd_tensors() -> None:
    started = time.monotonic()
    run_ranks(_odd, 2)
    record("8", "strided, unaligned, empty, wrong device", "right or refused", time.monotonic() - started)


# -- row 9: the store


def _host_store(rank: Rank) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank.report("port", store.port)
    time.sleep(300)


def _after_store(rank: Rank) -> str:
    rank.init(timeout=5)
    dist.barrier()
    rank.report("running")
    rank.wait_for("go")
    for step in range(50):
        tensor = torch.full((1000,), float(step))
        dist.all_reduce(tensor)
        assert tensor[0].item() == 2 * step
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    rank.report("went on", True)
    started = time.monotonic()
    try:
        dist.new_group([0, 1])
    except RuntimeError as error:
        assert time.monotonic() - started < 12
        return str(error)
    raise AssertionError("new_group without a store")


def test_row_9_the_store_dies_after_start_up() -> None:
    with Job(_host_store, 1, destroy=False) as host:
        port = host.wait_event(0, "port")
        with Job(_after_store, 2, store=("127.0.0.1", port), store_timeout=5, destroy=False) as job:
            job.wait_all("running")
            host.kill(0)
            host.finish(5)
            since = time.monotonic()
            job.go_all("go")
            job.wait_all("went on", 20)
            record("9", "store dies after start-up", "collectives go on", time.monotonic() - since)
            outcomes = job.finish(30)
            assert [o.kind for o in outcomes] == ["result"] * 2, [o.describe() for o in outcomes]


def _before_store(rank: Rank) -> None:
    store = rank.store()
    rank.report("connected")
    rank.wait_for("go")
    rank.init(store=store, timeout=5)


def test_row_9_the_store_dies_before_start_up() -> None:
    with Job(_host_store, 1, destroy=False) as host:
        port = host.wait_event(0, "port")
        with Job(_before_store, 2, store=("127.0.0.1", port), store_timeout=5, destroy=False) as job:
            job.wait_all("connected")
            host.kill(0)
            host.finish(5)
            since = time.monotonic()
            job.go_all("go")
            outcomes = job.wait_outcomes([0, 1], 40)
            seconds = [o.ended - since for o in outcomes]
            assert all(o.kind == "error" for o in outcomes), [o.describe() for o in outcomes]
            record("9", "store dies before start-up", "store's timeout", seconds, outcomes[0].message)
            assert max(seconds) < 5 + SLACK_S


# -- row 10: out of memory


def _starved(rank: Rank, what: str) -> None:
    rank.report("here")
    rank.wait_for("go")
    if rank.rank == 1 and what == "address space":
        size = next(
            int(line.split()[1]) << 10
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmSize:")
        )
        resource.setrlimit(resource.RLIMIT_AS, (size + (12 << 20), resource.RLIM_INFINITY))
    elif rank.rank == 1 and what == "file size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY))
    elif rank.rank == 1 and what == "descriptors":
        store = rank.store("early")
        used = len(processes.open_descriptors())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, 4096))
        rank.init(timeout=6, store=store)
        return
    rank.init(timeout=6, store=rank.store("early"))
    dist.all_reduce(torch.ones(10))


@pytest.mark.by_day("address space-(?i)memory|allocate", "descriptors-(?i)descriptor|open files")
@pytest.mark.parametrize(
    "what, hint",
    [
        ("address space", r"(?i)memory|allocate"),
        ("file size", r"(?i)memory|large|bytes"),
        ("descriptors", r"(?i)descriptor|open files"),
    ],
)
def test_row_10_out_of_memory_at_start(what: str, hint: str) -> None:
    with Job(_starved, 3, what, destroy=False) as job:
        job.wait_all("here")
        since = time.monotonic()
        job.go_all("go")
        outcomes = job.wait_outcomes([0, 1, 2], 40)
        seconds = [o.ended - since for o in outcomes]
        poor = outcomes[1]
        assert poor.kind == "error", poor.describe()
        assert re.search(hint, poor.message), poor.message
        assert "[rank 1]" in poor.message and len(re.findall(r"\. [A-Z]", poor.message)) >= 1, poor.message
        assert what != "file size" or re.search(r"\d{5,} bytes", poor.message), f"no size: {poor.message}"
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.kind == "error", outcome.describe()
            assert re.search(r"\brank 1\b|ranks? [\d, ]*\b1\b", outcome.message), outcome.message
        record("10", f"limit on {what}", f"T + {SLACK_S} s", seconds, poor.message)
        assert max(seconds) < 6 + SLACK_S


def _mapped() -> int:
    """Returns the size of this process's address space in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize:"))


def _starved_inside(rank: Rank) -> str:
    rank.init(timeout=TIMEOUT_S)
    count = 16 << 20
    buffer = torch.ones(2 * count)
    dist.all_reduce(torch.ones(10))
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + (8 << 20), resource.RLIM_INFINITY))
    dist.all_reduce(buffer[::2])  # needs a contiguous copy of 64 MB
    return "no error"


def test_row_10_out_of_memory_inside() -> None:
    with Job(_starved_inside, 2, destroy=False) as job:
        outcomes = job.wait_outcomes([0, 1], 40)
        poor, other = outcomes[1], outcomes[0]
        assert poor.kind == "error" and re.search(r"(?i)memory|allocate", poor.message), poor.describe()
        assert str((16 << 20) * 4) in poor.message, f"names no size: {poor.message}"
        check_message(other, 1, "all_reduce")
        record("10", "no memory for a copy", f"T + {SLACK_S} s", other.ended - poor.ended, poor.message)


def _no_thread_for_messages(rank: Rank) -> None:
    """A recv that raises has no effect: its tensor is not written, and the next recv gets the message."""
    rank.init(timeout=TIMEOUT_S)
    if rank.rank == 1:
        rank.wait_for("go")
        dist.send(torch.arange(50_000.0), 0)
        return
    first, second = torch.full((50_000,), -1.0), torch.empty(50_000)
    usual = resource.getrlimit(resource.RLIMIT_AS)
    # Too little for a thread's stack, but enough for what libraries allocate per thread, without which glibc aborts.
    resource.setrlimit(resource.RLIMIT_AS, (_mapped() + (1 << 20), usual[1]))
    try:
        with pytest.raises(RuntimeError, match=r"cannot start the thread that makes send and recv progress.*ulimit"):
            dist.irecv(first, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    rank.report("refused")
    dist.recv(second, 1)
    assert torch.equal(second, torch.arange(50_000.0)) and bool((first == -1).all())


def test_row_10_no_thread_for_messages() -> None:
    with Job(_no_thread_for_messages, 2) as job:
        job.wait_event(0, "refused", timeout=20)
        job.go(1, "go")
        job.values(20)
