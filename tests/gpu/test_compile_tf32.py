"""Products of float32 in TF32 in loop kernels on a GPU, compared with float64: as near as TF32 allows, and no nearer.

A product of tensor cores is told from one of float32 by its error, a thousand times as large. Warp groups of Hopper
round toward zero, which doubles it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_support import compiled, on_one_kernel
from support import tf32
from torch import Tensor

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fresh_compiler")]

# Of an element, relative to the root of the sum of its squared products and its own size: four times what 10 bits of
# mantissa and random operands give on average. Of all elements: what they give at least and at most.
CLOSE, LEAST, MOST = 2e-3, 1e-4, 1e-3
EXACT = 1e-5  # the same in float32

# The layout of rows and matrix; rows, columns, depth. On Hopper the first have every shape of tile that warp groups
# multiply, each with whole tiles and with odd edges.
CASES = [
    ("linear", 17, 64, 64),
    ("linear", 17, 77, 256),
    ("linear", 33, 100, 72),
    ("linear", 64, 8192, 256),
    ("linear", 77, 2304, 256),
    ("linear", 200, 2304, 264),
    ("linear", 384, 3072, 1024),
    ("linear", 384, 1024, 4096),
    ("linear", 384, 1000, 40),
    ("linear", 2040, 1000, 256),
    ("linear", 2040, 2000, 712),
    ("linear", 2048, 4096, 768),
    ("linear", 2047, 4100, 772),
    ("linear", 1576, 2304, 768),
    ("linear", 130, 150, 100),
    ("linear", 257, 77, 333),
    ("linear", 100, 200, 4),
    ("linear", 100, 200, 3),
    ("columns across", 384, 1024, 1024),
    ("columns across", 100, 160, 104),
    ("columns across", 70, 75, 77),
    ("columns across", 2048, 2048, 776),
    ("columns across", 17, 2304, 256),
    ("rows across", 128, 264, 104),
    ("rows across", 77, 99, 65),
    ("rows across", 2048, 2048, 512),
    ("both across", 2048, 2048, 512),
    ("both across", 136, 160, 192),
    ("both across", 132, 164, 196),
    ("both across", 131, 163, 67),
    ("rows at odd places", 200, 200, 128),
    ("matrix at odd places", 200, 200, 128),
    ("every other", 64, 72, 64),
]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def operands(layout: str, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Rows [m, k] and a matrix [k, n]."""

    def rows() -> Tensor:
        if layout in ("rows across", "both across"):
            return drawn(k, m).t()
        if layout == "rows at odd places":
            return drawn(m, k + 5)[:, 3 : 3 + k]
        return drawn(m, 2 * k)[:, ::2] if layout == "every other" else drawn(m, k)

    if layout in ("columns across", "both across"):
        return rows(), drawn(k, n)
    if layout == "matrix at odd places":
        return rows(), drawn(n * k + 1)[1:].view(n, k).t()
    return rows(), drawn(n, 2 * k)[:, ::2].t() if layout == "every other" else drawn(n, k).t()


def poison() -> None:
    """Results get memory with NaN."""
    torch.full((1 << 26,), float("nan"), device="cuda")


def stages(report: Any) -> list[dict[str, Any]]:
    on_one_kernel(report)
    return json.loads(report.regions[-1].plan_json)["stages"]  # type: ignore[no-any-return]


def check(got: Tensor, x: Tensor, w: Tensor, more: Tensor | float = 0.0, exact: bool = False, case: Any = None) -> None:
    """got = x @ w + more, in TF32 or exactly."""
    wide_x, wide_w = x.double(), w.double()
    want = wide_x @ wide_w + more
    scale = (wide_x.square() @ wide_w.square()).sqrt()
    wrong = got.double() - want
    most, all_of_them = float((wrong.abs() / (scale + want.abs())).max()), float(wrong.norm() / scale.norm())
    if exact:
        assert most < EXACT, (case, most)
    else:
        assert most < CLOSE and LEAST < all_of_them < MOST, (case, most, all_of_them)


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "other-layouts"])
@pytest.mark.parametrize("bias", ["none", "columns", "elements"])
def test_products_of_many_rows(bias: str, linear: bool) -> None:
    """Every layout and tile, with the same bits each time."""
    cases = [case for case in CASES if (case[0] == "linear") == linear]
    given = [operands(*case) for case in cases]
    biases = [drawn(*([case[2]] if bias == "columns" else case[1:3])) for case in cases]

    def products(given: list[tuple[Tensor, Tensor]], biases: list[Tensor]) -> list[Tensor]:
        return [x @ w if bias == "none" else torch.addmm(b, x, w) for (x, w), b in zip(given, biases, strict=True)]

    call, report = compiled(products)
    with tf32.allowed():
        poison()
        got, again = call(given, biases), call(given, biases)
    plan = stages(report)
    assert all(one["precision"] == "tf32" for one in plan if one["kind"] == "matmul")
    tiles = {(one["tile"]["rows"], one["tile"]["columns"]) for one in plan}
    assert not linear or {(64, 32), (64, 64), (128, 64), (128, 128)} <= tiles, tiles
    if linear and torch.cuda.get_device_capability() == (9, 0):
        larger = {(256, 128), (128, 256)} if bias == "none" else set()  # registers do not suffice for a bias
        assert {(128, 96)} | larger <= tiles, tiles
    for case, (x, w), b, one, other in zip(cases, given, biases, got, again, strict=True):
        check(one, x, w, 0.0 if bias == "none" else b.double(), case=case)
        assert torch.equal(one, other), case


@pytest.mark.parametrize("way", tf32.WAYS)
def test_only_where_it_is_allowed(way: str) -> None:
    """One function, before, while and after; few rows or columns are exact all the time."""
    x, w = operands("linear", 384, 1024, 1024)
    few, narrow = drawn(16, 1024), drawn(1024, 16)
    call, report = compiled(lambda x, w, few, narrow: (x @ w, few @ w, x @ narrow))
    for allowed in (False, True, False):
        if allowed:
            with tf32.allowed(way):
                many, of_few, of_narrow = call(x, w, few, narrow)
        else:
            many, of_few, of_narrow = call(x, w, few, narrow)
        check(many, x, w, exact=not allowed)
        check(of_few, few, w, exact=True)
        check(of_narrow, x, narrow, exact=True)
    assert len(report.regions) == 2, "a setting is compiled for once"


@pytest.mark.parametrize("act", [F.gelu, F.silu, torch.relu], ids=lambda act: str(act.__name__))
def test_activations_in_the_tile(act: Callable[[Tensor], Tensor]) -> None:
    cases = [("linear", 2048, 4096, 768), ("linear", 200, 2304, 264), ("linear", 130, 150, 100)]
    cases += [("both across", 2048, 2048, 512), ("columns across", 70, 75, 77)]
    given = [(*operands(*case), drawn(case[2])) for case in cases]
    call, report = compiled(lambda given: [act(torch.addmm(b, x, w)) for x, w, b in given])
    with tf32.allowed():
        poison()
        got = call(given)
    assert all("+" in one["name"] and one["precision"] == "tf32" for one in stages(report))
    for case, (x, w, b), one in zip(cases, given, got, strict=True):
        wide = x.double() @ w.double() + b.double()
        want = act(wide)
        scale = 1.2 * ((x.double().square() @ w.double().square()).sqrt() + wide.abs())
        assert float(((one.double() - want).abs() / scale).max()) < CLOSE, case
        assert float((one.double() - want).norm() / scale.norm()) > LEAST / 4, case


def test_gates() -> None:
    """Dual products, act(x @ w1) * (x @ w3)."""
    cases = [
        ("linear", 17, 77, 256),
        ("linear", 77, 2304, 256),
        ("linear", 200, 2344, 328),
        ("linear", 2040, 1000, 256),
    ]
    cases += [("linear", 2048, 4096, 1024), ("linear", 257, 77, 333), ("columns across", 2048, 2048, 776)]
    cases += [("columns across", 70, 75, 77), ("both across", 2048, 2048, 512), ("both across", 136, 168, 192)]
    cases += [("rows at odd places", 200, 200, 128), ("every other", 64, 72, 64)]
    fused = 0
    for case in cases:
        torch._dynamo.reset()
        x, w1 = operands(*case)
        w1, w3 = (w.div_(case[3] ** 0.5) for w in (w1, operands(*case)[1]))
        call, report = compiled(lambda x, w1, w3: F.silu(x @ w1) * (x @ w3))
        with tf32.allowed():
            poison()
            got, again = call(x, w1, w3), call(x, w1, w3)
        plan = stages(report)
        fused += any(", " in one["name"] for one in plan)
        assert all(one["precision"] == "tf32" for one in plan if "matmul" in one["name"])
        u, v = x.double() @ w1.double(), x.double() @ w3.double()
        of_u, of_v = ((x.double().square() @ w.double().square()).sqrt() + y.abs() for w, y in ((w1, u), (w3, v)))
        want = F.silu(u) * v
        scale = 1.2 * of_u * v.abs() + F.silu(u).abs() * of_v + of_u * of_v * CLOSE
        wrong = got.double() - want
        assert float((wrong.abs() / scale).max()) < CLOSE, case
        assert float(wrong.norm() / want.norm()) > LEAST, case
        assert torch.equal(got, again), case
    assert fused > len(cases) / 2


def test_batches() -> None:
    """Which have no tile of the plan's."""
    pairs = []
    for count, layout, m, n, k in [
        (12, "linear", 100, 72, 40),
        (12, "both across", 100, 72, 40),
        (3, "columns across", 200, 264, 128),
        (5, "rows across", 77, 99, 65),
        (64, "linear", 17, 33, 20),
    ]:
        several = [operands(layout, m, n, k) for _ in range(count)]
        x = torch.stack([x.t() for x, _ in several]).transpose(1, 2) if "rows" in layout or "both" in layout else None
        x = torch.stack([x for x, _ in several]) if x is None else x
        w = torch.stack([w.t() for _, w in several]).transpose(1, 2) if layout in ("linear", "rows across") else None
        pairs.append((x, torch.stack([w for _, w in several]) if w is None else w))
    call, report = compiled(lambda pairs: [torch.bmm(x, w) for x, w in pairs])
    with tf32.allowed():
        poison()
        got, again = call(pairs), call(pairs)
    assert all(one["precision"] == "tf32" for one in stages(report))
    for number, ((x, w), one, other) in enumerate(zip(pairs, got, again, strict=True)):
        check(one, x, w, case=number)
        assert torch.equal(one, other), number
    torch._dynamo.reset()
    exact, _ = compiled(lambda pairs: [torch.bmm(x, w) for x, w in pairs])
    for (x, w), one in zip(pairs, exact(pairs), strict=True):
        check(one, x, w, exact=True)


def test_products_in_parts_of_their_depth() -> None:
    """A norm adds the parts."""
    cases = [("linear", 384, 1024, 4096), ("linear", 61, 264, 8200), ("columns across", 128, 256, 4160)]
    given = [(*operands(*case), drawn(*case[1:3])) for case in cases]

    def norms(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [F.layer_norm(x @ w + beside, beside.shape[1:]) for x, w, beside in given]

    call, report = compiled(norms)
    with tf32.allowed():
        poison()
        got, again = call(given), call(given)
    assert len(stages(report)) > 3 * len(cases)
    exact = norms([tuple(one.double() for one in each) for each in given])
    for case, one, other, want in zip(cases, got, again, exact, strict=True):
        assert torch.equal(one, other), case
        assert LEAST < float((one - want).norm() / want.norm()) < MOST, case


def test_beside_inductor() -> None:
    """With the same setting its errors are as large as those of either rounding."""
    x, w = operands("linear", 2048, 2048, 1024)
    b = drawn(2048)

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(torch.addmm(b, x, w))

    with tf32.allowed():
        got = compiled(layer)[0](x, w, b)
        torch._dynamo.reset()
        inductor = torch.compile(layer, dynamic=False)(x, w, b)
    want = layer(*(one.double() for one in (x, w, b)))
    ours, theirs = (float((one - want).norm() / want.norm()) for one in (got, inductor))
    assert LEAST / 2 < theirs < MOST and ours < 4 * theirs, (ours, theirs)


def test_infinite_weights_stay_in_their_columns() -> None:
    """What a tile has beside its columns and behind its depth adds nothing."""
    for layout, m, n, k in [
        ("linear", 70, 75, 72),
        ("linear", 200, 2344, 328),
        ("linear", 2040, 1000, 100),
        ("both across", 132, 164, 68),
        ("columns across", 70, 75, 77),
    ]:
        torch._dynamo.reset()
        x, w = operands(layout, m, n, k)
        odd, which = w.clone(memory_format=torch.preserve_format), torch.randint(0, 8, (n,), device="cuda")
        odd[-1, which == 0] = float("inf")
        odd[0, which == 1] = float("nan")
        call, _ = compiled(lambda x, w: torch.relu(x @ w))
        with tf32.allowed():
            poison()
            got, plain = call(x, odd), call(x, w)
        assert torch.equal(got[:, which > 1], plain[:, which > 1]), (layout, m, n, k)
        assert not bool(got[:, which == 1].isfinite().any()), (layout, m, n, k)
        assert bool(plain.isfinite().all()), (layout, m, n, k)
