"""Measures the best algorithm and chunk size of collectives on CPU tensors on this machine (`ark tune`).

For all_reduce it finds the best chunk of one_shot and of two_shot, and the faster of the two at each size; for the
other collectives only the best chunk. Candidates alternate within the same processes over several rounds, and their
medians are compared, so that noise affects all of them equally.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any, TypeVar

import torch
import torch.distributed as dist

ANY_BYTES = 2**64 - 1
ANY_RANKS = 2**32 - 1
CHUNKS = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]
SIZES = [1 << power for power in range(10, 27, 2)]
Key = TypeVar("Key", int, str)
MOVING = ("all_gather", "broadcast", "reduce_scatter", "all_to_all", "gather", "scatter")


def rule(collective: str, algorithm: str, when: str, max_bytes: int, chunk: int) -> dict[str, Any]:
    """One rule of a table, for any number of ranks."""
    return {
        "collective": collective,
        "algorithm": algorithm,
        "when": when,
        "max_ranks": ANY_RANKS,
        "max_bytes": max_bytes,
        "chunk_bytes": chunk,
    }


def _group(rules: list[dict[str, Any]]) -> Any:
    from ark_torch import _C
    from ark_torch.distributed.group import complete

    options = complete(_C.Options())
    options.dispatch = [tuple(entry.values()) for entry in rules]
    return dist.new_group(backend="ark", pg_options=options)


def _call(collective: str, group: Any, floats: int) -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.rand(floats)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(x, group=group)
    if collective == "broadcast":
        return lambda: dist.broadcast(x, 0, group=group)
    if collective == "all_to_all":
        y, z = torch.rand(floats * size), torch.empty(floats * size)
        return lambda: dist.all_to_all_single(z, y, group=group)
    wide = torch.rand(floats * size)
    parts = list(wide.chunk(size))
    if collective == "all_gather":
        return lambda: dist.all_gather(parts, x, group=group)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter(x, parts, group=group)
    if collective == "gather":
        return lambda: dist.gather(x, parts if rank == 0 else None, 0, group=group)
    return lambda: dist.scatter(x, parts if rank == 0 else None, 0, group=group)


def _best(collective: str, groups: dict[Key, Any], floats: int, rounds: int) -> tuple[Key, float]:
    """The group with the lowest median time, the same on all ranks, and that time in microseconds."""
    calls = {key: _call(collective, group, floats) for key, group in groups.items()}
    times: dict[Key, list[float]] = {key: [] for key in groups}
    repeats = max(3, min(200, (4 << 20) // (floats * 4)))
    for _ in range(rounds):
        for key, call in calls.items():
            call()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            times[key].append((time.perf_counter() - start) / repeats * 1e6)
    medians = torch.tensor([statistics.median(times[key]) for key in groups], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    index = int(medians.argmin())
    return list(groups)[index], float(medians[index])


def tune(rank: int, size: int, rendezvous: str, rounds: int, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("ark", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    when = "oversubscribed" if size > len(os.sched_getaffinity(0)) else "core_per_rank"
    say = print if rank == 0 else lambda *_: None
    rules: list[dict[str, Any]] = []

    best: dict[str, Any] = {}
    chunks: dict[str, int] = {}
    for algorithm in ("one_shot", "two_shot"):
        groups = {chunk: _group([rule("all_reduce", algorithm, when, ANY_BYTES, chunk)]) for chunk in CHUNKS}
        chunks[algorithm], _ = _best("all_reduce", groups, (16 << 20) // 4, rounds)
        best[algorithm] = groups[chunks[algorithm]]
        say(f"all_reduce, {algorithm}: chunks of {chunks[algorithm] >> 10} KiB")
    winners: list[tuple[str, int]] = []  # algorithm and the largest size for it
    for bytes_ in SIZES:
        algorithm, microseconds = _best("all_reduce", best, bytes_ // 4, rounds)
        say(f"  {bytes_:>8} bytes: {algorithm} ({microseconds:.1f} us)")
        if winners and winners[-1][0] == algorithm:
            winners.pop()
        winners.append((algorithm, bytes_))
    winners[-1] = (winners[-1][0], ANY_BYTES)
    for collective in ("all_reduce", "reduce"):
        rules += [rule(collective, algorithm, when, limit, chunks[algorithm]) for algorithm, limit in winners]

    for collective in MOVING:
        groups = {chunk: _group([rule(collective, "one_shot", when, ANY_BYTES, chunk)]) for chunk in CHUNKS}
        chunk, microseconds = _best(collective, groups, (4 << 20) // 4, rounds)
        say(f"{collective}: chunks of {chunk >> 10} KiB ({microseconds:.0f} us for 4 MiB a rank)")
        rules.append(rule(collective, "one_shot", when, ANY_BYTES, chunk))
    if rank == 0:
        kept = {}
        if os.path.exists(output):
            with open(output, encoding="utf-8") as file:
                kept = {name: value for name, value in json.load(file).items() if name in ("cuda", "fast")}
        with open(output, "w", encoding="utf-8") as file:
            json.dump({**kept, "ranks": size, "cores": len(os.sched_getaffinity(0)), "rules": rules}, file, indent=1)
        say(f"wrote {output}: use it with ARK_DISPATCH={output}")
    dist.destroy_process_group()
