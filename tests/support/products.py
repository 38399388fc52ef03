"""Random cases of products with collectives, for tests/ops and tests/gpu.

Every rank draws every rank's matrices, so that it knows the whole result. The reference is the unfused form: torch.mm
rounded to the dtype, then the ranks' products added in float32 (float64 in float64) in rank order and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

OPERATORS: dict[str, Callable[..., Tensor]] = {
    "matmul_all_reduce": matmul_all_reduce,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "all_gather_matmul": all_gather_matmul,
}
LAYOUTS = ("plain", "transposed", "strided", "narrowed")


@dataclass
class Case:
    name: str
    m: int  # rows of a, per rank
    k: list[int]  # by rank: equal for all_gather_matmul
    n: list[int]  # by rank: equal for the other operators
    dtype: torch.dtype = torch.float32
    a: str = "plain"
    b: str = "plain"
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def call(self) -> Callable[..., Tensor]:
        return OPERATORS[self.name]


def laid_out(matrix: Tensor, layout: str) -> Tensor:
    """Returns the same values with other strides."""
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(2 * matrix.shape[0], 2 * matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        wide[::2, ::2] = matrix
        return wide[::2, ::2]
    if layout == "narrowed":
        wide = torch.zeros(matrix.shape[0] + 1, matrix.shape[1] + 3, dtype=matrix.dtype, device=matrix.device)
        wide[1:, 2 : 2 + matrix.shape[1]] = matrix
        return wide[1:, 2 : 2 + matrix.shape[1]]
    return matrix


def draw(case: Case, rank: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    a = torch.randn(case.m, case.k[rank], generator=generator).to(device, case.dtype)
    b = torch.randn(case.k[rank], case.n[rank], generator=generator).to(device, case.dtype)
    return laid_out(a, case.a), laid_out(b, case.b)


def random_case(random: Random, world: int, seed: int, dtypes: tuple[torch.dtype, ...]) -> Case:
    name = random.choice(sorted(OPERATORS))
    sizes = [0, 1, 3, 8, 17, 40, 129]
    m = random.choice(sizes) * (world if name == "matmul_reduce_scatter" else 1)
    k = [random.choice(sizes) for _ in range(world)]
    n = [random.choice(sizes) for _ in range(world)]
    if name == "all_gather_matmul":
        k = k[:1] * world
    else:
        n = n[:1] * world
    return Case(name, m, k, n, random.choice(dtypes), random.choice(LAYOUTS), random.choice(LAYOUTS), seed)


def added(products: list[Tensor]) -> Tensor:
    """Adds in rank order in float32 (float64 in float64), and rounds once."""
    wide = torch.float64 if products[0].dtype == torch.float64 else torch.float32
    total = products[0].to(wide)
    for product in products[1:]:
        total = total + product.to(wide)
    return total.to(products[0].dtype)


def reference(case: Case, rank: int, world: int, device: torch.device | str = "cpu") -> Tensor:
    if case.name == "all_gather_matmul":
        rows = torch.cat([draw(case, r, device)[0] for r in range(world)])
        return torch.mm(rows, draw(case, rank, device)[1])
    total = added([torch.mm(*draw(case, r, device)) for r in range(world)])
    return total if case.name == "matmul_all_reduce" else total.chunk(world)[rank] if total.numel() else total[
        : case.m // world
    ]  # fmt: skip


def exact(case: Case, rank: int, world: int) -> Tensor:
    """Computes everything in float64."""
    parts = [tuple(one.double() for one in draw(case, r)) for r in range(world)]
    if case.name == "all_gather_matmul":
        return torch.cat([a for a, _ in parts]) @ parts[rank][1]
    total = sum((a @ b for a, b in parts[1:]), parts[0][0] @ parts[0][1])
    return total if case.name == "matmul_all_reduce" else total[rank * case.m // world :][: case.m // world]


def product_of(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def unfused(case: Case, a: Tensor, b: Tensor, world: int, group: Any = None, bias: Tensor | None = None) -> Tensor:
    """Computes torch.mm (torch.addmm with a bias) and the group's collective."""
    if case.name == "all_gather_matmul":
        gathered = a.new_empty(world * a.shape[0], a.shape[1])
        dist.all_gather_into_tensor(gathered, a.contiguous(), group=group)
        return product_of(gathered, b, bias)
    product = product_of(a, b, bias)
    if case.name == "matmul_all_reduce":
        dist.all_reduce(product, group=group)
        return product
    out = product.new_empty(a.shape[0] // world, b.shape[1])
    dist.reduce_scatter_tensor(out, product, group=group)
    return out


def same(got: Tensor, wanted: Tensor, what: object) -> None:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, what
    assert torch.equal(got, wanted), f"{what}: {(got.double() - wanted.double()).abs().max()}"


def close(got: Tensor, wanted: Tensor, depth: int, what: object) -> None:
    """Checks against the rounding of products of normally distributed elements and of their sum."""
    assert got.shape == wanted.shape, what
    if not got.numel():
        return
    relative = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}.get(got.dtype, 1e-5)
    allowed = relative * (wanted.abs() + 2 * max(depth, 1) ** 0.5)
    error = (got.cpu().double() - wanted.cpu()).abs()
    assert bool((error <= allowed).all()), f"{what}: {(error / allowed).max()} of what is allowed"
