"""Flight records of real jobs: what a failure writes, and whether the tools name the rank that caused it.

Each failed job's files go through `show` and, converted, through PyTorch's own analyser.
"""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.flight import analyse, culprits
from support.launcher import Job, run_ranks
from support.rank import Rank

from ark_torch.tools import flight
from ark_torch.tools.flight_dumps import load

VICTIM = 2
LARGE = 4_000_000


def _reduce(count: int = 8) -> str:
    """Returns the error of an all_reduce, or an empty string."""
    try:
        dist.all_reduce(torch.ones(count))
    except Exception as error:
        return str(error)
    return ""


def _victim_outside(rank: Rank) -> str:
    """Two good operations, then the victim never calls the third."""
    rank.init()
    assert _reduce() == "" and _reduce() == ""
    rank.report("ready")
    rank.wait_for("go")
    return _reduce()


def _victim_inside(rank: Rank) -> str:
    """Two good operations. The victim is killed in the third, which the others join only afterwards.

    It is large, because a small one could complete with what the victim published before its end.
    """
    rank.init()
    assert _reduce() == "" and _reduce() == ""
    if rank.rank == VICTIM:
        rank.report("ready")
        return _reduce(LARGE)
    rank.wait_for("go")
    return _reduce(LARGE)


def _check_files(folder: Path, ranks: list[int]) -> dict[int, Any]:
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"flight_{rank}.json" for rank in ranks]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    return load([folder])


@pytest.mark.parametrize(
    "inside",
    [pytest.param(False, id="between operations", marks=pytest.mark.nightly), pytest.param(True, id="inside one")],
)
def test_killed_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: bool) -> None:
    body = _victim_inside if inside else _victim_outside
    with Job(body, 3, env={"ARK_FLIGHT_DUMP": str(tmp_path / "flight_")}, destroy=False) as job:
        if inside:
            job.wait_event(VICTIM, "ready")
            time.sleep(0.2)  # almost certainly inside the operation; otherwise the other case is tested again
        else:
            job.wait_all("ready")
        job.kill(VICTIM)
        for rank in (0, 1):
            job.go(rank, "go")
        outcomes = job.finish(30, ranks=[0, 1])
    for outcome in outcomes:
        assert outcome.kind == "result", outcome.describe()
        assert f"rank {VICTIM}" in outcome.value
    dumps = _check_files(tmp_path, [0, 1])
    for dump in dumps.values():
        (failure,) = dump.failures
        assert failure.peer == VICTIM and failure.sequence == 3
        states = [operation.state for operation in dump.operations if operation.sequence <= 3]
        assert states == ["completed", "completed", "failed"]
    # A rank that hears of it from another one may write its record before it notices by itself.
    assert any(dump.failures[0].peers[VICTIM].lost for dump in dumps.values())
    assert flight.main(["show", str(tmp_path)]) == 1
    assert f"failed because of rank {VICTIM}" in capsys.readouterr().out
    output = analyse(tmp_path)
    assert "Not all ranks joining collective, sequence number: 3" in output
    assert f"missing ranks: {{{VICTIM}}}" in output


def _late(rank: Rank) -> str:
    rank.init(timeout=2.0)
    assert _reduce() == ""
    if rank.rank == VICTIM:
        rank.wait_for("go")
    # The late rank's first call may succeed with what the others published before they gave up.
    error = _reduce() or _reduce()
    rank.report("failed")
    if rank.rank != VICTIM:
        rank.wait_for("end")  # so that the late rank finds a failed group, not a lost peer
    return error


@pytest.mark.nightly
def test_late_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks time out. The third comes late, raises as well (by its second call), and leaves a record."""
    with Job(_late, 3, env={"ARK_FLIGHT_DUMP": str(tmp_path / "flight_")}, destroy=False) as job:
        for rank in (0, 1):
            job.wait_event(rank, "failed", 30)
        job.go(VICTIM, "go")
        job.wait_event(VICTIM, "failed", 30)
        for rank in (0, 1):
            job.go(rank, "end")
        outcomes = job.finish(30)
    for outcome in outcomes:
        assert outcome.kind == "result" and outcome.value != "", outcome.describe()
    for rank in (0, 1):
        assert f"rank {VICTIM}" in outcomes[rank].value and "all_reduce" in outcomes[rank].value
    _check_files(tmp_path, [0, 1, 2])
    assert flight.main(["show", str(tmp_path)]) == 1
    report = capsys.readouterr().out
    assert f"rank {VICTIM} is behind: it has not called sequence 2, all_reduce SUM float32 [8]" in report
    output = analyse(tmp_path)
    assert "Not all ranks joining collective, sequence number: 2" in output
    assert f"missing ranks: {{{VICTIM}}}" in output


def _mismatch(rank: Rank) -> str:
    rank.init()
    assert _reduce() == ""
    return _reduce(16 if rank.rank == VICTIM else 8)


@pytest.mark.nightly
def test_mismatching_sizes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = {"ARK_FLIGHT_DUMP": str(tmp_path / "flight_"), "ARK_DEBUG": "1"}
    for error in run_ranks(_mismatch, 3, env=env, destroy=False):
        assert error != ""
    _check_files(tmp_path, [0, 1, 2])
    assert flight.main(["show", str(tmp_path)]) == 1
    report = capsys.readouterr().out
    assert (
        "sequence 2: ranks 0, 1 called all_reduce SUM float32 [8], but rank 2 called all_reduce SUM float32 [16]"
        in report
    )
    output = analyse(tmp_path)
    assert "SIZE_OR_SYNTAX_MISMATCH" in output and culprits(output) in ({VICTIM}, {0, 1})


def _everything(rank: Rank, folder: str) -> dict[str, Any]:
    """Runs every operation once, a subgroup and messages, then dumps the record on demand."""
    from ark_torch.distributed import flight as record

    rank.init()
    world, me = rank.world_size, rank.rank
    one, whole = torch.ones(4), torch.ones(4 * world)
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    dist.broadcast(one, 1)
    dist.reduce(one, 2)
    dist.all_gather([torch.empty(4) for _ in range(world)], one)
    dist.all_gather_into_tensor(torch.empty(4 * world), one)
    dist.reduce_scatter(torch.empty(4), list(whole.chunk(world)))
    dist.reduce_scatter_tensor(torch.empty(4), whole)
    dist.all_to_all_single(torch.empty(4 * world), whole)
    dist.all_to_all([torch.empty(4) for _ in range(world)], list(whole.chunk(world)))
    dist.gather(one, [torch.empty(4) for _ in range(world)] if me == 0 else None, 0)
    dist.scatter(torch.empty(4), list(whole.chunk(world)) if me == 1 else None, 1)
    dist.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16), async_op=True).wait()
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(2, 2))
    pair = dist.new_group([0, 2], group_desc="pair")
    if me in (0, 2):
        dist.all_reduce(torch.ones(3), group=pair)
    if me == 0:
        dist.send(torch.ones(7), 1, tag=3)
    elif me == 1:
        dist.recv(torch.empty(7), 0, tag=3)
    dist.barrier()
    record.dump(f"{folder}/flight_{me}.json")
    return record.record()


def _timeless(entry: dict[str, Any]) -> dict[str, Any]:
    """Removes wall times. They are derived from the steady clock at each write, so they differ by nanoseconds."""
    return {key: value for key, value in entry.items() if not key.startswith("time_")}


def test_record_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_ranks(_everything, 3, str(tmp_path))
    dumps = _check_files(tmp_path, [0, 1, 2])
    for rank, dump in dumps.items():
        written = json.loads(dump.path.read_text())["entries"]
        assert [_timeless(entry) for entry in records[rank]["entries"]] == [_timeless(entry) for entry in written]
        assert dump.rank == rank and not dump.failures
        assert {operation.state for operation in dump.operations} == {"completed"}
        assert dump.groups["0"].ranks == (0, 1, 2) and dump.groups["0"].description == "default_pg"
    calls = [operation.title for operation in dumps[0].operations if operation.group == "0" and not operation.is_p2p]
    assert calls[:3] == ["all_reduce MAX float32 [4]", "broadcast float32 root 1 [4]", "reduce SUM float32 root 2 [4]"]
    assert "all_reduce SUM bfloat16 [2, 3]" in calls
    assert any(call.startswith("all_reduce_coalesced SUM float32 [5], [2, 2]") for call in calls)
    (pair,) = (group for group in dumps[2].groups.values() if group.description == "pair")
    assert pair.ranks == (0, 2) and pair.rank == 1 and pair.collective.completed >= 1
    (message,) = (operation for operation in dumps[1].operations if operation.is_p2p)
    assert (message.operation, message.peer, message.tag) == ("recv", 0, 3)
    assert flight.main(["show", str(tmp_path)]) == 0, capsys.readouterr().out
    output = analyse(tmp_path)
    for trouble in ("errors", "Not all ranks", "mismatch", "Culprit", "cannot decide"):
        assert trouble not in output


@pytest.mark.quick
def test_demanded_record_that_cannot_be_written(tmp_path: Path) -> None:
    from ark_torch.distributed import flight as record

    with pytest.raises(OSError, match="cannot write the flight record to"):
        record.dump(tmp_path / "missing" / "flight_0.json")


def _small_record(rank: Rank) -> tuple[int, int]:
    from ark_torch.distributed import flight as record

    rank.init()
    for _ in range(40):
        assert _reduce() == ""
    data = record.record()
    return data["capacity"], len(data["entries"])


@pytest.mark.parametrize(("entries", "kept"), [("16", 16), ("0", 0)])
def test_capacity_is_obeyed(entries: str, kept: int) -> None:
    assert run_ranks(_small_record, 2, env={"ARK_FLIGHT_RECORD": entries}) == [(kept, kept)] * 2


def _unwritable(rank: Rank) -> str:
    rank.init()
    rank.report("ready")
    rank.wait_for("go")
    return _reduce()


def test_dump_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    """The folder was removed after the start. The user still gets the operation's own error."""
    (tmp_path / "missing").mkdir()
    with Job(_unwritable, 2, env={"ARK_FLIGHT_DUMP": str(tmp_path / "missing" / "flight_")}, destroy=False) as job:
        job.wait_all("ready")
        (tmp_path / "missing").rmdir()
        job.go(0, "go")
        job.kill(1)
        (outcome,) = job.finish(30, ranks=[0])
    assert outcome.kind == "result" and "rank 1" in outcome.value, outcome.describe()
    assert list(tmp_path.iterdir()) == []
