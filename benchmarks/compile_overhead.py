"""Measures what torch.compile(backend="ark") costs besides the kernel: host time per call and compile time.

    python benchmarks/compile_overhead.py [--layers 16] [--hidden 64] [--rounds 30] [--quick] [--output FOLDER]

Host time of a decoding step of a small Llama is the whole call minus the run of the loop kernel in that same call
(waking its workers included). Dynamo's own share is measured with the same compiled model, told to return results that
are ready: the same guards at the same addresses and the same arguments. The two alternate call by call, each after a
step of ark, as in a program that decodes. A second measurement runs a step of another model, compiled by Inductor, in
between, so that the processor's caches are cold. The table shows Inductor's whole call for scale. Inductor gets one
thread, because OpenMP's threads spin for milliseconds after a parallel loop and would occupy the next call's cores.
"Inside" is the time after Dynamo's guards have passed, which is less noisy. Compile times are of fresh processes: cold
with an empty cache, then again with what the first one cached. `ark` is the time inside ark's backend, `rest` is
torch._dynamo and AOTAutograd.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ark_torch.tools.bench import report

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "examples"))

from llama.model import Llama, LlamaConfig  # noqa: E402  (lies beside, in examples/)

CALLS = 30  # per contender and round


def model_of(layers: int, hidden: int) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(layers=layers, hidden=hidden, head_dim=hidden // 8, ffn=3 * hidden, vocabulary=512)
    return Llama(config).eval().requires_grad_(False)


def with_code_of_its_own(model: Llama, name: str) -> Llama:
    """Gives a model its own code object. Dynamo caches by code object, so models that share one check each other's
    guards.
    """
    forward = types.FunctionType(Llama.forward.__code__.replace(co_name=name), Llama.forward.__globals__, "forward")
    model.__class__ = type(f"Llama_{name}", (Llama,), {"forward": forward})
    return model


class Either:
    """The model compiled by ark, and its only region. While `idle`, a call returns prepared results."""

    def __init__(self, model: Llama, inputs: Sequence[torch.Tensor], threads: int) -> None:
        from ark_torch.compile import backend
        from ark_torch.compile import options as table
        from ark_torch.compile.report import Report

        self.idle, self.entered = False, 0.0
        told = Report()

        def compile_it(graph_module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            options = table.parse(None, {"choose": "ark", "threads": threads})
            call = backend.compile_graph(graph_module, example_inputs, options, told)
            results = call(*example_inputs)

            def either(*arguments: Any) -> Any:
                self.entered = time.perf_counter()
                return results if self.idle else call(*arguments)

            return either

        self.step = torch.compile(model, backend=compile_it)
        self.step(*inputs)
        (piece,) = told.regions
        self.region = piece.region


@torch.no_grad()
def host_time(arguments: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    inputs = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([5])
    model = model_of(arguments.layers, arguments.hidden)
    either = Either(with_code_of_its_own(model, "ark"), inputs, threads)
    inductor = torch.compile(with_code_of_its_own(model_of(arguments.layers, arguments.hidden), "inductor"))
    for step in (either.step, inductor):
        for _ in range(20):
            step(*inputs)
    tensors = sum(1 for _ in model.parameters()) + sum(1 for _ in model.buffers())
    rows = []
    for after in ("ark", "inductor"):
        row: dict[str, Any] = {"what": "host time of a call", "layers": arguments.layers, "hidden": arguments.hidden}
        row |= {"threads": threads, "tensors": tensors, "after": after}
        between = inductor if after == "inductor" else None
        rounds = [one_round(either, inputs, between) for _ in range(arguments.rounds)]
        row["microseconds"] = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for what in ("host", "inside"):
            above = sorted(one[f"ark, {what}"] - one[f"nothing, {what}"] for one in rounds)
            row[f"above_dynamo_{what}_us"] = statistics.median(above)
            row[f"above_dynamo_{what}_quartiles_us"] = [above[len(above) // 4], above[3 * len(above) // 4]]
        rows.append(row)
    return rows


def one_round(either: Either, inputs: Sequence[torch.Tensor], between: Callable[..., Any] | None) -> dict[str, float]:
    """Returns medians over CALLS turns, in microseconds."""
    times: dict[str, list[float]] = {}
    for _ in range(CALLS):
        for idle in (False, True):
            either.idle = False
            either.step(*inputs)
            if between is not None:
                begin = time.perf_counter()
                between(*inputs)
                times.setdefault("inductor", []).append(time.perf_counter() - begin)
            either.idle = idle
            begin = time.perf_counter()
            either.step(*inputs)
            end = time.perf_counter()
            name = "nothing" if idle else "ark"
            kernel = 0.0 if idle else either.region.last_kernel_us * 1e-6
            times.setdefault(name, []).append(end - begin)
            times.setdefault(f"{name}, host", []).append(end - begin - kernel)
            times.setdefault(f"{name}, inside", []).append(end - either.entered - kernel)
    return {name: statistics.median(taken) * 1e6 for name, taken in times.items()}


@torch.no_grad()
def compile_time(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures this process, which must not have compiled anything yet."""
    torch.set_num_threads(2)
    model = Llama(LlamaConfig(layers=arguments.layers)).eval().requires_grad_(False)
    return first_call(model, (torch.zeros(1, 1, dtype=torch.int64), torch.tensor([5])), {"choose": "ark"})


def first_call(model: torch.nn.Module, inputs: Sequence[Any], options: dict[str, Any] | None) -> dict[str, float]:
    """Times the first call with these options, and what of it passes in ark's backend (`ark_s`), and in planning, the
    compiler and loading (`plan_and_compiler_s`)."""
    from ark_torch.compile import backend, build, saved

    load = saved.SavedRegion.load
    seconds: dict[Callable[..., Any], float] = {backend.compile_graph: 0.0, build.make_region: 0.0, load: 0.0}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                seconds[function] += time.perf_counter() - begin

        return call

    ark, region, _ = seconds
    backend.compile_graph, build.make_region = timed(ark), timed(region)
    saved.SavedRegion.load = timed(load)  # type: ignore[method-assign]
    step = torch.compile(model, backend="ark", options=options)
    begin = time.perf_counter()
    step(*inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    whole = time.perf_counter() - begin
    return {
        "first_call_s": whole,
        "ark_s": seconds[ark],
        "plan_and_compiler_s": seconds[region] + seconds[load],
        "rest_s": whole - seconds[ark],
    }


def compile_times(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs two processes, one after the other, whose folders for ark's and PyTorch's caches are empty at first."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as cache:
        for name in ("cold", "from cache"):
            environ = {**os.environ, "ARK_CACHE": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
            command = [sys.executable, __file__, "--compile-once", "--layers", str(arguments.layers)]
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True, text=True)
            rows.append({"what": f"compiling, {name}", "layers": arguments.layers, **json.loads(done.stdout)})
    return rows


def show(row: dict[str, Any]) -> None:
    if "microseconds" in row:
        shape = f"{row['layers']} layers, {row['tensors']} tensors, {row['threads']} thread(s)"
        print(f"{shape}: host time of a call after a step of {row['after']}")
        for name, taken in row["microseconds"].items():
            print(f"  {name:<16} {taken:>9.1f} us")
        for what in ("host", "inside"):
            low, high = row[f"above_dynamo_{what}_quartiles_us"]
            above = row[f"above_dynamo_{what}_us"]
            print(f"  ark above Dynamo's own, {what}: {above:.1f} us (quartiles {low:.1f} to {high:.1f})")
        return
    print(
        f"{row['what']}: first call {row['first_call_s']:.2f} s, of which ark {row['ark_s']:.2f} s "
        f"(plan, compiler and loading {row['plan_and_compiler_s']:.2f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="host time on one thread only, few rounds")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    parser.add_argument("--compile-once", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile_once:
        print(json.dumps(compile_time(arguments)))
        return 0
    about = report.surroundings(report.shown_command("benchmarks/compile_overhead.py"))
    if arguments.quick:
        arguments.rounds = min(arguments.rounds, 5)
    rows = [row for threads in ([1] if arguments.quick else [1, 2]) for row in host_time(arguments, threads)]
    if not arguments.quick:
        rows += compile_times(arguments)
    for row in rows:
        show(row)
    name = "compile_overhead-quick.json" if arguments.quick else "compile_overhead.json"
    report.write_json(arguments.output / name, about, rows)
    print(f"# written to {arguments.output}: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
