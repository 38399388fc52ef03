"""Measures what communication costs a training step: shapes of known models over ark, over NCCL, and without.

    python benchmarks/training.py --models gpt2-xl --modes graph ddp fsdp2 --ranks 2

Sequence 384, batch 4 (GPT-2 XL, Llama 1B) or 10 (BERT-Large) per GPU, bfloat16 autocast, float32 gradients, fused
AdamW, blocks compiled by Inductor (plain modules; Hugging Face's unchanged). Modes:
  captured        ark_torch.train.capture over each group (captured_NAME), beside DDP over NCCL as users run it; memory
  captured_fsdp2  the same for a model in fully_shard, beside FSDP2 over NCCL
  graph           the whole step in one CUDA graph; gradients in flat buckets of 50 MB, each all-reduced on a
                  high-priority stream when its last gradient is ready
  eager           the same without the graph
  ddp             DistributedDataParallel with its defaults
  fsdp2           fully_shard of every block, bfloat16 parameters, float32 reduction
--bits 4 adds ark_4_bit to captured, ddp and fsdp2, with compressed gradients (compression_accuracy.py: accuracy).
A contender `free` runs the step without communication (ddp: a hook that leaves buckets alone; fsdp2: PyTorch's fake
backend); the difference is the cost of communication. All contenders take turns, in --rounds rounds. A figure is the
median over rounds of the slowest rank's. The learning rate is 0, so that weights stay constant and the gradients of all
contenders and ranks can be compared. In `graph` and `eager` mode each bucket's all-reduce is timed too, during training
and alone.

--plot draws both pictures of the paper from --output: all-reduce bandwidth during training beside alone, and the step's
time by contender. --ark NAME:VARIABLE=VALUE adds contenders, for example the SM engine or the copy engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import on_gpus
from gpu_ranks import Rank
from training_buckets import run_bucketed
from training_captured import run_captured
from training_models import IMPLEMENTATIONS, SHAPES
from training_report import HEADING, draw, tell
from training_subject import FREE, Subject, make_groups
from training_wrapped import fake_group, run_wrapped

MODES = ("captured", "captured_fsdp2", "graph", "eager", "ddp", "fsdp2")
RUNS = {
    "captured": run_captured,
    "captured_fsdp2": run_captured,
    "ddp": run_wrapped,
    "fsdp2": run_wrapped,
}  # all other modes: run_bucketed


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = make_groups(rank, arguments)
    free = {"ddp": next(iter(groups.values())), "fsdp2": fake_group() if "fsdp2" in arguments.modes else None}
    rank.say(HEADING)
    for name in arguments.models:
        for implementation in arguments.implementations:
            compiled = rank.device.type == "cuda" and implementation == "plain" and arguments.compile
            for mode in arguments.modes:
                if not rank.time_for(20 if rank.device.type == "cuda" else 1):
                    continue
                subject = Subject(rank, name, implementation, compiled)
                run = RUNS.get(mode, run_bucketed)
                began = time.monotonic()
                try:
                    rows = run(subject, groups | {FREE: free.get(mode)}, mode, arguments)
                except (ImportError, RuntimeError) as error:
                    if implementation == "plain":
                        raise
                    # The library is not installed, or cannot be captured, on any rank.
                    rank.warn(f"left out: {name} {implementation} {mode}: {str(error).splitlines()[0]}")
                    continue
                tell(rank, rows, {"model": name, "implementation": implementation, "mode": mode}, began)
                subject.free_memory()


def main() -> int:
    parser = on_gpus.parser(__doc__, "training.json", 90)
    parser.add_argument("--models", nargs="+", default=["bert-large"], choices=list(SHAPES))
    parser.add_argument("--implementations", nargs="+", default=["plain"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--modes", nargs="+", default=["graph"], choices=MODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="a round (default: 6)")
    parser.add_argument("--bucket-mb", type=float, default=50, help="of captured, graph and eager mode (default: 50)")
    parser.add_argument("--auto-buckets", action="store_true", help="captured: sizes by measurement, as by default")
    parser.add_argument("--bits", type=int, nargs="+", default=[], help="captured, ddp, fsdp2: bits of gradients")
    parser.add_argument("--direct-mb", type=float, help="captured: gradients from here on are averaged in place")
    parser.add_argument("--ablate", action="store_true", help="captured: also without single parts of the step")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="plain modules without Inductor")
    parser.add_argument("--no-bandwidth", dest="bandwidth", action="store_false", help="time no single all-reduce")
    parser.add_argument("--busy", action="store_true", help="every core of this process has other work, too")
    parser.add_argument("--plot", action="store_true", help="measure nothing: draw the pictures of --output")
    arguments = parser.parse_args()
    picture = arguments.output.with_suffix(".png")
    if arguments.plot:
        why = draw(json.loads(arguments.output.read_text(encoding="utf-8")), picture)
        return why_not(why)
    with other_work(arguments.busy):
        about, rows, problem = on_gpus.measure(measure, arguments)
    why_not(draw(about | {"rows": rows}, picture))
    unlike = sorted({row["contender"] for row in rows if not row.get("ranks_alike", True)})
    if unlike:
        print(f"# RANKS DIFFER: {', '.join(unlike)}", file=sys.stderr)
    return 1 if problem or unlike or not rows else 0


@contextlib.contextmanager
def other_work(wanted: bool) -> Iterator[None]:
    """While `wanted`, keeps every core that this process may use busy with another process."""
    cores = len(os.sched_getaffinity(0)) if wanted else 0
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def why_not(why: str) -> int:
    if why:
        print(f"# {why}", file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
