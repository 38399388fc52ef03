"""Counts the bytes that a rank sends for gradients when only some layers learn, on two CPU ranks. Machine-independent.

    python benchmarks/compression_bytes.py [--output FOLDER]

The demo's GPT, four ways: all layers learn; low-rank matrices learn beside frozen ones (as in LoRA); only the last
block learns and the rest is frozen; only the last block learns and the rest is detached but not frozen, so that DDP
hands over zeros.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

from ark_torch.tools.bench import report

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "examples"))

from gpt.model import GPT, ModelConfig, next_byte_loss  # noqa: E402

STEPS, RANK = 3, 8


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable product of two small matrices."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def make(way: str) -> GPT:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=4, width=128, heads=4, context=64))
    if way == "low rank":
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("qkv", "project", "up", "down"):
                setattr(block, name, LowRank(getattr(block, name)))
    elif way == "last block, frozen":
        model.requires_grad_(False)
        model.blocks[-1].requires_grad_(True)
    elif way == "last block, cut off":
        model.blocks[-1].register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(), *inputs[1:]))
        model.embedding.requires_grad_(False)  # the output layer shares its weights
    return model


def measured(way: str) -> dict[str, Any]:
    from ark_torch.distributed import compression

    ddp = DistributedDataParallel(make(way), find_unused_parameters=way.endswith("cut off"))
    state = compression.State(bits=4, module=ddp)
    ddp.register_comm_hook(state, compression.hook)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ddp.zero_grad()
        next_byte_loss(ddp, torch.randint(256, (2, 65), generator=generator)).backward()
    learnt = sum(parameter.numel() for parameter in ddp.parameters() if parameter.requires_grad)
    return {
        "way": way, "requires_grad": learnt, "exact": state.bytes_exact // STEPS, "sent": state.bytes_sent // STEPS,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER / "results")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return
    dist.init_process_group("ark")
    conditions = report.surroundings("python benchmarks/compression_bytes.py")
    rows = [measured(way) for way in ("all layers", "low rank", "last block, frozen", "last block, cut off")]
    if dist.get_rank() == 0:
        for row in rows:
            print(
                "{way:<20} {requires_grad:>8} elements learnt, {exact:>8} bytes a step exact, {sent:>7} sent".format(
                    **row
                )
            )
        arguments.output.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**conditions, "ranks": 2, "bits": 4, "rows": rows}, indent=1)
        (arguments.output / "compression_bytes.json").write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
