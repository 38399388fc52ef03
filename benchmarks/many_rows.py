"""Measures models whose products have many rows on one GPU, beside Inductor: prompts, encoders, batches of decoding.

    python benchmarks/many_rows.py --device cuda [--only "vit-b/16" ...] [--seconds 500]     many_rows_h200.json
    python benchmarks/many_rows.py --device cuda --ways ark inductor "inductor, max-autotune" "ark, default"
    python benchmarks/many_rows.py --device as-cuda          small models on the CPU, to test the benchmark itself

Contenders run the same model on the same inputs in one process, each captured in a CUDA graph, and take turns of a few
calls: ark's regions alone (choose="ark"), Inductor in its default mode and with max-autotune, and "ark, default", which
is what users get: the model is called until each of its graphs has a runner, chosen by the costs of its tasks or by
being measured beside Inductor and eager PyTorch. That compiles all of them, so neither it nor max-autotune is among the
--ways by default. With a cache folder of before (ARK_CACHE) it takes the choice of before. Errors are relative to the
model in float32. After --seconds nothing more is compiled, and what is left out is named; the JSON keeps rows of models
that are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import cache_policy_apps as apps
import gpu_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ark_torch.compile import background
from ark_torch.compile.report import GraphReport, Report
from ark_torch.tools.bench import report as bench

sys.path.insert(0, str(gpu_models.FOLDER.parent / "tests" / "compile"))

import real_sizes

Row = dict[str, Any]
WAYS = ("ark", "inductor", "inductor, max-autotune", gpu_models.CHOSEN)
RIVALS = WAYS[1:3]


class Clip(nn.Module):
    """CLIP's text encoder (ViT-B/32's): pre-norm, causal, its own approximation of GELU, the row of the last token."""

    def __init__(self, dim: int, heads: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.last = nn.Embedding(words, dim), nn.LayerNorm(dim)
        self.places = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.head = nn.Linear(dim, dim, bias=False)
        parts = {"n1": (dim,), "qkv": (dim, 3 * dim), "out": (dim, dim), "n2": (dim,)}
        parts |= {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.LayerNorm(*s) if n[0] == "n" else nn.Linear(*s) for n, s in parts.items()})
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["n1"](x)).chunk(3, -1)
            q, k, v = (t.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in (q, k, v))
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](h.transpose(1, 2).reshape(x.shape))
            h = layer["up"](layer["n2"](x))
            x = x + layer["down"](h * torch.sigmoid(1.702 * h))
        return self.head(self.last(x)[:, -1])  # type: ignore[no-any-return]


def clip(batch: int) -> apps.Application:
    def make(device: torch.device, small: bool) -> apps.Made:
        sizes = (64, 4, 2, 100, 12) if small else (512, 8, 12, 49408, 77)
        with device:
            return real_sizes.ready(Clip(*sizes), torch.float16), (torch.randint(0, sizes[3], (batch, sizes[4])),)

    return make


def bert(batch: int, length: int = 384) -> apps.Application:
    def make(device: torch.device, small: bool) -> apps.Made:
        made = real_sizes.bert(torch.float16, device, small, batch, length)
        return made.model, made.inputs

    return make


def gpt2(tokens: int) -> apps.Application:
    def make(device: torch.device, small: bool) -> apps.Made:
        sizes = (64, 4, 2, 500, 128) if small else (1600, 25, 48, 50257, max(1024, tokens))
        count = tokens // 16 if small else tokens
        with device:
            model = real_sizes.ready(real_sizes.CachedDecoder(*sizes), torch.bfloat16, 0.02)
            return model, (torch.randint(0, sizes[3], (1, count)), torch.arange(count))

    return make


def prompt(config: Any, tokens: int) -> apps.Application:
    return apps.llama(config, 1, 0, tokens)


# By name: the model, and how many times as fast as Inductor it is to be (issue 39; 0: a time of its own).
CASES: dict[str, tuple[apps.Application, float]] = {
    "bert-large 384": (bert(1), 1.0),
    "bert-large 384, batch 10": (bert(10), 1.0),
    "bert-large 128": (bert(1, 128), 1.0),
    "bert-large 16, batch 8": (bert(8, 16), 1.0),
    "bert-large 32, batch 32": (bert(32, 32), 1.0),
    "vit-b/16": (apps.vit(1), 1.2),
    "vit-b/16, batch 8": (apps.vit(8), 1.0),
    "clip text": (clip(1), 1.2),
    "clip text, batch 8": (clip(8), 1.0),
    "llama-1b prefill 512": (prompt(real_sizes.LLAMA_1B, 512), 1.15),
    "llama-1b prefill 2048": (prompt(real_sizes.LLAMA_1B, 2048), 1.15),
    "qwen2.5-0.5b prefill 512": (prompt(apps.QWEN, 512), 1.15),
    "qwen2.5-0.5b prefill 2048": (prompt(apps.QWEN, 2048), 1.15),
    "gpt2-xl prefill 512": (gpt2(512), 1.15),
    "gpt2-xl prefill 2048": (gpt2(2048), 1.15),
    "llama-1b decode, batch 4": (apps.llama(real_sizes.LLAMA_1B, 4, 512), 1.4),
    "llama-1b decode, batch 16": (apps.llama(real_sizes.LLAMA_1B, 16, 512), 1.5),
    "llama-1b decode, batch 32": (apps.llama(real_sizes.LLAMA_1B, 32, 512), 1.3),
    "llama-1b decode, batch 4, padded": (apps.llama(real_sizes.LLAMA_1B, 4, 512, padded=True), 1.4),
    "llama-1b decode, batch 16, padded": (apps.llama(real_sizes.LLAMA_1B, 16, 512, padded=True), 1.5),
}


def outputs(result: Any) -> list[Tensor]:
    return [t.double() for t in (result if isinstance(result, tuple) else (result,))]


def error(result: Any, wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest element of the same output."""
    pairs = zip(outputs(result), wanted, strict=True)
    return max(float((found - exact).abs().max() / exact.abs().max()) for found, exact in pairs)


def exact(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """What the model gives in float32, attention and products without TF32."""
    wide = copy.deepcopy(model).float()
    torch.backends.cuda.matmul.allow_tf32 = False
    given = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
    return outputs(wide(*given))


def runner(graph: GraphReport, captured: bool) -> str:
    """Who runs a graph, in a CUDA graph or outside; "" while that is not decided."""
    if graph.choice is not None:
        return graph.choice.parts[captured]
    return graph.whole_on.lower() if graph.whole else "ark" if graph.certain else ""


def settled(step: gpu_models.Step, told: Report, captured: bool) -> list[str]:
    """Calls until every graph has its runner, and returns these."""
    while background.active() or not all(runner(graph, captured) for graph in told.graphs):
        step()
    return [runner(graph, captured) for graph in told.graphs]


@torch.no_grad()
def measured(name: str, arguments: argparse.Namespace, ends: float) -> Row:
    device = gpu_models.device_of(arguments)
    make, goal = CASES[name]
    torch.manual_seed(0)
    model, inputs = make(device, arguments.device == "as-cuda")
    wanted = exact(model, inputs)
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    row: Row = {"model": name, "dtype": kind, "goal": goal, "error": {}, "first_call_seconds": {}, "left_out": []}
    steps: dict[str, gpu_models.Step] = {}
    for way in arguments.ways:
        if time.time() > ends:
            row["left_out"].append(way)
            continue
        torch._dynamo.reset()
        told = None
        if way == "ark":
            call, told = gpu_models.of_ark(model)
        elif way == gpu_models.CHOSEN:
            call, graphs = gpu_models.of_ark(model, choose="measure")
        else:
            call = torch.compile(model, dynamic=False, mode=gpu_models.MODES.get(way))

        def step(call: Any = call) -> Any:
            return call(*inputs)

        begin = time.perf_counter()
        try:
            with gpu_models.until(ends):
                result = step()
                gpu_models.finish(device)
                row["first_call_seconds"][way] = time.perf_counter() - begin
                if way == gpu_models.CHOSEN:
                    row["chosen"] = settled(step, graphs, device.type == "cuda")
                    row["chosen_after_seconds"] = time.perf_counter() - begin
                    result = step()
        except Exception:  # raised by the compiler because it was interrupted
            if time.time() < ends:
                raise
            row["left_out"].append(way)
            continue
        row["error"][way] = error(result, wanted)
        if told is not None:
            row |= gpu_models.made_of(told)
        steps[way] = gpu_models.captured(step) if device.type == "cuda" else step
    while background.active():  # what was interrupted would take cores
        time.sleep(0.1)
    row["microseconds"] = times = gpu_models.in_turns(steps, arguments.turns, device)
    rivals = [times[way]["median"] for way in RIVALS if way in times]
    row["ratio"] = min(rivals) / times["ark"]["median"] if rivals and "ark" in times else None
    if rivals and gpu_models.CHOSEN in times:
        row["ratio_by_default"] = min(rivals) / times[gpu_models.CHOSEN]["median"]
    return row


def table(rows: list[Row]) -> str:
    lines = [
        "| model | ark, ms | Inductor, ms | max-autotune, ms | times as fast | goal | error: ark / Inductor "
        "| first call, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        times = row["microseconds"]
        shown = [f"{times[way]['median'] / 1e3:.3f}" if way in times else "left out" for way in ("ark", *RIVALS)]
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        errors = " / ".join(f"{row['error'][way]:.1e}" for way in WAYS[:2] if way in row["error"])
        first = f"{row['first_call_seconds']['ark']:.1f}" if "ark" in row["first_call_seconds"] else ""
        named = f"{row['model']}, {row['dtype']}"
        lines.append(f"| {named} | {' | '.join(shown)} | {ratio} | {row['goal']:g} | {errors} | {first} |")
    return "\n".join([*lines, *sentences(rows)])


def sentences(rows: list[Row]) -> list[str]:
    """What users get by default, where it was measured."""
    told = [
        f"{row['model']}: {row['microseconds'][gpu_models.CHOSEN]['median'] / 1e3:.3f} ms ("
        f"{' + '.join(dict.fromkeys(row['chosen']))}), {row['ratio_by_default']:.2f} times as fast"
        for row in rows
        if "ratio_by_default" in row
    ]
    return ["", f"By default, beside the quicker of Inductor's: {'; '.join(told)}."] if told else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "as-cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:2]), help="default: ark inductor")
    parser.add_argument("--turns", type=int, default=15, help="of each contender")
    parser.add_argument("--seconds", type=float, default=500, help="after so many nothing is compiled")
    parser.add_argument("--output", type=Path, default=gpu_models.FOLDER / "results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("many_rows.py: this PyTorch sees no GPU")
    about = gpu_models.surroundings(arguments)
    path = arguments.output / f"many_rows_{gpu_models.slug(arguments.device)}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = {row["model"]: row for row in before}
    ends = time.time() + arguments.seconds
    for name in arguments.only:
        if time.time() > ends:
            print(f"# {name}: left out for time")
            continue
        rows[name] = measured(name, arguments, ends)
        print(f"# {name}: {rows[name]['ratio']}", flush=True)
        bench.write_json(path, about, [rows[one] for one in CASES if one in rows])
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    print(f"{table([rows[one] for one in CASES if one in rows])}\n# written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
