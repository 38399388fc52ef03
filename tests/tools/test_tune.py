"""The autotune writes a table that groups accept and use. Bad tables are refused with an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import child

from ark_torch import _C
from ark_torch.distributed.group import load_dispatch
from ark_torch.tools import _probes, _tune_cuda, tune
from ark_torch.tools._tune_timers import call_of

USE = """
import torch, torch.distributed as dist
dist.init_process_group("ark")
x = torch.arange(300_001, dtype=torch.float32)
dist.all_reduce(x)
assert torch.equal(x, 2 * torch.arange(300_001, dtype=torch.float32))
dist.destroy_process_group()
"""


@pytest.mark.changed("ark_torch/tools/*tune*", "csrc/collectives/dispatch*")
def test_the_table_covers_every_collective_and_is_used(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    command = [sys.executable, "-m", "ark_torch", "tune", "--rounds", "1", "--output", str(table)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    rules, cuda = load_dispatch(str(table))
    assert cuda == []
    assert {rule[0] for rule in rules} >= {"all_reduce", "reduce", "all_gather", "broadcast", "all_to_all"}
    script = tmp_path / "use.py"
    script.write_text(USE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(launch, check=True, timeout=120, env={**os.environ, "ARK_DISPATCH": str(table)})


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "[]", '{"rules": [{"collective": "all_reduce"}]}', "{"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "table.json"
    table.write_text(text)
    with pytest.raises(ValueError, match="is no dispatch table"):
        load_dispatch(str(table))


@pytest.mark.quick
def test_a_rule_out_of_range_is_named(tmp_path: Path) -> None:
    from ark_torch import Options

    good = ("all_reduce", "two_shot", "both", 8, 4096, 128)
    options = Options()
    options.dispatch = [good]
    assert options.dispatch == [good]
    with pytest.raises(ValueError, match="rule 1: chunk_bytes 100 is not a multiple of 64"):
        options.dispatch = [good, ("all_reduce", "two_shot", "both", 8, 4096, 100)]
    with pytest.raises(ValueError, match="unknown collective 'all_reduec'"):
        options.dispatch = [("all_reduec", "two_shot", "both", 8, 4096, 128)]
    assert json.dumps(options.dispatch)


@pytest.mark.quick
def test_rules_for_cuda(tmp_path: Path) -> None:
    from ark_torch import _C, Options

    table = tmp_path / "table.json"
    _tune_cuda.write(str(table), 4, _C._default_cuda_dispatch(4))
    _tune_cuda.write(str(table), 2, {"one_shot_to": 1000})
    _tune_cuda.write(str(table), 2, {"one_shot_to": 2000})
    rules, cuda = load_dispatch(str(table))
    assert rules == [] and [ranks for ranks, _ in cuda] == [2, 4]
    options = Options()
    options.cuda_dispatch = cuda
    (two, numbers), four = options.cuda_dispatch
    assert two == 2 and numbers == _C._default_cuda_dispatch(2) | {"one_shot_to": 2000}
    assert four == (4, _C._default_cuda_dispatch(4))
    with pytest.raises(ValueError, match="cuda: unknown field 'one_shot'"):
        options.cuda_dispatch = [(2, {"one_shot": 1})]
    with pytest.raises(ValueError, match="max_ranks is 0"):
        options.cuda_dispatch = [(0, {})]
    assert {field.name for field in _tune_cuda.FIELDS} <= set(numbers), "the tool measures what the group reads"


@pytest.mark.quick
def test_a_size_is_chosen_where_it_costs_least() -> None:
    sizes = [1, 2, 4, 8]
    assert _tune_cuda.boundary(sizes, [1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 2.0, 2.0]) == 2
    assert _tune_cuda.boundary(sizes, [1.0, 2.1, 1.0, 9.0], [2.0, 2.0, 2.0, 2.0]) == 3, "one noisy figure"
    assert _tune_cuda.boundary(sizes, [1.0] * 4, [2.0] * 4) == 4
    assert _tune_cuda.boundary(sizes, [3.0] * 4, [2.0] * 4) == 0
    small = _tune_cuda.Field("one_shot_to", True, False, (1024, 2048, 4096))
    assert _tune_cuda.decide(small, 2, [5.0, 5.0, 5.0], [1.0, 2.0, 9.0]) == 2048
    assert _tune_cuda.decide(small, 2, [5.0] * 3, [9.0] * 3) == 0
    part = _tune_cuda.Field("chunks_from", False, True, (1024, 2048, 4096))
    assert _tune_cuda.decide(part, 4, [1.0, 5.0, 5.0], [2.0, 2.0, 2.0]) == 512
    assert _tune_cuda.decide(part, 4, [1.0] * 3, [2.0] * 3) == _tune_cuda.NEVER


@pytest.mark.quick
def test_nccl_gets_a_range() -> None:
    field = _tune_cuda.Field("nccl_all_gather_from", False, False, (8, 16, 32, 64), "all_gather", True)

    def found(without: list[float], always: list[float]) -> tuple[int, int]:
        numbers = _tune_cuda.share(field, without, always)
        assert set(numbers) == {"nccl_all_gather_from", "nccl_all_gather_to"}
        return numbers["nccl_all_gather_from"], numbers["nccl_all_gather_to"]

    never = _tune_cuda.NEVER
    assert found([5.0, 76.0, 90.0, 150.0], [9.0, 55.0, 95.0, 165.0]) == (16, 16)
    assert found([5.0, 76.0, 90.0, 150.0], [9.0, 55.0, 91.0, 120.0]) == (16, never), "one noisy figure"
    assert found([9.0] * 4, [8.0] * 4) == (8, never)
    assert found([9.0] * 4, [9.1] * 4) == (never, never)
    assert found([5.0, 76.0, 90.0, 150.0], [9.0, 75.0, 91.0, 151.0]) == (never, never), "noise"


@pytest.mark.quick
def test_the_doctor_shows_what_nccl_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probes, "child", child.played)
    monkeypatch.delenv("ARK_DISPATCH", raising=False)
    monkeypatch.delenv("ARK_REDUCTION", raising=False)
    rows = list(_probes.thresholds(["NVIDIA H200"] * 4, nccl=True))
    assert [row.probe for row in rows] == ["dispatch"] * len(rows)
    exact = " ".join(row.found + " " + row.advice for row in rows)
    assert "all_reduce from 64 MB on" in exact, rows
    monkeypatch.setenv("ARK_REDUCTION", "fast")
    four = list(_probes.thresholds(["NVIDIA H200"] * 4, nccl=True))[1]
    assert four.found.endswith("carries on 4 GPUs: all_reduce from 64 MB on"), four
    assert four.advice == ""
    two = list(_probes.thresholds(["NVIDIA H200"] * 2, nccl=True))
    assert not any("NCCL" in row.found for row in two), "nothing is NCCL's with two ranks"
    assert len(list(_probes.thresholds(["NVIDIA H200"] * 4))) == 1, "without peers' memory"
    others = list(_probes.thresholds(["NVIDIA H100 80GB HBM3"] * 4, nccl=True))
    assert not any("NCCL" in row.found for row in others), "not measured there"
    monkeypatch.setenv("ARK_DISPATCH", __file__)
    assert not list(_probes.thresholds(["NVIDIA H200"] * 2, nccl=True))


@pytest.mark.quick
def test_the_doctor_shows_what_captured_steps_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARK_DISPATCH", raising=False)
    two, four = (list(_probes.thresholds(["NVIDIA H200"] * gpus, nccl=True))[-1].found for gpus in (2, 4))
    blocks, engines = "32 blocks carry move from 1 MB on, reduce_scatter from 1 MB on", "copy engines carry all_reduce"
    assert two.endswith(f"on 2 GPUs: {blocks}, {engines} from 24 MB on"), two
    sizes = ", ".join(f"{name} from 1 MB on" for name in ("all_reduce", "move", "reduce_scatter"))
    assert four.endswith(f"on 4 GPUs: 32 blocks carry {sizes}, all_reduce by 16 of them"), four
    (without,) = _probes.captured_steps(_C._default_cuda_dispatch(2) | {"step_blocks": 0}, 2)
    assert without.found.endswith(f"on 2 GPUs: {engines} from 24 MB on")
    assert not list(_probes.captured_steps(_C._default_cuda_dispatch(8), 8)), "not measured there"


@pytest.mark.quick
def test_what_fast_sums_would_gain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = _tune_cuda.Field("nccl_all_reduce_from", False, False, (1 << 20, 1 << 21, 1 << 22), "all_reduce", True)
    faster = {"all_reduce": _tune_cuda.gains(sums, [100.0, 109.0, 125.0], [120.0, 100.0, 100.0])}
    assert faster == {"all_reduce": {str(1 << 22): 1.25}}, "a tenth or less is not worth telling"
    moves = _tune_cuda.Field("nccl_broadcast_from", False, False, sums.sizes, "broadcast", True)
    assert _tune_cuda.gains(moves, [100.0] * 3, [1.0] * 3) == {}, "what only moves bytes is taken anyway"
    assert _tune_cuda.told(2, faster) == ['reduction="fast" would gain for all_reduce on 2 GPUs: 25% at 4 MB']
    table = tmp_path / "table.json"
    _tune_cuda.write(str(table), 2, {"nccl_all_reduce_from": 1 << 22}, faster)
    _tune_cuda.write(str(table), 4, {})
    assert load_dispatch(str(table)) == ([], [(2, {"nccl_all_reduce_from": 1 << 22}), (4, {})])
    monkeypatch.setenv("ARK_DISPATCH", str(table))
    rows = {row.probe: row for row in _probes.dispatch()}
    assert "groups of 2, 4 GPUs" in rows["dispatch"].found
    assert "all_reduce on 2 GPUs: up to 25% (4 MB)" in rows["reduction"].found
    assert "ARK_REDUCTION=fast" in rows["reduction"].advice
    monkeypatch.setenv("ARK_REDUCTION", "fast")
    assert {row.probe: row for row in _probes.dispatch()}["reduction"].advice == ""
    _tune_cuda.write(str(table), 2, {})
    assert [row.probe for row in _probes.dispatch()] == ["dispatch"], "measured again"


@pytest.mark.quick
def test_without_gpus_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--cuda"])
    assert stopped.value.code == 2 and "this machine has 0" in capsys.readouterr().err


@pytest.mark.quick
def test_fields_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--cuda", "--only", "one_shot"])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and "there is no field 'one_shot' (did you mean 'one_shot_to'?)" in told


class _Backend:
    """Its operations return `work`, whatever they are asked."""

    def __init__(self, work: Any) -> None:
        self.work, self.calls = work, 0

    def __getattr__(self, operation: str) -> Any:
        def call(*arguments: Any) -> Any:
            assert not arguments[-1].asyncOp
            self.calls += 1
            return self.work

        return call


class _Work:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.quick
@pytest.mark.parametrize(
    "operation", ["all_reduce", "reduce", "broadcast", "all_to_all", "all_gather", "reduce_scatter"]
)
def test_a_timed_call_may_return_no_work(operation: str) -> None:
    """NCCL returns none for synchronous calls since PyTorch 2.8. A work is waited for."""
    for work in (None, _Work()):
        backend = _Backend(work)
        call = call_of(operation, backend, torch.ones(8), torch.ones(8), 2)
        call()
        call()
        assert backend.calls == 2 and (work is None or work.waited == 2)
