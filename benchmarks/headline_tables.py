"""Formats the three tables of the README: five rows each, including rows that ark loses, and the conditions.

Every figure comes from benchmarks/results/*.json. docs/performance.md has the complete tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Load = Callable[[str], dict[str, Any]]
Row = dict[str, Any]
KB, MB = 1 << 10, 1 << 20


def medians(row: Row) -> dict[str, float]:
    """Maps the contenders of one row of gpu_models.py to milliseconds."""
    return {name: times["median"] / 1e3 for name, times in row["microseconds"].items()}


def of_ranks(data: dict[str, Any], ranks: int) -> dict[str, float]:
    """Same as medians(), for the rows of decode_ranks.py."""
    return {row["contender"]: row["microseconds"]["median"] / 1e3 for row in data["rows"] if row["ranks"] == ranks}


def best(times: dict[str, float], prefix: str) -> float:
    return min(time for name, time in times.items() if name.startswith(prefix))


def only(data: dict[str, Any], **wanted: Any) -> Row:
    """Returns the only row with these values."""
    found = [row for row in data["rows"] if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {wanted}")
    return dict(found[0])


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def day(data: dict[str, Any]) -> str:
    return str(data["date"][:10])


def days(data: dict[str, Any]) -> str:
    """Every day of a file whose rows were measured on several, without the time."""
    return re.sub(r" \d\d:\d\d UTC", "", data["date"])


def versions(data: dict[str, Any]) -> str:
    return f"PyTorch {data['versions']['torch']}, NCCL {data['versions']['nccl']}"


def inference(load: Load) -> str:
    one, two, bert, cpu = (
        load(name) for name in ("decode_h200", "decode_ranks_autotune_h100", "compile_models_h200", "decode")
    )
    alone, pair = medians(only(one, model="llama-1b")), of_ranks(two, 2)
    encoder = medians(only(bert, model="bert-large", dtype="float16"))
    rows = []

    def add(what: str, on: str, times: dict[str, float]) -> None:
        ark, rival = best(times, "ark"), best(times, "inductor")
        eager = [time for name, time in times.items() if name.startswith("eager")]
        shown = f"{min(eager):.2f}" if eager else ""
        rows.append((what, on, f"{ark:.3f}", f"{rival:.3f}", shown, f"{rival / ark:.2f}"))

    add("Llama 1B, one token, bfloat16", "1 H200", alone)
    add("the same, tensor parallel", "2 H100", pair)
    add("BERT-Large, 384 positions, float16", "1 H200", encoder)
    for ranks, on in ((1, "CPU, 1 process of 2 threads"), (2, "CPU, 2 processes of 1 thread")):
        row = only(cpu, ranks=ranks, position=256, dtype="float32")
        add("small Llama, one token, float32", on, {name: us / 1e3 for name, us in row["microseconds"].items()})
    head = ("one step", "on", "ark, ms", "best of Inductor, ms", "best of eager, ms", "times as fast")
    return (
        table(head, rows)
        + "\nBatch of one; 512 of 1,024 positions (CPU: 256 of 512). Inductor: its best mode, max-autotune "
        "and CUDA graphs among them (BERT-Large: default mode in a graph); over NCCL or ark between processes. GPU: "
        f"{versions(one)}, multicast off, {day(one)}; CPU: {cpu['machine']['cpu']}, "
        f"PyTorch {cpu['versions']['torch']}, {day(cpu)}.\n"
    )


def collectives(load: Load) -> str:
    gpu, four, fused, cpu = (
        load(name) for name in ("collectives_2_h200", "collectives_4_h200", "fused", "collectives")
    )
    rows: list[tuple[str, ...]] = []
    small = ""
    for data, ranks, size, shown in ((gpu, 2, 8 * KB, "8 KB"), (four, 4, MB, "1 MB"), (four, 4, 64 * MB, "64 MB")):
        bfloat16 = [row for row in data["rows"] if row.get("dtype", "bfloat16") == "bfloat16"]
        row = only({"rows": bfloat16}, operation="all_reduce", ranks=ranks, bytes=size)
        rivals = {way: us for way, us in row["graph_us"].items() if not way.startswith("ark")}
        rival = min(rivals, key=lambda way: rivals[way])
        ark = row["graph_us"]["ark"]
        if data is gpu:
            small = row.get("measured", gpu["date"])
        name = f"all_reduce, {shown}, bfloat16, in a graph"
        rows.append(
            (name, f"{ranks} H200", f"{ark:.1f}", f"{rivals[rival]:.1f} ({rival})", f"{rivals[rival] / ark:.2f}")
        )
    row = only(fused, shape="T8-D128-L32-B4096")
    us = row["us"]
    rival = min(("eager_nccl", "inductor_nccl"), key=lambda way: us[way])
    name = "8 pooled embeddings + all-to-all, 4,096 samples"
    rows.append((name, "2 H100", f"{us['fused']:.1f}", f"{us[rival]:.1f} ({rival})", f"{us[rival] / us['fused']:.2f}"))
    timings = only(cpu, operation="all_reduce", ranks=2, bytes=MB, dtype="float32")["timings"]
    rivals = {name: timing["median"] for name, timing in timings.items() if name in ("gloo", "mpi")}
    rival = min(rivals, key=lambda way: rivals[way])
    ark = timings["ark"]["median"]
    shown = ", ".join(f"{us:.1f} ({name})" for name, us in rivals.items())
    ratios = ", ".join(f"{us / ark:.2f}" for us in rivals.values())
    rows.append(("all_reduce, 1 MB, float32", "CPU, 2 processes", f"{ark:.1f}", shown, ratios))
    head = ("operation", "on", "ark, us", "best rival, us", "times as fast")
    return (
        table(head, rows)
        + "\nRivals: NCCL (plain, registered, each CTA policy) and PyTorch's symmetric memory, the quickest of them. "
        f"GPU: {versions(gpu)}, multicast off, {day({'date': small})} (4 GPUs: {day(four)}, embeddings: {day(fused)}); "
        f"CPU: {cpu['machine']['cpu']}, "
        f"Gloo and {cpu['versions'].get('mpi', 'no MPI')}, {day(cpu)}.\n"
    )


def training(load: Load) -> str:
    two, captured, four = load("training_in_line"), load("training_captured"), load("training_4_h200")
    rows = []
    names = {"gpt2-xl": "GPT-2 XL", "bert-large": "BERT-Large"}

    def add(what: str, data: dict[str, Any], ark: str, *others: str, **of: Any) -> None:
        ms = {who: only(data, contender=who, **of)["step_ms"] for who in (ark, *others, "free")}
        shown = [f"{ms[who]:.1f} ({ms[who] / ms[ark]:.2f})" for who in others]
        times = (shown[0], "" if len(shown) == 1 else shown[1], f"{ms['free']:.1f}")
        rows.append((f"{names[of['model']]}, {what}", f"{of['ranks']} H200", f"{ms[ark]:.1f}", *times))

    for model, mode, what in (
        ("gpt2-xl", "captured", "`train.capture` of DDP"), ("bert-large", "captured", "`train.capture` of DDP"),
        ("gpt2-xl", "captured_fsdp2", "`train.capture` of FSDP2"),
    ):  # fmt: skip
        of = {"model": model, "implementation": "plain", "mode": mode, "ranks": 2}
        add(what, captured, "captured_ark", "nccl", "captured_nccl", **of)
    add("DDP, eager", two, "ark_line", "nccl", model="gpt2-xl", mode="ddp", ranks=2)  # today's default
    add("DDP, eager, copy engines", four, "ark_engine", "nccl", model="gpt2-xl", mode="ddp", ranks=4)
    head = ("step", "on", "ark, ms", "NCCL, same wrapper, eager", "`train.capture`, NCCL", "no communication")
    return (
        table(head, rows)
        + f"\nIn brackets: times as long as ark. {versions(two)}, multicast off, sequences of 384, bfloat16 "
        f"products; captured {days(captured)}, eager {day(two)} (2 GPUs), {day(four)} (4). No communication: the step "
        "of the first column with the collectives left out.\n"
    )
