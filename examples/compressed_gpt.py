"""Trains the demo's GPT with exact and with compressed gradients, and compares bytes sent and losses.

    python examples/compressed_gpt.py --bits 4                        # starts its own two ranks
    torchrun --nproc-per-node 2 examples/compressed_gpt.py --bits 2   # the same under torchrun

gpt/training.py shows the code for it: a compression.State and one call of register_comm_hook. The exit code is 1 if the
held-out loss differs by more than --tolerance from that of exact gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt.data import load_corpus
from gpt.model import ModelConfig
from gpt.training import Place, TrainingConfig, train


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bits", type=int, default=4, help="bits an element of the gradients (default: 4)")
    add("--no-feedback", action="store_true", help="forget what quantisation loses")
    add("--ranks", type=int, default=2, help="processes to start; torchrun's own number counts under torchrun")
    add("--steps", type=int, default=200)
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64)
    add("--batch", type=int, default=8, help="windows of 64 bytes a rank and step")
    add("--seed", type=int, default=1234)
    add("--tolerance", type=float, default=0.1, help="nats a byte (default: 0.1)")
    add("--text", type=Path, help="folder of *.py files to train on instead of the standard library")
    arguments = parser.parse_args()
    if not 1 <= arguments.bits <= 8:
        parser.error(f"--bits {arguments.bits}: 1 to 8")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", f"--nproc-per-node={arguments.ranks}", __file__, *sys.argv[1:]])
        return
    store, rank, world = next(dist.rendezvous("env://"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    place, corpus = Place(store, rank, world, torch.device("cpu")), load_corpus(arguments.text)
    model = ModelConfig(arguments.layers, arguments.width, heads=4, context=64)
    settings = {"bits": arguments.bits, "error_feedback": not arguments.no_feedback}
    losses = []
    for run, compression in enumerate((None, settings)):
        config = TrainingConfig(model, arguments.steps, arguments.batch, seed=arguments.seed, compression=compression)
        result, _ = train(config, corpus, "ark", run, place, lambda *_: None)
        losses.append(result.held_out[-1][1])
        if rank == 0:
            how = "exact gradients" if compression is None else f"{arguments.bits} bits an element"
            sent = f", {result.bytes_sent / result.bytes_exact:.1%} of the bytes" if compression else ""
            print(f"{how}: held-out loss {losses[-1]:.4f} nats a byte, {result.seconds:.1f} s{sent}", flush=True)
    apart = losses[1] - losses[0]
    if rank == 0:
        print(f"compressed against exact: {apart:+.4f} nats a byte", flush=True)
    sys.exit(0 if abs(apart) <= arguments.tolerance else 1)


if __name__ == "__main__":
    main()
