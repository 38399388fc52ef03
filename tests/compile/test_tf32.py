"""Products of float32 in TF32: only where the user allows it, in plans and in kernels, which compile without a GPU.

tests/gpu/test_compile_tf32.py tests what GPUs compute.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_sources import MULTIPROCESSORS, Sources, needs_nvrtc
from support import tf32
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ark_torch import _C
from ark_torch.compile import choice, precision, saved

pytestmark = pytest.mark.timeout(200)

# Rows and columns that have each kind of tile on sm_90a, with this depth.
SIZES = [
    (17, 77),
    (17, 8192),
    (77, 2304),
    (200, 2304),
    (384, 3072),
    (2040, 1000),
    (1576, 2304),
    (2048, 4096),
    (2048, 6144),
]
DEPTH = 256


def stages(sources: Sources) -> list[dict[str, Any]]:
    text = _C.plan.plan_for(sources.graph, sources.arch, MULTIPROCESSORS)
    return json.loads(text)["stages"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", tf32.WAYS)
def test_a_change_of_the_setting_compiles_anew(sources: Sources, compiled: Any, way: str) -> None:
    """torch._dynamo guards each of the ways, and what was compiled without TF32 is taken again without it."""
    if sources.arch != "sm_90a":
        pytest.skip("plans are shown for sm_90a")
    call, _ = compiled(lambda x, w: torch.relu(x @ w), dynamic=False, fallback=False)
    x, w = torch.randn(64, 96), torch.randn(96, 128)
    call(x, w)
    assert ".tf32" not in sources.found[0] and not any("precision" in one for one in stages(sources))
    with tf32.allowed(way):
        call(x, w)
        assert len(sources.found) == 2
        assert ".tf32 = true" in sources.found[1]
        assert {one.get("precision") for one in stages(sources)} == {"tf32"}
        call(x, w)
    call(x, w)
    assert len(sources.found) == 2
    torch._dynamo.reset()
    call(x, w)
    assert sources.found[2] == sources.found[0]


def test_what_stays_float32(sources: Sources, compiled: Any) -> None:
    """Few rows or columns, which wait for memory; other types have no such precision."""

    def products(x: Tensor, few: Tensor, w: Tensor, narrow: Tensor, v: Tensor) -> list[Tensor]:
        return [few @ w, x @ narrow, x @ v, x.bfloat16() @ w.bfloat16()]

    operands = torch.randn(64, 96), torch.randn(16, 96), torch.randn(96, 128), torch.randn(96, 16), torch.randn(96)
    with tf32.allowed():
        compiled(products, dynamic=False, fallback=False)[0](*operands)
    assert ".tf32" not in sources.found[0]
    if sources.arch == "sm_90a":
        assert not any("precision" in one for one in stages(sources))


def test_the_cpu_ignores_it(compiled: Any) -> None:
    """The kernel is the same text, and so are the bits."""
    x, w = torch.randn(64, 96), torch.randn(96, 128)
    call, report = compiled(lambda x, w: torch.relu(x @ w) + 1, dynamic=False, fallback=False)
    plain = call(x, w)
    with tf32.allowed():
        again = call(x, w)
    one, other = report.regions
    assert torch.equal(plain, again) and one.region.source() == other.region.source()
    assert "precision" not in other.plan_json
    assert json.loads(one.plan_json)["stages"] == json.loads(other.plan_json)["stages"]


def told(flagged: bool) -> saved.Told:
    graph = saved.Told()
    graph.buffer("input", 0, 64, mutated=False, parameter=False)
    graph.node("matmul", [0, 1], [2], {"tf32": True} if flagged else {}, "here")
    return graph


def test_keys_differ() -> None:
    """Of regions in portable caches, and of choices of who runs a graph on a GPU."""
    options = {"threads": 1, "multi_step": False, "cache": "auto", "caches": {}, "device": -1}
    assert saved.key_of(told(True), options) != saved.key_of(told(False), options)

    def text(device: str) -> str:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.matmul, (x, x)))
        with FakeTensorMode():
            return choice.text_of(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.empty(2, 2, device=device)])

    exact = {device: text(device) for device in ("cpu", "cuda")}
    with tf32.allowed():
        assert precision.tf32()
        assert text("cpu") == exact["cpu"] and text("cuda") != exact["cuda"]
    assert not precision.tf32() and text("cuda") == exact["cuda"]


def test_other_types_cannot_have_it() -> None:
    graph = _C.plan.Graph()

    def value(kind: str, argument: int) -> int:
        return graph.value(graph.buffer(kind, argument, 32 * 32 * 2), "bfloat16", [32, 32], [32, 1])

    a, b, out = value("input", 0), value("input", 1), value("output", 0)
    with pytest.raises(ValueError, match=r"here.*bfloat16 and bfloat16 in TF32, which float32 operands alone may have"):
        graph.node("matmul", [a, b], [out], {"tf32": True}, "here")


def test_costs_of_tiles(sources: Sources, compiled: Any) -> None:
    """Tensor cores make larger tiles pay, products cheaper, and deep narrow products worth splitting."""
    if sources.arch != "sm_90a":
        pytest.skip("plans are shown for sm_90a")

    def layers(x: Tensor, w: Tensor, y: Tensor, v: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w), F.layer_norm(F.linear(y, v) + z, (256,))

    given = (2048, 704), (4096, 704), (128, 4096), (256, 4096), (128, 256)
    operands = [torch.randn(*shape) for shape in given]
    call, _ = compiled(layers, dynamic=False, fallback=False)
    call(*operands)
    plain = stages(sources)
    with tf32.allowed():
        call(*operands)
    allowed = stages(sources)

    def first(plan: list[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
        return [one for one in plan if "tile" in one and one["tile"]["depth"] == depth]

    def cost(plan: list[dict[str, Any]]) -> float:
        return sum(one["cost_us"] for one in first(plan, 704))

    assert cost(allowed) < cost(plain) / 4
    tiles = [{(one["tile"]["rows"], one["tile"]["columns"]) for one in first(plan, 704)} for plan in (plain, allowed)]
    assert max(rows * columns for rows, columns in tiles[0]) <= 128 * 128
    assert tiles[1] <= {(256, 128), (128, 256)}
    assert first(plain, 4096) and not first(allowed, 4096)  # the latter is in parts of its depth
    assert all(one["precision"] == "tf32" for one in allowed if one["kind"] == "matmul")


def layout(kind: str, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Rows [m, k] and a matrix [k, n]."""
    rows = torch.randn(k, m).t() if kind in ("rows across", "both across") else torch.randn(m, k)
    return rows, torch.randn(k, n) if kind in ("columns across", "both across") else torch.randn(n, k).t()


@needs_nvrtc
@pytest.mark.by_day("sm_90a-linear-True-gelu", "sm_90a-both across-False-plain")
@pytest.mark.parametrize("act", [None, F.gelu], ids=["plain", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["linear", "rows across", "columns across", "both across"])
def test_kernels_of_every_tile(
    sources: Sources, compiled: Any, kind: str, biased: bool, act: Callable[[Tensor], Tensor] | None
) -> None:
    """Also where operands are not aligned. Lines along the depth are for warp groups, others are not."""

    def products(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
        made = [torch.addmm(b, x, w) if biased else x @ w for x, w, b in given]
        return made if act is None else [act(one) for one in made]

    call, _ = compiled(products, dynamic=False, minimum=1, fallback=False)
    with tf32.allowed():
        # With a bias for columns or for elements.
        call([(*layout(kind, m, n, DEPTH), torch.randn(m, n) if n % 3 == 0 else torch.randn(n)) for m, n in SIZES])
    [source] = sources.found
    assert source.count(".tf32 = true") == source.count("product<") >= 6
    tiles = set(re.findall(r"product<\d+, s, (\d+, \d+)>", source))
    grouped = sources.arch == "sm_90a" and kind == "linear"
    assert {"64, 32", "64, 64", "128, 64", "128, 128"} <= tiles, tiles
    assert bool({"256, 128", "128, 256"} & tiles) == (grouped and act is None and not biased), tiles
    assert ("#define ARK_LOOP_TRAPS" in source) == grouped
    sources.check(misaligned=True)


@needs_nvrtc
@pytest.mark.by_day("sm_90a-linear-silu", "sm_90a-both across-gelu")
@pytest.mark.parametrize("act", [F.silu, F.gelu], ids=["silu", "gelu"])
@pytest.mark.parametrize("kind", ["linear", "columns across", "both across"])
def test_kernels_of_dual_products(sources: Sources, compiled: Any, kind: str, act: Any) -> None:
    def gates(given: list[tuple[Tensor, ...]]) -> list[Tensor]:
        return [act(torch.addmm(b, x, w)) * torch.addmm(c, x, v) for x, w, v, b, c in given]

    given = []
    for m, n in SIZES:
        x, w = layout(kind, m, n, DEPTH)
        given.append((x, w, layout(kind, m, n, DEPTH)[1], torch.randn(n), torch.randn(n)))
    call, _ = compiled(gates, dynamic=False, minimum=1, fallback=False)
    with tf32.allowed():
        call(given)
    [source] = sources.found
    assert source.count(".tf32 = true") >= source.count("dual_product<") >= 3
    sources.check()


@needs_nvrtc
def test_kernels_of_odd_operands(sources: Sources, compiled: Any) -> None:
    """Depths that no chunk of 16 bytes ends, rows at odd places, every other element, batches, and parts of a depth."""
    x, w = torch.randn(64, 256), torch.randn(96, 256)
    apart = torch.randn(200, 133)[:, 3:131]

    def products(given: list[tuple[Tensor, Tensor]], deep: Tensor, matrix: Tensor, beside: Tensor) -> list[Tensor]:
        made = [torch.relu(a @ b) for a, b in given]
        return [*made, F.layer_norm(deep @ matrix + beside, (256,))]

    given = [layout("linear", 130, 150, 100), layout("linear", 257, 77, 333), layout("both across", 70, 75, 77)]
    given += [(x[:, ::2], w.t()[::2]), (apart, torch.randn(128, 200)), (apart, torch.randn(200, 128).t())]
    for kind in ("linear", "both across"):
        pairs = [layout(kind, 100, 72, 40) for _ in range(12)]
        given.append((torch.stack([a for a, _ in pairs]), torch.stack([b.t() for _, b in pairs]).transpose(1, 2)))
    given.append((torch.randn(12, 40, 100).transpose(1, 2), torch.randn(12, 40, 72)))
    call, _ = compiled(products, dynamic=False, minimum=1, fallback=False)
    with tf32.allowed():
        call(given, *layout("linear", 128, 256, 4160), torch.randn(128, 256))
    [source] = sources.found
    assert source.count(".tf32 = true") >= len(given)
    sources.check()
