"""Flight records of several ranks: the output of `show`, and of PyTorch's own analyser on the converted records.

The analyser runs in a separate process on the files that `convert` wrote, as users run it.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from flight_records import RecordBuilder, peer
from support.flight import analyse, culprits

from ark_torch.tools import flight
from ark_torch.tools.flight_dumps import DumpError, load


def show(folder: Path, capsys: pytest.CaptureFixture[str], expected: int) -> str:
    assert flight.main(["show", str(folder)]) == expected
    return capsys.readouterr().out


def entries(folder: Path, rank: int) -> list[dict[str, object]]:
    return list(pickle.loads((folder / "converted" / f"ark_rank_{rank}").read_bytes())["entries"])


def healthy(world: int = 3) -> list[RecordBuilder]:
    return [RecordBuilder(rank, world) for rank in range(world)]


def test_missing_operation_names_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in healthy():
        record.call().call("broadcast", root=0)
        if record.rank != 2:
            record.call("all_gather_into_tensor", [4], "failed", out=[12])
        record.write(tmp_path)
    report = show(tmp_path, capsys, 1)
    assert "rank 2 is behind: it has not called sequence 3, all_gather_into_tensor float32 [4]" in report
    assert "ranks 0, 1 called it" in report
    output = analyse(tmp_path)
    assert "Not all ranks joining collective, sequence number: 3" in output
    assert "missing ranks: {2}" in output
    assert "nccl:_all_gather_base" in output
    assert "collective state: started" in output


def test_mismatching_sizes_name_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in healthy():
        record.call(reduce_op="SUM")
        record.call(shape=[16, 2] if record.rank == 2 else [8, 2], state="started", reduce_op="SUM").write(tmp_path)
    report = show(tmp_path, capsys, 1)
    assert "sequence 2: ranks 0, 1 called all_reduce SUM float32 [8, 2], but rank 2 called" in report
    output = analyse(tmp_path)
    assert "Collective sequence number: 2 has errors" in output
    assert culprits(output) in ({2}, {0, 1})
    (reason,) = set(
        re.findall(r"Error type: SIZE_OR_SYNTAX_MISMATCH, (Expected input sizes.*?'\[\[\d+, 2\]\]'$)", output, re.M)
    )
    assert "[[8, 2]]" in reason and "[[16, 2]]" in reason


@pytest.mark.by_day("change0-COLLECTIVE_TYPE_MISMATCH")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"operation": "broadcast", "root": 0}, "COLLECTIVE_TYPE_MISMATCH"),
        ({"dtype": "bfloat16", "output_dtype": "bfloat16"}, "COLLECTIVE_DTYPE_MISMATCH"),
        ({"reduce_op": "MAX"}, None),  # not in PyTorch's format: only `show` can detect it
    ],
)
def test_other_mismatches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], told: str | None
) -> None:
    for record in healthy():
        fields = {"operation": "all_reduce", "reduce_op": "SUM", **(change if record.rank == 1 else {})}
        record.call(state="started", **fields).write(tmp_path)
    report = show(tmp_path, capsys, 1)
    assert "sequence 1: ranks 0, 2 called all_reduce SUM float32 [8], but rank 1 called" in report
    output = analyse(tmp_path)
    assert culprits(output) in ([set()] if told is None else [{1}, {0, 2}])
    assert told is None or f"Error type: {told}" in output


def test_healthy_job_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of every operation, as the process group records them, passes the analyser's checks."""
    for record in healthy():
        rank = record.rank
        record.call(reduce_op="SUM").call("barrier", [], dtype=None, output_dtype=None)
        record.call("broadcast", root=1).call("reduce", root=1, reduce_op="SUM")
        record.call("all_reduce_coalesced", input_sizes=[[2], [3]], output_sizes=[[2], [3]], reduce_op="SUM")
        record.call("all_gather", [4], out=[12], output_sizes=[[4], [4], [4]])
        record.call("all_gather_into_tensor", [4, 2], out=[12, 2])
        record.call("all_gather_into_tensor_coalesced", [6], input_sizes=[[2], [4]], out=[18])
        record.call("reduce_scatter", [12], input_sizes=[[4], [4], [4]], out=[4], reduce_op="SUM")
        record.call("reduce_scatter_tensor", [12], out=[4], reduce_op="AVG")
        record.call("reduce_scatter_tensor_coalesced", [18], out=[6], reduce_op="SUM")
        record.call("gather", [4], out=[12] if rank == 0 else [0], root=0)
        record.call("scatter", [12] if rank == 0 else [0], out=[4], root=0)
        record.call("all_to_all_single", [6], out=[6]).call("all_to_all", [rank + 1], out=[3 - rank])
        record.call("monitored_barrier", []).call("all_reduce_sparse", reduce_op="SUM")
        record.write(tmp_path)
    assert "none: every rank has called the same operations" in show(tmp_path, capsys, 0)
    output = analyse(tmp_path, "--output", str(tmp_path / "database"))
    for trouble in ("errors", "Not all ranks", "mismatch", "Culprit", "cannot decide"):
        assert trouble not in output
    _, database = pickle.loads((tmp_path / "database").read_bytes())
    assert len(database.collectives) == 17
    assert all(collective.pass_check for collective in database.collectives)


@pytest.mark.by_day("inside one")
@pytest.mark.parametrize("called", [2, 3], ids=["between operations", "inside one"])
def test_killed_rank_is_made_up_from_what_others_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], called: int
) -> None:
    """Rank 1 left no record. The survivors read its progress in shared memory."""
    for record in healthy():
        record.call().call().call(state="failed")
        seen = [peer(0, 3, 2), peer(1, called, 1, lost=True), peer(2, 3, 2, waiting_on=1)]
        record.fail("rank 1 ended", seen, peer=1)
        if record.rank != 1:
            record.write(tmp_path)
    report = show(tmp_path, capsys, 1)
    assert "ranks 0, 2 failed because of rank 1" in report
    if called == 2:
        assert "rank 1 (its process ended) is behind: it has not called sequence 3" in report
    assert re.search(r"2 +3 +3 +2 +rank 1", report)
    assert "rank 0 at 2001-09-09 01:46:40.003500 UTC: rank 1 ended" in report
    output = analyse(tmp_path)
    assert "Not all ranks joining collective, sequence number: 3" in output and "missing ranks: {1}" in output
    assert "has errors" not in output
    assert [entry["state"] for entry in entries(tmp_path, 1)] == ["completed", "completed"]


def test_late_rank_is_named_though_it_calls_after_the_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0 and 1 timed out waiting for rank 2, which then came, found the group failed, and left a record too."""
    for record in healthy():
        record.call()
        if record.rank != 2:
            record.call(state="failed")
        record.fail("rank 2 did not arrive", [], peer=2)
        if record.rank == 2:
            record.failures[0]["time_ns"] = 10**18 + 10**9
            record.call(state="failed")
            record.entries[-1]["time_created_ns"] = 10**18 + 10**9 - 1
        if record.rank == 1:
            record.entries[-1]["time_created_ns"] += 10**7  # after rank 0 gave up: not rank 1's fault
        record.write(tmp_path)
    report = show(tmp_path, capsys, 1)
    assert "rank 2 is behind: it has not called sequence 2, all_reduce float32 [8]; ranks 0, 1 called it" in report
    output = analyse(tmp_path)
    assert "Not all ranks joining collective, sequence number: 2" in output and "missing ranks: {2}" in output


def test_messages_are_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sends and receives in another order on each rank, and one receive without a sender."""
    first, second, third = healthy()
    first.message("send", 1, 1).message("send", 2, 1).message("recv", 2, 1, [2]).call()
    second.message("recv", 0, 1).call()
    third.message("send", 0, 1, [2]).message("recv", 0, 1).call().message("recv", 1, 1, state="started", tag=5)
    for record in (first, second, third):
        record.write(tmp_path)
    report = show(tmp_path, capsys, 1)
    expected = "rank 2 waits in recv float32 [8] (message 1 from rank 1 to rank 2, tag 5), which rank 1 has not sent"
    assert expected in report
    output = analyse(tmp_path)
    assert output.count("Not all ranks joining") == 1
    assert "group info: 0:p2p 1->2 tag 5:send/recv" in output and "missing ranks: {1}" in output


def test_message_sizes_are_compared(tmp_path: Path) -> None:
    first, second = healthy(2)
    first.message("send", 1, 1, [8]).write(tmp_path)
    second.message("recv", 0, 1, [9]).write(tmp_path)
    assert "SIZE_OR_SYNTAX_MISMATCH" in analyse(tmp_path)


def test_wrapped_rings_are_cut_to_what_all_still_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rings of different depth, and record ids that differ between ranks, are no mismatch."""
    for record in healthy():
        record.capacity = 6 + 2 * record.rank
        extra = record.group("1", "tp", [0, 1]) if record.rank < 2 else None
        for _ in range(10):
            record.call(reduce_op="SUM")
            if extra is not None:
                record.call(group=extra, reduce_op="SUM")
        record.write(tmp_path)
    show(tmp_path, capsys, 0)
    output = analyse(tmp_path)
    assert "Not all ranks" not in output and "errors" not in output
    assert {entry["collective_seq_id"] for entry in entries(tmp_path, 2)} == {8, 9, 10}


def test_subgroup_ranks_are_global(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in healthy(4):
        record.call()
        if record.rank in (1, 3):
            group = record.group("5", "tp", [1, 3])
            record.call(group=group)
            if record.rank == 1:
                record.call(group=group, state="started")
        record.write(tmp_path)
    assert "group 5 (tp): rank 3 is behind: it has not called sequence 2" in show(tmp_path, capsys, 1)
    assert "missing ranks: {3}" in analyse(tmp_path)


def test_group_made_again_counts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After destroy and init the name "0" starts again at sequence 1. The old group's entries must not be mixed in."""
    for record in healthy():
        record.call(shape=[3]).groups[0]["retired"] = True
        again = record.group("0", "default_pg", [0, 1, 2])
        record.call(shape=[4], group=again, reduce_op="SUM").write(tmp_path)
    assert load([tmp_path])[0].operations[0].input_sizes == [[4]]
    show(tmp_path, capsys, 0)
    assert "errors" not in analyse(tmp_path)


def test_process_group_tables(tmp_path: Path) -> None:
    for record in healthy(2):
        record.call().call(state="scheduled").write(tmp_path)
    analyse(tmp_path)
    content = pickle.loads((tmp_path / "converted" / "ark_rank_0").read_bytes())
    assert content["version"] == "2.10"
    assert content["pg_config"] == {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    assert content["pg_status"]["0"] == {
        "last_enqueued_collective": "2",
        "last_started_collective": "1",
        "last_completed_collective": "1",
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.pop("schema"), "not a flight record"),
        (lambda data: data.update(version="2.0"), "schema version 2.0"),
        (lambda data: data["entries"][0].pop("state"), "'state' is None"),
        (lambda data: data["entries"][0].update(input_sizes=["x"]), "'input_sizes'"),
        (lambda data: data["process"].update(global_rank=True), "'global_rank' is True"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage, message: str) -> None:  # type: ignore[no-untyped-def]
    data = RecordBuilder(0, 1).call().data()
    damage(data)
    path = tmp_path / "flight_0.json"
    path.write_text(json.dumps(data))
    assert flight.main(["show", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and message in error


def test_unusable_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.json").write_text('{"schema": "ark_fl')
    for path, message in ((tmp_path / "cut.json", "not JSON"), (tmp_path / "none.json", "No such file")):
        assert flight.main(["show", str(path)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "cut.json").unlink()
    with pytest.raises(DumpError, match=r"no \*\.json files"):
        load([tmp_path])


def test_rank_from_the_name_and_newest_dump_wins(tmp_path: Path) -> None:
    old, new = RecordBuilder(3, 4), RecordBuilder(3, 4).call()
    for record, written, name in ((new, 2, "a_3.json"), (old, 1, "b_3.json")):
        record.process.update(global_rank=-1, written_ns=written)
        (tmp_path / name).write_text(json.dumps(record.data()))
    dumps = load([tmp_path])
    assert list(dumps) == [3] and len(dumps[3].operations) == 1
