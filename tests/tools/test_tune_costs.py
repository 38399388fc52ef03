"""What work costs on a GPU: figures out of samples, files that plans find, and plans that follow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ark_torch import _C, _cost_files, _jit
from ark_torch.compile import costs
from ark_torch.tools import _tune_caches, _tune_costs, tune

GPU, MULTIPROCESSORS = "NVIDIA A100-SXM4-40GB", 108
FIGURES = {"flops_per_us": 2.5e5, "task_us": 0.4, "tile_half_flops_per_us": 2.8e6}
CACHES = {"kept_bytes": 8 << 20, "states_first": True}


def stage(us: float, tasks: int = 4, tile: tuple[int, int, int, bool] | None = None, **more: Any) -> dict[str, Any]:
    """`tile`: rows, columns, depth, and whether it has an epilogue."""
    made = {"kind": "matmul", "flops": 0.0, "bytes": 0.0, "near": False, "times": [us] * tasks, "lasts": us}
    if tile is not None:
        rows, columns, depth, finished = tile
        made["tile"] = {"rows": rows, "columns": columns, "depth": depth, "size": 2, "finished": finished}
    return {"tile": None, **made, **more}


def sample(*stages: dict[str, Any], gaps: tuple[float, ...] = (), handed: tuple[float, ...] = ()) -> dict[str, Any]:
    return {"stages": list(stages), "gaps": list(gaps), "handed": list(handed)}


@pytest.mark.quick
def test_figures_are_those_that_give_the_samples() -> None:
    """Times that a machine with these figures would take; its tiles as matmul_tile.cpp computes them."""
    flops, moved, start, element, finished = 4e6, 5e4, 2.0, 5e-5, 7e-5

    def tile(rows: int, columns: int, depth: int, has_end: bool = False) -> dict[str, Any]:
        work = max(2 * rows * columns * depth / flops, (rows + columns) * depth * 2 / moved)
        ends = start + rows * columns * (element + (finished if has_end else 0))
        return stage(work + ends, 100, (rows, columns, depth, has_end))

    large = [tile(128, 128, 4096), tile(128, 128, 1024), tile(128, 128, 1024, True)]
    small = [tile(64, 32, 4096), tile(64, 32, 1024), tile(64, 32, 1024, True)]
    found = _tune_costs.figures(
        {
            "parameters": sample(stage(20.0, bytes=1.6e6), stage(25.0, bytes=2e6), gaps=(0.2, 0.3, 0.9)),
            "few rows": sample(stage(90.0, flops=1.0), stage(10.0, flops=1.2e7), handed=(1.0,) * 2 + (3.0,) * 8),
            "moves": sample(stage(9.0, bytes=1.0), stage(5.0, bytes=6e5, near=True), stage(5.0, bytes=6e5, near=True)),
            "arithmetic": sample(stage(10.0, flops=8e5)),
            "large tiles": sample(*large),
            "small tiles": sample(*small),
        }
    )
    assert found.pop("tile_all_bytes_per_us") == pytest.approx(100 * 2 * 256 * 4096 / large[0]["lasts"])
    assert found == pytest.approx(
        {
            "bytes_per_us": 2e4,
            "flops_per_us": 3e5,
            "cached_bytes_per_us": 3e4,
            "pointwise_per_us": 2e4,
            "task_us": 0.3,
            "wait_us": 1.0,
            # 128 x 128 is bound by its multiplications or its operands, whichever is longer: here by operands
            "tile_half_flops_per_us": 2 * 128 * 128 / (256 * 2 / moved),
            "tile_bytes_per_us": moved,
            "tile_element_us": element,
            "tile_start_us": start,
            "tile_finished_us": finished,
        }
    )


@pytest.mark.quick
def test_what_a_sample_does_not_show_is_left_out() -> None:
    assert _tune_costs.figures({}) == {}
    one = _tune_costs.figures({"large tiles": sample(stage(9.0, tile=(128, 128, 512, False)))})
    assert one == {}, "a line needs two depths"
    busy = _tune_costs.figures({"few rows": sample(stage(1.0, flops=1.0), handed=(100.0,) * 10)})
    assert "wait_us" not in busy, "the workers shared a processor"


@pytest.mark.quick
def test_a_sample_of_stamps() -> None:
    """Two workers; the second waits for the first. Gaps are between tasks, waits from the signal on."""
    plan = {
        "stages": [
            {"kind": "matmul", "flops": 8.0, "bytes": 4.0, "accesses": [{"operand": "weight"}]},
            {"kind": "rows", "flops": 2.0, "bytes": 6.0, "accesses": [{"operand": "activation"}]},
        ],
        "tasks": [
            {"stage": 0, "worker": 0, "waits": [], "signals": []},
            {"stage": 0, "worker": 0, "waits": [], "signals": [0]},
            {"stage": 1, "worker": 1, "waits": [0], "signals": []},
            {"stage": 1, "worker": 0, "waits": [0], "signals": []},
            {"stage": 1, "worker": 1, "waits": [], "signals": [], "head": 2},
        ],
    }
    stamps = [(1000, 1000, 3000), (3200, 3200, 5200), (1100, 6700, 8000), (5300, 5300, 6000), (8000, 8000, 8500)]
    found = _tune_costs.sample_of(plan, stamps)
    assert [one["times"] for one in found["stages"]] == [[2.0, 2.0], [1.3, 0.7]]
    assert [one["near"] for one in found["stages"]] == [False, True]
    assert found["gaps"] == pytest.approx([0.2, 0.1]) and found["handed"] == [1.5]
    assert [one["lasts"] for one in found["stages"]] == pytest.approx([4.2, 2.7])
    slower = json.loads(json.dumps(found))
    slower["stages"][0]["times"] = [9.0, 9.0]
    assert [one["times"] for one in _tune_costs.best_of([slower, found])["stages"]] == [[2.0, 2.0], [1.3, 0.7]]


def test_probes_run_and_give_figures() -> None:
    """On the CPU's loop, whose plans have no tiles."""
    found = _tune_costs.figures(_tune_costs.measure_samples(torch.device("cpu"), _tune_costs.Size(2, 128, 256), 2))
    assert set(found) - {"wait_us"} == {*_C.plan.costs_of("cpu")} - {"wait_us"}
    assert all(_cost_files.LEAST < one < _cost_files.MOST for one in found.values())


@pytest.mark.parametrize("multiprocessors", [20, 108, 132])
def test_a_gpus_probes_have_tiles_of_two_shapes(multiprocessors: int) -> None:
    shapes: dict[str, set[tuple[int, int]]] = {}
    depths: dict[str, set[int]] = {}
    for name, rows, columns in (("large", 128, 128), ("small", 64, 32)):
        chain = _tune_costs.Chain(torch.device("meta"), torch.bfloat16)
        _tune_costs.tiles(chain, rows, columns * multiprocessors)
        plan = json.loads(_C.plan.plan_for(chain.graph, "sm_90a", multiprocessors, cache="none"))
        found = [one["tile"] for one in plan["stages"]]
        shapes[name] = {(one["rows"], one["columns"]) for one in found}
        depths[name] = {one["depth"] for one in found}
        assert [one["finished"] for one in found] == [False, False, True]
    assert shapes == {"large": {(128, 128)}, "small": {(64, 32)}}
    assert all(max(found) == 4 * min(found) for found in depths.values())


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    assert _cost_files.recall(GPU, MULTIPROCESSORS) is None
    record = _cost_files.Record(FIGURES, CACHES, "2026-11-27 17:00 UTC")
    return Path(_cost_files.remember(GPU, MULTIPROCESSORS, record, {"torch": "2.13"}))


@pytest.mark.quick
def test_a_record_is_kept_and_replaced(kept: Path) -> None:
    found = _cost_files.recall(GPU, MULTIPROCESSORS)
    assert found == _cost_files.Record(FIGURES, CACHES, "2026-11-27 17:00 UTC")
    assert kept.stat().st_mode & 0o777 == 0o600 and found.told == "measured 2026-11-27 17:00 UTC"
    assert _cost_files.recall(GPU, 20) is None and _cost_files.recall("NVIDIA A100-SXM4-80GB", MULTIPROCESSORS) is None
    _cost_files.remember(GPU, MULTIPROCESSORS, _cost_files.Record({"task_us": 1.0}, {}, "later"), {})
    assert _cost_files.recall(GPU, MULTIPROCESSORS) == _cost_files.Record({"task_us": 1.0}, {}, "later")
    assert _cost_files.is_built_in("NVIDIA H100 80GB HBM3") and not _cost_files.is_built_in(GPU)


@pytest.mark.quick
@pytest.mark.parametrize(
    "what",
    [
        {"ark": "0.0.1"},
        {"model": "another"},
        {"multiprocessors": 20},
        {"costs": {"task_us": -1.0}},
        {"costs": {"task_us": float("inf")}},
        {"costs": {"task_us": "0.3"}},
        {"costs": None},
        {"caches": {"kept_bytes": -1}},
        {"caches": {"kept_bytes": True}},
        {"caches": {"unknown": True}},
        {"measured": None},
    ],
)
def test_a_record_that_does_not_fit_is_ignored(kept: Path, what: dict[str, Any]) -> None:
    kept.write_text(json.dumps(json.loads(kept.read_text()) | what))
    assert _cost_files.recall(GPU, MULTIPROCESSORS) is None


@pytest.mark.quick
def test_plans_find_the_record(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, multi_processor_count = GPU, MULTIPROCESSORS

    class Node:
        def __init__(self, **attributes: Any) -> None:
            self.attributes = attributes

    class Graph:
        def __init__(self, *nodes: Node) -> None:
            self.nodes = nodes

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    costs._kept.cache_clear()
    found = costs.of_gpu(0)
    assert found.costs == FIGURES and costs.of_caches(found) == CACHES
    assert costs.of_gpu(0, Graph(Node(group=0, ranks=2))) is found
    assert costs.of_gpu(0, Graph(Node(group=0, ranks=4, nodes=2))).costs == {}, "machines have folders of their own"
    kept.unlink()
    assert costs.of_gpu(0) is found, "the same for all plans of a process"
    monkeypatch.setenv("ARK_COSTS", "assumed")
    assert costs.of_gpu(0).costs == {}
    with costs.instead(_cost_files.Record({"task_us": 2.0})):
        assert costs.of_gpu(0).costs == {"task_us": 2.0}
    costs._kept.cache_clear()


@pytest.mark.quick
def test_a_plan_follows_its_figures() -> None:
    """Of a machine whose multiplications are slow, larger tiles gain nothing; names and values are checked."""

    def plan(**figures: float) -> dict[str, Any]:
        chain = _tune_costs.Chain(torch.device("meta"), torch.bfloat16)
        _tune_costs.tiles(chain, 256, 4096)
        return json.loads(_C.plan.plan_for(chain.graph, "sm_90a", 132, costs=figures))  # type: ignore[no-any-return]

    usual = plan()
    assert usual["target"]["costs"] == "assumed" and plan(**_C.plan.costs_of("sm_90a"))["tasks"] == usual["tasks"]
    other = plan(tile_half_flops_per_us=1e5, tile_bytes_per_us=1e9, tile_start_us=50.0)
    assert other["target"]["tile_start_us"] == 50.0 and other["target"]["costs"] == "given"
    assert other["stages"][0]["tile"] != usual["stages"][0]["tile"]
    assert other["estimated_us"] > usual["estimated_us"]
    with pytest.raises(ValueError, match="no figure 'speed'"):
        plan(speed=1.0)
    with pytest.raises(ValueError, match="no machine's task_us is -1"):
        plan(task_us=-1.0)


@pytest.mark.quick
def test_the_better_of_two_candidates_is_kept() -> None:
    plain = {"large": 100.0, "near": 50.0}
    times = {
        "keep a fifth": 97.0,
        "keep half": 95.0,
        "states first": 99.5,
        "reused last": 101.0,
        "plain where near": 48.0,
    }
    found = _tune_caches.decide(plain, times, 40 << 20)
    assert found == {"kept_bytes": 20 << 20, "plain_where_near": True}, "half a percent is noise"
    assert _tune_caches.decide(plain, dict.fromkeys(times, 100.0), 40 << 20) == {}


def test_candidates_are_compiled_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that gain alone, but not together, none is kept."""
    shapes = {"large": _tune_caches.Shape(128, 256, 64, 4), "near": _tune_caches.Shape(64, 128, 32, 4)}
    steps = _tune_caches.Steps(torch.device("cpu"), shapes, torch.float32)
    compiled: list[tuple[str, dict[str, Any]]] = []
    real, turns = steps.compiled, iter(({"large": 100.0, "near": 50.0, "alone": 90.0}, {"plain": 9.0, "together": 9.0}))

    def noted(step: str, caches: Any, figures: Any) -> Any:
        compiled.append((step, dict(caches)))
        return real(step, caches, figures) if len(compiled) in (1, 3) else lambda: None

    def in_turns(run: Any, count: int) -> dict[str, float]:
        one = run["large" if "large" in run else "plain"]
        assert one().shape == (1, 1, 128) and len(steps._times(one)) == _tune_caches.CALLS
        times = next(turns)
        return {name: times.get(name, times.get("alone", 0.0)) for name in run}

    monkeypatch.setattr(steps, "compiled", noted)
    monkeypatch.setattr(steps, "in_turns", in_turns)
    said: list[str] = []
    found = _tune_caches.measure(steps, 40 << 20, {"task_us": 0.3}, said.append, 1)
    assert compiled[:3] == [("large", {}), ("near", {}), ("large", {"kept_bytes": 8 << 20})]
    assert compiled[-1] == ("large", {"kept_bytes": 8 << 20, "states_first": True, "reused_last": True})
    assert found == {} and len(said) == 6


def test_figures_that_make_slower_plans_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiles are judged by a prompt, on top of what a decoding step has kept."""
    shapes = {"large": _tune_caches.Shape(128, 256, 64, 4), "prompt": _tune_caches.Shape(128, 256, 64, 4, rows=16)}
    steps = _tune_caches.Steps(torch.device("cpu"), shapes, torch.float32)
    measured = {"task_us": 0.3, "tile_start_us": 2.0}

    def kept(large: float, prompt: float) -> tuple[dict[str, float], list[tuple[str, dict[str, float]]], list[str]]:
        compiled: list[tuple[str, dict[str, float]]] = []
        times = iter(({"without": 100.0, "with": large}, {"without": 100.0, "with": prompt}))
        said: list[str] = []

        def noted(step: str, caches: Any, figures: Any) -> Any:
            compiled.append((step, dict(figures)))
            return lambda: None

        monkeypatch.setattr(steps, "compiled", noted)
        monkeypatch.setattr(steps, "in_turns", lambda run, count: next(times))
        return _tune_caches.kept(steps, measured, said.append), compiled, said

    first, _ = steps.compiled("prompt", {}, {})(), steps.compiled("large", {}, {})()
    assert first.shape == (1, 16, 128)
    found, compiled, said = kept(100.5, 90.0)
    assert found == measured and len(said) == 2 and "slower" not in "".join(said)
    assert compiled == [
        ("large", {}), ("large", {"task_us": 0.3}), ("prompt", {"task_us": 0.3}), ("prompt", measured)
    ]  # fmt: skip
    found, compiled, said = kept(120.0, 90.0)
    assert found == {"tile_start_us": 2.0} and "slower, so the built-in ones stay" in said[0]
    assert compiled[2:] == [("prompt", {}), ("prompt", {"tile_start_us": 2.0})]
    assert kept(100.0, 102.0)[0] == {"task_us": 0.3}


def test_the_tool_from_probes_to_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, with small layers, as if it were a GPU. Which figures are kept depends on times."""

    class Properties:
        name, multi_processor_count, major, minor, L2_cache_size = GPU, MULTIPROCESSORS, 8, 0, 1 << 20

    monkeypatch.setenv("ARK_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(_tune_costs.Size, "of_gpu", lambda count: _tune_costs.Size(2, 128, 256))
    small = _tune_caches.Shape(64, 128, 32, 4)
    for name in ("large", "near", "prompt"):
        monkeypatch.setattr(_tune_caches.Shape, name, lambda *_: small)
    samples = tmp_path / "samples.json"
    assert _tune_costs.tune(torch.device("cpu"), True, str(samples)) == 0
    told = capsys.readouterr().out
    record = _cost_files.recall(GPU, MULTIPROCESSORS)
    assert record is not None and record.told == f"measured {record.measured}"
    seen = _tune_costs.figures(json.loads(samples.read_text()))
    assert record.costs.items() <= seen.items() and record.costs.keys() in ({*seen}, set())
    assert all(f"\n{name} " in told for name in _C.plan.costs_of("sm_80")) and "plain where near" in told
    assert set(record.caches) <= set(_cost_files.CACHES) and "cache policies that gain: " in told
    elsewhere = tmp_path / "elsewhere.json"
    assert _tune_costs.tune(torch.device("cpu"), False, "", str(elsewhere)) == 0
    assert _cost_files.read(elsewhere, GPU, MULTIPROCESSORS) is not None
    assert "policies" not in capsys.readouterr().out


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--costs", "--cuda"], "takes neither"),
        (["--costs", "--ranks", "2"], "takes neither"),
        (["--no-caches"], "go with --costs"),
        (["--costs"], "PyTorch sees none"),
    ],
)
def test_the_command_refuses(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("arch, multiprocessors", [("sm_90a", 132), ("sm_80", 108)])
def test_a_gpus_probes_compile_without_spills(arch: str, multiprocessors: int) -> None:
    _jit.configure()
    size = _tune_costs.Size.of_gpu(multiprocessors)
    for name, chain in _tune_costs.probes(torch.device("meta"), size):
        source = _C.plan.cuda_source(chain.graph, arch, multiprocessors, False, "none")
        _, [kernel] = _C._compile_kernel(source, arch, fuse=True, may_spill=False)
        assert 0 < kernel["registers"] <= 128 and kernel["spilled"] == 0, name
