"""Random cases of embedding_bag_all_to_all and their expected results, for tests/ops and tests/gpu.

The reference adds rows in float32 (float64 in float64) in the order of the indices and rounds once. Every rank draws
every rank's tables and bags, so that it knows the whole result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from ark_torch.ops import embedding_bag_all_to_all


@dataclass
class Case:
    tables: list[int]  # by rank
    batch: int
    dim: int
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    mode: str = "sum"
    weighted: bool = False
    last: bool = False
    seed: int = 0


@dataclass
class Part:
    """One rank's part."""

    tables: list[Tensor]
    indices: list[Tensor]
    offsets: list[Tensor]
    weights: list[Tensor] | None
    lengths: list[list[int]]

    def call(self, case: Case, group: Any = None, **more: Any) -> Tensor:
        return embedding_bag_all_to_all(
            self.tables, self.indices, self.offsets, group, mode=case.mode, per_sample_weights=self.weights,
            include_last_offset=case.last, **more,
        )  # fmt: skip


def draw(case: Case, rank: int, world: int, device: torch.device | str = "cpu") -> Part:
    """Draws a rank's tables and bags: empty and long bags, duplicates, sometimes a table without rows."""
    random = Random(f"{case.seed} {rank}")
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    part = Part([], [], [], [] if case.weighted else None, [])
    for _ in range(case.tables[rank]):
        rows = random.choice([0, 1, 7, 50])
        lengths = [0 if rows == 0 else random.choice([0, 1, 1, 2, 5, 9]) for _ in range(world * case.batch)]
        count = sum(lengths)
        begins = [sum(lengths[:i]) for i in range(len(lengths) + int(case.last))]
        part.tables.append(torch.randn(rows, case.dim, generator=generator).to(device, case.dtype))
        part.indices.append(torch.randint(0, max(rows, 1), (count,), generator=generator).to(device, case.index))
        part.offsets.append(torch.tensor(begins, dtype=case.index, device=device))
        part.lengths.append(lengths)
        if part.weights is not None:
            part.weights.append(torch.randn(count, generator=generator).to(device, case.dtype))
    return part


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def reference(case: Case, rank: int, world: int) -> Tensor:
    out = torch.empty(case.batch, sum(case.tables), case.dim, dtype=case.dtype)
    column = 0
    for owner in range(world):
        part = draw(case, owner, world)
        for t, table in enumerate(part.tables):
            at = sum(part.lengths[t][: rank * case.batch])
            for sample in range(case.batch):
                length = part.lengths[t][rank * case.batch + sample]
                total = torch.zeros(case.dim, dtype=wide(case.dtype))
                for i in range(at, at + length):
                    row = table[int(part.indices[t][i])].to(total.dtype)
                    total += row * part.weights[t][i].to(total.dtype) if part.weights is not None else row
                at += length
                out[sample, column] = total / length if case.mode == "mean" and length else total
            column += 1
    return out


PART = 64  # entries of a row that are added first, before the partial sums are


def reference_sums(case: Case, rank: int, world: int, gradients: list[Tensor]) -> list[dict[int, Tensor]]:
    """Returns unrounded gradients of the rows that bags name, for each of this rank's tables.

    `gradients` are every rank's, of its result.
    """
    part = draw(case, rank, world)
    first = sum(case.tables[:rank])
    made: list[dict[int, Tensor]] = []
    for t in range(len(part.tables)):
        brought: dict[int, list[Tensor]] = {}
        i = 0
        for bag, length in enumerate(part.lengths[t]):
            gradient = gradients[bag // case.batch][bag % case.batch, first + t].to(wide(case.dtype))
            for _ in range(length):
                each = gradient / length if case.mode == "mean" else gradient
                if part.weights is not None:
                    each = gradient * part.weights[t][i].to(each.dtype)
                brought.setdefault(int(part.indices[t][i]), []).append(each)
                i += 1
        made.append({row: _in_parts(entries) for row, entries in sorted(brought.items())})
    return made


def _in_parts(entries: list[Tensor]) -> Tensor:
    total = torch.zeros_like(entries[0])
    for first in range(0, len(entries), PART):
        part = torch.zeros_like(total)
        for entry in entries[first : first + PART]:
            part += entry
        total += part
    return total


def reference_gradients(case: Case, rank: int, world: int, gradients: list[Tensor]) -> list[Tensor]:
    """Returns the tables' dense gradients."""
    made = []
    for table, rows in zip(draw(case, rank, world).tables, reference_sums(case, rank, world, gradients), strict=True):
        dense = torch.zeros_like(table)
        for row, value in rows.items():
            dense[row] = value.to(case.dtype)
        made.append(dense)
    return made


def same(got: Tensor, wanted: Tensor, what: str) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    assert torch.equal(got, wanted), f"{what}: {(got.double() - wanted.double()).abs().max()}"


def gradient_of(case: Case, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(77 + rank + 1000 * case.seed)
    return torch.randn(case.batch, sum(case.tables), case.dim, generator=generator).to(case.dtype)


def check(case: Case, rank: int, world: int, group: Any = None, device: torch.device | str = "cpu") -> None:
    """Checks the result and the tables' gradients bit for bit, on one rank."""
    part = draw(case, rank, world, device)
    for table in part.tables:
        table.requires_grad_()
    got = part.call(case, group)
    assert got.device == torch.device(device) or not part.tables
    same(got.detach().cpu(), reference(case, rank, world), str(case))
    assert got.requires_grad, "a rank without a table takes part in the way back, too"
    got.backward(gradient_of(case, rank).to(got.device))
    wanted = reference_gradients(case, rank, world, [gradient_of(case, r) for r in range(world)])
    for table, gradient in zip(part.tables, wanted, strict=True):
        assert table.grad is not None
        same(table.grad.cpu(), gradient, f"gradient of {case}")


TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def random_case(random: Random, world: int, seed: int, types: tuple[torch.dtype, ...] = TYPES) -> Case:
    tables = [random.choice([0, 1, 2, 3]) for _ in range(world)]
    tables[random.randrange(world)] = random.choice([1, 3, 5])
    mode = random.choice(["sum", "mean"])
    return Case(
        tables,
        batch=random.choice([0, 1, 3, 8]),
        dim=random.choice([1, 3, 8, 17, 64]),
        dtype=random.choice(types),
        index=random.choice([torch.int32, torch.int64]),
        mode=mode,
        weighted=mode == "sum" and random.random() < 0.4,
        last=random.random() < 0.3,
        seed=seed,
    )


# --- sparse gradients and updates in place ------------------------------------------------------------------------


def mean_of_squares(gradient: Tensor) -> Tensor:
    """Returns each row's mean of squares: blocks of 32 columns are added pairwise, then the blocks in order."""
    count, dim = gradient.shape
    squares = torch.nn.functional.pad(gradient * gradient, (0, -dim % 32)).view(count, -1, 32)
    while squares.shape[2] > 1:
        squares = squares[..., 0::2] + squares[..., 1::2]
    total = torch.zeros(count, dtype=gradient.dtype)
    for block in range(squares.shape[1]):
        total = total + squares[:, block, 0]
    return total / dim


def update(table: Tensor, state: Tensor | None, rows: dict[int, Tensor], lr: float, eps: float) -> None:
    """Applies SGD (without a state) or row-wise Adagrad with PyTorch's operators, to the rows that bags name."""
    if not rows:
        return
    at = torch.tensor(list(rows))
    gradient = torch.stack(list(rows.values()))
    step = torch.full((len(at),), lr, dtype=gradient.dtype)
    if state is not None:
        state[at] += mean_of_squares(gradient)
        roots = [math.sqrt(value) for value in state[at].tolist()]  # correctly rounded, unlike torch.sqrt on some CPUs
        step = step / (torch.tensor(roots, dtype=gradient.dtype) + eps)
    table[at] = (table[at].to(gradient.dtype) - step[:, None] * gradient).to(table.dtype)


def check_sparse(case: Case, rank: int, world: int, device: torch.device | str = "cpu") -> None:
    """Checks the coalesced gradient: exactly the rows that bags name, with the bits of the dense gradient."""
    part = draw(case, rank, world, device)
    for table in part.tables:
        table.requires_grad_()
    out = part.call(case, sparse=True)
    gradient = gradient_of(case, rank).to(out.device)
    if not part.tables:
        return out.backward(gradient)
    got = torch.autograd.grad(out, part.tables, gradient)
    sums = reference_sums(case, rank, world, [gradient_of(case, r) for r in range(world)])
    for table, gradient, rows in zip(part.tables, got, sums, strict=True):
        assert gradient.is_sparse and gradient.is_coalesced(), case
        assert gradient.shape == table.shape and gradient.dtype == table.dtype
        assert gradient.indices()[0].tolist() == list(rows), f"rows of {case}"
        if rows:
            same(gradient.values().cpu(), torch.stack(list(rows.values())).to(case.dtype), f"sparse gradient of {case}")


def check_updates(case: Case, rank: int, world: int, adapts: bool, device: torch.device | str = "cpu") -> None:
    """Checks three steps with different gradients and learning rates: the same bits as the reference."""
    from ark_torch.ops import SGD, RowwiseAdagrad

    eps = 1e-3
    part, wanted = draw(case, rank, world, device), draw(case, rank, world).tables
    states = [torch.zeros(len(table), dtype=wide(case.dtype)) if adapts else None for table in wanted]
    optimizer = RowwiseAdagrad(part.tables, lr=0.5, eps=eps) if adapts else SGD(part.tables, lr=0.5)
    for step, lr in enumerate((0.5, 0.25, 0.1)):
        if step == 1:
            optimizer.lr.fill_(lr)
        elif step == 2:
            optimizer.param_groups[0]["lr"] = lr
        scale = [1.0, -3.0, 0.5][step]
        out = part.call(case, optimizer=optimizer)
        assert out.requires_grad, "a rank without a table takes part in the way back, too"
        out.backward((gradient_of(case, rank) * scale).to(device))
        sums = reference_sums(case, rank, world, [gradient_of(case, r) * scale for r in range(world)])
        for t, (table, state, rows) in enumerate(zip(wanted, states, sums, strict=True)):
            update(table, state, rows, lr, eps)
            same(part.tables[t].cpu(), table, f"tables[{t}] in step {step} of {case}")
            assert part.tables[t].grad is None
            if state is not None:
                same(optimizer.state[part.tables[t]]["sum"].cpu(), state, f"state[{t}] in step {step} of {case}")


def crowded_case(world: int, seed: int, **more: Any) -> Case:
    """Few rows in many bags: each row has more indices than a part, also in tables with one row."""
    return Case([3] * world, batch=300 // world + 1, seed=seed, **({"dim": 40} | more))
