"""Decoding with torch.compile(backend="ark") on CPU: a step of a small Llama, against Inductor and eager.

    python benchmarks/decode.py [--threads 2] [--dtype float32] [--positions 32 256 500] [--quick] [--output FOLDER]

All contenders decode the same tokens at the same positions with models of the same weights, in the same process,
taking turns step by step, so that the machine's noise hits all of them alike; outputs are compared with float64 before
anything is timed. Inductor runs in its default mode, with freezing, and with max-autotune besides; the ratio is to the
best of them. The attention of Inductor's graphs reads the whole cache at every position.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ark_torch.tools.bench import report

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "examples"))

from llama.model import Llama, LlamaConfig  # noqa: E402  (lies beside, in examples/)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def contenders(model: Llama) -> dict[str, tuple[Llama, Step]]:
    """Name -> its own copy of the model, and the step."""
    made: dict[str, tuple[Llama, Step]] = {}
    inductor: dict[str, dict[str, bool]] = {
        "inductor": {},
        "inductor, freezing": {"freezing": True},
        "inductor, max-autotune": {"freezing": True, "max_autotune": True},
    }
    for name in ("eager", *inductor, "ark"):
        own = copy.deepcopy(model)
        step: Step = own
        if name in inductor:
            step = torch.compile(own, options=dict(inductor[name]))
        elif name == "ark":
            step = torch.compile(own, backend="ark", options={"choose": "ark"})
        made[name] = own, step
    return made


def fill(models: list[Llama], length: int) -> None:
    """Random keys and values, the same in all, at the positions before `length`."""
    torch.manual_seed(length)
    for caches in zip(*(model.caches() for model in models), strict=True):
        values = torch.randn_like(caches[0][:, :, :length])
        for cache in caches:
            cache.zero_()
            cache[:, :, :length] = values


def errors(model: Llama, made: dict[str, tuple[Llama, Step]], position: int, ids: torch.Tensor) -> dict[str, float]:
    """Largest error of the logits against float64, relative to the largest logit."""
    exact = copy.deepcopy(model)
    fill([model, *(own for own, _ in made.values())], position)
    for there, here in zip(exact.caches(), model.caches(), strict=True):
        there.copy_(here)
    exact = exact.double()
    where = torch.tensor([position])
    want = exact(ids, where)
    return {
        name: float((step(ids, where).double() - want).abs().max() / want.abs().max())
        for name, (_, step) in made.items()
    }


def measure(made: dict[str, tuple[Llama, Step]], position: int, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median microseconds of a step."""
    where = torch.tensor([position])
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (_, step) in made.items():
            step(ids, where)  # what ran before had the caches of the processor
            start = time.perf_counter()
            step(ids, where)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--positions", type=int, nargs="+", default=[32, 256, 500])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and no max-autotune")
    parser.add_argument("--output", type=Path, default=None, help="folder for decode.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    surroundings = report.surroundings(report.shown_command("benchmarks/decode.py"))
    torch.manual_seed(0)
    model = Llama(LlamaConfig()).eval().requires_grad_(False).to(getattr(torch, arguments.dtype))
    made = contenders(model)
    if arguments.quick:
        made.pop("inductor, max-autotune")
    ids = torch.randint(0, model.config.vocabulary, (1, 1))
    compile_seconds = {}
    for name, (_, step) in made.items():
        start = time.perf_counter()
        step(ids, torch.tensor([0]))
        compile_seconds[name] = time.perf_counter() - start
    rows: list[dict[str, Any]] = []
    print(f"{'position':>8} " + " ".join(f"{name:>22}" for name in made) + f" {'ratio':>6}   microseconds a step")
    for position in arguments.positions:
        wrong = errors(model, made, position, ids)
        times = measure(made, position, ids, 20 if arguments.quick else 300)
        best = min(time for name, time in times.items() if name.startswith("inductor"))
        rows.append({"position": position, "microseconds": times, "ratio": best / times["ark"], "error": wrong})
        print(f"{position:>8} " + " ".join(f"{times[name]:>22.0f}" for name in made) + f" {best / times['ark']:>6.2f}")
    print("error against float64: " + ", ".join(f"{name} {rows[-1]['error'][name]:.2e}" for name in made))
    print("first call, s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in compile_seconds.items()))
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        content = {**surroundings, "threads": arguments.threads, "dtype": arguments.dtype, "rows": rows}
        content["compile_seconds"] = compile_seconds
        (arguments.output / "decode.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
