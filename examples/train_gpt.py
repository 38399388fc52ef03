"""Trains a small GPT on the source of Python's standard library with DistributedDataParallel over ark.

    python examples/train_gpt.py                                # starts its own two ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py           # the same under torchrun

The training runs three times: over ark, over Gloo (PyTorch's own backend) and over ark again. Then decode_gpt.py lets
the model write, compiled by ark and in three other ways. The program shows the loss curve, whether the weights agree
(bit for bit between the runs over ark, within rounding with Gloo), the cost of communication, and the speed of writing.
The exit code is 1 if something does not agree. index.html in the output folder has all results. Using ark takes one
word in gpt/training.py, dist.init_process_group("ark"), and one in gpt/decoding.py, torch.compile(step, backend="ark").
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    from gpt import page, report
    from gpt.bars import Bars
    from rich.console import Console
except ImportError as error:
    sys.exit(f"{error}. The demo draws with matplotlib, plotille and rich: pip install matplotlib plotille rich")

from gpt.data import check_length, load_corpus
from gpt.model import GPT, ModelConfig
from gpt.training import Place, RunResult, TrainingConfig, measure_communication, train

CUDA_BACKENDS = {"ark", "nccl"}  # their groups carry CUDA tensors; Gloo's only through host memory


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", default="ark", help="backend of the first and the last run (default: ark)")
    add("--compare", default="gloo", metavar="BACKEND", help="backend of the run in between, or 'none'")
    add("--no-repeat", action="store_true", help="leave out the second run over the first backend")
    add("--ranks", type=positive, default=2, help="processes to start; torchrun's own number counts under torchrun")
    add("--threads", type=positive, default=1, help="compute threads a rank")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where all backends carry it")
    add("--steps", type=positive, default=120)
    add("--batch", type=positive, default=16, help="windows of text a rank and step")
    add("--context", type=positive, default=64, help="bytes a window")
    add("--layers", type=positive, default=4)
    add("--width", type=positive, default=128)
    add("--heads", type=positive, default=4)
    add("--seed", type=int, default=1234)
    add("--tokens", type=positive, default=400, help="bytes that the trained model writes (default: 400)")
    add("--text", type=Path, help="folder of *.py files to train on instead of the standard library")
    add("--output", type=Path, default=Path("demo-output"), help="folder for pictures and figures")
    arguments = parser.parse_args()
    for backend in backends_of(arguments):
        if not dist.is_backend_available(backend):
            hint = " (install this package: pip install .)" if backend == "ark" else ""
            parser.error(f"backend {backend!r} is not known to this PyTorch{hint}")
    if arguments.width % (2 * arguments.heads) != 0:
        parser.error(f"--width {arguments.width} must be a multiple of twice --heads ({arguments.heads})")
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus(arguments.text)
        check_length(corpus.train, arguments.context, "training")
        check_length(corpus.held_out, arguments.context, "held-out")
        arguments.device_type = pick_device_type(arguments)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    arguments.corpus = corpus
    return arguments


def backends_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the backends of the runs, in order."""
    compared = [] if arguments.compare == "none" else [arguments.compare]
    repeated = [] if arguments.no_repeat else [arguments.backend]
    return [arguments.backend, *compared, *repeated]


def pick_device_type(arguments: argparse.Namespace) -> str:
    """CUDA if every backend of the comparison carries CUDA tensors and each rank has a GPU, otherwise the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", arguments.ranks))
    unable = sorted(set(backends_of(arguments)) - CUDA_BACKENDS)
    if torch.cuda.device_count() < local_ranks:
        why_not = f"{torch.cuda.device_count()} GPUs are visible and {local_ranks} ranks need one each"
    elif unable:
        why_not = f"these backends do not carry CUDA tensors: {', '.join(unable)}"
    else:
        why_not = ""
    if arguments.device == "cuda" and why_not:
        raise ValueError(f"--device cuda cannot be used: {why_not}")
    return "cuda" if arguments.device != "cpu" and not why_not else "cpu"


def run_rank(arguments: argparse.Namespace) -> bool:
    """Runs one rank's part: all runs, then the report on rank 0."""
    store, rank, world = next(dist.rendezvous("env://"))
    device = torch.device(arguments.device_type, *([int(os.environ["LOCAL_RANK"])] * (arguments.device_type == "cuda")))
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    model_config = ModelConfig(arguments.layers, arguments.width, arguments.heads, arguments.context)
    config = TrainingConfig(model_config, steps=arguments.steps, batch=arguments.batch, seed=arguments.seed)
    console = Console(quiet=rank != 0, highlight=False)
    corpus = arguments.corpus
    console.print(
        f"{corpus.train_files} files, {corpus.train.numel() / 1e6:.1f} MB to train on; {corpus.held_out_files} files, "
        f"{corpus.held_out.numel() / 1e6:.1f} MB held out; {world} ranks on {device.type}"
    )
    place = Place(store, rank, world, device)
    results: list[RunResult] = []
    models: list[GPT] = []
    with Bars(console) as bars:
        for run, backend in enumerate(backends_of(arguments)):
            result, model = train(config, corpus, backend, run, place, bars.follow(backend, config.steps))
            results.append(result)
            models.append(model)
    times = measure_communication(config, backends_of(arguments), place)
    if rank != 0:
        return True
    folder = arguments.output
    torch.save(models[0].state_dict(), folder / "model.pt")
    report.draw(results, times, folder / "loss.png")
    report.write_report(results, times, config, place, folder / "report.json")
    agrees = report.show(console, results, times)
    wrote = write_text(arguments, folder, world)
    page.write(folder)
    if wrote:
        report.show_writing(console, folder)
    return agrees and wrote


def write_text(arguments: argparse.Namespace, folder: Path, world: int) -> bool:
    """Runs decode_gpt.py in a separate process with the threads of all ranks. Returns False if it failed."""
    for name in ("decode.json", "sample.txt", "schedule.svg", "trace.json"):  # of an earlier run
        (folder / name).unlink(missing_ok=True)
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_")
    alone = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    command = [sys.executable, str(Path(__file__).with_name("decode_gpt.py")), "--folder", str(folder)]
    for name, value in (("tokens", arguments.tokens), ("threads", arguments.threads * world), ("seed", arguments.seed)):
        command += [f"--{name}", str(value)]
    return subprocess.run(command, env=alone).returncode == 0


def main() -> None:
    arguments = parse_arguments()  # also here, before any rank starts: an error is printed once
    if "RANK" in os.environ:
        sys.exit(0 if run_rank(arguments) else 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    torchrun(["--standalone", f"--nproc-per-node={arguments.ranks}", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
