"""Measures decoding with weight-only int8, float8 and int4: a step of a Llama by ark and by Inductor, batch 1.

    python benchmarks/low_bits.py [--size small] [--forms bfloat16 int8 torchao-int8] [--output FOLDER]
    python benchmarks/low_bits.py --device cuda [--size 1b | 8b] [--layers N] [--seconds 150]

Linear layers come from examples/llama/quantized.py. "int8", "float8" and "int4" are plain PyTorch, as GPT-fast and
torchao write it. The forms "torchao-..." are the same model after torchao's quantize_, with its weight-only
configuration; Inductor then has the settings that torchao sets, for these forms only. Both backends get the same graph.
What torchao cannot make on this machine is named in the table, with the reason.

All contenders take turns of a few calls in one process, with the same tokens at the same position. On a GPU, Inductor's
steps (mode max-autotune) and ark's are captured in CUDA graphs. Errors are relative to the same codes, with the same
scales and zeros, decoded in float64. `speedup` is relative to the same backend's step with the original weights,
`beside Inductor` is Inductor's time of the same form divided by ark's. After --seconds no further contender is
compiled. ark's forms come first, and what is left out is named.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.metadata
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "examples")]

import gpu_models  # noqa: E402
import models  # noqa: E402  (lies in tests/compile, which gpu_models adds)
import real_sizes  # noqa: E402
from coded import decoded  # noqa: E402
from llama.quantized import FORMS as CODED  # noqa: E402  (lies in examples/)
from llama.quantized import TORCHAO, quantize, quantize_by_torchao  # noqa: E402

Row = dict[str, Any]
SIZES = {
    "small": models.Config(1024, 8, 16, 4, 2816, 8192, 512),
    "1b": real_sizes.LLAMA_1B,
    "8b": models.Config(4096, 32, 32, 8, 14336, 128256, 1024, theta=500000.0),
    "tiny": models.Config(256, 1, 4, 2, 512, 64, 32),  # to test the script
}
BY_TORCHAO = "torchao-"
FORMS = ("bfloat16", *CODED, *(BY_TORCHAO + form for form in TORCHAO))
BACKENDS = ("ark", "inductor")
THREADS = 2  # on a CPU


def model_of(config: models.Config, form: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with device:
        torch.set_default_dtype(dtype)  # 8 billion weights in float32 would not fit beside the others
        try:
            model = real_sizes.ready(models.Llama(config, 1, dtype), dtype, 0.02)
        finally:
            torch.set_default_dtype(torch.float32)
    if form.startswith(BY_TORCHAO):
        return quantize_by_torchao(model, form.removeprefix(BY_TORCHAO))
    return model if form == "bfloat16" else quantize(model, form)


class Decoded(nn.Module):
    """The product with torchao's weight, in float64. Each call decodes: all layers at once would not fit on a GPU."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.decode = functools.partial(decoded, weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.decode())


def exactly(model: nn.Module) -> nn.Module:
    """Returns the model with the same codes, scales and weights, computed in float64."""
    wide = (torch.bfloat16, torch.float16, torch.float32)
    exact = copy.deepcopy(model)
    for name, layer in list(exact.named_modules()):
        if isinstance(layer, nn.Linear) and is_traceable_wrapper_subclass(layer.weight):
            exact.set_submodule(name, Decoded(layer.weight))
    return exact._apply(lambda tensor: tensor.double() if tensor.dtype in wide else tensor)


def bytes_of(model: nn.Module) -> int:
    """Returns the weight bytes that a step reads: all but the embedding, of which it reads one row."""
    total = 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not name.startswith("emb.") and not name.endswith("_cache"):
            # A tensor subclass tells the size of the weight that it stands for, not of the tensors that it holds.
            inner = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
            total += sum(getattr(tensor, one).nbytes for one in inner) if inner else tensor.nbytes
    return total


@contextlib.contextmanager
def inductors_settings_kept() -> Iterator[None]:
    """torchao's quantize_ changes them for the whole process."""
    before = torch._inductor.config.save_config()
    try:
        yield
    finally:
        torch._inductor.config.load_config(before)


class Contest:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = gpu_models.device_of(arguments)
        self.config = SIZES[arguments.size]
        if arguments.layers:
            self.config = models.Config(**{**vars(self.config), "layers": arguments.layers})
        self.position = min(512, self.config.max_len // 2)
        self.ids = torch.randint(0, self.config.vocab, (1, 1), device=self.device)
        self.where = torch.tensor([self.position], device=self.device)
        self.dtype = getattr(torch, arguments.dtype)
        self.ends = time.time() + arguments.seconds
        self.steps: dict[str, Any] = {}
        self.rows: dict[str, Row] = {}

    def add(self, form: str, backend: str) -> None:
        row: Row = {"backend": backend, "form": form}
        self.rows[f"{backend}, {form}"] = row
        if time.time() > self.ends:
            row["left_out"] = True
            return
        with inductors_settings_kept():
            try:
                model = model_of(self.config, form, self.device, self.dtype)
            except Exception as error:  # torchao raises many types for what a machine lacks
                if not form.startswith(BY_TORCHAO):
                    raise
                traceback.print_exc()
                row["not_available"] = (str(error) or type(error).__name__).splitlines()[0]
                return
            try:
                with gpu_models.until(self.ends):
                    self._add(row, model)
            except Exception:  # raised by the compiler because it was interrupted
                if time.time() < self.ends:
                    raise
                row["left_out"] = True

    def _add(self, row: Row, model: Any) -> None:
        row["bytes"] = bytes_of(model)
        right = None
        if row["bytes"] < 6e9:  # the float64 copy takes four times as much and must fit, too
            exact = exactly(model)
            real_sizes.fill(exact, self.position)
            right = exact(self.ids, self.where)
        self._compile(row, model, right)

    def _compile(self, row: Row, model: Any, right: torch.Tensor | None) -> None:
        real_sizes.fill(model, self.position)
        told = None
        if row["backend"] == "ark":
            call, told = gpu_models.of_ark(model)
        else:
            call = torch.compile(model, dynamic=False, **self._inductors_best(row["form"]))

        def step() -> torch.Tensor:
            result: torch.Tensor = call(self.ids, self.where)
            return result

        begin = time.perf_counter()
        result = step().double()
        gpu_models.finish(self.device)
        row["first_call_seconds"] = time.perf_counter() - begin
        if right is not None:
            row["error"] = float((result - right).abs().max() / right.abs().max())
        if told is not None:
            row |= gpu_models.made_of(told) | {"weights": [line for graph in told.graphs for line in graph.weights]}
        self.steps[f"{row['backend']}, {row['form']}"] = (
            gpu_models.captured(step) if self.device.type == "cuda" else step
        )

    def _inductors_best(self, form: str) -> dict[str, Any]:
        """On a GPU max-autotune, but for torchao's forms the default mode with torchao's settings, as GPT-fast has it.
        With these a product of one row is a sum whose tiles are searched; max-autotune adds no kernel to it."""
        if self.device.type != "cuda":
            return {"options": CPU_OPTIONS}
        return {} if form.startswith(BY_TORCHAO) else {"mode": "max-autotune-no-cudagraphs"}

    def measure(self, turns: int) -> list[Row]:
        for name, times in gpu_models.in_turns(self.steps, turns, self.device).items():
            self.rows[name]["microseconds"] = times
        for row in self.rows.values():
            mine = self._median(row["backend"], row["form"])
            if mine is None:
                continue
            plain, theirs = self._median(row["backend"], "bfloat16"), self._median("inductor", row["form"])
            row["gigabytes_per_second"] = row["bytes"] / mine / 1e3
            row["speedup"] = plain / mine if plain else None
            row["beside_inductor"] = theirs / mine if theirs else None
        return list(self.rows.values())

    def _median(self, backend: str, form: str) -> float | None:
        times = self.rows.get(f"{backend}, {form}", {}).get("microseconds")
        return times["median"] if times else None


CPU_OPTIONS = {"freezing": True, "max_autotune": True}


def table(rows: list[Row]) -> str:
    lines = [
        "| weights | backend | median, us | GB/s of weights | speedup | beside Inductor | error | first call, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "not_available" in row:
            reason = row["not_available"].replace("|", "\\|")
            lines.append(f"| {row['form']} | {row['backend']} | not available: {reason} | | | | | |")
            continue
        if "microseconds" not in row:
            lines.append(f"| {row['form']} | {row['backend']} | left out for time | | | | | |")
            continue
        ratios = [f"{row[key]:.2f}" if row[key] else "" for key in ("speedup", "beside_inductor")]
        error = f"{row['error']:.1e}" if "error" in row else ""
        lines.append(
            f"| {row['form']} | {row['backend']} | {row['microseconds']['median']:.0f} | "
            f"{row['gigabytes_per_second']:.0f} | {' | '.join(ratios)} | {error} | {row['first_call_seconds']:.1f} |"
        )
    return "\n".join(lines)


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=SIZES, default="", help="small on a CPU, 1b on a GPU")
    parser.add_argument("--layers", type=int, default=0, help="instead of all")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--turns", type=int, default=20, help="of each contender")
    parser.add_argument("--seconds", type=float, default=150, help="after so many nothing more is compiled")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    arguments.size = arguments.size or ("1b" if arguments.device == "cuda" else "small")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("low_bits.py: this PyTorch sees no GPU")
    if arguments.device == "cpu":
        torch.set_num_threads(THREADS)
        torch.set_float32_matmul_precision("highest")
    about = gpu_models.surroundings(arguments)
    if any(form.startswith(BY_TORCHAO) for form in arguments.forms):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            about["versions"]["torchao"] = importlib.metadata.version("torchao")
    # All contenders compile the same function. After a reset each would be compiled again while they take turns.
    torch._dynamo.config.recompile_limit = len(FORMS) * len(BACKENDS)
    contest = Contest(arguments)
    for backend in arguments.backends:
        for form in arguments.forms:
            contest.add(form, backend)
    rows = contest.measure(arguments.turns)
    about |= {"size": arguments.size, "layers": contest.config.layers, "dtype": arguments.dtype}
    about |= {"position": contest.position}
    print(f"# {arguments.size}, {contest.config.layers} layers, {arguments.dtype}; {about['date']}\n{table(rows)}")
    where = gpu_models.slug("cuda") if arguments.device == "cuda" else "cpu"
    path = arguments.output / f"low_bits_{arguments.size}_{where}.json"
    bench.write_json(path, about, rows)
    print(f"# written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
