"""The failure table, rows 13, 14 and 20: abort, destroy, fork, restart, and strangers at the bootstrap."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import processes
from support.failures import KILL_BOUND_S, SLACK_S, TIMEOUT_S, check_message, record
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank

pytestmark = pytest.mark.skipif(BACKEND != "ark", reason="the failure table is ark's promise")


# -- row 13: abort, destroy, fork


def _destroy_pending(rank: Rank) -> float:
    rank.init(timeout=TIMEOUT_S)
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    work = dist.all_reduce(torch.ones(10), async_op=True)  # rank 1 never calls
    started = time.monotonic()
    try:
        dist.destroy_process_group()
    except RuntimeError:
        pass
    took = time.monotonic() - started
    with pytest.raises(RuntimeError):
        work.wait()
    rank.report("destroyed", took)
    return took


def test_row_13_destroy_with_work_pending() -> None:
    with Job(_destroy_pending, 2, destroy=False) as job:
        took = job.wait_event(0, "destroyed", 40)
        job.go(1, "go")
        job.finish(20)
    record("13", "destroy with work pending", f"T + {SLACK_S} s", took)
    assert took < TIMEOUT_S + SLACK_S


def _abort_in_flight(rank: Rank) -> tuple[float, str]:
    group = rank.init(timeout=120)
    dist.barrier()
    rank.report("running")
    if rank.rank == 2:
        threading.Timer(0.5, group.abort).start()
    started = time.monotonic()
    try:
        if rank.rank == 0:
            rank.wait_for("go")  # does not take part until the end
            dist.all_reduce(torch.ones(10))  # the others' inputs may all have arrived: then this one is correct
        dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        return time.monotonic() - started, str(error)
    raise AssertionError("the group goes on after abort()")


def test_row_13_abort_in_flight() -> None:
    with Job(_abort_in_flight, 3, destroy=False) as job:
        job.wait_all("running")
        outcomes = job.wait_outcomes([1, 2], 20)
        job.go(0, "go")
        outcomes += job.wait_outcomes([0], 20)
        for outcome in outcomes:
            assert outcome.kind == "result", outcome.describe()
            assert "abort" in outcome.value[1].lower(), outcome.value[1]
        seconds = [o.value[0] - 0.5 for o in outcomes[:2]]
        assert "rank 2" in outcomes[0].value[1].partition("]")[2], outcomes[0].value[1]
        record("13", "abort in flight, own and peer's", "2 s", seconds, outcomes[0].value[1])
        assert max(seconds) < 2


def _double_destroy(rank: Rank) -> None:
    group = rank.init()
    dist.all_reduce(torch.ones(3))
    backend = group._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        dist.destroy_process_group()
    backend.shutdown()
    backend.abort()


@pytest.mark.quick
def test_row_13_double_destroy() -> None:
    started = time.monotonic()
    run_ranks(_double_destroy, 2, destroy=False)
    record("13", "double destroy", "no abort", time.monotonic() - started)


def _fork_and_exit(rank: Rank, children: int) -> None:
    """A forked child (a DataLoader's worker) exits without affecting the parent's group."""
    rank.init()
    dist.all_reduce(torch.ones(3))
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            raise SystemExit(0)  # through the interpreter's shutdown with all destructors
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the child ended with status {status}"
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        assert tensor[0].item() == rank.world_size


def _fork_quietly(rank: Rank) -> None:
    rank.init()
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor[0].item() == rank.world_size
    child = os.fork()
    if child == 0:
        time.sleep(3)  # outlives its parent: peers must not mistake it for the parent
        os._exit(0)
    rank.report("forked", child)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))


def test_row_13_forked_children_exit(request: pytest.FixtureRequest) -> None:
    started = time.monotonic()
    children = 5 if request.config.getoption("--night") else 2
    run_ranks(_fork_and_exit, 2, children, timeout=60, leaves_at_once=False)
    record("13", "forked children shut down, the parents go on", "no abort", time.monotonic() - started)


def test_row_13_fork_after_init() -> None:
    """A surviving child holds copies of the parent's descriptors. The parent's death must still be noticed."""
    with Job(_fork_quietly, 2, destroy=False) as job:
        child = job.wait_event(1, "forked", 60)
        other = job.wait_event(0, "forked", 60)
        since = job.wait_outcomes([1], 10)[0].ended
        (outcome,) = job.wait_outcomes([0], 30)
        text = check_message(outcome, 1, "all_reduce")
        record("13", "killed parent of a living fork", f"{KILL_BOUND_S} s", outcome.ended - since, text)
        assert outcome.ended - since < KILL_BOUND_S
        processes.end_tree([child, other])


# -- row 14: start again


def _start_again(rank: Rank) -> tuple[float, str]:
    rank.init(timeout=20)
    dist.barrier()
    rank.report("running")
    if rank.rank == 1:
        time.sleep(300)
    try:
        dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("rank 1 was killed and nobody noticed")
    dist.destroy_process_group()
    started = time.monotonic()
    rank.init(rank={0: 0, 2: 1}[rank.rank], world_size=2)
    for step in range(100):
        tensor = torch.full((5000,), float(step))
        dist.all_reduce(tensor)
        assert tensor[-1].item() == 2.0 * step
    return time.monotonic() - started, text


def test_row_14_start_again_after_a_failure() -> None:
    with Job(_start_again, 3) as job:
        job.wait_all("running")
        time.sleep(0.1)
        job.kill(1)
        outcomes = job.finish(40, [0, 2])
        assert [o.kind for o in outcomes] == ["result"] * 2, [o.describe() for o in outcomes]
        record("14", "start again in the same processes", "works", [o.value[0] for o in outcomes], outcomes[0].value[1])


# -- row 20: strangers at the bootstrap socket


def _wait_for_socket(pid: int, bound: float) -> str | None:
    """Returns the name of the abstract socket on which the process listens, or None if there is none in time."""
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        inodes = {link[8:-1] for link in processes.open_descriptors(pid).values() if link.startswith("socket:[")}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("@ark-"):
                return "\0" + fields[7][1:]
    return None


def _late(rank: Rank) -> float:
    store = rank.store("one")
    rank.report("here")
    rank.wait_for("go")
    rank.init(timeout=30, store=store)
    tensor = torch.full((100,), float(rank.rank))
    dist.all_reduce(tensor)
    return tensor[0].item()


def _harass(name: str) -> list[socket.socket]:
    """Sends garbage, a flood, silence, early hang-ups and foreign descriptors. Returns connections that stay open."""
    held = []
    for payload in (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), os.urandom(1 << 16), b"ark"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        try:
            stranger.connect(name)
            stranger.send(payload)
        except OSError:
            pass  # already dropped, or the queue is full
        if len(payload) in (0, 3):
            held.append(stranger)  # stays connected and silent
        else:
            stranger.close()
    for _ in range(20):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        try:
            stranger.connect(name)
        except OSError:
            pass
        stranger.close()
    foreign = socket.socket(socket.AF_UNIX)
    foreign.setblocking(False)
    try:
        foreign.connect(name)
        socket.send_fds(foreign, [os.urandom(64)], [0, 1, 2])
    except OSError:
        pass
    held.append(foreign)
    return held


@pytest.mark.nightly
def test_row_20_strangers_at_the_bootstrap_socket() -> None:
    """The peers are stopped as soon as rank 0 listens, strangers connect, then the peers continue."""
    started = time.monotonic()
    met = 0
    for _ in range(12):
        with Job(_late, 3) as job:
            job.wait_all("here")
            job.go_all("go")
            name = _wait_for_socket(job.pids[0], 1.0)
            held: list[socket.socket] = []
            if name is not None:
                job.stop(1)
                job.stop(2)
                held = _harass(name)
                met += 1
                job.resume(1)
                job.resume(2)
            values = job.values(40)
            for stranger in held:
                stranger.close()
        assert values == [3.0, 3.0, 3.0]
    assert met >= 3, f"the socket was met in {met} of 12 starts: the test proves nothing"
    record("20", f"garbage, flood, silence, descriptors; {met} starts", "the job goes on", time.monotonic() - started)
