"""Measures decoding with torch.compile(backend="ark") on CPU: a step of a small Llama, against Inductor and eager.

    python benchmarks/decode.py [--ranks 1 2] [--dtype float32] [--positions 32 256 500] [--quick] [--output FOLDER]
    python benchmarks/decode.py --plot      measures nothing: the picture from the JSON
    python benchmarks/decode.py --device cuda [--ways ...]    a Llama of 1.2 billion weights on one GPU
                                                              (gpu_models.py): its table and decode_h200.json
    python benchmarks/decode.py --device cuda --ranks 2       the same, tensor parallel (decode_ranks.py)

One process has two threads. Several ranks (tensor parallel, two all_reduces per layer) have one thread each, and
Inductor's all_reduces run over Gloo and over ark. All contenders decode the same token at the same positions with the
same weights in the same processes. They take turns step by step, so that noise of the machine affects all equally.
Their logits are compared with float64 before timing. Inductor runs in its default mode, with freezing, and with
max-autotune; the ratio is to the best of them. Inductor's attention reads the whole cache at every position.

`loop_microseconds` is the time per step of greedy decoding, up to 32 steps from the position on: with one launch per
step, and with one launch for all (ark_torch.resident). Both use the model of "ark" and take turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ark_torch
from ark_torch.tools.bench import report

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "examples"))

import decode_inputs  # noqa: E402
import decode_report  # noqa: E402
import gpu_models  # noqa: E402
from llama.model import Llama, LlamaConfig, shard  # noqa: E402  (lies beside, in examples/)

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Contenders = dict[str, tuple[Llama, Step]]
INDUCTOR: dict[str, dict[str, bool]] = {
    "inductor": {},
    "inductor, freezing": {"freezing": True},
    "inductor, max-autotune": {"freezing": True, "max_autotune": True},
}
THREADS = 2  # per process


def contenders(model: Llama, quick: bool) -> Contenders:
    """Maps a name to its own model (or this rank's shard of it) and the step."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "ark")} if ranks > 1 else {"": None}
    made: Contenders = {}
    for name, options in {"eager": None, **dict(list(INDUCTOR.items())[: 1 if quick else 3])}.items():
        for carrier, group in groups.items():
            own = copy.deepcopy(model) if group is None else shard(model, group)
            made[f"{name} over {carrier}" if carrier else name] = (
                own,
                own if options is None else torch.compile(own, options=dict(options)),
            )
    own = copy.deepcopy(model) if ranks == 1 else shard(model, groups["ark"])
    made["ark"] = own, torch.compile(own, backend="ark", options={"choose": "ark"})
    return made


def errors(model: Llama, made: Contenders, position: int, ids: torch.Tensor) -> dict[str, float]:
    """Returns the largest error of the logits against eager float64, relative to the largest logit."""
    where = torch.tensor([position])
    exact = copy.deepcopy(model).double()
    found = {}
    for name, (own, step) in made.items():
        decode_inputs.fill(own, model.config, position)
        decode_inputs.fill(model, model.config, position)
        for there, here in zip(exact.caches(), model.caches(), strict=True):
            there.copy_(here)
        want = exact(ids, where)
        found[name] = float((step(ids, where).double() - want).abs().max() / want.abs().max())
    return found


def measure(made: Contenders, position: int, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Returns median microseconds per step."""
    where = torch.tensor([position])
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, (_, step) in made.items():
            step(ids, where)  # warms the caches, which the previous contender used
            start = time.perf_counter()
            step(ids, where)
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


class Loops:
    """Greedy decoding with one launch per step, and with one launch for all steps."""

    def __init__(self, model: Llama) -> None:
        def step(token: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return model(token, where).argmax(-1, keepdim=True), where + 1

        self._most = model.config.max_len
        self._single = torch.compile(step, backend="ark", options={"choose": "ark"})
        self._loop = ark_torch.resident(step, options={"choose": "ark", "fallback": False})

    def _launches(self, ids: torch.Tensor, where: torch.Tensor, steps: int) -> None:
        for _ in range(steps):
            ids, where = self._single(ids, where)

    def measure(self, position: int, ids: torch.Tensor, rounds: int) -> dict[str, float]:
        """Returns median microseconds per step."""
        where, steps = torch.tensor([position]), min(32, self._most - position)
        ways: dict[str, Callable[[], object]] = {
            "launches": lambda: self._launches(ids, where, steps),
            "resident": lambda: self._loop(ids, where, steps=steps),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                if turn > 0:
                    times[name].append((time.perf_counter() - start) * 1e6 / steps)
        return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}


@torch.no_grad()
def run_rank(arguments: argparse.Namespace, rows: Path) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(THREADS if ranks == 1 else 1)
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Llama(LlamaConfig()).eval().requires_grad_(False).to(getattr(torch, arguments.dtype))
    made = contenders(model, arguments.quick)
    loops = Loops(made["ark"][0])
    ids = torch.randint(0, model.config.vocabulary, (1, 1))
    first_call = {}
    for name, (_, step) in made.items():
        start = time.perf_counter()
        step(ids, torch.tensor([0]))
        first_call[name] = time.perf_counter() - start
    for position in arguments.positions:
        row: dict[str, Any] = {"ranks": ranks, "threads": torch.get_num_threads(), "position": position}
        row |= {"dtype": arguments.dtype, "error": errors(model, made, position, ids)}
        row["microseconds"] = times = measure(made, position, ids, 20 if arguments.quick else 200)
        row["loop_microseconds"] = loops.measure(position, ids, 3 if arguments.quick else 30)
        row["ratio"] = min(taken for name, taken in times.items() if name.startswith("inductor")) / times["ark"]
        if ranks == 1 or dist.get_rank() == 0:
            show({**row, "first_call_seconds": first_call})
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "first_call_seconds": first_call}) + "\n")
    if ranks > 1:
        dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    print(f"{row['ranks']} rank(s) of {row['threads']} thread(s), position {row['position']}: {row['ratio']:.2f}x")
    for name, taken in row["microseconds"].items():
        seconds, error = row["first_call_seconds"][name], row["error"][name]
        print(f"  {name:<32} {taken:>9.0f} us   error {error:.1e}   first call {seconds:>5.1f} s", flush=True)
    for name, taken in row["loop_microseconds"].items():
        print(f"  {'greedy decoding, ' + name:<32} {taken:>9.0f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1 and 2; on a GPU, the one of decode_h200.json")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--positions", type=int, nargs="+", default=[32, 256, 500])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and Inductor in its default mode only")
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    parser.add_argument("--shape", choices=("1b", "8b"), default="1b", help="on several GPUs: of the Llama")
    parser.add_argument("--layers", type=int, help="on several GPUs: so many of them")
    parser.add_argument("--prompt", type=int, default=0, metavar="N", help="on several GPUs: prefill of so many tokens")
    parser.add_argument("--plot", action="store_true", help="measure nothing: draw the picture from the JSON")
    parser.add_argument("--rows", type=Path, default=None, help=argparse.SUPPRESS)
    gpu_models.add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.device != "cpu" and arguments.ranks:
        import decode_ranks  # not at the top: it sets environment variables that CPU ranks must not have

        return decode_ranks.main(arguments)
    if arguments.device != "cpu":
        return gpu_models.main("decode", [("llama-1b", None)], arguments)
    if arguments.rows is not None:
        run_rank(arguments, arguments.rows)
        return 0
    if arguments.plot:
        about = json.loads((arguments.output / "decode.json").read_text(encoding="utf-8"))
        print(decode_report.draw(about, arguments.output / "decode.png"), end="")
        return 0
    about = report.surroundings(report.shown_command("benchmarks/decode.py"))
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        rows = Path(folder) / "rows.jsonl"
        same = ["--dtype", arguments.dtype, "--positions", *map(str, arguments.positions)]
        for ranks in arguments.ranks or [1, 2]:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            command = [sys.executable, *launcher, __file__, "--rows", str(rows), *same]
            done = subprocess.run([*command, *(["--quick"] if arguments.quick else [])])
            if done.returncode != 0:
                return 1
        measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    name = "decode-quick.json" if arguments.quick else "decode.json"
    report.write_json(arguments.output / name, about, measured)
    print(f"# written to {arguments.output}: {name}")
    if not arguments.quick:
        print(decode_report.draw({**about, "rows": measured}, arguments.output / "decode.png"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
