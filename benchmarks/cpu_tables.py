"""Formats tables of measurements on CPU tensors: collectives and DistributedDataParallel against Gloo and MPI.

The JSON files of the benchmarks are the only input. doc_tables.py puts the tables into the documents.
"""

from __future__ import annotations

from typing import Any

from ark_torch.tools.bench import table
from ark_torch.tools.bench.config import parse_size, show_size

SHOWN_SIZES = tuple(parse_size(text) for text in ("4", "1K", "64K", "1M", "16M", "64M", "256M"))
SHOWN_OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


def origin(about: dict[str, Any]) -> str:
    machine, versions = about["machine"], about["versions"]
    rival = f", {versions['mpi']}" if versions.get("mpi") else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, PyTorch {versions['torch']}{rival}, Python {versions['python']}, "
        f"{about['date']}, load before {machine['load_before']}"
    )


def microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def cell(row: dict[str, Any]) -> str:
    """Formats our time, then our speed relative to each rival."""
    ours = next(iter(row["timings"].values()))
    if ours["error"] or ours["wrong"]:
        return "failed"
    ratios = [(rival, table.ratio_to(row, rival)) for rival in table.rivals_of(row)]
    return f"{microseconds(ours['median'])} ({', '.join('-' if r is None else f'{r:.1f}x' for _, r in ratios)})"


def collectives(data: dict[str, Any]) -> str:
    rows = data["rows"]
    text = f"{origin(data)}.\n"
    for world in sorted({row["ranks"] for row in rows}):
        chosen = {(row["operation"], row["bytes"]): row for row in rows if row["ranks"] == world}
        sizes = [size for size in SHOWN_SIZES if any(size == there for _, there in chosen)]
        operations = [name for name in SHOWN_OPERATIONS if any(name == there for there, _ in chosen)]
        if not sizes or not operations:
            continue
        rivals = " and ".join(dict.fromkeys(name for row in chosen.values() for name in table.rivals_of(row)))
        text += f"\n{world} ranks, {rows[0]['dtype']}; microseconds (times as fast as {rivals}):\n\n"
        text += f"| | {' | '.join(show_size(size) for size in sizes)} |\n|{' --- |' * (len(sizes) + 1)}\n"
        for name in operations:
            cells = [cell(chosen[name, size]) if (name, size) in chosen else "" for size in sizes]
            text += f"| {name} | {' | '.join(cells)} |\n"
    overhead = data.get("overhead_us") or {}
    if overhead:
        times = ", ".join(f"{name} {time:.1f} us" for name, time in overhead.items() if time > 0)
        text += (
            f"\nOne `all_reduce` of 4 bytes, two ranks, from Python: {times} (empty: a backend that does nothing).\n"
        )
    return text


def ddp(data: dict[str, Any]) -> str:
    text = f"{origin(data)}; milliseconds of forward and backward.\n\n"
    columns = ("model", "gradients", "ranks", "windows a rank", "ark", "gloo", "gloo by ark", "no communication")
    text += f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    for row in data["rows"]:
        text += (
            f"| {row['model']} | {row['gradient_bytes'] / 1e6:.1f} MB | {row['ranks']} | {row['batch']} "
            f"| {row['ark_ms']:.2f} | {row['gloo_ms']:.2f} | {row['ratio']:.2f} | {row['local_ms']:.2f} |\n"
        )
    return text
