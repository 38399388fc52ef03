"""Measures the examples of docs/serving.md: tokens (or sentences) a second by eager PyTorch, Inductor and ark.

    python benchmarks/serving.py                     small models on the CPU: serving_cpu.json
    python benchmarks/serving.py --device cuda       large ones in bfloat16 on a GPU: serving_h200.json
    python benchmarks/serving.py --only encode generate --beside

From "decode" on, "encode" excepted, it is the same loop of one sequence: greedy, with weights of few bits (by plain
PyTorch, or by torchao where that is installed), or sampled (temperature and top-k inside the compiled step). In
"resident" ark decodes all tokens from one launch (ark_torch.resident), beside the others' loops, which launch each step
from Python. ark is forced (choose="ark"): the table says what its kernels do, not whom it would choose.

Each example is a process of its own, with random weights; it compares every contender's result with eager PyTorch's.
First calls compile and are not counted. Then the contenders take turns, --times each, and the median counts. Inductor
is run in its default mode and, on a GPU, in mode="reduce-overhead" (CUDA graphs; what GPT-fast and generate() take by
themselves); --beside without a name leaves it out.

--seconds bounds all of it. Each example gets an equal part of what is left and begins no turn after it; one that still
compiles when all is over is ended. Ended examples, by Ctrl-C too, keep the turns that they had.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ark_torch.tools.bench import report as bench

FOLDER = Path(__file__).resolve().parent
EXAMPLES = FOLDER.parent / "examples"
Row = dict[str, Any]
RUNS = {
    "generate": ("huggingface.py", "--only=generate"),
    "plain": ("huggingface.py", "--only=plain"),
    "pipeline": ("huggingface.py", "--only=pipeline"),
    "decode": ("decode_loop.py",),
    "int8": ("decode_loop.py", "--quantize=int8"),
    "int4": ("decode_loop.py", "--quantize=int4"),
    "float8": ("decode_loop.py", "--quantize=float8"),
    "encode": ("encode.py",),
    "torchao-int8": ("decode_loop.py", "--quantize=int8", "--torchao"),
    "torchao-float8": ("decode_loop.py", "--quantize=float8", "--torchao"),
    "sampled": ("decode_loop.py", "--temperature=0.8"),
    "resident": ("decode_loop.py", "--resident"),
    "resident-sampled": ("decode_loop.py", "--resident", "--temperature=0.8"),
}
CONTENDERS = {"eager": "eager", "inductor": "Inductor", "reduce-overhead": "reduce-overhead", "ark": "ark"}


class WrongResult(Exception):
    """An example has failed; its text is what the example wrote last."""


def run(name: str, arguments: argparse.Namespace, share: float, left: float) -> tuple[list[Row], str]:
    """Rows of an example, and why there are no more: "", or what ended it. `share` and `left`: seconds until it begins
    no further turn, and until it is ended."""
    script, *more = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="ark-serving-") as folder:
        rows, told = Path(folder) / "rows.json", Path(folder) / "told"
        command = [sys.executable, str(EXAMPLES / script), *more, "--rows", str(rows), "--size", arguments.size]
        command += ["--device", arguments.device, "--dtype", arguments.dtype, "--times", str(arguments.times)]
        command += ["--seconds", str(share), "--beside", *arguments.beside]
        # Its output goes to a file and it is a session of its own: compilers that it started cannot keep a pipe open,
        # and end with it.
        with told.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        ended = ""
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            ended = "time"
        except KeyboardInterrupt:
            ended = "Ctrl-C"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = told.read_text(encoding="utf-8", errors="replace")
        if not ended and process.returncode != 0:
            raise WrongResult(f"{name}: exit code {process.returncode}\n{text[-5000:]}")
        lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    found = [{"example": name} | json.loads(line) for line in lines]
    shown = [line for line in text.splitlines() if line.split()[:1] and line.split()[0] in CONTENDERS]
    print("\n".join([f"# {name}{f', ended early: {ended}' if ended else ''}", *shown]), flush=True)
    return found, ended


def table(rows: list[Row]) -> str:
    """A line for each example: how much a second each contender does, and how ark stands to eager PyTorch and to the
    faster of Inductor's modes."""
    shown = [by for by in CONTENDERS if by != "reduce-overhead" or any(row["by"] == by for row in rows)]
    names = ["example", "unit", *(CONTENDERS[by] for by in shown), "ark to eager", "ark to Inductor"]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for example in dict.fromkeys(row["example"] for row in rows):
        own = [row for row in rows if row["example"] == example]
        rates = {row["by"]: row["rate"] for row in own}
        cells = [f"{rates[by]:.0f}" if by in rates else "" for by in shown]
        for others in (["eager"], ["inductor", "reduce-overhead"]):
            best = max((rates[by] for by in others if by in rates), default=0.0)
            cells.append(f"{rates['ark'] / best:.2f}" if best and "ark" in rates else "")
        lines.append(f"| {own[0]['what']} | {own[0]['unit']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("tiny", "small", "large"), help="default: small on a CPU, large on a GPU")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--beside", nargs="*", choices=list(CONTENDERS)[1:3], help="default: both on a GPU")
    parser.add_argument("--times", type=int, default=25, help="counted runs of each contender")
    parser.add_argument("--seconds", type=float, default=900, help="after so many all is over")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    there = importlib.util.find_spec("torchao") is not None
    missing = [name for name in arguments.only if "--torchao" in RUNS[name] and not there]
    arguments.only = [name for name in arguments.only if name not in missing]
    on_gpu = arguments.device == "cuda"
    arguments.size = arguments.size or ("large" if on_gpu else "small")
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    if arguments.beside is None:
        arguments.beside = ["inductor", "reduce-overhead"] if on_gpu else ["inductor"]
    import gpu_models  # not at the top: it sets environment variables

    about = gpu_models.surroundings(arguments) | {"size": arguments.size, "dtype": arguments.dtype, "left_out": missing}
    about["ended_early"] = {}
    path = arguments.output / f"serving_{gpu_models.slug('cuda') if on_gpu else 'cpu'}.json"
    rows: list[Row] = []
    ends = time.monotonic() + arguments.seconds
    code = 0
    for done, name in enumerate(arguments.only):
        left = ends - time.monotonic()
        if left <= 0 or code != 0:
            about["left_out"].append(name)
            continue
        try:
            share = 0.8 * left / (len(arguments.only) - done)  # its imports and last turn come on top
            found, ended = run(name, arguments, share, left)
        except WrongResult as error:
            print(f"# {error}")
            return 1
        rows += found
        if not found:
            about["left_out"].append(name)
        if ended:
            about["ended_early"][name] = ended
            code = 130 if ended == "Ctrl-C" else 0
        bench.write_json(path, about, rows)
    if about["left_out"]:
        print(f"# left out: {', '.join(about['left_out'])}")
        bench.write_json(path, about, rows)
    print(f"{table(rows)}\n# written to {path}")
    return code


if __name__ == "__main__":
    sys.exit(main())
