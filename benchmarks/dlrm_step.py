"""Measures a whole training step of a DLRM: embeddings of 26 tables, MLPs, backward pass, update of rows and weights.

    python benchmarks/dlrm_step.py --ranks 2 [--shapes D128-L1-B8192] [--device cpu]

Tables have Criteo's sizes (capped by --rows) and D columns, and are distributed over the ranks. B is samples per rank,
L the number of Zipf-distributed indices per bag. A rank gets the bags of its tables for all ranks' samples, so that no
way exchanges indices. MLPs are MLPerf's (512-256-D; 1024-1024-512-256-1), replicated, with one all-reduce of all
gradients and an SGD step. Rows use row-wise Adagrad. Ways:

eager_nccl     F.embedding_bag(sparse=True) over all of the rank's tables at once, all_to_all_single with its gradient,
               sparse gradients coalesced, Adagrad by PyTorch's operators (Gloo on CPU); no graph can contain it,
               because the host reads a gradient's size from the GPU
padded_nccl    the same with the gradient summed into as many rows as there are indices, so that a graph can contain it
inductor_nccl  padded_nccl with the forward pass through torch.compile
ark            ark_torch.ops.embedding_bag_all_to_all(optimizer=RowwiseAdagrad), all_reduce of ark's group
ark_inductor   the same with the forward pass through torch.compile

A figure is the median over rounds of the slowest rank's time per step, launched by the host ("eager") and in a CUDA
graph of two steps with different indices ("graph"). Losses and rows of all ways are compared within rounding. One
element of the rows in 10,000 may differ more, because Adagrad's step depends on the sign of gradients near zero.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import on_gpus
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from fused import CALLS, captured, timed
from gpu_ranks import ark_group, rival_group
from on_gpus import Rank, Row
from torch import Tensor, nn

from ark_torch.ops import RowwiseAdagrad, embedding_bag_all_to_all

SHAPES = ("D128-L1-B2048", "D128-L1-B8192", "D128-L8-B4096")
# The table sizes of Criteo's Kaggle data set.
SIZES = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
         2173, 4, 7046547, 18, 15, 286181, 105, 142572)  # fmt: skip
DENSE, LR, EPS = 13, 0.01, 1e-6


def sizes_of(shape: str) -> tuple[int, int, int]:
    dim, length, batch = (int(part[1:]) for part in shape.split("-"))
    return dim, length, batch


class Rest(nn.Module):
    """The MLPs and the interaction."""

    def __init__(self, dim: int, wide: int) -> None:
        super().__init__()
        tables = len(SIZES)
        self.bottom = mlp(DENSE, wide // 2, wide // 4, dim)
        self.top = mlp(dim + (tables + 1) * tables // 2, wide, wide, wide // 2, wide // 4, 1)
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", first * (tables + 1) + second)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vector = F.relu(self.bottom(dense))
        vectors = torch.cat([vector[:, None], pooled], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([vector, products], 1)).squeeze(1)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Setting:
    """One shape on one rank: its tables and its batches."""

    def __init__(self, rank: Rank, shape: str, groups: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.rank, self.groups, self.wide = rank, groups, arguments.width
        self.dim, self.length, self.batch = sizes_of(shape)
        self.bags = rank.ranks * self.batch
        each = [len(SIZES) // rank.ranks + (r < len(SIZES) % rank.ranks) for r in range(rank.ranks)]
        self.known, first = each, sum(each[: rank.rank])
        self.sizes = [min(size, arguments.rows) for size in SIZES[first : first + each[rank.rank]]]
        self.begins = [sum(self.sizes[:t]) for t in range(len(self.sizes))]
        device, generator = rank.device, torch.Generator(device=rank.device)
        self.indices: list[list[Tensor]] = []
        self.dense: list[Tensor] = []
        self.clicks: list[Tensor] = []
        for call in range(CALLS):
            generator.manual_seed(31 * call + rank.rank)
            self.indices.append([self._zipf(size, generator) for size in self.sizes])
            self.dense.append(torch.randn(self.batch, DENSE, generator=generator, device=device))
            self.clicks.append((torch.rand(self.batch, generator=generator, device=device) < 0.3).float())
        # In the order in which the all-to-all sends: [sample of all ranks, table].
        self.flat = [
            torch.stack([one.view(self.bags, self.length) + at for one, at in zip(call, self.begins, strict=True)], 1)
            .reshape(-1, self.length).contiguous() for call in self.indices
        ]  # fmt: skip
        offsets = torch.arange(0, self.bags * self.length, self.length, device=device, dtype=torch.int32)
        self.offsets = [offsets] * len(self.sizes)

    def _zipf(self, size: int, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(self.bags * self.length, generator=generator, device=self.rank.device)
        return ((size + 1.0) ** uniform).int().sub_(1).clamp_(0, size - 1)

    def rows(self) -> Tensor:
        """Returns the initial values of this rank's rows, the same for each way."""
        generator = torch.Generator(device=self.rank.device).manual_seed(5 + self.rank.rank)
        shape = (sum(self.sizes) + 1, self.dim)  # plus one unused row, for `padded`
        return torch.randn(shape, generator=generator, device=self.rank.device) * 0.05


class Way:
    """A model and its training step."""

    def __init__(self, setting: Setting, kind: str, compiled: bool) -> None:
        self.setting, self.kind = setting, kind
        self.group = setting.groups["ark" if kind == "ark" else "rival"]
        torch.manual_seed(1)
        with setting.rank.device:
            self.rest = Rest(setting.dim, setting.wide)
        self.weights = list(self.rest.parameters())
        self.whole = setting.rows()
        self.pooled: Tensor | None = None
        if kind == "ark":
            self.tables = [table.clone() for table in self.whole[:-1].split(setting.sizes)]
            self.whole = self.whole[:0]
            self.optimizer = RowwiseAdagrad(self.tables, lr=LR, eps=EPS)
        else:
            self.sums = torch.zeros(len(self.whole), device=self.whole.device)
        self.capturable = kind != "eager"
        forward = self.forward_ark if kind == "ark" else self.forward
        self.loss = torch.compile(forward, dynamic=False) if compiled else forward

    def rows(self) -> Tensor:
        """Returns the rows of all tables without the unused last one."""
        return torch.cat(self.tables) if self.kind == "ark" else self.whole[:-1]

    def forward_ark(self, i: int) -> tuple[Tensor, Tensor]:
        s = self.setting
        pooled = embedding_bag_all_to_all(
            self.tables, s.indices[i], s.offsets, self.group, tables_per_rank=s.known, optimizer=self.optimizer
        )
        return F.binary_cross_entropy_with_logits(self.rest(s.dense[i], pooled), s.clicks[i]), pooled

    def forward(self, i: int) -> tuple[Tensor, Tensor]:
        """Returns the loss and the pooled embeddings, whose gradient the update needs."""
        s, mine = self.setting, len(self.setting.sizes)
        with torch.no_grad():
            bags = F.embedding_bag(s.flat[i], self.whole, mode="sum")
        bags = bags.requires_grad_()
        each = s.batch * s.dim
        received = funcol.all_to_all_single_autograd(
            bags.view(-1), [count * each for count in s.known], [mine * each] * len(s.known), self.group
        )
        parts = received.split([count * each for count in s.known])
        pooled = torch.cat([part.view(s.batch, -1, s.dim) for part in parts], 1)
        return F.binary_cross_entropy_with_logits(self.rest(s.dense[i], pooled), s.clicks[i]), bags

    def step(self, i: int) -> Tensor:
        for weight in self.weights:
            weight.grad = None
        loss, bags = self.loss(i)
        if self.kind == "ark":
            loss.backward()
        else:
            *gradients, of_bags = torch.autograd.grad(loss, [*self.weights, bags])
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient
            with torch.no_grad():
                (self.update_coalesced if self.kind == "eager" else self.update_padded)(i, of_bags)
        with torch.no_grad():
            flat = torch.cat([weight.grad.view(-1) for weight in self.weights])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([weight.numel() for weight in self.weights])
            parts = [part.view_as(weight) for part, weight in zip(parts, self.weights, strict=True)]
            torch._foreach_add_(self.weights, parts, alpha=-LR / self.setting.rank.ranks)
        return loss.detach().reshape(1)

    def update_coalesced(self, i: int, of_bags: Tensor) -> None:
        flat, dim = self.setting.flat[i], self.setting.dim
        each = of_bags[:, None].expand(-1, flat.shape[1], dim).reshape(-1, dim)
        gradient = torch.sparse_coo_tensor(flat.view(1, -1), each, self.whole.shape).coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        self.sums.index_add_(0, rows, values.square().mean(1))
        self.whole.index_add_(0, rows, -LR / (self.sums[rows].sqrt() + EPS)[:, None] * values)

    def update_padded(self, i: int, of_bags: Tensor) -> None:
        flat = self.setting.flat[i].view(-1)
        keys, order = flat.sort()
        heads = torch.ones_like(keys, dtype=torch.bool)
        heads[1:] = keys[1:] != keys[:-1]
        slots = heads.cumsum(0) - 1
        each = of_bags.index_select(0, order // self.setting.length)
        values = torch.zeros_like(each).index_add_(0, slots, each)
        rows = torch.full_like(slots, len(self.whole) - 1).scatter_(0, slots, keys.long())
        self.sums.index_add_(0, rows, values.square().mean(1))
        self.whole.index_add_(0, rows, -LR / (self.sums[rows].sqrt() + EPS)[:, None] * values)


def ways_of(setting: Setting) -> dict[str, Callable[[], Way]]:
    rival = "nccl" if setting.rank.device.type == "cuda" else "gloo"
    return {
        f"eager_{rival}": lambda: Way(setting, "eager", False),
        f"padded_{rival}": lambda: Way(setting, "padded", False),
        f"inductor_{rival}": lambda: Way(setting, "padded", True),
        "ark": lambda: Way(setting, "ark", False),
        "ark_inductor": lambda: Way(setting, "ark", True),
    }


def compare(rank: Rank, shape: str, setting: Setting, arguments: argparse.Namespace) -> Row:
    cuda = rank.device.type == "cuda"
    row: Row = {"work": "dlrm_step", "shape": shape, "ranks": rank.ranks, "rows": sum(rank.share(sum(setting.sizes)))}
    row |= {"eager_us": {}, "graph_us": {}, "wrong": {}}
    wanted: tuple[Tensor, Tensor] | None = None
    for name, make in ways_of(setting).items():
        if arguments.ways and name not in arguments.ways:
            continue
        way = make()
        losses = torch.cat([way.step(i) for i in range(CALLS)])
        got = losses, way.rows()[:: max(1, sum(setting.sizes) // 100_000)].clone()
        wanted = wanted or got
        pairs = zip(got, wanted, strict=True)
        unlike = [int((~torch.isclose(one, other, rtol=2e-3, atol=1e-4)).sum()) for one, other in pairs]
        rounding = got[1].numel() // 10_000
        row["wrong"][name] = max(rank.share(unlike[0] + (unlike[1] if unlike[1] > rounding else 0)))
        row["eager_us"][name] = rank.slowest(
            timed(rank, lambda way=way: [way.step(i) for i in range(CALLS)], arguments.rounds)
        )
        if cuda and way.capturable:
            replay, _outs = captured(way.step)
            row["graph_us"][name] = rank.slowest(timed(rank, replay, arguments.rounds))
            del replay, _outs
        del way
        if cuda:
            torch.cuda.empty_cache()
    for kind in ("eager", "graph"):
        ours = [us for name, us in row[f"{kind}_us"].items() if name.startswith("ark")]
        rivals = [us for name, us in row[f"{kind}_us"].items() if not name.startswith("ark")]
        if ours and rivals:
            row[f"faster_{kind}"] = min(rivals) / min(ours)
    return row


def line(row: Row) -> str:
    parts = [f"{row['shape']:16}"]
    for kind in ("eager", "graph"):
        parts.append(f"{kind}: " + " ".join(f"{name} {value:.0f}" for name, value in row[f"{kind}_us"].items()))
        if f"faster_{kind}" in row:
            parts.append(f"rival / ark {row[f'faster_{kind}']:.2f}")
    wrong = {name: count for name, count in row["wrong"].items() if count}
    return " | ".join([*parts, f"wrong {wrong or 0}"])


def measure(rank: Rank, arguments: argparse.Namespace) -> None:
    groups = {"rival": rival_group(rank), "ark": ark_group(rank)}
    estimate = 10.0
    for shape in arguments.shapes:
        if not rank.time_for(estimate):
            continue
        began = time.monotonic()
        row = compare(rank, shape, Setting(rank, shape, groups, arguments), arguments)
        rank.write(row)
        rank.say(line(row))
        estimate = max(rank.share(time.monotonic() - began)) * 2


def table(about: dict[str, Any]) -> str:
    """Formats Markdown: microseconds per step, and the ratios."""
    columns = [(kind, name) for kind in ("eager", "graph")
               for name in dict.fromkeys(name for row in about["rows"] for name in row[f"{kind}_us"])]  # fmt: skip
    heads = [f"{name}, {kind}" for kind, name in columns] + ["rival / ark, eager", "rival / ark, graph"]
    lines = [on_gpus.origin(about), "", "| shape | " + " | ".join(heads) + " |", "| --- " * (len(heads) + 1) + "|"]
    for row in about["rows"]:
        cells = [f"{row[f'{kind}_us'][name]:.0f}" if name in row[f"{kind}_us"] else "-" for kind, name in columns]
        cells += [f"{row[key]:.2f}" if key in row else "-" for key in ("faster_eager", "faster_graph")]
        lines.append(f"| {row['shape']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = on_gpus.parser(__doc__, "dlrm_step.json", 300)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="D128-L1-B8192")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a table at most")
    parser.add_argument("--width", type=int, default=1024, help="of the MLPs' widest layers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", help="these alone")
    arguments = parser.parse_args()
    about, rows, problem = on_gpus.measure(measure, arguments)
    print(table({**about, "rows": rows}))
    return 1 if problem or any(any(row["wrong"].values()) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
