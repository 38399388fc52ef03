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

# Of the namespaces of benchmarks/nodes.py: ranks, the token bucket, a message over a pair of virtual devices.
NODE_RANKS, BURST, LINK_US = 2, 256 << 10, 10.0
GOLDEN, STEPS, GRID = (math.sqrt(5) - 1) / 2, 8, 20
MOST_CPU_GBPS = 64.0
MESSAGE = Engine(10.0, 50.0, 2.0, (), 20.0)  # where the search begins
FIRST_STEP, LAST_STEP = 2.0, 1.03
SMALL = 1 << 20  # smaller rows determine a setup, larger ones a rate
CACHED, PLATEAU = 256 << 10, 4  # bytes: operations of processes to this size stay in a core's own cache


def base_machines(results: Path) -> dict[str, Machine]:
    """Machines without fitted engines: the files' facts about the hardware. node_ranks of h200 is the usual eight."""
    dma = measured.load(results, "dma")["rows"]

    def of(what: str, engine: str, size: int, key: str) -> float:
        return next(float(r[key]) for r in dma if (r["what"], r["engine"], r["bytes"]) == (what, engine, size))

    start = Engine(1.0, of("latency", "packet", 8 << 10, "us"), 100.0)
    groups = measured.load(results, "simulate_groups")
    cores, rate = groups["machine"]["cores"], max(measured.gbit(row) for row in groups["rows"])
    gpu_link = of("throughput", "copy_engine", 64 << 20, "gbps")
    idle = replace(start, latency_us=0.0)
    return {
        GPU: Machine(GPU, "gpu", 8, gpu_link, 400.0, 5.0, {"any/any": {2: start}}),
        CPU: Machine(CPU, "cpu", 64, gpu_link, rate, LINK_US, {"any/any": {2: idle}}, cores),
        NODES: Machine(NODES, "cpu", NODE_RANKS, gpu_link, rate, LINK_US, {"any/any": {2: idle}}, cores, BURST, True),
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
    return simulate(machine, row.operation, row.bytes, row.ranks, row.dispatch, row.engine, calls=row.calls).us


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

    plain = replace(start, rates=())
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
    """Fits a setup and the caches' rate to the small rows, then a rate at each size beyond.

    A rate beyond a core's own cache holds from half a row's size, or less where ranks share cores and their caches, to
    PLATEAU times of it: what the next level holds. The largest row's holds from its size.
    """
    small = [row for row in rows if row.bytes <= CACHED]
    large = sorted((row for row in rows if row.bytes > CACHED), key=lambda row: row.bytes)
    made = fit_engine(machine, key, ranks, small, start)
    rates = [(CACHED, made.gbps)]
    for row in large:
        gbps = fit_engine(machine, key, ranks, [row], start, made.setup_us).gbps
        low = row.bytes // 2 * machine.cores // max(machine.cores, ranks)
        rates += [(row.bytes, gbps)] if row is large[-1] else [(low, gbps), (row.bytes * PLATEAU, gbps)]
    return replace(made, rates=tuple(rates))


def fit_messages(machine: Machine, rows: list[Measured], start: Engine) -> Engine:
    """Fits what a message between nodes costs, to all operations together.

    Each parameter in turn is multiplied and divided by a step, which shrinks when nothing helps any more.
    """

    def error(engine: Engine) -> float:
        trial = machine.having("all_reduce/tcp", rows[0].ranks, engine)
        return sum(min(1.0, abs(math.log(predicted(trial, row) / row.us))) for row in rows)

    made, best, step = start, error(start), FIRST_STEP
    while step > LAST_STEP:
        before = best
        for name in ("gbps", "latency_us", "message_us", "setup_us"):
            for factor in (step, 1 / step):
                trial = replace(made, **{name: round(getattr(made, name) * factor, 4)})
                found = error(trial)
                if found < best:
                    made, best = trial, found
                    break
        if best == before:
            step = math.sqrt(step)
    return made


def _operation(group: tuple[str, str, int]) -> str:
    return group[1].partition("/")[0]


def fit(results: Path, say: Callable[[str], Any] = lambda text: None) -> dict[str, Machine]:
    """All machines, from the rows for fitting. `results`: benchmarks/results."""
    made = base_machines(results)
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    every = measured.rows(results)
    for row in every:
        if row.fitted and row.machine != NODES:
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
    spaces = [row for row in every if row.fitted and row.machine == NODES]
    memory = {key: of for key, of in made[CPU].engines.items() if key != "any/any"}
    made[NODES] = replace(made[NODES], engines={**made[NODES].engines, **memory})
    tcp = fit_messages(made[NODES], spaces, MESSAGE)
    for name in (CPU, NODES):
        made[name] = made[name].having("all_reduce/tcp", spaces[0].ranks, tcp)
    say(f"{NODES} tcp: {tcp}, {len(spaces)} rows")
    files = {name: sorted({row.source for row in every if row.fitted and row.machine == name}) for name in made}
    return {
        name: replace(
            machine, engines={key: of for key, of in machine.engines.items() if key != "any/any"},
            fitted_from=", ".join(files[name]),
        )
        for name, machine in made.items()
    }  # fmt: skip
