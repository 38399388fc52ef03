"""Measures a training step with DistributedDataParallel over ark and over Gloo: the demo's model at several sizes.

    python benchmarks/ddp_step.py [--ranks 2,4] [--quick] [--output FOLDER]

Both backends, and the same step without communication (no_sync), take turns in the same processes, so that noise of the
machine affects all equally. A step is forward and backward, and takes as long as its slowest rank. Small batches of a
wide model make communication visible. The demo's own size is among the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ark_torch.tools.bench import cli, report

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "examples"))

from gpt.model import ModelConfig  # noqa: E402  (lies beside, in examples/)
from gpt.timing import time_communication  # noqa: E402


@dataclass(frozen=True)
class Step:
    """A model and the batch of one rank."""

    name: str
    model: ModelConfig
    batch: int


STEPS = (
    Step("2 layers of 64", ModelConfig(2, 64, 4, 32), 2),
    Step("demo: 4 layers of 128", ModelConfig(4, 128, 4, 64), 2),
    Step("demo: 4 layers of 128", ModelConfig(4, 128, 4, 64), 16),
    Step("4 layers of 384", ModelConfig(4, 384, 6, 64), 1),
    Step("4 layers of 384", ModelConfig(4, 384, 6, 64), 4),
    Step("6 layers of 768", ModelConfig(6, 768, 12, 32), 1),
)


def measure(step: Step, groups: dict[str, dist.ProcessGroup], rounds: int) -> dict[str, Any]:
    """Returns median milliseconds over each backend and without communication. All ranks return the same."""
    times = time_communication(step.model, step.batch, groups, rounds, torch.device("cpu"))
    row = {"model": step.name, **asdict(step.model), "batch": step.batch, "ranks": dist.get_world_size()}
    row |= {"rounds": rounds, "gradient_bytes": times.gradient_bytes, "local_ms": times.local_ms}
    for name, of_backend in times.backends.items():
        row |= {f"{name}_{key.removeprefix('step_')}": value for key, value in asdict(of_backend).items()}
    row["ratio"] = row["gloo_ms"] / row["ark_ms"]
    return row


def run_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("ark", "gloo")}
    rounds = 5 if arguments.quick else 25
    with open(arguments.rows, "a", encoding="utf-8") as file:
        for step in STEPS[:3] if arguments.quick else STEPS:
            row = measure(step, groups, rounds)
            if dist.get_rank() == 0:
                print(
                    f"{row['model']:>22} {row['gradient_bytes'] / 1e6:>8.1f} {row['ranks']:>6} {row['batch']:>6} "
                    f"{row['ark_ms']:>9.2f} {row['gloo_ms']:>9.2f} {row['ratio']:>6.2f} {row['local_ms']:>9.2f}",
                    flush=True,
                )
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    time.sleep(0.1)  # lets Gloo's threads release their last tensors before the groups are destroyed
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=cli.rank_list, default=(2, 4), help="numbers of processes (default: 2,4)")
    parser.add_argument("--quick", action="store_true", help="three models, few rounds; written to ddp_step-quick.json")
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder for the JSON")
    parser.add_argument("--rows", help=argparse.SUPPRESS)  # where rank 0 writes the rows for the parent process
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
        return 0
    about = report.surroundings(report.shown_command("benchmarks/ddp_step.py"))
    heading = f"{'model':>22} {'grad. MB':>8} {'ranks':>6} {'batch':>6} {'ark ms':>9} {'gloo ms':>9} {'ratio':>6}"
    print(f"{heading} {'local ms':>9}", flush=True)
    with tempfile.TemporaryDirectory(prefix="ark-bench-") as folder:
        rows = Path(folder) / "rows.jsonl"
        for world in arguments.ranks:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
            command = [*launcher, __file__, "--rows", str(rows), *(["--quick"] if arguments.quick else [])]
            done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
            if done.returncode != 0:
                return 1
        measured = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    name = "ddp_step-quick.json" if arguments.quick else "ddp_step.json"
    report.write_json(arguments.output / name, about, measured)
    print(f"# written to {arguments.output}: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
