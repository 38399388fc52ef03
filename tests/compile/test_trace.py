"""ARK_TRACE: the content and size of the timeline, and the tool's output."""

from __future__ import annotations

import itertools
import json
import os
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import ark_torch
from ark_torch import _C
from ark_torch.compile import trace
from ark_torch.tools import trace as tool
from ark_torch.tools._trace_files import Slice, Step, merge, read, steps_of, timeline_of, write
from ark_torch.tools._trace_picture import draw
from ark_torch.tools._trace_scan import about_of, scan

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with monkeypatch.context() as patch:
        patch.setenv("ARK_TRACE", str(tmp_path / "trace.json"))
        yield tmp_path / "trace.json"
    trace.configure()
    assert _C.plan.trace_path() == ""


def run(compiled: Any, steps: int = 3) -> dict[str, Any]:
    """Runs decoding steps of a small Llama on two workers. Returns the plan of its region."""
    model = models.Llama(models.Config()).eval()
    call, report = compiled(model, threads=2)
    for position in range(steps):
        call(torch.tensor([[1]]), torch.tensor([position % 32]))
    _C.plan.flush_trace()
    (region,) = report.regions
    plan: dict[str, Any] = json.loads(region.plan_json)
    return plan


def test_every_task_of_every_step(file: Path, compiled: Any) -> None:
    plan = run(compiled, steps=3)
    steps = steps_of(merge([read(file)]))
    assert [step.region for step in steps] == ["ark::Llama.forward[0/0] 0"] * 3
    kinds = [stage["kind"] for stage in plan["stages"]]
    for step in steps:
        tasks = {one.arguments["task"]: one for one in step.slices if one.kind != "wait"}
        assert len(tasks) == len(plan["tasks"]) == sum(one.kind != "wait" for one in step.slices)
        for number, planned in enumerate(plan["tasks"]):
            one = tasks[number]
            assert (one.kind, one.worker) == (kinds[planned["stage"]], planned["worker"])
            assert one.arguments["origin"] == plan["stages"][planned["stage"]]["origin"]
            assert step.begin <= one.begin and one.end <= step.end + 1e-3
        # A worker does one thing at a time, in queue order.
        for worker, queue in enumerate(plan["queues"]):
            mine = [one for one in step.slices if one.worker == worker]
            in_time = sorted(mine, key=lambda one: one.begin)
            assert all(a.end <= b.begin + 1e-3 for a, b in itertools.pairwise(in_time))
            assert [one.arguments["task"] for one in in_time if one.kind != "wait"] == queue["tasks"]
        for wait in (one for one in step.slices if one.kind == "wait"):
            event, signaller = wait.arguments["event"], wait.arguments["of_task"]
            assert event in plan["tasks"][wait.arguments["before_task"]]["waits"]
            assert event in plan["tasks"][signaller]["signals"]
            assert tasks[signaller].end <= wait.end + 1e-3  # the awaited task had ended
            assert wait.name == "wait for " + tasks[signaller].name
    names = {one.name for one in steps[0].slices}
    assert "matmul layers.0.attn.wq" in names, names


def test_regions_and_models_share_a_file(file: Path, compiled: Any) -> None:
    run(compiled, steps=1)
    call, _ = compiled(models.ResidualBlock(transposed=True).eval(), minimum=1)
    call(torch.randn(1, 8, 5, 5))
    _C.plan.flush_trace()
    regions = {step.region for step in steps_of(merge([read(file)]))}
    assert len(regions) > 1 and all(".forward[" in region for region in regions), regions


def test_bounded(file: Path, compiled: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_TRACE_MB", "1")
    with caplog.at_level("WARNING", logger="ark_torch.compile"):
        run(compiled, steps=150)
    assert 0 < file.stat().st_size <= 1 << 20
    steps = steps_of(merge([read(file)]))  # still valid
    assert 10 < len(steps) < 150
    (said,) = [record.message for record in caplog.records if "trace" in record.message]
    assert "has reached 1 MiB (ARK_TRACE_MB)" in said


def test_off_writes_nothing(tmp_path: Path, compiled: Any) -> None:
    run(compiled, steps=1)
    assert _C.plan.trace_path() == "" and not list(tmp_path.glob("*.json"))


def test_a_failed_step_is_in_it(file: Path, compiled: Any) -> None:
    call, _ = compiled(lambda table, index: table[index] * 2 + 1)
    with pytest.raises(IndexError, match="out of bounds"):
        call(torch.ones(4, 3), torch.tensor([9]))
    _C.plan.flush_trace()
    assert len(steps_of(merge([read(file)]))) == 1


def test_a_file_that_cannot_be_written(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("ARK_TRACE", str(tmp_path / "folder"))
        with caplog.at_level("WARNING", logger="ark_torch.compile"):
            run(compiled, steps=2)  # works all the same
        assert any("cannot write the trace" in record.message for record in caplog.records)
    trace.configure()


def test_processes_do_not_share_a_file(file: Path, compiled: Any) -> None:
    run(compiled, steps=1)
    before = file.read_bytes()
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            path = _C.plan.trace_path()
            os._exit(0 if path == f"{file}.{os.getpid()}" and Path(path).exists() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read_bytes() == before


def test_names_of_ranks() -> None:
    assert trace.file_of("/a/trace.json", 0, 1) == "/a/trace.json"
    assert trace.file_of("/a/trace.json", 3, 4) == "/a/trace.rank3.json"
    assert trace.file_of("/a/trace", 3, 4) == "/a/trace.rank3.json"


def test_tool(file: Path, compiled: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(compiled, steps=5)
    picture, merged = tmp_path / "step.svg", tmp_path / "merged.json"
    assert tool.main([str(file), "--picture", str(picture), "--output", str(merged)]) == 0
    said = capsys.readouterr().out
    assert (
        "ark::Llama.forward[0/0] 0: 5 steps on 1 rank(s), 2 workers" in said and "waiting" in said and "matmul" in said
    )
    tree = xml.etree.ElementTree.parse(picture)
    whole = len(tree.findall("{http://www.w3.org/2000/svg}rect"))
    assert whole > 50
    assert tool.main([str(file), "--picture", str(picture), "--microseconds", "5"]) == 0
    assert 0 < len(xml.etree.ElementTree.parse(picture).findall("{http://www.w3.org/2000/svg}rect")) < whole
    assert tool.main([str(tmp_path / "no.json")]) == 2
    file.write_text("{}")
    assert tool.main([str(file)]) == 2


def test_picture_of_many_workers() -> None:
    """As on a GPU: thin lanes, every twentieth with a label."""
    steps = [
        Step("r", rank, 0.0, 100.0, 0, [Slice("a", "matmul", 1.0 + w, 0.5, w, {}) for w in range(60)])
        for rank in (0, 1)
    ]
    tree = xml.etree.ElementTree.fromstring(draw(steps, 30.0))
    texts = [one.text or "" for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if "rank 1" in text] == [f"rank 1, worker {w}" for w in (0, 20, 40)]
    assert len(tree.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 2 + 2 * 30
    assert float(tree.attrib["height"]) < 120 * 10


def test_timeline_of_one_step(file: Path, compiled: Any, tmp_path: Path) -> None:
    """One step, starting at its own beginning, with all its slices."""
    run(compiled, steps=5)
    packed = tmp_path / "step.json.gz"
    assert tool.main([str(file), "--step", "3", "--timeline", str(packed)]) == 0
    (found,), step = steps_of(read(packed)), steps_of(read(file))[3]
    assert found.begin == 0.0 and abs(found.length - step.length) < 1e-3
    assert len(found.slices) == len(step.slices) > 50

    def order(one: Slice) -> tuple[int, float]:
        return one.worker, one.begin

    for one, whole in zip(sorted(found.slices, key=order), sorted(step.slices, key=order), strict=True):
        assert (one.name, one.kind, one.worker) == (whole.name, whole.kind, whole.worker)
        assert abs(one.begin + step.begin - whole.begin) < 2e-3 and abs(one.length - whole.length) < 2e-3
        assert one.arguments.items() <= whole.arguments.items()
    again = merge([read(packed)])
    assert len(steps_of(again)) == 1
    with pytest.raises(ValueError, match="has no clock"):
        merge([again, again])
    packed.write_bytes(packed.read_bytes()[:40])
    with pytest.raises(ValueError, match="is not a timeline"):
        read(packed)


def test_timeline_of_ranks_as_of_gpus(tmp_path: Path) -> None:
    """One process per rank, one track per multiprocessor, on one clock."""
    steps = [
        Step(
            "r",
            rank,
            50.0 + rank,
            100.0,
            0,
            [Slice("a", "matmul", 60.0 + rank, 0.5, w, {"task": w}) for w in range(132)],
        )
        for rank in (2, 3)
    ]
    for name in ("ranks.json", "ranks.json.gz"):
        write(tmp_path / name, timeline_of(steps))
        found = steps_of(read(tmp_path / name))
        assert [(step.rank, step.begin, step.workers) for step in found] == [(2, 0.0, 132), (3, 1.0, 132)]
        assert {one.begin for one in found[1].slices} == {11.0}
    assert (tmp_path / "ranks.json").stat().st_size > 5 * (tmp_path / "ranks.json.gz").stat().st_size
    events = read(tmp_path / "ranks.json.gz")["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert names[2, 132] == "worker 131" and len(names) == 2 * 132
    processes = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert processes == ["rank 2", "rank 3"]


def test_ranks_of_several_machines_share_a_clock(file: Path, compiled: Any) -> None:
    run(compiled, steps=2)
    one = read(file)
    other = json.loads(json.dumps(one))
    other["otherData"].update(rank=1, boot="another", monotonic_ns=one["otherData"]["monotonic_ns"] + 5_000_000)
    for event in other["traceEvents"]:
        if "ts" in event:
            event["ts"] += 5000  # the same moments on a clock that is ahead
    steps = steps_of(merge([one, other]))
    assert [step.rank for step in steps].count(1) == 2
    first = {step.rank: step.begin for step in reversed(steps)}
    assert abs(first[0] - first[1]) < 0.01


def same_steps(*paths: Path) -> list[Step]:
    """What scan() finds, compared with the steps of the parsed files."""
    found, parsed = scan(paths), steps_of(merge([read(path) for path in paths]))
    for one, whole in zip(found, parsed, strict=True):
        for name in ("region", "rank", "begin", "length", "lane", "first", "workers", "slices"):
            assert getattr(one, name) == getattr(whole, name), (name, one, whole)
    return found


def test_slices_are_parsed_when_asked_for(file: Path, compiled: Any, tmp_path: Path) -> None:
    run(compiled, steps=4)
    first, *_ = scan([file])
    assert about_of(file.read_bytes()) and first.begin < first.first < first.end
    assert "slices" not in vars(first)
    assert len(first.slices) > 50 and "slices" in vars(first)
    assert len(same_steps(file)) == 4
    whole = read(file)
    for name in ("merged.json", "packed.json.gz"):  # parsed as a whole
        write(tmp_path / name, whole)
        assert len(same_steps(tmp_path / name)) == 4
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match="is not a timeline"):
        scan([file])


def lines_of(rank: int, boot: str, *events: tuple[int, float, str]) -> str:
    """A file as csrc/compiler/inspect/trace.cpp writes it, of events on threads."""
    clock = {"boot": boot, "monotonic_ns": 1_000 * (rank + 1), "realtime_ns": 500_000}
    head = {"displayTimeUnit": "ns", "otherData": {"made_by": "ark_torch", "rank": rank, **clock}, "traceEvents": []}
    rows = [{"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "process 7"}}]
    for number, (thread, begin, kind) in enumerate(events):
        name = '"cat":"region" of a task' if kind == "gelu" else kind
        times = {"ph": "X", "pid": 7, "tid": thread, "ts": begin, "dur": 2.5}
        rows.append({**times, "name": name, "cat": kind, "args": {"step" if kind == "region" else "task": number}})
        if kind == "region":
            rows.insert(-1, {"ph": "M", "pid": 7, "tid": thread, "name": "thread_name", "args": {"name": "worker"}})

    def text(of: Any) -> str:
        return json.dumps(of, separators=(",", ":"))

    return text(head).removesuffix("]}") + ",\n".join(map(text, rows)) + "\n]}\n"


@pytest.mark.quick
def test_slices_that_begin_outside_their_step(tmp_path: Path) -> None:
    """They belong to the step of their lane in which they begin, wherever the file has them."""
    events = [
        (1, 100.0, "region"), (1, 99.0, "gelu"), (2, 101.5, "wait"), (2, 212.0, "matmul"),
        (1001, 150.0, "region"), (1003, 151.0, "gelu"), (1002, 151.0, "wait"),
        (1, 300.0, "region"),
        (1, 200.0, "region"), (2, 150.25, "gelu"), (2, 201.0, "gelu"), (2, 300.0, "gelu"),
    ]  # fmt: skip
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(lines_of(0, "a", *events))
    other.write_text(lines_of(1, "b", *((thread, begin + 7, kind) for thread, begin, kind in events)))
    assert [len(step.slices) for step in same_steps(one)] == [2, 2, 2, 1]
    found = same_steps(one, other)
    assert [step.rank for step in found].count(1) == 4
    assert min(step.begin for step in found if step.rank == 1) == 100 + 7 - 1  # this clock is ahead by 1 us
    one.write_text(lines_of(0, "a"))
    assert same_steps(one) == []


def test_profiler_names_the_region(compiled: Any) -> None:
    model = models.Llama(models.Config()).eval()
    call, _ = compiled(model)
    call(torch.tensor([[1]]), torch.tensor([0]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for position in range(3):
            call(torch.tensor([[1]]), torch.tensor([position % 32]))
    (event,) = [event for event in profile.key_averages() if event.key == "ark::Llama.forward[0/0] 0"]
    assert event.count == 3


def test_explain_takes_the_same_name() -> None:
    model = models.Decoder().eval()
    report = ark_torch.explain(model, torch.zeros(1, 4, dtype=torch.int64), ark_options={"choose": "ark"})
    assert report.regions[0].region.name.startswith("ark::Decoder.forward[")
