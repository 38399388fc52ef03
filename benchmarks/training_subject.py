"""What benchmarks/training.py trains, over which groups, and how a step is timed and checked in every mode.

A subject is a shape's model, tokens and optimizer on one rank. The learning rate is 0 and weights stay constant, so
that every contender's gradients must be equal: bit for bit on all ranks, and close to the rival's.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_ranks import Rank, Row, ark_group, rival_group
from torch import nn
from training_models import SHAPES, Shape, build

FREE = "free"
Groups = dict[str, Any]  # contender -> group; None: no communication


def make_groups(rank: Rank, arguments: argparse.Namespace) -> Groups:
    rival = "nccl" if rank.device.type == "cuda" else "gloo"
    groups: Groups = {rival: rival_group(rank), "ark": ark_group(rank)}
    for name, variables in arguments.ark:
        groups[f"ark_{name}"] = ark_group(rank, variables)
    return groups


@dataclass
class Subject:
    """What is trained. Each mode creates its own model, because DDP and FSDP2 modify it."""

    rank: Rank
    name: str
    implementation: str
    compiled: bool
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = SHAPES[self.name]
        generator = torch.Generator(device=self.rank.device).manual_seed(7 + self.rank.rank)
        size = (self.shape.batch, self.shape.sequence)
        device = self.rank.device
        self.tokens = torch.randint(0, self.shape.vocabulary, size, device=device, generator=generator)

    @property
    def gpu(self) -> bool:
        return self.rank.device.type == "cuda"

    def model(self) -> nn.Module:
        return build(self.implementation, self.shape, self.rank.device, self.compiled)

    def optimizer(self, model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
        # In a graph the rate must be a tensor or constant. 0 keeps the weights constant.
        options = {"fused": True, "capturable": capturable} if self.gpu else {}
        return torch.optim.AdamW(model.parameters(), lr=0.0, **options)

    def autocast(self) -> Any:
        return torch.autocast(self.rank.device.type, torch.bfloat16, cache_enabled=False)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def free_memory(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()


def timed(subject: Subject, step: Callable[[], Any], steps: int) -> float:
    """Returns milliseconds per step on this rank. All ranks start together."""
    subject.synchronize()
    subject.rank.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    subject.synchronize()
    return (time.perf_counter() - began) / steps * 1e3


def same_gradients(rank: Rank, name: str, sums: dict[str, torch.Tensor]) -> Row:
    """Checks that all ranks have the same sums of gradients. Returns how far they are from the rival's."""
    if name == FREE:
        return {}
    own = sums[name]
    alike = all(torch.equal(own, other) for other in rank.share(own))
    rival = next(sums[other] for other in ("nccl", "gloo") if other in sums)
    difference = float((own - rival).abs().max() / (rival.abs().max() + 1e-30))
    return {"ranks_alike": alike, "difference": difference}
