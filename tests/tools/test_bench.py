"""The benchmark: its result check detects errors, its files contain the measurements, bad arguments are refused.

Times are only checked for existence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support import launcher, start
from support.rank import Rank

from ark_torch.tools.bench import cli, goals, launch, report, table
from ark_torch.tools.bench.config import OPERATION_NAMES, REDUCTIONS, Config, parse_size, show_size, sizes_between
from ark_torch.tools.bench.measure import Timing
from ark_torch.tools.bench.operations import OPERATIONS, REDUCE_OPS

TOP = start.TESTS.parent


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_operation_is_measured_and_right(ranks: int, tmp_path: Path, leaves_nothing: None) -> None:
    options = ["--quick", "--no-mpi", "--rounds", "1", "--sizes", "4,10K,300K", "--ops", ",".join(OPERATIONS)]
    command = [sys.executable, "-m", "ark_torch", "bench", "--backend", launcher.BACKEND, "--ranks", str(ranks)]
    done = subprocess.run(
        [*command, *options, "--output", str(tmp_path)],
        env=start.base_environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : " in done.stdout and "goal" not in done.stdout
    data = json.loads((tmp_path / "collectives-quick.json").read_text())
    assert data["command"].startswith("ark bench --backend ")
    sizes = {name: {row["bytes"] for row in data["rows"] if row["operation"] == name} for name in OPERATIONS}
    assert sizes.pop("barrier") == {0}
    for name, measured in sizes.items():
        # If the buffer is divided among ranks, there is at least one element per rank and no remainder.
        share = 4 * ranks
        shared_out = {max(share, size // share * share) for size in (4, 10 << 10, 300 << 10)}
        assert measured == (shared_out if OPERATIONS[name].splits else {4, 10 << 10, 300 << 10}), name
    for row in data["rows"]:
        for backend, timing in row["timings"].items():
            assert not timing["error"], f"{backend}: {row}"
            assert timing["wrong"] == 0, f"{backend}: {row}"
            assert 0 < timing["best"] <= timing["median"]
    assert data["machine"]["cores"] >= 1 and data["versions"]["torch"] and data["date"] and "--quick" in data["command"]
    assert set(data["overhead_us"]) == ({launcher.BACKEND, "gloo", "empty"} if ranks == 2 else set())
    if not why_no_matplotlib():
        assert (tmp_path / "collectives-quick.png").read_bytes().startswith(b"\x89PNG")


def why_no_matplotlib() -> str:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


def measure_broken_backends(rank: Rank, name: str, count: int) -> dict[str, dict[str, Any]]:
    import torch
    import torch.distributed as dist

    from ark_torch.tools.bench.measure import Bench, bind_to
    from ark_torch.tools.bench.operations import Case

    control = rank.init("gloo")
    good = bind_to(control)

    def off_by_one(operation: Any, case: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        call = good(operation, case, x, y)

        def spoil() -> None:
            call()
            if rank.rank == 1:
                y[-1] += 1

        return spoil

    def fails(operation: Any, case: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        def call() -> None:
            if rank.rank == 1:
                raise ValueError("no such dtype here")

        return call

    binders = {"good": good, "does nothing": lambda *_: lambda: None, "off by one": off_by_one, "fails": fails}
    bench = Bench(control, binders, rounds=1, seconds=0.001)
    case = Case(rank.rank, rank.world_size, count, "float32", "sum")
    timings = {backend: asdict(timing) for backend, timing in bench.run(OPERATIONS[name], case, list(binders)).items()}
    dist.barrier(control)
    return timings


@pytest.mark.by_day("all_reduce", "send_recv")
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"barrier", "reduce", "gather"}))
def test_wrong_results_and_failures_are_noticed(name: str) -> None:
    timings = launcher.run_ranks(measure_broken_backends, 2, name, 70_000)
    for on_rank in timings:
        assert on_rank["good"]["wrong"] == 0 and not on_rank["good"]["error"]
        # An unwritten output keeps its poison, or its own input. Twice: before and after the timed calls.
        assert on_rank["does nothing"]["wrong"] >= 2 * 30_000
        assert on_rank["off by one"]["wrong"] == 2
        assert on_rank["fails"]["median"] == 0
    assert timings[0]["fails"]["error"] == "failed on another rank"
    assert timings[1]["fails"]["error"] == "ValueError: no such dtype here"


def row(ours: float, gloo: float, size: int = 4, **changes: Any) -> dict[str, Any]:
    timings = {"ark": asdict(Timing(ours, ours, 0.1, 10, 5, 0)), "gloo": asdict(Timing(gloo, gloo, 0.1, 10, 5, 0))}
    made = {"operation": "all_reduce", "ranks": 2, "bytes": size, "count": size // 4, "dtype": "float32"}
    return made | {"redop": "sum", "bus_factor": 1.0, "timings": timings} | changes


@pytest.mark.quick
def test_verdicts_follow_the_goals() -> None:
    found = {kb: goals.goal("all_reduce", 2, kb << 10) for kb in (1, 64, 65, 1024, 16384, 65536)}
    assert found == {1: 10, 64: 10, 65: None, 1024: 8, 16384: 8, 65536: 7}
    assert goals.goal("all_reduce", 4, 256 << 20) == 5
    assert goals.goal("gather", 2, 4) is None
    assert table.verdict(row(1, 10)) == "met >=10"
    assert table.verdict(row(1, 9.9)) == "MISSED >=10"
    assert table.verdict(row(1, 10, dtype="float64")) == ""
    wrong = row(1, 100)
    wrong["timings"]["ark"]["wrong"] = 3
    assert table.verdict(wrong) == "WRONG"
    assert "1 of 3 met" in table.goals_met([wrong, row(1, 10), row(1, 2)])
    assert "# Out of bounds values : 3 FAILED" in table.summary([wrong, row(1, 10)])
    assert "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 1 GB/s" in table.summary([row(1, 5, size=1000)])
    failed = row(1, 10)
    failed["timings"]["gloo"]["error"] = "out of order"
    assert table.ratio_to(failed, "gloo") is None and table.verdict(failed) == ""
    assert "gloo: out of order" in table.row_line(failed)
    columns = table.row_line(row(2.0, 30.0, size=4_000_000)).split()
    assert columns[4:] == ["2.00", "5", "2000.00", "2000.00", "0", "30.00", "15.0"], "goals are the developers'"
    columns = table.row_line(row(2.0, 30.0, size=4_000_000), True).split()
    assert columns[-2:] == ["met", ">=8"]
    lines = [table.overhead_line({"ark": 9.0, "gloo": 90.0}, developer) for developer in (False, True)]
    assert "goal" not in lines[0] and lines[1].endswith("goal MISSED <=8 us")


@pytest.mark.quick
def test_sizes() -> None:
    assert [parse_size(text) for text in ("4", "1k", "64K", "1MB", "2G")] == [4, 1 << 10, 64 << 10, 1 << 20, 2 << 30]
    assert sizes_between(4, 256 << 20, 4)[-2:] == (64 << 20, 256 << 20)
    assert sizes_between(4, 100, 4) == (4, 16, 64, 100)
    assert [show_size(size) for size in (4, 1 << 10, 1536, 256 << 20)] == ["4 B", "1 KB", "1536 B", "256 MB"]
    assert tuple(OPERATIONS) == OPERATION_NAMES and tuple(REDUCE_OPS) == REDUCTIONS, "names that need no torch"
    config = Config(2, ("all_reduce",), (4, 8), ("ark", "gloo"), mpi=False)
    assert Config.from_json(config.to_json()) == config


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sizes", "4X"], "'4X' is not a size"),
        (["--sizes", "0"], "'0' is not a size"),
        (["--ops", "all_reduce,all_deuce"], "'all_deuce' is no operation (did you mean 'all_reduce'?)"),
        (["--ranks", "1"], "numbers of ranks from 2 to 16"),
        (["--backend", "fpga"], "backend 'fpga' is not known"),
        (["--backend", "glo"], "(did you mean 'gloo'?)"),
        (["--rounds", "-1"], "'-1' is not a whole number"),
        (["--sizes", "1000G"], "need more memory than there is"),
        (["--readme"], "unrecognized arguments: --readme"),
    ],
)
def test_bad_arguments(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_run(leaves_nothing: None) -> None:
    config = Config(2, ("no_such_operation",), (4,), ("gloo",), mpi=False, timeout_seconds=20)
    with pytest.raises(launch.BenchmarkFailed, match="exit code 1"):
        launch.run_ranks(config)


@pytest.mark.quick
def test_tables_show_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOP / "benchmarks"))
    import cpu_tables

    about = report.surroundings("ark bench") | {"date": "2026-01-01"}
    rows = [row(2.5, 50.0), row(1000.0, 9000.0, size=1 << 20)]
    shown = cpu_tables.collectives(about | {"rows": rows, "overhead_us": {"ark": 6.5, "gloo": 150.0}})
    assert "| all_reduce | 2.5 (20.0x) | 1,000 (9.0x) |" in shown and "ark 6.5 us, gloo 150.0 us" in shown
    step = {"model": "tiny", "gradient_bytes": 3_300_000, "ranks": 2, "batch": 16, "ratio": 1.25}
    shown = cpu_tables.ddp(about | {"rows": [step | {"ark_ms": 4.0, "gloo_ms": 5.0, "local_ms": 3.5}]})
    assert "| tiny | 3.3 MB | 2 | 16 | 4.00 | 5.00 | 1.25 | 3.50 |" in shown
