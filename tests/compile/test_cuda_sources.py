"""Loop kernels for GPUs without a GPU: every model's plan is emitted, and NVRTC compiles it.

tests/gpu/test_compile.py tests what they compute.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import recommender
import torch
import torch.nn.functional as F
from cuda_sources import MULTIPROCESSORS, Sources, needs_nvrtc
from torch import Tensor

import ark_torch
from ark_torch import _C, _jit
from ark_torch.compile import build

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


pytestmark = [needs_nvrtc, pytest.mark.timeout(200)]

# A function with many live sums, in a kernel whose threads have 64 registers each.
SPILLING = """
// matmul: layers.0.up (model.py:12)
// matmul: layers.1.up (model.py:12)
__device__ __noinline__ void matmul_3(const float* from, float* to) {
  float sums[100] = {};
  for (int i = 0; i < 1000; ++i)
#pragma unroll
    for (int j = 0; j < 100; ++j) sums[j] = sums[j] * from[i] + from[i + j];
#pragma unroll
  for (int j = 0; j < 100; ++j) to[j] = sums[j];
}
extern "C" __global__ void __launch_bounds__(1024, 1) loop_kernel(const float* from, float* to) { matmul_3(from, to); }
"""


def test_the_plan_that_is_shown_is_the_plan_that_runs(sources: Sources, compiled: Any) -> None:
    """explain(target="sm_90a") plans like the emitter: as many tasks, events and loads."""
    if sources.arch != "sm_90a":
        pytest.skip("plans are shown for sm_90a")
    model = models.Llama(models.Config(256, 1, 4, 2, 512, 64, 256)).eval()
    call, _ = compiled(model, dynamic=False, fallback=False)
    call(torch.randint(0, 64, (1, 1)), torch.tensor([5]))
    plan = json.loads(_C.plan.plan_for(sources.graph, sources.arch, MULTIPROCESSORS))
    [source] = sources.found
    emitted = source.partition("kTasks[] =\n")[2].partition(";")[0].count("\n")
    assert emitted == len(plan["tasks"]) - sum("head" in task for task in plan["tasks"])
    stages = [line for line in source.splitlines() if re.search(r"// \d+: stage \d+, ", line)]
    assert len(stages) >= len(plan["stages"])


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama(sources: Sources, compiled: Any, dtype: torch.dtype) -> None:
    """Two layers of a model with a billion weights: decoding and a prompt."""
    config = models.Config(2048, 2, 32, 8, 8192, 1024, 1024)
    model = models.Llama(config, 1, dtype).eval()
    call, _ = compiled(model, dynamic=False, fallback=False)
    call(torch.randint(0, 1024, (1, 1)), torch.tensor([5]))
    if sources.arch == "sm_90a":
        stages = sources.stages()
        assert stages.count("matmul, matmul, matmul") == config.layers  # queries, keys, values
        assert stages.count("matmul, matmul, swiglu") == config.layers and "swiglu" not in stages
        assert stages.count("matmul") == 2 * config.layers + 1
    call(torch.randint(0, 1024, (1, 100)), torch.arange(100))
    small = ["#define ARK_LOOP_SMALL_WORKSPACE" in source for source in sources.found]
    assert small == [True, False], "a decoding step leaves shared memory to the first-level cache, a prompt needs it"
    sources.check()


# Sizes of Llama 2 7B, Qwen 1.5B, Llama 3B, SmolLM 135M and TinyLlama: heads of 128 and 64, in groups of 1 to 8.
OTHERS = [(4096, 32, 32, 11008), (1536, 12, 2, 8960), (3072, 24, 8, 8192), (576, 9, 3, 1536), (2048, 32, 4, 5632)]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes, rows", list(zip(OTHERS, (1, 1, 2, 4, 16), strict=True)))
def test_other_llamas(sources: Sources, compiled: Any, sizes: tuple[int, int, int, int], rows: int) -> None:
    """One layer of each: decoding of that many sequences, and a prompt of five tokens."""
    dim, heads, kv_heads, ffn = sizes
    config = models.Config(dim, 1, heads, kv_heads, ffn, 100, 1024)
    for batch, steps in ((rows, 1), (1, 5)):
        call, _ = compiled(models.Llama(config, batch, torch.bfloat16).eval(), dynamic=False, fallback=False)
        call(torch.randint(0, 100, (batch, steps)), torch.arange(steps))
    sources.check()


@pytest.mark.by_day("sm_90a-64-16")
@pytest.mark.parametrize("batch", [2, 4, 16, 32])
@pytest.mark.parametrize("size", [64, 128])
def test_a_batch_of_sequences(sources: Sources, compiled: Any, size: int, batch: int) -> None:
    """With a task for each key head, these make the queries and append to the caches."""
    config = models.Config(2048, 1, 2048 // size, 512 // size, 256, 64, 576)
    call, _ = compiled(models.Llama(config, batch, torch.bfloat16).eval(), dynamic=False, fallback=False)
    call(torch.randint(0, 64, (batch, 1)), torch.tensor([500]))
    appends = "return index_fits(" in sources.found[0]
    if batch == 16 and size == 64:
        assert appends and "WarpAnew<" in sources.found[0]
    if sources.arch == "sm_90a":
        assert appends != bool({"rotary", "index_copy_", "rotary+index_copy_"} & set(sources.stages()))
    sources.check()


@pytest.mark.nightly
def test_many_steps_a_launch(sources: Sources) -> None:
    """Greedy decoding with a stop, in resident mode."""
    model = models.Llama(models.Config(256, 2, 8, 4, 512, 100, 64)).eval()

    def step(token: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        return model(token, where).argmax(-1, keepdim=True), where + 1

    loop = ark_torch.resident(step, stop=lambda token, where: token == 7, options={"fallback": False})
    loop(torch.ones(1, 1, dtype=torch.int64), torch.tensor([0]), steps=2)
    assert "kLeader = 0" in sources.found[-1] and "kClosing = -1" not in sources.found[-1]
    sources.check()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_encoder_and_decoder(sources: Sources, compiled: Any, dtype: torch.dtype) -> None:
    encoder, decoder = (
        models.Encoder(1024, 16, 1, 100, 384).to(dtype).eval(),
        models.Decoder(1600, 25, 1).to(dtype).eval(),
    )
    compiled(encoder, dynamic=False, fallback=False)[0](torch.randint(0, 100, (1, 384)), torch.rand(1, 384) < 0.7)
    compiled(decoder, dynamic=False, fallback=False)[0](torch.randint(0, 50, (2, 16)))
    sources.check()


@pytest.mark.changed("ark_torch/kernels/cuda/*", "csrc/compiler/emit/*")
def test_recommender(sources: Sources, compiled: Any) -> None:
    model = recommender.Dlrm(dim=64).eval()
    indices = [torch.randint(0, 50, (30,)) for _ in range(8)]
    offsets = [torch.arange(0, 30, 3) for _ in range(8)]
    compiled(model, dynamic=False, fallback=False)[0](torch.randn(10, 13), indices, offsets)
    sources.check()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [models.Experts, models.SortedExperts])
@pytest.mark.parametrize("tokens", [3, 6, 12])  # less rows than the eight experts, more, and more than a stream takes
def test_experts(sources: Sources, compiled: Any, kind: Any, tokens: int) -> None:
    model = kind(dim=512, hidden=1024).to(torch.bfloat16).eval()
    compiled(model, dynamic=False, fallback=False)[0](torch.randn(tokens, 512, dtype=torch.bfloat16))
    sources.check()


@pytest.mark.by_day("sm_90a-bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_large_tiles(sources: Sources, compiled: Any, dtype: torch.dtype) -> None:
    """Of 256 rows or columns, with and without a bias and an activation; also where operands are not aligned."""
    sizes = [(2048, 2048), (1576, 2304), (2048, 8192)]
    weights = [(torch.randn(n, 768, dtype=dtype), torch.randn(n, dtype=dtype)) for _, n in sizes]
    plain = torch.randn(768, 2048, dtype=dtype)

    def call(rows: list[Tensor]) -> list[Tensor]:
        (w0, _), (w1, b1), (w2, b2) = weights
        linear = [F.linear(rows[0], w0), F.linear(rows[1], w1, b1), F.gelu(F.linear(rows[2], w2, b2))]
        return [*linear, rows[0] @ plain]

    compiled(call, dynamic=False, minimum=1, fallback=False)[0]([torch.randn(m, 768, dtype=dtype) for m, _ in sizes])
    [source] = sources.found
    tiles = set(re.findall(r"product<\d+, s, (\d+, \d+)>", source))
    assert ("256, 128" in tiles and "128, 256" in tiles) == (sources.arch == "sm_90a"), tiles
    sources.check(misaligned=True)


def test_views_that_begin_anywhere(sources: Sources, compiled: Any) -> None:
    """Functions whose operands begin elsewhere in their buffers have variants: few rows, many rows, attention."""

    def call(x: Tensor, few: Tensor, weight: Tensor, packed: Tensor) -> list[Tensor]:
        q, k, v = (packed[..., i * 520 + 4 : i * 520 + 516].view(2, 300, 8, 64).transpose(1, 2) for i in range(3))
        made = [F.linear(one[:, 4:516], weight[:, 4:516]) for one in (x, few)]
        return [*made, F.scaled_dot_product_attention(q, k, v)]

    given = [(2048, 520), (4, 520), (256, 520), (2, 300, 1560)]
    compiled(call, dynamic=False, minimum=1, fallback=False)[0](
        *(torch.randn(*shape, dtype=torch.bfloat16) for shape in given)
    )
    [source] = sources.found
    variants = re.findall(r"void (\w+?)_\d+_misaligned\(", source)
    assert set(variants) == {"attention", "matmul"} and variants.count("matmul") == 2, variants
    assert source.count("case kFunctions + ") == len(variants)
    sources.check()


@pytest.mark.by_day("sm_90a-64")
@pytest.mark.parametrize("size", [64, 128])
def test_attention_of_many_rows(sources: Sources, compiled: Any, size: int) -> None:
    """In blocks of positions: every kind of mask, keys shared by query heads, a batch in parts."""
    shapes = {"none": (3, 5, 5, 197), "causal": (2, 4, 4, 300), "rows": (1, 8, 2, 700), "floats": (1, 6, 2, 150)}
    masks = {"rows": torch.rand(700, 700) < 0.5, "floats": torch.randn(150, 150, dtype=torch.bfloat16)}

    def call(given: dict[str, list[Tensor]]) -> list[Tensor]:
        return [
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=masks.get(kind), is_causal=kind == "causal", enable_gqa=q.shape[1] != k.shape[1]
            )
            for kind, (q, k, v) in given.items()
        ]

    def drawn(batch: int, heads: int, rows: int) -> Tensor:
        return torch.randn(batch, rows, heads, size, dtype=torch.bfloat16).transpose(1, 2)

    given = {kind: [drawn(b, hq, n), drawn(b, hk, n), drawn(b, hk, n)] for kind, (b, hq, hk, n) in shapes.items()}
    compiled(call, dynamic=False, minimum=1, fallback=False)[0](given)
    [source] = sources.found
    if sources.arch == "sm_90a":
        assert source.count(f"attend_flash<{size}, s>") >= len(shapes)
    sources.check()


@pytest.mark.by_day("sm_90a-exact-bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_float8_rows(sources: Sources, compiled: Any, fast: bool, dtype: torch.dtype) -> None:
    """Every shape of tile, and a bias with an activation behind it."""
    if sources.arch != "sm_90a":
        pytest.skip("others have no kernel for them: Inductor multiplies")
    f8, depth = torch.float8_e4m3fn, 272
    sizes = [(17, 48), (150, 2048), (128, 8320), (1024, 3072), (2048, 2048)]
    weights = [torch.randn(n, depth).to(f8) for _, n in sizes]
    scales = [(torch.rand(m, 1), torch.rand(1, n)) for m, n in sizes]
    bias = torch.randn(48).to(dtype) if dtype != torch.float32 else None  # PyTorch adds none to float32

    def call(rows: list[Tensor]) -> list[Tensor]:
        products = []
        for i, (x, w, (a, b)) in enumerate(zip(rows, weights, scales, strict=True)):
            add = None if i else bias
            product = torch._scaled_mm(x.to(f8), w.t(), a, b, bias=add, out_dtype=dtype, use_fast_accum=fast)
            products.append(product if i else F.gelu(product))
        return products

    compiled(call, dynamic=False, minimum=1, fallback=False)[0]([torch.randn(m, depth) for m, _ in sizes])
    assert any(one.startswith("scaled_mm+") for one in sources.stages())
    [source] = sources.found
    tiles = set(re.findall(rf"scaled_product<\d+, s, (\d+, \d+), {str(fast).lower()}>", source))
    assert tiles == {"64, 32", "64, 64", "128, 64", "128, 128"} | ({"128, 96"} if fast else set())
    sources.check()


def test_a_bias_of_elements(sources: Sources, compiled: Any) -> None:
    """In the largest tiles, with an activation: loads of biases leave registers for the sums."""
    given = [torch.randn(*shape, dtype=torch.bfloat16) for shape in ((2048, 256), (6144, 256), (2048, 6144))]
    compiled(lambda x, w, bias: F.gelu(torch.addmm(bias, x, w.t())), dynamic=False, fallback=False)[0](*given)
    sources.check()


def test_a_batch_whose_tasks_have_several_heads(sources: Sources, compiled: Any) -> None:
    """Each warp loads a block of positions at once, which leaves the loop over heads hardly a register."""
    model = models.Llama(models.Config(512, 1, 8, 2, 512, 64, 600), 32, torch.bfloat16).eval()
    compiled(model, dynamic=False, fallback=False)[0](torch.randint(0, 64, (32, 1)), torch.tensor([500]))
    sources.check()


def test_lookups_sorts_and_sums(sources: Sources, compiled: Any) -> None:
    def call(x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        values, places = torch.topk(x, 3)
        return (
            values + x.cumsum(-1)[:, :3],
            places,
            x.sort(dim=0).values,
            F.embedding(index, x),
            x.index_add(0, index, x[index]),
            x.gather(1, places),
            x @ weights,
        )

    compiled(call, dynamic=False, fallback=False)[0](
        torch.randn(40, 100), torch.randint(0, 40, (7,)), torch.randn(100, 30)
    )
    sources.check()


def test_what_spills_is_refused_and_falls_back(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the task, and the region runs elsewhere."""
    _jit.configure()
    assert _C._compile_kernel(SPILLING, "sm_90a")[1][0]["spilled_by_function"]
    monkeypatch.setattr(build, "make_region", lambda *_: _C._compile_kernel(SPILLING, "sm_90a", may_spill=False))
    named = r"matmul_3 \(matmul: layers.0.up \(model.py:12\); matmul: layers.1.up .*needs more registers .* in memory"
    x = torch.randn(3, 4)
    with pytest.raises(Exception, match=named):
        compiled(lambda x: (x + 1) * 2 - x, fallback=False, minimum=1)[0](x)
    call, report = compiled(lambda x: (x + 1) * 2 - x, minimum=1)
    assert torch.equal(call(x), (x + 1) * 2 - x)
    assert re.search(named, report.graphs[0].pieces[0].reason)


@pytest.mark.by_day("sm_90a-4-bfloat16-2")
@pytest.mark.parametrize("arch, ranks, dtype, size", [("sm_90a", 4, "bfloat16", 2), ("sm_80", 8, "int64", 8)])
def test_collectives(arch: str, ranks: int, dtype: str, size: int) -> None:
    """Without a group: the lowered form of functional collectives."""
    graph, count = _C.plan.Graph(), 840

    def value(kind: str, argument: int, elements: int) -> int:
        return graph.value(graph.buffer(kind, argument, elements * size), dtype, [elements], [1])

    attributes = {"group": 0, "ranks": ranks}
    given = value("input", 0, count)
    graph.argument(given)
    for op, more, elements in (
        ("all_reduce", {"reduce_op": "sum"}, count),
        ("all_reduce", {"reduce_op": "max"}, count),
        ("all_gather", {}, count * ranks),
        ("reduce_scatter", {"reduce_op": "product"}, count),
        ("all_to_all", {"input_splits": [], "output_splits": []}, count),
    ):
        made = value("temporary", -1, elements)
        graph.node(op, [given], [made], attributes | more, op)
        given = made
    result = value("output", 0, count)
    graph.node("neg", [given], [result], {}, "neg")
    graph.output(result)
    _jit.configure()
    _, [kernel] = _C._compile_kernel(_C.plan.cuda_source(graph, arch, MULTIPROCESSORS), arch, fuse=True)
    assert kernel["name"] == "loop_kernel" and 0 < kernel["registers"] <= 128 and kernel["spilled"] == 0


@pytest.mark.by_day("sm_90a-2-2-bfloat16-sum")
@pytest.mark.parametrize(
    "arch, nodes, places, dtype, reduce_op",
    [
        ("sm_90a", 2, 2, "bfloat16", "sum"),
        ("sm_90a", 2, 1, "float32", "avg"),
        ("sm_90a", 4, 8, "float16", "avg"),
        ("sm_80", 2, 1, "bfloat16", "sum"),
        ("sm_80", 2, 4, "float32", "sum"),
    ],
)
def test_sums_over_nodes(arch: str, nodes: int, places: int, dtype: str, reduce_op: str) -> None:
    """A product's sum over several nodes: its tiles are messages."""
    graph, rows, width, size = _C.plan.Graph(), 4, 4096, 4 if dtype == "float32" else 2

    def value(kind: str, argument: int, rows: int = rows, turned: bool = False) -> int:
        strides = [1, width] if turned else [width, 1]
        return graph.value(graph.buffer(kind, argument, rows * width * size), dtype, [rows, width], strides)

    x, weights = value("input", 0), value("input", 1, width, True)
    for one in (x, weights):
        graph.argument(one)
    part, total, result = value("temporary", -1), value("temporary", -1), value("output", 0)
    attributes = {"group": 0, "ranks": nodes * places, "nodes": nodes, "reduce_op": reduce_op}
    graph.node("matmul", [x, weights], [part], {}, "first")
    graph.node("all_reduce", [part], [total], attributes, "sum")
    graph.node("neg", [total], [result], {}, "neg")
    graph.output(result)
    _jit.configure()
    source = _C.plan.cuda_source(graph, arch, MULTIPROCESSORS)
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    assert f"all_reduce_between<ark::device::DType::{short}, ark::device::ReduceOp::{reduce_op}, {places}>" in source
    _, [kernel] = _C._compile_kernel(source, arch, fuse=True, may_spill=False)
    assert kernel["name"] == "loop_kernel" and 0 < kernel["registers"] <= 128 and kernel["spilled"] == 0


@pytest.mark.by_day("sm_90a-2-bfloat16-2")
@pytest.mark.parametrize(
    "arch, ranks, dtype, size", [("sm_90a", 2, "bfloat16", 2), ("sm_90a", 8, "float16", 2), ("sm_80", 4, "float32", 4)]
)
def test_pushed_sums(arch: str, ranks: int, dtype: str, size: int) -> None:
    """A norm and a pass over the elements add a product's parts."""
    graph, width = _C.plan.Graph(), 1024

    def value(kind: str, argument: int, rows: int = 1, turned: bool = False) -> int:
        strides = [1, width] if turned else [width, 1]
        return graph.value(graph.buffer(kind, argument, rows * width * size), dtype, [rows, width], strides)

    inputs = [value("input", 0), value("input", 1, width, True), value("input", 2, width, True)]
    for one in inputs:
        graph.argument(one)
    x, first, then = inputs
    part, total, moved = (value("temporary", -1) for _ in range(3))
    square = value("temporary", -1)
    mean = graph.value(graph.buffer("temporary", -1, size), dtype, [1, 1], [1, 1])
    results = [value("output", i) for i in range(3)]
    graph.node("matmul", [x, first], [part], {}, "first")
    graph.node("all_reduce", [part], [total], {"group": 0, "ranks": ranks, "reduce_op": "sum"}, "sum")
    graph.node("add", [x, total], [moved], {}, "moved")
    graph.node("mul", [moved, moved], [square], {}, "moved")
    graph.node("mean", [square], [mean], {"dims": [1], "keepdim": True}, "norm")
    graph.node("div", [moved, mean], [results[0]], {}, "norm")
    graph.node("neg", [total], [results[1]], {}, "neg")
    graph.node("matmul", [results[0], then], [results[2]], {}, "then")
    for one in results:
        graph.output(one)
    _jit.configure()
    source = _C.plan.cuda_source(graph, arch, MULTIPROCESSORS)
    assert source.count("in_turn<const Packet<") >= 2 and "exchange<" not in source
    _, [kernel] = _C._compile_kernel(source, arch, fuse=True)
    assert kernel["name"] == "loop_kernel" and 0 < kernel["registers"] <= 128 and kernel["spilled"] == 0
