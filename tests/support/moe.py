"""Random cases of mixtures of experts, for tests/ops and tests/gpu.

The reference is the unfused form over the same group: rows sorted by expert, all_to_all_single by counts, sorted again,
products expert by expert, back the same way, and index_add in the order of the choices in float32 (float64 in float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass
class Case:
    tokens: list[int]  # by rank
    k: int
    local: int  # experts per rank
    dim: int
    dtype: torch.dtype = torch.float32
    kind: str = "random"  # ids: random (some -1), distinct, one (all to one expert), none
    ids: torch.dtype = torch.int64
    weights: torch.dtype = torch.float32
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.local * len(self.tokens)


def draw(case: Case, rank: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, topk_ids and topk_weights."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    tokens = case.tokens[rank]
    shape = (tokens, case.k)
    x = torch.randn(tokens, case.dim, generator=generator, dtype=torch.float64)
    if case.kind == "random":
        ids = torch.randint(-1, case.experts, shape, generator=generator)
    elif case.kind == "distinct":
        ids = torch.rand(tokens, case.experts, generator=generator).argsort(1)[:, : case.k]
    else:
        ids = torch.full(shape, case.experts - 1 if case.kind == "one" else -1)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    return x.to(device, case.dtype), ids.to(device, case.ids), weights.to(device, case.weights)


def draw_experts(case: Case, rank: int, ffn: int, gated: bool, device: torch.device | str = "cpu") -> list[Tensor]:
    """Returns w1 and w2."""
    generator = torch.Generator().manual_seed(7000 + 1000 * case.seed + rank)
    rows = 2 * ffn if gated else ffn
    made = [
        torch.randn(case.local, *size, generator=generator, dtype=torch.float64) * size[1] ** -0.5
        for size in ((rows, case.dim), (case.dim, ffn))
    ]
    return [one.to(device, case.dtype) for one in made]


def random_case(random: Random, world: int, seed: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    local = random.choice([1, 2, 3, 8])
    kind = random.choice(["random", "random", "distinct", "one", "none"])
    k = random.choice([1, 2, 3, 6])
    if kind == "distinct":
        k = min(k, local * world)
    tokens = [random.choice([0, 1, 2, 7, 33, 64]) for _ in range(world)]
    dim = random.choice([1, 3, 8, 16, 40, 130])
    ids = random.choice([torch.int32, torch.int64])
    weights = random.choice([torch.float32, torch.float32, torch.bfloat16])
    return Case(tokens, k, local, dim, random.choice(dtypes), kind, ids, weights, seed)


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


class Unfused:
    """Dispatch and combine through all_to_all_single."""

    def __init__(self, case: Case, topk_ids: Tensor, group: Any = None) -> None:
        self.group, self.case = group, case
        world, me = dist.get_world_size(group), dist.get_rank(group)
        flat = topk_ids.flatten().long()
        routed = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # choices, sorted by expert
        self.choices = routed
        mine = torch.bincount(flat[routed].cpu(), minlength=case.experts)
        counts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(counts, mine, group=group)
        self.by_rank = torch.stack(counts)  # [world, experts]
        local = self.by_rank.view(world, world, case.local)  # from, to
        self.sent, self.received = local[me].sum(1).tolist(), local[:, me].sum(1).tolist()
        theirs = local[:, me]  # [from, local expert]
        self.counts = theirs.sum(0)
        expert = torch.arange(case.local).repeat(world).repeat_interleave(theirs.flatten())
        self.order = expert.argsort(stable=True).to(topk_ids.device)

    def there(self, x: Tensor) -> Tensor:
        rows = x[self.choices // self.case.k]
        return exchanged(rows, self.sent, self.received, self.group)[self.order]

    def back(self, y: Tensor, topk_weights: Tensor | None, tokens: int) -> Tensor:
        came = torch.empty_like(y)
        came[self.order] = y
        mine = exchanged(came, self.received, self.sent, self.group)
        wide = torch.float64 if y.dtype == torch.float64 else torch.float32
        total = torch.zeros(tokens, y.shape[1], dtype=wide, device=y.device)
        for j in range(self.case.k):
            of = self.choices % self.case.k == j
            choices = self.choices[of]
            part = mine[of].to(wide)
            if topk_weights is not None:
                part = part * topk_weights.flatten()[choices].to(wide)[:, None]
            total.index_add_(0, choices // self.case.k, part)
        return total.to(y.dtype)


def experts_one_by_one(rows: Tensor, counts: list[int], w1: Tensor, w2: Tensor, activation: str) -> Tensor:
    ffn, parts = w2.shape[2], []
    for e, part in enumerate(rows.split(counts)):
        hidden = torch.mm(part, w1[e].t())
        inner = ACTIVATIONS[activation](hidden[:, :ffn])
        if hidden.shape[1] != ffn:
            inner = inner * hidden[:, ffn:]
        parts.append(torch.mm(inner, w2[e].t()))
    return torch.cat(parts) if parts else rows
