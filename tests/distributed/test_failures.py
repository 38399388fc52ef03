"""The failure table: processes are killed, stopped and starved, and every survivor must say so in time.

Each test is one row (or a part of one) of the project's failure table, and adds what it measured to the
table "failures", printed at the end and written as JSON. Times run from the signal to the survivor's error
arriving here. An error must name the guilty rank, the operation, its sequence number and a remedy.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import processes, tables
from support.launcher import BACKEND, Job, Outcome, run_ranks
from support.rank import Rank

pytestmark = pytest.mark.skipif(BACKEND != "ark", reason="the failure table is ark's promise")

KILL_BOUND_S = 1.0  # a killed local peer is noticed within this
TIMEOUT_S = 2.0
SLACK_S = 5.0  # a timeout of T is told between T and T + SLACK_S


def _record(row: str, case: str, bound: str, seconds: list[float] | float, message: str = "") -> None:
    values = seconds if isinstance(seconds, list) else [seconds]
    tables.add(
        "failures", row=row, case=case, bound=bound, slowest_s=max(values), message=message.partition("\n")[0][:160]
    )


def _check_message(outcome: Outcome, guilty: int | None, operation: str) -> str:
    """The survivor raised, and says who, what, which and what to do."""
    assert outcome.kind == "error", outcome.describe()
    assert "RuntimeError" in outcome.value["bases"], outcome.value["bases"]
    text = outcome.message.splitlines()[0]
    assert text.startswith(f"ark: [rank {outcome.rank}] "), text
    if guilty is not None:
        assert re.search(rf"\brank {guilty}\b", text.partition("] ")[2]), f"does not name rank {guilty}: {text}"
    assert re.search(rf"\b{operation} #\d+", text), f"does not name {operation} and its number: {text}"
    assert len(re.findall(r"\. [A-Z][^.]+\.", text)) >= 1, f"no remedy: {text}"
    return text


# -- row 1: SIGKILL


def _loop(rank: Rank, count: int) -> None:
    """All-reduce for ever; the error ends it."""
    rank.init(timeout=120)
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    rank.report("running")
    while True:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)


def _victim_idle(rank: Rank, how: str) -> None:
    """The victim (the last rank) does nothing; the others wait for it in various ways."""
    rank.init(timeout=120)
    dist.barrier()
    victim = rank.world_size - 1
    rank.report("running")
    if rank.rank == victim:
        time.sleep(300)
    if how == "sync":
        dist.all_reduce(torch.ones(10))
    elif how == "async":
        dist.all_reduce(torch.ones(10), async_op=True).wait()
    elif how == "future":
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
    elif how == "polling":
        work = dist.all_reduce(torch.ones(10), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
    elif how == "broadcast":
        dist.broadcast(torch.ones(10), victim)
    elif how == "barrier":
        dist.barrier()
    elif how == "recv":
        dist.recv(torch.ones(10), victim)
    elif how == "later":  # nobody is inside an operation when it happens
        rank.wait_for("go")
        dist.all_reduce(torch.ones(10))
    elif how == "subgroup":
        raise AssertionError("not here")


def _kill(job: Job, victim: int, survivors: list[int], operation: str, row: str, case: str) -> None:
    sent = job.kill(victim)
    outcomes = job.wait_outcomes(survivors, timeout=30)
    seconds = [o.ended - sent for o in outcomes]
    texts = [_check_message(o, victim, operation) for o in outcomes]
    _record(row, case, f"{KILL_BOUND_S} s", seconds, texts[0])
    assert max(seconds) < KILL_BOUND_S, f"noticed after {seconds} s"
    codes = [o.exit_code for o in job.finish(10, survivors)]
    assert all(code == 1 for code in codes), f"survivors' exit codes {codes}"


@pytest.mark.quick
@pytest.mark.parametrize("count", [16, 4 << 20], ids=["small", "large"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_row_1_killed_inside_an_operation(count: int, victim: int) -> None:
    with Job(_loop, 3, count, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.15 + 0.01 * victim)
        _kill(
            job,
            victim,
            [r for r in range(3) if r != victim],
            "all_reduce",
            "1",
            f"inside, {count} elements, rank {victim}",
        )


@pytest.mark.parametrize("how", ["sync", "async", "future", "polling", "broadcast", "barrier", "recv"])
def test_row_1_killed_while_others_wait(how: str) -> None:
    operation = how if how in ("broadcast", "barrier", "recv") else "all_reduce"
    with Job(_victim_idle, 3, how, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.3)
        _kill(job, 2, [0, 1], operation, "1", f"others wait: {how}")


def test_row_1_killed_while_idle() -> None:
    with Job(_victim_idle, 3, "later", destroy=False) as job:
        job.wait_all("running")
        job.kill(2)
        job.finish(5, [2])
        time.sleep(0.2)
        sent = time.monotonic()
        job.go(0, "go")
        job.go(1, "go")
        outcomes = job.wait_outcomes([0, 1], timeout=30)
        seconds = [o.ended - sent for o in outcomes]
        text = _check_message(outcomes[0], 2, "all_reduce")
        _check_message(outcomes[1], 2, "all_reduce")
        _record("1", "idle; next operation", f"{KILL_BOUND_S} s", seconds, text)
        assert max(seconds) < KILL_BOUND_S
        job.finish(10, [0, 1])


def _subgroup_survives(rank: Rank) -> float:
    """A death outside a subgroup does not fail it."""
    rank.init(timeout=30)
    pair = dist.new_group([0, 1])
    dist.barrier()
    rank.report("running")
    if rank.rank == 2:
        time.sleep(300)
    rank.wait_for("go")
    for _ in range(20):
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=pair)
        assert tensor[0].item() == 2
    return tensor[0].item()


def test_row_1_a_group_without_the_dead_rank_goes_on() -> None:
    with Job(_subgroup_survives, 3, destroy=False) as job:
        job.wait_all("running")
        job.kill(2)
        job.finish(5, [2])
        job.go(0, "go")
        job.go(1, "go")
        outcomes = job.finish(30, [0, 1])
        assert [o.kind for o in outcomes] == ["result", "result"], [o.describe() for o in outcomes]


def _start_up(rank: Rank, victim: int, delay: float) -> None:
    rank.report("here")
    rank.wait_for("go")
    if rank.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if delay == 0:
            time.sleep(60)
    rank.init(timeout=4)
    while True:
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("delay_ms", [0, 2, 5, 10, 20, 40])
def test_row_1_killed_during_start_up(delay_ms: int) -> None:
    """Before the victim has said a word only the group's timeout (4 s) tells; afterwards it is immediate."""
    victim = delay_ms // 2 % 3
    survivors = [r for r in range(3) if r != victim]
    with Job(_start_up, 3, victim, delay_ms / 1000, destroy=False) as job:
        job.wait_all("here")
        job.go_all("go")
        (dead,) = job.wait_outcomes([victim], 20)
        outcomes = job.wait_outcomes(survivors, 30)
        seconds = [o.ended - dead.ended for o in outcomes]
        for outcome in outcomes:
            assert outcome.kind == "error", outcome.describe()
            assert re.search(rf"\b(rank|ranks) [\d, ]*\b{victim}\b", outcome.message), outcome.message
        _record("1", f"start-up, {delay_ms} ms", "5 s", seconds, outcomes[0].message)
        assert max(seconds) < 5.5
        assert all(o.exit_code for o in job.finish(10, survivors))


# -- rows 2 and 3: SIGSTOP


def _stopped(rank: Rank, timeout: float, inside: bool) -> float:
    rank.init(timeout=timeout)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    rank.report("running")
    if not inside:
        rank.wait_for("go")
        dist.all_reduce(tensor.fill_(1.0))
        return tensor[0].item()
    while True:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "before"])
def test_row_2_stopped(inside: bool) -> None:
    with Job(_stopped, 3, TIMEOUT_S, inside, destroy=False) as job:
        job.wait_all("running")
        time.sleep(0.2)
        since = job.stop(1)
        if not inside:
            since = time.monotonic()
            job.go(0, "go")
            job.go(2, "go")
        outcomes = job.wait_outcomes([0, 2], timeout=30)
        seconds = [o.ended - since for o in outcomes]
        texts = [_check_message(o, 1, "all_reduce") for o in outcomes]
        _record(
            "2",
            f"SIGSTOP {'inside' if inside else 'before'} an operation, T = {TIMEOUT_S} s",
            f"T to T + {SLACK_S} s",
            seconds,
            texts[0],
        )
        assert min(seconds) >= TIMEOUT_S - 0.1 and max(seconds) < TIMEOUT_S + SLACK_S, seconds
        assert all(o.exit_code == 1 for o in job.finish(10, [0, 2]))


def _paused(rank: Rank) -> float:
    rank.init(timeout=30)
    dist.barrier()
    rank.report("running")
    total = 0.0
    for step in range(400):
        tensor = torch.full((10_000,), float(rank.rank + step))
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0 + 3 * step]
        total += tensor[0].item()
        if step == 150:
            rank.report("half")
        time.sleep(0.001)
    return total


def test_row_3_stopped_and_resumed() -> None:
    with Job(_paused, 3) as job:
        job.wait_event(1, "half")
        since = job.stop(1)
        time.sleep(1.5)
        job.resume(1)
        values = job.values(60)
        _record("3", "SIGSTOP 1.5 s, SIGCONT", "right answer", time.monotonic() - since)
        assert values == [sum(3.0 + 3 * step for step in range(400))] * 3


# -- row 4: an exception on one rank


def _dumps(folder: Path) -> dict[int, Any]:
    found = {}
    for path in folder.glob("record*"):
        number = re.search(r"(\d+)\.json$", path.name)
        if number:
            found[int(number.group(1))] = json.loads(path.read_text())
    return found


def _one_raises(rank: Rank, leaves: bool) -> None:
    rank.init(timeout=TIMEOUT_S)
    for _ in range(5):
        dist.all_reduce(torch.ones(7))
    if rank.rank == 1:
        try:
            raise ValueError("user code failed")
        except ValueError:
            if leaves:
                raise
        rank.report("raised")
        time.sleep(30)
    dist.all_reduce(torch.ones(7, 3))


@pytest.mark.parametrize("leaves", [True, False], ids=["process ends", "process stays"])
def test_row_4_exception_on_one_rank(leaves: bool, tmp_path: Path) -> None:
    with Job(_one_raises, 3, leaves, destroy=False, env={"ARK_FLIGHT_DUMP": str(tmp_path / "record")}) as job:
        if leaves:
            (first,) = job.finish(30, [1])
        else:
            job.wait_event(1, "raised")
        since = time.monotonic() if not leaves else first.ended
        outcomes = job.wait_outcomes([0, 2], 30)
        seconds = [o.ended - since for o in outcomes]
        texts = [_check_message(o, 1, "all_reduce") for o in outcomes]
        job.finish(10, [0, 2])
    _record("4", f"exception, {'process ends' if leaves else 'process stays'}", f"T + {SLACK_S} s", seconds, texts[0])
    assert max(seconds) < TIMEOUT_S + SLACK_S
    dumps = _dumps(tmp_path)
    assert {0, 2} <= set(dumps), f"dumps of ranks {sorted(dumps)}"
    for rank in (0, 2):
        failure = dumps[rank]["failures"][0]
        assert failure["peer"] == 1 and failure["operation"] == "all_reduce" and failure["sequence"] == 6, failure
        peers = {peer["rank"]: peer for peer in failure["peers"]}
        assert peers[1]["last_enqueued"] == 5 and peers[rank]["last_enqueued"] == 6, peers
        last = [entry for entry in dumps[rank]["entries"] if entry["sequence"] == 6][-1]
        assert last["state"] == "failed" and last["input_sizes"] == [[7, 3]], last


# -- rows 5 and 6: ranks that disagree


def _different(rank: Rank, what: str) -> None:
    rank.init(timeout=10)
    me = rank.rank
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if what == "operation":
        if me == 0:
            dist.all_reduce(torch.ones(8))
        else:
            dist.broadcast(torch.ones(8), 0)
    elif what == "operation, gather kinds":
        if me == 0:
            dist.all_gather_into_tensor(torch.ones(16), torch.ones(8))
        else:
            dist.reduce_scatter_tensor(torch.ones(8), torch.ones(16))
    elif what == "barrier":
        dist.barrier() if me == 0 else dist.all_reduce(torch.ones(1))
    elif what == "count":
        dist.all_reduce(torch.ones(8 + me))
    elif what == "count, large":
        dist.all_reduce(torch.ones((1 << 20) + 64 * me))
    elif what == "count, all_gather":
        dist.all_gather([torch.ones(8 + me) for _ in range(2)], torch.ones(8 + me))
    elif what == "count, broadcast":
        dist.broadcast(torch.ones(8 + me), 0)
    elif what == "dtype":
        dist.all_reduce(torch.ones(8, dtype=torch.float32 if me == 0 else torch.int32))
    elif what == "dtype, broadcast":
        dist.broadcast(torch.ones(8, dtype=torch.float32 if me == 0 else torch.float64), 0)
    elif what == "reduce op":
        dist.all_reduce(torch.ones(8), dist.ReduceOp.SUM if me == 0 else dist.ReduceOp.MAX)
    elif what == "root":
        dist.broadcast(torch.ones(8), me)
    elif what == "root, reduce":
        dist.reduce(torch.ones(8), me)
    elif what == "splits":
        sends = [4, 4] if me == 0 else [5, 3]
        receives = [4, 4] if me == 0 else [4, 3]
        dist.all_to_all_single(torch.ones(sum(receives)), torch.ones(8), receives, sends)
    elif what == "shape":
        dist.all_reduce(torch.ones((2, 6) if me == 0 else (3, 4)))
    else:
        raise AssertionError(what)


MISMATCHES = {
    "operation": r"all_reduce.*broadcast|broadcast.*all_reduce",
    "operation, gather kinds": r"all_gather.*reduce_scatter|reduce_scatter.*all_gather",
    "barrier": r"barrier.*all_reduce|all_reduce.*barrier",
    "count": r"\b8\b.*\b9\b|\b9\b.*\b8\b",
    "count, large": r"1048576.*1048640|1048640.*1048576",
    "count, all_gather": r"\b\d+\b",
    "count, broadcast": r"\b\d+\b",
    "dtype": r"float32.*int32|int32.*float32",
    "dtype, broadcast": r"float32.*float64|float64.*float32|\b32\b.*\b64\b|\b64\b.*\b32\b",
    "reduce op": r"SUM.*MAX|MAX.*SUM",
    "root": r"root",
    "root, reduce": r"root",
    "splits": r"\b[45]\b.*\b[45]\b|bytes",
    "shape": r"(?i)shape",
}

# Everybody receives in these, so everybody raises, debug mode or not.
MUST_ALL = [what for what in MISMATCHES if what not in ("count, broadcast", "dtype, broadcast", "root", "splits")]


@pytest.mark.parametrize("what", list(MISMATCHES))
@pytest.mark.parametrize("debug", ["1", "0", "detail"])
def test_rows_5_and_6_mismatch(what: str, debug: str) -> None:
    """Always found but for shapes of one size, which need the debug mode."""
    env: dict[str, str | None] = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if debug == "detail" else {"ARK_DEBUG": debug}
    with Job(_different, 2, what, destroy=False, env=env) as job:
        started = time.monotonic()
        outcomes = job.wait_outcomes([0, 1], 40)
        if what == "shape" and debug == "0":
            assert all(o.kind == "result" for o in outcomes), [o.describe() for o in outcomes]
            return
        if debug == "0":
            # Nobody hangs and nobody gets wrong data, but a rank that receives nothing (a root, a sender) may not
            # hear of it: comparing everything with everybody is what the debug mode is for.
            assert what == "root" or any(o.kind == "error" for o in outcomes), "nobody noticed"
            assert what not in MUST_ALL or all(o.kind == "error" for o in outcomes), [o.describe() for o in outcomes]
            outcomes = [o for o in outcomes if o.kind == "error"]
            if not outcomes:  # two roots, each of which only sends
                return
        seconds = [o.ended - started for o in outcomes]
        for outcome in outcomes:
            assert outcome.kind == "error", outcome.describe()
            if debug != "detail":  # there PyTorch's own checker speaks first
                first = outcome.message.splitlines()[0]
                assert "#4" in first and re.search(r"\brank \d", first), first
                assert re.search(MISMATCHES[what], first), first
        if debug != "detail":
            row = "5" if what.startswith(("operation", "barrier")) else "6"
            _record(row, f"{what}, ARK_DEBUG={debug}", "error on all ranks", seconds, outcomes[0].message)
        assert max(seconds) < 8, "found at once, not by timeout"


# -- row 7: wrong order across two groups


def _wrong_order(rank: Rank) -> None:
    rank.init(timeout=TIMEOUT_S)
    one = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
    two = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
    for group in (one, two):
        dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()
    first, second = (one, two) if rank.rank == 0 else (two, one)
    rank.report("running")
    dist.all_reduce(torch.ones(1000), group=first)
    dist.all_reduce(torch.ones(1000), group=second)


def test_row_7_wrong_order_across_two_groups(tmp_path: Path) -> None:
    with Job(_wrong_order, 2, destroy=False, env={"ARK_FLIGHT_DUMP": str(tmp_path / "record")}) as job:
        job.wait_all("running")
        since = time.monotonic()
        outcomes = job.wait_outcomes([0, 1], 30)
        seconds = [o.ended - since for o in outcomes]
        text = _check_message(outcomes[0], 1, "all_reduce")
        _check_message(outcomes[1], 0, "all_reduce")
        job.finish(10)
    _record("7", "two groups in different order", f"T to T + {SLACK_S} s", seconds, text)
    assert TIMEOUT_S - 0.2 <= max(seconds) < TIMEOUT_S + SLACK_S
    for dump in _dumps(tmp_path).values():
        progress = {g["name"]: g["collective"] for g in dump["groups"] if g["size"] == 2}
        assert sorted(p["last_started"] for p in progress.values() if p["last_scheduled"])[-1] >= 2, progress
        assert len(progress) >= 3, "both groups and the world are in the dump"
    assert set(_dumps(tmp_path)) == {0, 1}


# -- row 8: odd tensors (the details are in test_collectives.py and test_bad_input.py)


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
    _record("8", "strided, unaligned, empty, wrong device", "right or refused", time.monotonic() - started)


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
            _record("9", "store dies after start-up", "collectives go on", time.monotonic() - since)
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
            _record("9", "store dies before start-up", "store's timeout", seconds, outcomes[0].message)
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
        _record("10", f"limit on {what}", f"T + {SLACK_S} s", seconds, poor.message)
        assert max(seconds) < 6 + SLACK_S


def _starved_inside(rank: Rank) -> str:
    rank.init(timeout=TIMEOUT_S)
    count = 16 << 20
    buffer = torch.ones(2 * count)
    dist.all_reduce(torch.ones(10))
    if rank.rank == 1:
        size = next(
            int(line.split()[1]) << 10
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("VmSize:")
        )
        resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), resource.RLIM_INFINITY))
    dist.all_reduce(buffer[::2])  # needs a contiguous copy of 64 MB
    return "no error"


def test_row_10_out_of_memory_inside() -> None:
    with Job(_starved_inside, 2, destroy=False) as job:
        outcomes = job.wait_outcomes([0, 1], 40)
        poor, other = outcomes[1], outcomes[0]
        assert poor.kind == "error" and re.search(r"(?i)memory|allocate", poor.message), poor.describe()
        assert str((16 << 20) * 4) in poor.message, f"names no size: {poor.message}"
        _check_message(other, 1, "all_reduce")
        _record("10", "no memory for a copy", f"T + {SLACK_S} s", other.ended - poor.ended, poor.message)


# -- row 13: abort, destroy, fork


def _destroy_pending(rank: Rank) -> float:
    rank.init(timeout=TIMEOUT_S)
    dist.barrier()
    if rank.rank == 1:
        rank.wait_for("go")
        return 0.0
    work = dist.all_reduce(torch.ones(10), async_op=True)  # rank 1 will not come
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
    _record("13", "destroy with work pending", f"T + {SLACK_S} s", took)
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
            rank.wait_for("go")  # does not take part until it is over
            dist.all_reduce(torch.ones(10))  # the others' inputs may all have arrived: then this one is right
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
        _record("13", "abort in flight, own and peer's", "2 s", seconds, outcomes[0].value[1])
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
    _record("13", "double destroy", "no abort", time.monotonic() - started)


def _fork_and_exit(rank: Rank) -> None:
    """A forked child (a DataLoader's worker) ends without touching the parent's group."""
    rank.init()
    dist.all_reduce(torch.ones(3))
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            raise SystemExit(0)  # through the interpreter's shutdown, destructors and all
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
        time.sleep(3)  # outlives its parent: must not look like the parent to the peers
        os._exit(0)
    rank.report("forked", child)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))


def test_row_13_fork_after_init() -> None:
    """A child that lives on holds copies of the parent's descriptors; the parent's death is noticed all the same."""
    with Job(_fork_quietly, 2, destroy=False) as job:
        child = job.wait_event(1, "forked", 60)
        other = job.wait_event(0, "forked", 60)
        since = job.wait_outcomes([1], 10)[0].ended
        (outcome,) = job.wait_outcomes([0], 30)
        text = _check_message(outcome, 1, "all_reduce")
        _record("13", "killed parent of a living fork", f"{KILL_BOUND_S} s", outcome.ended - since, text)
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
        _record(
            "14", "start again in the same processes", "works", [o.value[0] for o in outcomes], outcomes[0].value[1]
        )


# -- row 20: strangers at the bootstrap socket


def _wait_for_socket(pid: int, bound: float) -> str | None:
    """The name of the abstract socket on which the process listens; None when it opens none in time."""
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
    """Garbage, a flood, silence, early hang-ups, foreign descriptors; returns connections that stay open."""
    held = []
    for payload in (b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), os.urandom(1 << 16), b"ark"):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.setblocking(False)
        try:
            stranger.connect(name)
            stranger.send(payload)
        except OSError:
            pass  # dropped already, or the queue is full
        if len(payload) in (0, 3):
            held.append(stranger)  # stays connected and says nothing more
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


def test_row_20_strangers_at_the_bootstrap_socket() -> None:
    """The peers are stopped as soon as rank 0 listens, strangers come, then the peers go on."""
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
    _record("20", f"garbage, flood, silence, descriptors; {met} starts", "the job goes on", time.monotonic() - started)
