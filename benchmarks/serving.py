"""Measures the examples of docs/serving.md: tokens (or sentences) a second by eager PyTorch, Inductor and ark.

    python benchmarks/serving.py                     small models on the CPU: serving_cpu.json
    python benchmarks/serving.py --device cuda       large ones in bfloat16 on a GPU: serving_h200.json
    python benchmarks/serving.py --only encode generate --beside

Each example is a process of its own, with random weights; it compares every contender's result with eager PyTorch's.
First calls compile and are not counted. Inductor is run in its default mode, as the examples' users have it; --beside
without a name leaves it out. After --seconds no further example is begun.
"""

from __future__ import annotations

import argparse
import json
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
}
CONTENDERS = ("eager", "inductor", "ark")


def run(name: str, arguments: argparse.Namespace) -> list[Row]:
    """Rows of an example; raises CalledProcessError with its output if a result was wrong."""
    script, *more = RUNS[name]
    with tempfile.TemporaryDirectory(prefix="ark-serving-") as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, str(EXAMPLES / script), *more, "--rows", str(rows), "--size", arguments.size]
        command += ["--device", arguments.device, "--dtype", arguments.dtype, "--times", str(arguments.times)]
        command += ["--beside", *arguments.beside]
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.seconds)
        print(done.stdout, end="", flush=True)
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        lines = rows.read_text(encoding="utf-8").splitlines()
    return [{"example": name} | json.loads(line) for line in lines]


def table(rows: list[Row]) -> str:
    """A line for each example: how much a second each contender does, and how ark stands to the others."""
    lines = [
        "| example | unit | eager | Inductor | ark | ark to eager | ark to Inductor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for example in dict.fromkeys(row["example"] for row in rows):
        own = [row for row in rows if row["example"] == example]
        rates = {row["by"]: row["rate"] for row in own}
        shown = [f"{rates[by]:.0f}" if by in rates else "" for by in CONTENDERS]
        shown += [f"{rates['ark'] / rates[by]:.2f}" if by in rates else "" for by in ("eager", "inductor")]
        lines.append(f"| {own[0]['what']} | {own[0]['unit']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("tiny", "small", "large"), help="default: small on a CPU, large on a GPU")
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--beside", nargs="*", choices=("inductor",), default=["inductor"])
    parser.add_argument("--times", type=int, default=5, help="counted runs of each contender")
    parser.add_argument("--seconds", type=float, default=900, help="after so many no further example is begun")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.size = arguments.size or ("large" if on_gpu else "small")
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    import gpu_models  # not at the top: it sets environment variables

    about = gpu_models.surroundings(arguments) | {"size": arguments.size, "dtype": arguments.dtype, "left_out": []}
    path = arguments.output / f"serving_{gpu_models.slug('cuda') if on_gpu else 'cpu'}.json"
    rows: list[Row] = []
    ends = time.monotonic() + arguments.seconds
    for name in arguments.only:
        if time.monotonic() > ends:
            about["left_out"].append(name)
            continue
        try:
            rows += run(name, arguments)
        except subprocess.CalledProcessError as error:
            print(f"# {name}: {error}\n{error.stderr}")
            return 1
        except subprocess.TimeoutExpired:
            about["left_out"].append(name)
        bench.write_json(path, about, rows)
    print(f"{table(rows)}\n# written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
