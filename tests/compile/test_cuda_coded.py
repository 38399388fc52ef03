"""Products of coded weights in loop kernels for GPUs, without a GPU: sources that NVRTC compiles.

tests/gpu/test_compile_low_bits.py tests what they compute.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import coded
import models
import pytest
import torch
from cuda_sources import Sources, needs_nvrtc

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.quantized import quantize  # in examples/

pytestmark = [needs_nvrtc, pytest.mark.timeout(200)]


@pytest.mark.by_day("sm_90a-1-bfloat16")
@pytest.mark.changed("ark_torch/kernels/cuda/*", "csrc/compiler/emit/*")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
def test_coded_weights(sources: Sources, compiled: Any, rows: int, dtype: torch.dtype) -> None:
    """Every form, with several batches of columns and several passes over the depth, which slices fill or do not."""
    # For nine rows, Ampere has too few registers for float8. That product goes to Inductor, and `explain` says so.
    forms = [name for name in coded.FORMS if (rows, sources.arch) != (9, "sm_80") or "float8" not in name]
    products = [(coded.coded(name, 2048, 4096)[0], coded.coded(name, 48, 2176)[0]) for name in forms]
    call, _ = compiled(
        lambda x: [one for whole, rest in products for one in (whole(x), rest(x[:, :2176]))],
        dynamic=False,
        fallback=False,
        minimum=1,
    )
    call(torch.randn(rows, 4096, dtype=dtype))
    sources.check()


@pytest.mark.parametrize("depth, small", [(16384, True), (32768, False), (114688, False)])
def test_scales_of_a_column_take_room(sources: Sources, compiled: Any, depth: int, small: bool) -> None:
    """Up to eight rows stage them in shared memory, or if it has no room for a batch of columns load them ahead."""
    product, _ = coded.coded("int4, zeros", 48, depth)
    compiled(product, dynamic=False, fallback=False, minimum=1)[0](torch.randn(8, depth, dtype=torch.bfloat16))
    assert ["#define ARK_LOOP_SMALL_WORKSPACE" in source for source in sources.found] == [small]
    sources.check()


def test_scales_of_several_layouts(sources: Sources, compiled: Any) -> None:
    """Products that share their rows are one stage, also where only one has a column's scales adjacent."""
    products = [coded.coded("int4, zeros", 2112, 4096)[0] for _ in range(3)]
    products[1].scales = products[1].scales.t().contiguous().t()
    x = torch.randn(1, 4096, dtype=torch.bfloat16)
    compiled(lambda x: [product(x).sin() for product in products], dynamic=False, fallback=False, minimum=1)[0](x)
    if sources.arch == "sm_90a":
        assert sum("int4 linear" in name for name in sources.stages()) == 1, sources.stages()
    sources.check()


@pytest.mark.by_day("sm_90a-int8-1-pairs", "sm_90a-bfloat16-8-groups")
@pytest.mark.parametrize("layout", coded.LAYOUTS)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("zeros", [torch.bfloat16, torch.int8, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_scales_by_column_or_group(sources: Sources, compiled: Any, zeros: torch.dtype, rows: int, layout: str) -> None:
    """All layouts, as many columns as make even and odd addresses. The prefetches of a task fit into its slot."""
    of = torch.float32 if zeros == torch.float32 else torch.bfloat16
    sizes = [(2112, 4096), (37, 2176), (130, 4096)]
    made = [coded.laid_out(coded.coded("int4, zeros", *size)[0], layout, of, zeros) for size in sizes]
    call, _ = compiled(
        lambda x: [one(x[:, :k]).sin() for one, (_, k) in zip(made, sizes, strict=True)],
        dynamic=False,
        fallback=False,
        minimum=1,
    )
    call(torch.randn(rows, 4096, dtype=torch.bfloat16))
    assert "// Tasks with more entries than their slots have room for: 0." in sources.found[0]
    sources.check()


@pytest.mark.parametrize("layout", ["columns", "groups"])
def test_scales_are_staged_while_a_norm_makes_the_rows(sources: Sources, compiled: Any, layout: str) -> None:
    """Those that lie by column."""
    types = torch.bfloat16, torch.bfloat16
    product = coded.laid_out(coded.coded("int4, zeros", 2112, 2048)[0], layout, *types)
    model = torch.nn.Sequential(torch.nn.RMSNorm(2048, dtype=torch.bfloat16), product)
    compiled(model, dynamic=False, fallback=False, minimum=1)[0](torch.randn(1, 2048, dtype=torch.bfloat16))
    for text in ("stage_scales<1>(", "dequant_products<1, true>("):
        assert (text in sources.found[0]) == (layout == "columns"), text
    sources.check()


@pytest.mark.by_day("sm_90a-int4, zeros-bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("form", coded.FORMS)
def test_coded_weights_of_many_rows(sources: Sources, compiled: Any, form: str, dtype: torch.dtype) -> None:
    """Codes are decoded into tiles of every shape."""
    if sources.arch != "sm_90a":
        pytest.skip("others have no kernel for them: Inductor multiplies")
    sizes = [(17, 48), (150, 2048), (1024, 3072), (2048, 2048)]
    products = [coded.coded(form, n)[0] for _, n in sizes]
    call, _ = compiled(
        lambda rows: [product(x) for product, x in zip(products, rows, strict=True)],
        dynamic=False,
        minimum=1,
        fallback=False,
    )
    call([torch.randn(m, 256, dtype=dtype) for m, _ in sizes])
    [source] = sources.found
    tiles = set(re.findall(r"dequant_tiles<\d+, (\d+, \d+)>", source))
    assert tiles == {"64, 32", "64, 64", "128, 96", "128, 128"}
    sources.check()


@pytest.mark.by_day("sm_90a-1-int4")
@pytest.mark.parametrize("form", ["int8", "int4", "float8", "float8-dynamic"])
@pytest.mark.parametrize("batch", [1, 2, 8, 16])
def test_coded_llama(sources: Sources, compiled: Any, batch: int, form: str) -> None:
    """Products that share rows, and activations after them, form the same stages as with plain weights."""
    model = models.Llama(models.Config(2048, 1, 32, 8, 8192, 512, 256), batch, torch.bfloat16).eval()
    compiled(quantize(model, form), dynamic=False, fallback=False)[0](
        torch.randint(0, 512, (batch, 1)), torch.tensor([5])
    )
    if batch <= 8 and sources.arch == "sm_90a":
        one = f"{form.partition('-')[0]} linear"
        scaled = ", mul, mul, mul" if form == "float8-dynamic" else ""  # by the rows' scales
        assert f"{one}, {one}, {one}{scaled}" in sources.stages()
        assert bool(scaled) or f"{one}, {one}, swiglu" in sources.stages()
    assert "// Tasks with more entries than their slots have room for: 0.\n" in sources.found[0]
    sources.check()
