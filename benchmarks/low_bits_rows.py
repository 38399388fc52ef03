"""Measures products of many rows with coded weights, as in prompts: a Llama layer's by ark and by Inductor.

    python benchmarks/low_bits_rows.py --device cuda [--rows 32 128 512 2048] [--forms float8-dynamic] [--seconds 60]

A layer is queries, keys and values, the output's, gate, up and down projections of Llama 1B, with what stands between
them but attention; its linear layers come from examples/llama/quantized.py. Contenders: ark (forced), Inductor by
default, whose torch._scaled_mm is cuBLAS's, Inductor with max-autotune, and the same layer in bfloat16. They are
captured in CUDA graphs and take turns. Errors are relative to the layer in float64 with the same codes; those of float8
rows hold the rounding of rows, too. `beside Inductor` is the fastest of Inductor's times of the same form by ark's.
After --seconds no further contender is compiled; ark's come first, and what is left out is named.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "examples")]

import gpu_models  # noqa: E402
from llama.quantized import quantize  # noqa: E402  (lies in examples/)

Row = dict[str, Any]
FORMS = ("bfloat16", "float8-dynamic", "float8", "int8", "int4")
WAYS = ("ark", "inductor", "inductor, max-autotune")
SIZES = {"1b": (2048, 512, 8192), "tiny": (256, 64, 512)}  # of a row, of keys, and between gate and down


class Layer(nn.Module):
    def __init__(self, dim: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, n, bias=False) for n in (dim, keys, keys))
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shared = (self.k(x) * self.v(x)).mean(-1, keepdim=True)
        x = x + self.out(self.q(x) + shared)
        result: Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def layer_of(size: str, form: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layer = Layer(*SIZES[size]).to(device).bfloat16().eval()
    return layer if form == "bfloat16" else quantize(layer, form)


def exact(size: str, form: str, layer: nn.Module, x: Tensor) -> Tensor:
    """The layer in float64 with the same codes; of float8 rows, with rows that are not rounded."""
    weights = layer if form != "float8-dynamic" else quantize(layer_of(size, "bfloat16", x.device), "float8")
    wide = copy.deepcopy(weights)._apply(lambda t: t.double() if t.dtype in (torch.bfloat16, torch.float32) else t)
    right: Tensor = wide(x.double())
    return right


def compiled(way: str, layer: nn.Module) -> Any:
    torch._dynamo.reset()
    if way != "ark":
        mode = None if way == "inductor" else "max-autotune-no-cudagraphs"
        return torch.compile(layer, dynamic=False, mode=mode), None
    return gpu_models.of_ark(layer)


@torch.no_grad()
def measured(arguments: argparse.Namespace) -> list[Row]:
    device = gpu_models.device_of(arguments)
    ends = time.time() + arguments.seconds
    rows: list[Row] = []
    steps: dict[int, dict[str, Any]] = {count: {} for count in arguments.rows}
    for way in arguments.ways:
        for form in arguments.forms:
            layer = layer_of(arguments.size, form, device)
            for count in arguments.rows:
                row: Row = {"form": form, "way": way, "rows": count}
                rows.append(row)
                if time.time() > ends:
                    row["left_out"] = True
                    continue
                torch.manual_seed(1)
                x = torch.randn(count, SIZES[arguments.size][0], device=device).bfloat16()
                call, told = compiled(way, layer)

                def step(call: Any = call, x: Tensor = x) -> Any:
                    return call(x)

                begin = time.perf_counter()
                result = step().double()
                gpu_models.finish(device)
                row["first_call_seconds"] = time.perf_counter() - begin
                if told is not None:
                    row |= gpu_models.made_of(told)
                    row["weights"] = [line for graph in told.graphs for line in graph.weights]
                right = exact(arguments.size, form, layer, x)
                row["error"] = float((result - right).abs().max() / right.abs().max())
                row["tflops"] = 2e-12 * count * sum(n.numel() for n in weights_of(arguments.size))
                steps[count][f"{way}, {form}"] = gpu_models.captured(step) if device.type == "cuda" else step
    for count, contenders in steps.items():
        times = gpu_models.in_turns(contenders, arguments.turns, device)
        for row in rows:
            if row["rows"] == count and (mine := times.get(f"{row['way']}, {row['form']}")):
                row["microseconds"] = mine
                row["tflops"] /= mine["median"] * 1e-6
    for row in rows:
        theirs = [
            one["microseconds"]["median"]
            for one in rows
            if one["way"] != "ark"
            and (one["form"], one["rows"]) == (row["form"], row["rows"])
            and "microseconds" in one
        ]
        row["beside_inductor"] = (
            min(theirs) / row["microseconds"]["median"] if theirs and "microseconds" in row else None
        )
    return rows


def weights_of(size: str) -> list[Tensor]:
    with torch.device("meta"):
        return list(Layer(*SIZES[size]).parameters())


def table(rows: list[Row]) -> str:
    lines = [
        "| weights | rows | by | median, us | TFLOP/s | beside Inductor | error | regions | first call, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda one: (one["form"], one["rows"])):
        if "microseconds" not in row:
            lines.append(f"| {row['form']} | {row['rows']} | {row['way']} | left out for time | | | | | |")
            continue
        beside = f"{row['beside_inductor']:.2f}" if row["beside_inductor"] and row["way"] == "ark" else ""
        lines.append(
            f"| {row['form']} | {row['rows']} | {row['way']} | {row['microseconds']['median']:.1f} | "
            f"{row['tflops']:.0f} | {beside} | {row['error']:.1e} | {row.get('regions', '')} | "
            f"{row['first_call_seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="", help="tiny on a CPU, 1b on a GPU")
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 128, 512, 2048])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS[:2]))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--turns", type=int, default=20, help="of each contender")
    parser.add_argument("--seconds", type=float, default=60, help="after so many nothing more is compiled")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    arguments.size = arguments.size or ("1b" if arguments.device == "cuda" else "tiny")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("low_bits_rows.py: this PyTorch sees no GPU")
    about = gpu_models.surroundings(arguments) | {"size": arguments.size}
    rows = measured(arguments)
    print(f"# a layer of Llama, {arguments.size}; {about['date']}\n{table(rows)}")
    where = gpu_models.slug("cuda") if arguments.device == "cuda" else "cpu"
    path = arguments.output / f"low_bits_rows_{arguments.size}_{where}.json"
    bench.write_json(path, about, rows)
    print(f"# written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
