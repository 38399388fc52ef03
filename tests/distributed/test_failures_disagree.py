"""The failure table, rows 4 to 7: ranks that stay away, call something else, or call in another order."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.failures import SLACK_S, TIMEOUT_S, check_message, flight_dumps, record
from support.launcher import BACKEND, Job
from support.rank import Rank

pytestmark = pytest.mark.skipif(BACKEND != "ark", reason="the failure table is ark's promise")


# -- row 4: an exception on one rank


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
        texts = [check_message(o, 1, "all_reduce") for o in outcomes]
        job.finish(10, [0, 2])
    record("4", f"exception, {'process ends' if leaves else 'process stays'}", f"T + {SLACK_S} s", seconds, texts[0])
    assert max(seconds) < TIMEOUT_S + SLACK_S
    dumps = flight_dumps(tmp_path)
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

# In these every rank receives, so every rank raises, with or without debug mode.
MUST_ALL = [what for what in MISMATCHES if what not in ("count, broadcast", "dtype, broadcast", "root", "splits")]


@pytest.mark.by_day(
    "1-operation",
    "1-operation, gather kinds",
    "1-barrier",
    "1-count",
    "1-count, large",
    "1-count, all_gather",
    "1-count, broadcast",
    "1-dtype",
    "1-dtype, broadcast",
    "1-reduce op",
    "1-root",
    "1-root, reduce",
    "1-splits",
    "1-shape",
    "0-operation, gather kinds",
    "0-count, large",
    "0-root",
    "0-splits",
    "0-shape",
    "detail-operation",
    "detail-shape",
)
@pytest.mark.parametrize("what", list(MISMATCHES))
@pytest.mark.parametrize("debug", ["1", "0", "detail"])
def test_rows_5_and_6_mismatch(what: str, debug: str) -> None:
    """Always detected, except for different shapes of the same size, which need debug mode."""
    env: dict[str, str | None] = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"} if debug == "detail" else {"ARK_DEBUG": debug}
    with Job(_different, 2, what, destroy=False, env=env) as job:
        started = time.monotonic()
        outcomes = job.wait_outcomes([0, 1], 40)
        if what == "shape" and debug == "0":
            assert all(o.kind == "result" for o in outcomes), [o.describe() for o in outcomes]
            return
        if debug == "0":
            # No rank hangs or gets wrong data. But a rank that receives nothing (a root, a sender) may not notice: only
            # debug mode compares everything with everybody.
            assert what == "root" or any(o.kind == "error" for o in outcomes), "nobody noticed"
            assert what not in MUST_ALL or all(o.kind == "error" for o in outcomes), [o.describe() for o in outcomes]
            outcomes = [o for o in outcomes if o.kind == "error"]
            if not outcomes:  # two roots, which both only send
                return
        seconds = [o.ended - started for o in outcomes]
        for outcome in outcomes:
            assert outcome.kind == "error", outcome.describe()
            if debug != "detail":  # in that mode PyTorch's own checker raises first
                first = outcome.message.splitlines()[0]
                assert "#4" in first and re.search(r"\brank \d", first), first
                assert re.search(MISMATCHES[what], first), first
        if debug != "detail":
            row = "5" if what.startswith(("operation", "barrier")) else "6"
            record(row, f"{what}, ARK_DEBUG={debug}", "error on all ranks", seconds, outcomes[0].message)
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
        text = check_message(outcomes[0], 1, "all_reduce")
        check_message(outcomes[1], 0, "all_reduce")
        job.finish(10)
    record("7", "two groups in different order", f"T to T + {SLACK_S} s", seconds, text)
    assert TIMEOUT_S - 0.2 <= max(seconds) < TIMEOUT_S + SLACK_S
    for dump in flight_dumps(tmp_path).values():
        progress = {g["name"]: g["collective"] for g in dump["groups"] if g["size"] == 2}
        assert sorted(p["last_started"] for p in progress.values() if p["last_scheduled"])[-1] >= 2, progress
        assert len(progress) >= 3, "both groups and the world are in the dump"
    assert set(flight_dumps(tmp_path)) == {0, 1}


# -- on another node


def _hears_late(rank: Rank) -> None:
    """Ranks 1 and 2 disagree in the memory of their node, so that rank 0 hears of it from their notes alone."""
    os.environ["ARK_NODE"] = str((0, 1, 1)[rank.rank])
    rank.init()
    dist.barrier()
    rank.report("running")
    if rank.rank != 0:
        rank.wait_for("go")
    with pytest.raises(RuntimeError, match=r"ranks disagree: rank \d called .*, rank \d called"):
        dist.all_reduce(torch.ones(4 if rank.rank == 1 else 3))
        dist.barrier()


def test_a_rank_that_hears_late_hears_the_cause() -> None:
    """The others are done with the group long before, and stay for the rank that is only slow."""
    with Job(_hears_late, 3) as job:
        job.wait_all("running")
        time.sleep(0.2)  # rank 0 is in its all_reduce
        job.stop(0)
        job.go_all("go")
        time.sleep(1.5)
        job.resume(0)
        job.values()
