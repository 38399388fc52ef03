"""Fits machines to measurements: each engine's setup time and transfer rate.

A time is launches * setup_us + f(rate), where f comes from the simulator. For each candidate rate the best setup has a
closed form; the rate is found by a grid and golden section. Errors are relative: a microsecond counts as much at 3 us
as a millisecond at 3 ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ark_torch.simulation import measured
from ark_torch.simulation.collective import gpu_choice, simulate
from ark_torch.simulation.machine import Engine, Machine
from ark_torch.simulation.measured import CPU, GPU, NODES, Measured

GOLDEN, STEPS, GRID = (math.sqrt(5) - 1) / 2, 8, 20
MOST_CPU_GBPS = 64.0
SMALL = 1 << 20  # smaller rows determine a setup, larger ones a rate
LARGE_FROM = (1 << 20, 2 << 20, 16 << 20)  # candidate sizes at which a CPU's working set leaves its caches


def base_machines(results: Path) -> dict[str, Machine]:
    """Machines without fitted engines: the files' facts about the hardware. node_ranks of h200 is the usual eight."""
    dma = measured.load(results, "dma")["rows"]

    def of(what: str, engine: str, size: int, key: str) -> float:
        return next(float(r[key]) for r in dma if (r["what"], r["engine"], r["bytes"]) == (what, engine, size))

    start = Engine(1.0, of("latency", "packet", 8 << 10, "us"), 100.0)
    processes = measured.load(results, "collectives")["machine"]["cores"]
    spaces = measured.load(results, "nodes")
    gpu_link = of("throughput", "copy_engine", 64 << 20, "gbps")
    rate = max(float(row["rate"].removesuffix("gbit")) for row in spaces["rows"])
    idle = replace(start, latency_us=0.0)
    return {
        GPU: Machine(GPU, "gpu", 8, gpu_link, 400.0, 5.0, {"any/any": {2: start}}),
        CPU: Machine(CPU, "cpu", 64, gpu_link, 10.0, 50.0, {"any/any": {2: idle}}, processes),
        NODES: Machine(NODES, "cpu", spaces["rows"][0]["ranks"], gpu_link, rate, 50.0, {"any/any": {2: idle}},
                       spaces["machine"]["cores"]),
    }  # fmt: skip


def engine_of(row: Measured) -> str:
    from ark_torch.simulation.collective import cuda_dispatch

    if row.machine == CPU:
        return "shared_memory"
    if row.machine == NODES:
        return "tcp"
    fields = {**cuda_dispatch(row.ranks), **row.dispatch}
    return row.engine or gpu_choice(row.operation, row.bytes, row.ranks, fields)[1]


def predicted(machine: Machine, row: Measured) -> float:
    if row.rail_gbit:
        machine = replace(machine, rail_gbit=row.rail_gbit)
    return simulate(machine, row.operation, row.bytes, row.ranks, row.dispatch, row.engine).us


def least(error: Callable[[float], float], most: float) -> float:
    """The rate with the least error up to `most`: the best of a grid, refined by golden section.

    Golden section alone would fail on the plateau where this rate is not the limit.
    """
    grid = [most / 2 ** (k / 2) for k in range(GRID)]
    errors = [error(rate) for rate in grid]
    at = errors.index(min(errors))
    low, high = math.log(grid[min(at + 1, GRID - 1)]), math.log(grid[max(at - 1, 0)])
    first, second = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_first, at_second = error(math.exp(first)), error(math.exp(second))
    for _ in range(STEPS):
        if at_first < at_second:
            high, second, at_second = second, first, at_first
            first = high - GOLDEN * (high - low)
            at_first = error(math.exp(first))
        else:
            low, first, at_first = first, second, at_second
            second = low + GOLDEN * (high - low)
            at_second = error(math.exp(second))
    return math.exp((low + high) / 2)


def fit_engine(
    machine: Machine,
    key: str,
    ranks: int,
    rows: list[Measured],
    start: Engine,
    setup: float | None = None,
    known_rate: float | None = None,
) -> Engine:
    """Fits one engine. setup, known_rate: given if the rows do not determine them (None: fitted)."""
    most = machine.link_gbps if machine.kind == "gpu" else MOST_CPU_GBPS

    def times(engine: Engine) -> list[float]:
        trial = machine.having(key, ranks, engine)
        return [predicted(trial, row) for row in rows]

    plain = replace(start, large_gbps=0.0, large_from=0)
    launches = [
        one - none
        for one, none in zip(
            times(replace(plain, setup_us=1.0, gbps=most)), times(replace(plain, setup_us=0.0, gbps=most)),
            strict=True,
        )
    ]  # fmt: skip

    def best(rate: float) -> tuple[float, float]:
        """(setup, error)"""
        moving = times(replace(plain, setup_us=0.0, gbps=rate))
        weights = [count / row.us for count, row in zip(launches, rows, strict=True)]
        left = [1 - time / row.us for time, row in zip(moving, rows, strict=True)]
        found = sum(w * e for w, e in zip(weights, left, strict=True)) / sum(w * w for w in weights)
        found = max(0.0, found) if setup is None else setup
        return found, sum((w * found - e) ** 2 for w, e in zip(weights, left, strict=True))

    rate = known_rate or least(lambda rate: best(rate)[1], most)
    return replace(start, setup_us=round(best(rate)[0], 4), gbps=round(rate, 4))


def fit_processes(machine: Machine, key: str, ranks: int, rows: list[Measured], start: Engine) -> Engine:
    """Fits two rates, in the caches and beyond them, split at the size with the least total error."""
    candidates: list[tuple[float, Engine]] = []
    for border in LARGE_FROM:
        small = [row for row in rows if row.bytes < border]
        large = [row for row in rows if row.bytes >= border]
        near = fit_engine(machine, key, ranks, small, start, None)
        far = fit_engine(machine, key, ranks, large, start, near.setup_us)
        made = replace(near, large_gbps=far.gbps, large_from=border)
        trial = machine.having(key, ranks, made)
        error = sum((predicted(trial, row) / row.us - 1) ** 2 for row in rows)
        candidates.append((error, made))
    return min(candidates, key=lambda one: one[0])[1]


def _operation(group: tuple[str, str, int]) -> str:
    return group[1].partition("/")[0]


def fit(results: Path, say: Callable[[str], Any] = lambda text: None) -> dict[str, Machine]:
    """All machines, from the rows for fitting. `results`: benchmarks/results."""
    made = base_machines(results)
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    for row in measured.rows(results):
        if row.fitted:
            groups.setdefault((row.machine, f"{row.operation}/{engine_of(row)}", row.ranks), []).append(row)

    def one(group: tuple[str, str, int], setup: float | None = None, rate: float | None = None) -> Engine:
        name, key, ranks = group
        start = made[name].engines["any/any"][2]
        if key.endswith("/copy_engine"):
            start = replace(start, latency_us=0.0)  # its waits are on other streams than the copies
        if name == CPU:
            engine = fit_processes(made[name], key, ranks, groups[group], start)
        else:
            engine = fit_engine(made[name], key, ranks, groups[group], start, setup, rate)
        made[name] = made[name].having(key, ranks, engine)
        say(f"{name} {key} {ranks} ranks: {engine.setup_us:.2f} us, {engine.gbps:.1f} GB/s, {len(groups[group])} rows")
        return engine

    single = [group for group, of in groups.items() if len(of) == 1]
    small = [group for group in single if groups[group][0].bytes < SMALL]
    found = {group: one(group) for group in groups if group not in single}
    for group in small:
        found[group] = one(group, None, made[group[0]].link_gbps)
    # A single large row determines a rate; its setup is that of the operation's smallest rows.
    by_size = sorted(found, key=lambda group: min(row.bytes for row in groups[group]))
    for group in single:
        if group not in small:
            near = (g for g in by_size if (g[0], g[2]) == (group[0], group[2]) and _operation(g) == _operation(group))
            found[group] = one(group, next((found[g].setup_us for g in near), 0.0))
    # A single small row determines a setup; its rate is the engine's in another operation, if known.
    for group in small:
        name, key, ranks = group
        others = [g for g in found if g not in small and (g[0], g[2]) == (name, ranks)]
        same = [g for g in others if g[1].partition("/")[2] == key.partition("/")[2]]
        if same:
            rate = found[same[0]].gbps
            found[group] = one(group, None, rate)
    files = {
        name: sorted({row.source for rows in groups.values() for row in rows if row.machine == name}) for name in made
    }
    return {
        name: replace(
            machine, engines={key: of for key, of in machine.engines.items() if key != "any/any"},
            fitted_from=", ".join(files[name]),
        )
        for name, machine in made.items()
    }  # fmt: skip
