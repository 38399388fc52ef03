"""Compares convolutions in ark's regions with Inductor and eager PyTorch (oneDNN), on one CPU thread.

    python benchmarks/convolutions.py [--only NAME ...] [--output FOLDER]

Each row is one convolution with bias and relu, named by the model that has it; "last" means channels-last layout. ark
is forced to compile it (fallback=False), so that the table shows where the limits in
ark_torch/compile/operators/convolutions.py should be. `default` is what torch.compile(backend="ark") does with it.
Times are the least of several medians, taken in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_tables
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ark_torch.compile.backend import compile_graph
from ark_torch.compile.options import parse
from ark_torch.compile.report import Report
from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
ROUNDS, TURN_S = 15, 0.008

# name: input, weight, stride, padding, dilation, groups
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int, int]] = {
    "Whisper, first": ((1, 80, 200), (128, 80, 3), 1, 1, 1, 1),
    "Whisper, second": ((1, 128, 200), (128, 128, 3), 2, 1, 1, 1),
    "ViT, patches of 8": ((1, 3, 64, 64), (192, 3, 8, 8), 8, 0, 1, 1),
    "ViT, patches of 16": ((1, 3, 224, 224), (768, 3, 16, 16), 16, 0, 1, 1),
    "ConvNeXt, patches of 4": ((1, 3, 64, 64), (32, 3, 4, 4), 4, 0, 1, 1),
    "ResNet, stem": ((1, 3, 64, 64), (16, 3, 7, 7), 2, 3, 1, 1),
    "ResNet, 16 channels": ((1, 16, 16, 16), (16, 16, 3, 3), 1, 1, 1, 1),
    "ResNet, 64 on 4 x 4": ((1, 64, 4, 4), (64, 64, 3, 3), 1, 1, 1, 1),
    "ResNet-50, 64 on 56 x 56": ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1),
    "ResNet-50, 256 on 14 x 14": ((1, 256, 14, 14), (256, 256, 3, 3), 1, 1, 1, 1),
    "UNet, 32 on 32 x 32": ((1, 32, 32, 32), (32, 32, 3, 3), 1, 1, 1, 1),
    "UNet, 64 on 16 x 16": ((1, 64, 16, 16), (64, 64, 3, 3), 1, 1, 1, 1),
    "windows of one, 64 on 16 x 16": ((1, 64, 16, 16), (64, 64, 1, 1), 1, 0, 1, 1),
    "windows of one, 256 on 14 x 14": ((1, 256, 14, 14), (1024, 256, 1, 1), 1, 0, 1, 1),
    "4 groups": ((1, 64, 16, 16), (64, 16, 3, 3), 1, 1, 1, 4),
    "Wav2Vec2, positions": ((1, 128, 50), (128, 8, 16), 1, 8, 1, 16),
    "Wav2Vec2, first": ((1, 1, 4000), (64, 1, 10), 5, 0, 1, 1),
    "dilated by 4": ((1, 64, 200), (64, 64, 3), 1, 4, 4, 1),
    "depthwise, Mamba": ((1, 256, 64), (256, 1, 4), 1, 3, 1, 256),
    "depthwise 7 x 7, 32 on 16 x 16": ((1, 32, 16, 16), (32, 1, 7, 7), 1, 3, 1, 32),
    "depthwise 7 x 7, 96 on 56 x 56": ((1, 96, 56, 56), (96, 1, 7, 7), 1, 3, 1, 96),
    "depthwise 3 x 3, 32 on 112 x 112": ((1, 32, 112, 112), (32, 1, 3, 3), 1, 1, 1, 32),
    "depthwise 3 x 3, 576 on 14 x 14": ((1, 576, 14, 14), (576, 1, 3, 3), 1, 1, 1, 576),
}


class Convolution(nn.Module):
    def __init__(self, name: str, last: bool) -> None:
        super().__init__()
        _, weight, self.stride, self.padding, self.dilation, self.groups = FORMS[name]
        form = torch.channels_last if last else torch.contiguous_format
        self.weight = nn.Parameter(torch.randn(weight).contiguous(memory_format=form))
        self.bias = nn.Parameter(torch.randn(weight[0]))

    def forward(self, x: Tensor) -> Tensor:
        run = F.conv1d if x.dim() == 3 else F.conv2d
        return run(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups).relu()


def by_ark(model: nn.Module, x: Tensor, **options: Any) -> tuple[Callable[..., Any], Report]:
    report, parsed = Report(), parse(None, {"choose": "ark", "minimum": 1, **options})
    call = torch.compile(model, backend=lambda graph, inputs: compile_graph(graph, inputs, parsed, report))
    call(x)
    return call, report


def seconds(call: Callable[..., Any], x: Tensor) -> float:
    begin = time.perf_counter()
    call(x)
    return time.perf_counter() - begin


def measured(name: str, last: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Convolution(name, last)
    x = torch.randn(FORMS[name][0])
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    _, report = by_ark(model, x)
    torch._dynamo.reset()
    calls = {"ark": by_ark(model, x, fallback=False)[0], "inductor": torch.compile(model), "eager": model}
    best = dict.fromkeys(calls, 1e-3)
    for number in range(ROUNDS):
        for way, call in calls.items():
            call(x)
            runs = max(3, min(200, int(TURN_S / best[way])))
            median = statistics.median(seconds(call, x) for _ in range(runs))
            best[way] = median if number == 0 else min(best[way], median)
    taken = not any(f.operator == "aten.convolution.default" for f in report.fallbacks)
    return {"name": name, "last": last, "us": {way: s * 1e6 for way, s in best.items()}, "taken": taken}


HEAD = "| convolution | | ark, us | Inductor | eager | ark / Inductor | default |\n|" + " --- |" * 7 + "\n"


def line(row: dict[str, Any]) -> str:
    us = row["us"]
    times = " | ".join(f"{us[way]:.0f}" for way in ("ark", "inductor", "eager"))
    by = "ark" if row["taken"] else "Inductor"
    return f"| {row['name']} | {'last' if row['last'] else ''} | {times} | {us['ark'] / us['inductor']:.2f} | {by} |"


def table(about: dict[str, Any]) -> str:
    """Formats the table in docs/performance-cpu.md."""
    return f"{cpu_tables.origin(about)}, one thread.\n\n{HEAD}" + "".join(line(row) + "\n" for row in about["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(FORMS), choices=list(FORMS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    about = bench.surroundings(bench.shown_command("benchmarks/convolutions.py"))
    torch.set_num_threads(1)
    print(HEAD, end="", flush=True)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name in arguments.only:
            for last in (False, True)[: len(FORMS[name][0]) - 2]:
                rows.append(measured(name, last))
                print(line(rows[-1]), flush=True)
                bench.write_json(arguments.output / "convolutions.json", about, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
