"""Measures what work costs in loop kernels on this GPU (`ark tune --costs`), with the kernels that run plans.

Probes are small regions: products of few rows that read parameters, the same of sixteen rows out of the cache, passes
over elements, and products of many rows in tiles. Each runs some steps with a time stamp per task. A figure is what the
planner's estimate (csrc/compiler/schedule/tile_cost.cpp and matmul_tile.cpp) needs to give those times, in the best of
several steps, so that other load does not count as the machine's speed. What a probe does not show keeps its built-in
figure. figures() works on samples, which are plain data: a test gives it those of a machine that is not here.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ark_torch import _cost_files

ROUNDS = 12  # steps of each probe; the best counts
WARM = 2  # steps before them, which also fill the cache
MOST_WAIT_US = 20.0  # beyond it workers shared a processor, which says nothing about a signal
TRUSTED = 3.0  # factor between the built-in figure and a measured one beyond which a line says so
Sample = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Sizes of the probes: of a GPU with that many multiprocessors, or small ones, for a test on a CPU."""

    workers: int
    depth: int  # of products
    few: int = 0  # columns of products of few rows; as many as they have depths

    @classmethod
    def of_gpu(cls, multiprocessors: int) -> Size:
        wide = -(-32 * multiprocessors // 128) * 128
        return cls(multiprocessors, min(4096, wide), max(2048, wide))


class Chain:
    """A region of operators each of which reads what the one before it wrote."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        from ark_torch import _C

        self.graph = _C.plan.Graph()
        self.device, self.dtype = device, dtype
        self.given: list[torch.Tensor] = []
        self._buffers: dict[int, tuple[int, int]] = {}  # of a value: its buffer and how wide a row of it is
        self._name = str(dtype).removeprefix("torch.")

    def _value(self, kind: str, argument: int, shape: Sequence[int], strides: Sequence[int], **more: Any) -> int:
        buffer = self.graph.buffer(kind, argument, shape[0] * shape[1] * self.dtype.itemsize, **more)
        value: int = self.graph.value(buffer, self._name, list(shape), list(strides))
        self._buffers[value] = buffer, shape[1]
        return value

    def temporary(self, rows: int, columns: int) -> int:
        return self._value("temporary", -1, (rows, columns), (columns, 1))

    def first(self, value: int, rows: int, columns: int) -> int:
        """A view of a matrix' first columns."""
        buffer, width = self._buffers[value]
        return self.graph.value(buffer, self._name, [rows, columns], [width, 1])  # type: ignore[no-any-return]

    def input(self, rows: int, columns: int, turned: bool = False) -> int:
        """A matrix. `turned`: a linear layer's, whose depths are adjacent, and a parameter."""
        with self.device:
            tensor = torch.randn(columns, rows).t() if turned else torch.randn(rows, columns)
        self.given.append((tensor / 32).to(self.dtype))
        strides = (1, rows) if turned else (columns, 1)
        value = self._value("input", len(self.given) - 1, (rows, columns), strides, parameter=turned)
        self.graph.argument(value)
        return value

    def below(self, value: int, rows: int, columns: int) -> int:
        """A view of all rows but the first."""
        return self.graph.value(self._buffers[value][0], self._name, [rows - 1, columns], [columns, 1], columns)  # type: ignore[no-any-return]

    def node(self, op: str, inputs: Sequence[int], rows: int, columns: int, last: bool = False) -> int:
        made = self._value("output", 0, (rows, columns), (columns, 1)) if last else self.temporary(rows, columns)
        self.graph.node(op, list(inputs), [made], {}, op)
        if last:
            self.graph.output(made)
        return made

    def region(self, name: str, costs: Mapping[str, float]) -> Any:
        from ark_torch import _C, _jit

        _jit.configure()
        index = self.device.index if self.device.type == "cuda" else -1
        options = {"device": index, "cache": "none", "costs": dict(costs), "costs_from": "given"}
        return _C.plan.Region(self.graph, f"ark tune: {name}", options)


def few_rows(chain: Chain, rows: int, width: int, count: int, weights: int) -> None:
    """Square products one after the other, which take turns at `weights` matrices."""
    x = chain.input(rows, width)
    matrices = [chain.input(width, width, turned=True) for _ in range(weights)]
    for number in range(count):
        x = chain.node("matmul", [x, matrices[number % weights]], rows, width, last=number == count - 1)


def elements(chain: Chain, rows: int, columns: int, ops: Sequence[str], count: int) -> None:
    """Passes over a matrix. Each reads from the second row on, so that it cannot join the one before."""
    x = chain.input(rows, columns)
    for number in range(count):
        moved = chain.below(x, rows - number, columns)
        for op in (*ops, "neg"):
            ends = op == "neg" and number == count - 1
            moved = chain.node(op, [moved], rows - number - 1, columns, last=ends)
        x = moved


def tiles(chain: Chain, rows: int, columns: int) -> None:
    """A deep product, one with a quarter of its depths, and one of those with an activation behind."""
    depth = min(4096, columns)
    x = chain.input(rows, depth)
    for depths, finished in ((depth, False), (depth // 4, False), (depth // 4, True)):
        x = chain.node("matmul", [chain.first(x, rows, depths), chain.input(depths, columns, True)], rows, columns)
        if finished:
            x = chain.node("relu", [x], rows, columns, last=True)


def probes(device: torch.device, size: Size) -> Iterator[tuple[str, Chain]]:
    """Name and region of each probe."""
    on_cpu = device.type == "cpu"
    half, single = torch.float32 if on_cpu else torch.bfloat16, torch.float32

    def made(dtype: torch.dtype, fill: Callable[..., None], *arguments: Any) -> Chain:
        chain = Chain(device, dtype)
        fill(chain, *arguments)
        return chain

    width = size.workers * 32
    yield "parameters", made(half, few_rows, 1, size.few, 6, 6)
    yield "few rows", made(half, few_rows, 8 if on_cpu else 16, size.few, 6, 1)
    yield "moves", made(half, elements, 8 * size.workers, size.depth, (), 6)
    yield "arithmetic", made(half, elements, 8 * size.workers, size.depth, ("tanh", "erf", "sigmoid", "exp"), 4)
    if not on_cpu:  # whose plans have no tiles
        yield "large tiles", made(half, tiles, 128, 4 * width)
        yield "small tiles", made(half, tiles, 64, width)
        yield "float32 tiles", made(single, tiles, 64, width)


def sample_of(plan: Mapping[str, Any], stamps: Sequence[tuple[int, int, int]]) -> Sample:
    """What a step of a plan took, from the times at which its tasks' turns came, they began, and they ended."""
    stages: list[Sample] = [
        {name: stage[name] for name in ("kind", "flops", "bytes")}
        | {"tile": stage.get("tile"), "near": all(one["operand"] in NEAR for one in stage["accesses"]), "times": []}
        for stage in plan["stages"]
    ]
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    queues: dict[int, list[int]] = defaultdict(list)
    signalled: dict[int, tuple[int, int]] = {}  # per event: when it was last signalled, and by which worker
    handed: list[float] = []
    for number, (task, (came, began, ended)) in enumerate(zip(plan["tasks"], stamps, strict=True)):
        if task.get("head", -1) >= 0 or 0 in (came, began, ended):
            continue
        stages[task["stage"]]["times"].append((ended - began) / 1000)
        begins[task["stage"]].append(began)
        ends[task["stage"]].append(ended)
        queues[task["worker"]].append(number)
        for event in task["signals"]:
            signalled[event] = max(signalled.get(event, (0, -1)), (ended, task["worker"]))
    for task, (came, began, _) in zip(plan["tasks"], stamps, strict=True):
        last, by = max((signalled[event] for event in task["waits"] if event in signalled), default=(0, -1))
        if by not in (-1, task["worker"]) and 0 < came < last < began:  # it was waiting when the signal came
            handed.append((began - last) / 1000)
    gaps = [
        (stamps[after][0] - stamps[before][2]) / 1000
        for queue in queues.values()
        for before, after in itertools.pairwise(sorted(queue, key=lambda one: stamps[one][1]))
    ]
    for index, stage in enumerate(stages):
        stage["lasts"] = (max(ends[index]) - min(begins[index])) / 1000 if ends[index] else 0.0
    return {"stages": stages, "gaps": [gap for gap in gaps if gap >= 0], "handed": handed}


NEAR = ("activation", "packets")  # operands that were written in the same step


def best_of(samples: Sequence[Sample]) -> Sample:
    """Each stage as it was in its quickest step; all gaps and waits."""
    best: Sample = {"stages": [], "gaps": [], "handed": []}
    for several in zip(*(one["stages"] for one in samples), strict=True):
        seen = [stage for stage in several if stage["times"]]
        if seen:
            best["stages"].append(min(seen, key=lambda stage: sum(stage["times"])))
    for name in ("gaps", "handed"):
        best[name] = [time for one in samples for time in one[name]]
    return best


def run(region: Any, given: list[torch.Tensor], rounds: int = ROUNDS) -> Sample:
    plan = json.loads(region.json())
    for _ in range(WARM):
        region(given)
    return best_of([sample_of(plan, region.stamped(given)) for _ in range(rounds)])


def _rate(stages: Iterable[Sample], what: str) -> float | None:
    """What a worker does in a microsecond, over all tasks of the stages."""
    done, took = 0.0, 0.0
    for stage in stages:
        done += stage[what]
        took += sum(stage["times"])
    return done / took if took > 0 and done > 0 else None


def _line(stages: Sequence[Sample]) -> tuple[float, float] | None:
    """Slope and intercept of a tile's time over its depths, of two products of one shape and different depths."""
    if len(stages) != 2 or len({(stage["tile"]["rows"], stage["tile"]["columns"]) for stage in stages}) != 1:
        return None
    if stages[0]["tile"]["depth"] == stages[1]["tile"]["depth"]:
        return None
    (one, deep), (two, shallow) = ((statistics.fmean(s["times"]), s["tile"]["depth"]) for s in stages)
    slope = (one - two) / (deep - shallow)
    return (slope, one - slope * deep) if slope > 0 else None


def figures(samples: Mapping[str, Sample]) -> dict[str, float]:
    """The figures that these samples show, by the names of a target's costs; others are left out."""
    found: dict[str, float | None] = {}

    def stages(probe: str) -> list[Sample]:
        return samples[probe]["stages"] if probe in samples else []

    found["bytes_per_us"] = _rate(stages("parameters"), "bytes")
    found["flops_per_us"] = _rate(stages("few rows")[1:], "flops")  # the first brings the weights into the cache
    found["cached_bytes_per_us"] = _rate((stage for stage in stages("moves") if stage["near"]), "bytes")
    found["pointwise_per_us"] = _rate(stages("arithmetic"), "flops")
    gaps = [gap for sample in samples.values() for gap in sample["gaps"]]
    found["task_us"] = statistics.median(gaps) if gaps else None
    handed = sorted(time for sample in samples.values() for time in sample["handed"])
    found["wait_us"] = handed[len(handed) // 10] if handed else None
    if found["wait_us"] is not None and found["wait_us"] > MOST_WAIT_US:
        del found["wait_us"]
    found |= _tile_figures(stages("large tiles"), stages("small tiles"), stages("float32 tiles"))
    return {name: value for name, value in found.items() if value is not None and value > 0}


def _tile_figures(large: list[Sample], small: list[Sample], single: list[Sample]) -> dict[str, float | None]:
    """A tile takes start_us + area * element_us + depths * the slower of its multiplications and its operands."""
    found: dict[str, float | None] = {}
    shapes = [[stage for stage in stages if stage["tile"]] for stages in (large, small)]
    lines = [_line([stage for stage in stages if not stage["tile"]["finished"]]) for stages in shapes]
    known = [(stages[0]["tile"], line) for stages, line in zip(shapes, lines, strict=True) if line is not None]
    if known:
        found["tile_half_flops_per_us"] = max(2 * _area(tile) / slope for tile, (slope, _) in known)
        found["tile_bytes_per_us"] = max(
            (tile["rows"] + tile["columns"]) * tile["size"] / slope for tile, (slope, _) in known
        )
        every = [stage for stages in shapes for stage in stages if stage["lasts"] > 0]
        found["tile_all_bytes_per_us"] = max(
            len(stage["times"]) * _operand_bytes(stage["tile"]) / stage["lasts"] for stage in every
        )
    if len(known) == 2 and _area(known[0][0]) != _area(known[1][0]):
        (one, (_, long)), (two, (_, short)) = known
        element = max((long - short) / (_area(one) - _area(two)), 1e-6)
        found["tile_element_us"] = element
        found["tile_start_us"] = short - element * _area(two)
    plain, finished = ([s for s in shapes[0] if s["tile"]["finished"] is flag] for flag in (False, True))
    if plain and finished:
        alike = min(plain, key=lambda stage: stage["tile"]["depth"])
        more = statistics.fmean(finished[0]["times"]) - statistics.fmean(alike["times"])
        found["tile_finished_us"] = max(more / _area(alike["tile"]), 1e-6)
    if line := _line([stage for stage in single if stage["tile"] and not stage["tile"]["finished"]]):
        found["tile_float_flops_per_us"] = 2 * _area(single[0]["tile"]) / line[0]
    return found


def _area(tile: Mapping[str, int]) -> int:
    return tile["rows"] * tile["columns"]


def _operand_bytes(tile: Mapping[str, int]) -> int:
    return (tile["rows"] + tile["columns"]) * tile["depth"] * tile["size"]


def measure_samples(device: torch.device, size: Size, rounds: int = ROUNDS) -> dict[str, Sample]:
    """Of all probes. They are compiled first, so that no compiler runs beside them."""
    chains = dict(probes(device, size))
    regions = {name: chain.region(name, {}) for name, chain in chains.items()}
    return {name: run(region, chains[name].given, rounds) for name, region in regions.items()}


def table(found: Mapping[str, float], built_in: Mapping[str, float]) -> list[str]:
    """Lines that show each figure beside the built-in one."""
    lines = [f"{'figure':<26} {'built in':>12} {'measured':>12}"]
    for name, usual in built_in.items():
        value = found.get(name)
        if value is None:
            lines.append(f"{name:<26} {usual:>12.4g} {'-':>12}")
            continue
        far = not 1 / TRUSTED < value / usual < TRUSTED
        note = f"   {value / usual:.2g} times the built-in one" if far else ""
        lines.append(f"{name:<26} {usual:>12.4g} {value:>12.4g}{note}")
    return lines


def tune(device: torch.device, caches: bool, samples: str = "", output: str = "") -> int:
    """Measures this GPU and keeps the record in the cache folder, or in `output`. `caches`: cache policies too, which
    takes a minute. `samples`: a file for what the figures are made of. Returns the exit code."""
    from ark_torch import _C
    from ark_torch.tools import _tune_caches

    properties = torch.cuda.get_device_properties(device)
    model, multiprocessors = properties.name, properties.multi_processor_count
    arch = f"sm_{properties.major}{properties.minor}"
    print(f"{model}, {multiprocessors} multiprocessors", flush=True)
    found = measure_samples(device, Size.of_gpu(multiprocessors))
    if samples:
        Path(samples).write_text(json.dumps(found), encoding="utf-8")
    measured = figures(found)
    print("\n".join(table(measured, _C.plan.costs_of(arch))), flush=True)
    cache_bytes = properties.L2_cache_size
    shape = _tune_caches.Shape
    shapes = {"large": shape.large(), "near": shape.near(cache_bytes), "prompt": shape.prompt()}
    steps = _tune_caches.Steps(device, shapes, torch.bfloat16)
    measured = _tune_caches.kept(steps, measured, lambda line: print(line, flush=True))
    gains: dict[str, Any] = {}
    if caches:
        gains = _tune_caches.measure(steps, cache_bytes, measured, lambda line: print(line, flush=True))
        print(f"cache policies that gain: {gains or 'none'}")
    record = _cost_files.Record(measured, gains, _cost_files.now())
    about = {"torch": torch.__version__, "cuda": torch.version.cuda}
    path = _cost_files.remember(model, multiprocessors, record, about, Path(output) if output else None)
    if not path:
        print("nothing is kept: there is no cache folder (ARK_CACHE)")
        return 1
    print(f"wrote {path}: plans of loop kernels for this GPU use it from now on (ARK_COSTS=assumed: not)")
    return 0
