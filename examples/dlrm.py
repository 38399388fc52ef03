"""Trains a DLRM, a recommender with embedding tables distributed over ranks, and compares it with one process.

    python examples/dlrm.py                             # starts two ranks by itself
    torchrun --nproc-per-node 2 examples/dlrm.py --sharding row_wise
    torchrun --nproc-per-node 2 examples/dlrm.py --device cuda --dim 128 --max-rows 5000000 --batch 65536
    torchrun --nproc-per-node 2 examples/dlrm.py --device cuda --capture

The data is synthetic, in Criteo's format: 13 numbers and 26 categories per sample, and a click or none. The categories
have the Kaggle set's sizes (capped by --max-rows) and Zipf-distributed values. Clicks depend on a hidden value of each
category, so that the model can learn: the area under the ROC curve (AUC) rises from 0.5.

Each rank reads its share of a batch. Tables are on different ranks (ark_torch.nn.ShardedEmbeddingBags) and are updated
by row-wise Adagrad within the backward pass. The two MLPs are under DistributedDataParallel. The first steps (--check)
also run in one process with plain PyTorch, which must reach the same weights, up to rounding from another order of
additions. With --capture a step is one launch (ark_torch.train.capture; eager on CPUs), and Adam trains the MLPs in
place of Adagrad, because PyTorch's Adagrad does not support CUDA graphs.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ImportError as error:
    sys.exit(f"{error}. The example draws its progress with rich: pip install rich")

import ark_torch

DENSE = 13
CATEGORIES = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
              5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]  # fmt: skip
EPS = 1e-6  # of Adagrad
HELD_OUT = 1 << 20  # batches from this number on are not used for training


@dataclass
class Batch:
    dense: Tensor  # [samples, 13]
    categories: list[Tensor]  # one per table, [samples, 1]
    clicks: Tensor  # [samples]


class Clicks:
    """Batches of synthetic samples. A batch depends only on its number, so that any rank can draw any of them."""

    def __init__(self, rows: list[int], samples: int, seed: int, device: torch.device) -> None:
        self.rows, self.samples, self.seed, self.device = rows, samples, seed, device
        generator = torch.Generator().manual_seed(seed)
        self.weights = (torch.randn(DENSE, generator=generator) * 0.15).to(device)
        self.scales = torch.rand(len(rows), generator=generator).add_(0.3).tolist()

    def batch(self, number: int) -> Batch:
        generator = torch.Generator(self.device).manual_seed(self.seed * 100_003 + number)
        dense = torch.randn(self.samples, DENSE, generator=generator, device=self.device)
        logits = dense @ self.weights - 1.0
        categories = []
        for table, rows in enumerate(self.rows):
            uniform = torch.rand(self.samples, generator=generator, device=self.device)
            chosen = ((rows + 1.0) ** uniform).long().sub_(1).clamp_(0, rows - 1)  # Zipf: row k with probability 1 / k
            categories.append(chosen[:, None])
            logits += self.scales[table] * hidden(chosen, table)
        clicks = torch.rand(self.samples, generator=generator, device=self.device) < logits.sigmoid()
        return Batch(dense, categories, clicks.float())


def hidden(rows: Tensor, table: int) -> Tensor:
    """Returns a category's hidden value, from -0.5 to 0.5: a hash of it."""
    mixed = (rows + 1) * 2654435761 + (table + 1) * 40503 * 65537
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)).remainder(65536).float() / 65536 - 0.5


def share(batch: Batch, rank: int, world: int) -> Batch:
    tables = [table.chunk(world)[rank] for table in batch.categories]
    return Batch(batch.dense.chunk(world)[rank], tables, batch.clicks.chunk(world)[rank])


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Interaction(nn.Module):
    """All of a DLRM except its tables: bottom MLP, products of all pairs of vectors, top MLP."""

    def __init__(self, tables: int, dim: int, width: int) -> None:
        super().__init__()
        self.bottom = mlp(DENSE, width, width // 2, dim)
        self.top = mlp(dim + (tables + 1) * tables // 2, width, width // 2, 1)
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", first * (tables + 1) + second, persistent=False)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        vector = F.relu(self.bottom(dense))
        vectors = torch.cat([vector[:, None], pooled], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return self.top(torch.cat([vector, products.index_select(1, self.pairs)], 1)).squeeze(1)


class Dlrm(nn.Module):
    """Tables distributed over the ranks of `group`, the rest replicated."""

    def __init__(self, rows: list[int], arguments: argparse.Namespace, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(arguments.seed)
        self.bags = ark_torch.nn.ShardedEmbeddingBags(
            [(count, arguments.dim) for count in rows],
            group,
            sharding=arguments.sharding,
            optimizer_class=ark_torch.ops.RowwiseAdagrad,
            optimizer_kwargs={"lr": arguments.lr, "eps": EPS},
            # A sample has one index per table, which gives the maximum per rank, so that the host need not count them.
            max_values=arguments.batch // dist.get_world_size(group) if arguments.capture else None,
        )
        for name, table in self.bags.tables.items():
            table.weight.mul_(min(1.0, rows[int(name)] ** -0.5))
        self.rest = Interaction(len(rows), arguments.dim, arguments.width)

    def forward(self, dense: Tensor, categories: list[Tensor]) -> Tensor:
        return self.rest(dense, self.bags(categories))


class PlainDlrm(nn.Module):
    """The same in one process with PyTorch's modules and the initial values of `model`, a group of one rank."""

    def __init__(self, model: Dlrm) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(table.weight.clone(), freeze=False, mode="sum", sparse=True)
            for table in model.bags.tables.values()
        )
        self.rest, self.sums = model.rest, [torch.zeros(len(one.weight)) for one in self.tables]

    def forward(self, dense: Tensor, categories: list[Tensor]) -> Tensor:
        pooled = [table(indices) for table, indices in zip(self.tables, categories, strict=True)]
        return self.rest(dense, torch.stack(pooled, 1))

    @torch.no_grad()
    def update_tables(self, lr: float) -> None:
        """Applies row-wise Adagrad."""
        for table, sums in zip(self.tables, self.sums, strict=True):
            gradient = table.weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            sums[rows] += values.square().mean(1)
            table.weight[rows] -= lr / (sums[rows].sqrt() + EPS)[:, None] * values
            table.weight.grad = None


def optimizer_of(rest: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    if arguments.capture:
        return torch.optim.Adam(rest.parameters(), lr=0.1 * arguments.lr)
    return torch.optim.Adagrad(rest.parameters(), lr=arguments.lr)


def loss_of(model: nn.Module, batch: tuple[Tensor, list[Tensor], Tensor]) -> Tensor:
    dense, categories, clicks = batch
    return F.binary_cross_entropy_with_logits(model(dense, categories), clicks)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """A Dlrm's tables are already updated when this returns, because their optimizer runs in the backward pass."""
    optimizer.zero_grad()
    loss = loss_of(model, (batch.dense, batch.categories, batch.clicks))
    loss.backward()
    optimizer.step()
    return loss.detach()


def auc_of(scores: Tensor, clicks: Tensor) -> float:
    """Returns how often a sample with a click has the higher score."""
    order = scores.argsort()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(1, len(order) + 1, device=order.device))
    positive = clicks.sum()
    above = places[clicks > 0].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(clicks) - positive)))


@torch.no_grad()
def held_out_auc(model: nn.Module, data: Clicks, rank: int, world: int, batches: int = 4) -> float:
    mine = [share(data.batch(HELD_OUT + number), rank, world) for number in range(batches)]
    scores = torch.cat([model(batch.dense, batch.categories) for batch in mine])
    both = torch.stack([scores, torch.cat([batch.clicks for batch in mine])])
    every = [torch.empty_like(both) for _ in range(world)]
    dist.all_gather(every, both)
    return auc_of(*torch.cat(every, 1))


def check(model: Dlrm, losses: list[float], data: Clicks, arguments: argparse.Namespace, alone: Dlrm) -> None:
    """Repeats the steps so far in this process alone."""
    plain = PlainDlrm(alone)
    optimizer = optimizer_of(plain.rest, arguments)
    close = {"rtol": 2e-3, "atol": 2e-4}
    for step, loss in enumerate(losses):
        expected = train_step(plain, optimizer, data.batch(step))
        plain.update_tables(arguments.lr)
        torch.testing.assert_close(torch.tensor(loss), expected.cpu(), **close, msg=f"loss of step {step}")
    for name, ours in model.rest.named_parameters():
        torch.testing.assert_close(ours, plain.rest.get_parameter(name), **close)
    for name, table in model.bags.tables.items():
        rows = plain.tables[int(name)].weight[table.first : table.first + len(table.weight)]
        torch.testing.assert_close(table.weight.detach(), rows.detach(), **close)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", default="ark", help="of the MLPs' gradients (default: ark); tables are always ark's")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--sharding", choices=("table_wise", "row_wise"), default="table_wise")
    add("--capture", action="store_true", help="a step is one launch of a CUDA graph")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=2400, help="samples a step, of all ranks together")
    add("--dim", type=int, default=16, help="columns of the tables")
    add("--width", type=int, default=64, help="of the MLPs' first layers")
    add("--max-rows", type=int, default=2000, help="of a table; 10,131,227 is the largest")
    add("--lr", type=float, default=0.03)
    add("--seed", type=int, default=1)
    add("--check", type=int, default=-1, help="steps to compare with one process (default: 20 on the CPU, else none)")
    arguments = parser.parse_args()
    if arguments.check < 0:
        arguments.check = 20 if arguments.device == "cpu" else 0
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no GPU")
    if arguments.check and arguments.device == "cuda":
        parser.error("--check: one process is compared on the CPU; leave out --device cuda")
    arguments.check = min(arguments.check, arguments.steps)
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if "RANK" not in os.environ:  # plain python: start two ranks like torchrun
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])
        return
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if arguments.batch % world != 0:
        raise SystemExit(f"{world} ranks cannot share --batch {arguments.batch} equally; use a multiple of {world}")
    group = dist.group.WORLD if arguments.backend == "ark" else dist.new_group(backend="ark")
    rows = [min(count, arguments.max_rows) for count in CATEGORIES]
    data = Clicks(rows, arguments.batch, arguments.seed, device)
    with device:
        model = Dlrm(rows, arguments, group)
    optimizer = optimizer_of(model.rest, arguments)
    if arguments.capture:
        captured = ark_torch.train.capture(model, optimizer, loss_of)

        def step_of(batch: Batch) -> Tensor:
            return captured((batch.dense, batch.categories, batch.clicks))
    else:
        rest = DistributedDataParallel(model.rest)
        model.rest = rest.module

        def through_ddp(dense: Tensor, categories: list[Tensor]) -> Tensor:
            return rest(dense, model.bags(categories))

        def step_of(batch: Batch) -> Tensor:
            return train_step(through_ddp, optimizer, batch)

    console = Console(quiet=rank != 0, highlight=False)
    console.print(
        f"{sum(rows):,} rows of {arguments.dim} in {len(rows)} tables, {arguments.sharding} over {world} ranks on "
        f"{device.type}; AUC before: {held_out_auc(model, data, rank, world):.3f}",
        soft_wrap=True,
    )
    alone = [dist.new_group([r], backend="ark") for r in range(world)][rank]
    losses: list[float] = []
    columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[told]}"), console=console, disable=rank != 0) as progress:
        task = progress.add_task("", total=arguments.steps, told="")
        for step in range(arguments.steps):
            mine = share(data.batch(step), rank, world)
            loss = step_of(mine)
            last = step + 1 == arguments.steps
            if step < arguments.check or (step + 1) % 10 == 0 or last:  # on a GPU, reading a number waits for it
                dist.all_reduce(loss)
                mean = float(loss) / world
                told = f"loss {mean:.4f}"
                if step < arguments.check:
                    losses.append(mean)
                if (step + 1) % 100 == 0 or last:
                    told += f"  AUC {held_out_auc(model, data, rank, world):.3f}"
                    console.print(f"step {step + 1}: {told}")
                progress.update(task, completed=step + 1, told=told)
            if step + 1 == arguments.check:
                check(model, losses, data, arguments, Dlrm(rows, arguments, alone))
                print(f"rank {rank} of {world}: {arguments.check} steps equal those of one process", flush=True)
    if arguments.capture:
        console.print(f"the last step was {'a graph' if captured.captured else f'run eagerly: {captured.reason}'}")
        captured.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
