"""decode.py --device cuda --ranks 2: a decoding step of a Llama (1b: 1.2 billion weights), tensor parallel over GPUs.

Each rank is a process with a GPU and its shard of the model (examples/llama), in bfloat16: two all_reduces per layer
and an all_gather of the logits. Contenders: ark (one loop kernel, collectives included), the default choice of
backend="ark", and eager and Inductor over NCCL. "graph": the call captured in a CUDA graph by hand. Contenders take
turns, and all ranks start together. A time is that of the slowest rank, between CUDA events of neighbouring calls.
Errors are those of the logits at the measured position, relative to the whole model in float64. --prompt N measures a
prefill of N tokens in place of the step. --seconds bounds the run, and names what it leaves out.

--device as-cuda runs all of it on the CPU with a small model and Gloo for NCCL, to test the benchmark itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import decode_inputs
import exactness
import gpu_models
import gpu_ranks
import on_gpus
import real_sizes
import torch
from llama.model import Llama, LlamaConfig, shard
from torch import Tensor

from ark_torch.compile.report import Report
from ark_torch.tools.bench import report

LLAMA_1B = LlamaConfig(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocabulary=128256, max_len=1024)
LLAMA_8B = replace(LLAMA_1B, hidden=4096, layers=32, ffn=14336, head_dim=128)
SMALL = LlamaConfig(hidden=64, layers=2, heads=8, kv_heads=4, ffn=128, vocabulary=512, max_len=1024, head_dim=8)
POSITION = 512
WAYS = {
    "eager": 20.0,
    "ark": 40.0,
    gpu_models.CHOSEN: 120.0,
    "inductor": 90.0,
    "inductor, max-autotune": 240.0,
}  # with the seconds that each may take

Row = dict[str, Any]


def whole_model(small: bool, device: torch.device, arguments: argparse.Namespace | None = None) -> Llama:
    """Returns the whole model, with the same weights on every rank."""
    torch.manual_seed(0)
    config = SMALL if small else LLAMA_8B if arguments is not None and arguments.shape == "8b" else LLAMA_1B
    if arguments is not None:
        config = replace(config, layers=arguments.layers or config.layers, max_len=max(1024, arguments.prompt))
    with device:
        model: Llama = real_sizes.ready(Llama(config), torch.bfloat16, 0.02)
    return model


def inputs_on(device: torch.device, prompt: int = 0) -> tuple[Tensor, Tensor]:
    if prompt == 0:
        return torch.full((1, 1), 7, device=device), torch.tensor([POSITION], device=device)
    ids = torch.randint(0, SMALL.vocabulary, (1, prompt), generator=torch.Generator().manual_seed(7))
    return ids.to(device), torch.arange(prompt, device=device)


def share(rank: gpu_ranks.Rank, model: Llama, group: Callable[[gpu_ranks.Rank], Any]) -> Llama:
    """Returns the rank's shard, or the model itself if there is one rank."""
    if rank.ranks == 1:
        return model
    with rank.device:
        return shard(model, group(rank))


def of_ark(rank: gpu_ranks.Rank, model: Llama) -> tuple[Llama, Any, Report]:
    own = share(rank, model, gpu_ranks.ark_group)
    return own, *gpu_models.of_ark(own)


def prepared(rank: gpu_ranks.Rank, way: str, model: Llama, inputs: tuple[Tensor, Tensor]) -> tuple[Llama, Any, Row]:
    """Returns the way's own shard of the model, its call, and what its first call reported."""
    if way == "ark":
        own, call, told = of_ark(rank, model)
    elif way == gpu_models.CHOSEN:
        own = share(rank, model, gpu_ranks.ark_group)
        call = torch.compile(own, backend="ark", dynamic=False)
    else:
        own = share(rank, model, gpu_ranks.rival_group)
        call = own if way == "eager" else torch.compile(own, dynamic=False, mode=gpu_models.MODES.get(way))
    begin = time.perf_counter()
    call(*inputs)
    gpu_models.finish(rank.device)
    row: Row = {"contender": way, "first_call_seconds": max(rank.share(time.perf_counter() - begin))}
    return own, call, row | (gpu_models.made_of(told) if way == "ark" else {})


def in_turns(rank: gpu_ranks.Rank, steps: dict[str, Any], turns: int) -> dict[str, list[float]]:
    """Returns microseconds of every call, each that of the slowest rank."""
    timed = gpu_models.on_device if rank.device.type == "cuda" else gpu_models.on_host
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            rank.barrier()
            times[name] += timed(step)
    return {name: [max(some) for some in zip(*rank.share(taken), strict=True)] for name, taken in times.items()}


@torch.no_grad()
def body(rank: gpu_ranks.Rank, arguments: argparse.Namespace) -> None:
    model = whole_model(rank.device.type == "cpu", rank.device, arguments)
    config, inputs = model.config, inputs_on(rank.device, arguments.prompt)
    filled = 0 if arguments.prompt else POSITION

    def run(call: Any, own: Any) -> list[Tensor]:
        decode_inputs.fill(own, config, filled)
        return [call(*inputs)]

    wanted = exactness.exact(model, lambda double, _: run(double, double))
    steps: dict[str, Any] = {}
    rows: dict[str, Row] = {}
    for way in arguments.ways:
        if not rank.time_for(WAYS[way] + 10):
            rank.warn(f"left out: {way} on {rank.ranks} ranks: the time is over (--seconds)")
            continue
        own, call, row = prepared(rank, way, model, inputs)
        row["error"] = max(rank.share(exactness.error(run(call, own), wanted)))

        def step(call: Any = call) -> Any:
            return call(*inputs)

        if way in ("eager", "ark", gpu_models.CHOSEN) or rank.device.type == "cpu":
            steps[way], rows[way] = step, row
        if rank.device.type == "cuda":
            captured = f"{way}, graph"
            steps[captured], rows[captured] = gpu_models.captured(step), row | {"contender": captured}
    for name, times in in_turns(rank, steps, arguments.turns).items():
        deciles = statistics.quantiles(times, n=10)
        median = {"median": deciles[4], "p10": deciles[0], "p90": deciles[8]}
        rank.write({"ranks": rank.ranks, **rows[name], "microseconds": median})


def table(about: dict[str, Any]) -> str:
    """Formats the table. Ratios are to the fastest of ark's ways on the same number of ranks."""
    lines = [
        on_gpus.origin(about),
        "",
        "| GPUs | contender | median, us | p10 to p90 | times ark's | error | first call, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    best: dict[int, float] = {}
    for row in about["rows"]:
        if row["contender"].startswith("ark"):
            taken = row["microseconds"]["median"]
            best[row["ranks"]] = min(taken, best.get(row["ranks"], taken))
    for row in about["rows"]:
        times, ark = row["microseconds"], best.get(row["ranks"])
        ratio = f"{times['median'] / ark:.2f}" if ark else ""
        lines.append(
            f"| {row['ranks']} | {row['contender']} | {times['median']:.0f} | {times['p10']:.0f} to {times['p90']:.0f} "
            f"| {ratio} | {row['error']:.1e} | {row['first_call_seconds']:.1f} |"
        )
        if row.get("fallbacks"):
            lines.append(f"| | falls back: {'; '.join(row['fallbacks'])} | | | | | |")
    return "\n".join(lines)


def main(arguments: argparse.Namespace) -> int:
    arguments.output = arguments.output / f"decode_ranks_{gpu_models.slug(arguments.device)}.json"
    arguments.device = gpu_models.device_of(arguments).type
    arguments.ways = [way for way in arguments.ways if way in WAYS]
    about, rows, problem = on_gpus.measure(body, arguments)
    if arguments.beside:
        about |= gpu_models.beside(arguments)
        report.write_json(arguments.output, about, rows)
    print(table({**about, "rows": rows}))
    print(f"# written to {arguments.output}")
    return int(bool(problem) or not rows)
