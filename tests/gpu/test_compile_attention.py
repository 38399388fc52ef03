"""Compares attention in loop kernels on a GPU with float64."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ark_torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "compile"))

from test_softmax_attention import FUSED

pytestmark = pytest.mark.timeout(120)

# Batch, query and key heads, queries, positions, head size; the mask. Warp groups handle head sizes 64 and 128, all
# positions at once if there are up to 512, one mask for all rows and few rows.
Case = tuple[int, int, int, int, int, int, str]
CASES: list[Case] = [
    (1, 16, 16, 384, 384, 64, "floats"),
    (2, 3, 3, 100, 100, 64, "floats"),
    (1, 2, 2, 65, 500, 64, "bools"),
    (1, 4, 4, 200, 200, 64, "none"),
    (1, 6, 2, 50, 77, 64, "none"),
    (1, 2, 2, 70, 512, 64, "holes"),
    (1, 2, 2, 40, 130, 64, "at odd places"),
    (1, 2, 2, 64, 513, 64, "bools"),
    (1, 2, 2, 96, 256, 96, "bools"),
    (3, 5, 5, 197, 197, 64, "none"),
    (2, 4, 4, 300, 300, 64, "causal"),
    (1, 8, 2, 700, 700, 64, "rows"),
    (1, 6, 2, 130, 1000, 64, "row floats"),
    (1, 4, 4, 260, 700, 64, "holes"),
    (2, 3, 3, 200, 650, 64, "heads"),
    (1, 4, 4, 333, 333, 128, "causal"),
    (1, 8, 2, 100, 777, 128, "rows"),
    (2, 2, 2, 140, 70, 128, "none"),
    (1, 2, 2, 70, 129, 128, "row floats"),
    (1, 14, 2, 150, 640, 64, "rows"),
    (1, 6, 2, 60, 776, 128, "row floats"),
    (8, 16, 16, 16, 16, 64, "sequences"),
    (24, 4, 2, 3, 9, 64, "sequences"),
    (2, 8, 4, 1, 2048, 128, "sequences"),
    (20, 16, 8, 1, 520, 64, "sequences"),
]


def operands(case: Case, dtype: torch.dtype) -> list[Tensor | None]:
    batch, heads, shared, queries, keys, size, kind = case

    def drawn(count: int, rows: int) -> Tensor:
        wide = torch.randn(batch, count, rows, size + 1, dtype=dtype, device="cuda")
        return wide[..., 1:] if kind == "at odd places" else wide[..., 1:].contiguous()

    mask: Tensor | None = None
    if kind in ("floats", "bools", "holes", "sequences"):
        mask = torch.rand(batch, 1, 1, keys, device="cuda") < 0.7
        mask[..., 0] = True
        if kind == "holes":
            mask[..., 128:300] = False
        if kind == "floats":
            mask = torch.where(mask, 0.25, float("-inf")).to(dtype)
    if kind in ("rows", "row floats", "heads"):
        # Nobody attends to the middle, and every row to the first position.
        mask = torch.rand(batch, heads if kind == "heads" else 1, queries, keys, device="cuda") < 0.6
        mask &= torch.arange(keys, device="cuda") < torch.arange(queries, device="cuda")[:, None] * keys // queries + 64
        mask[..., 128:200] = False
        mask[..., 0] = True
        if kind == "row floats":
            mask = torch.where(mask, torch.randn_like(mask, dtype=torch.float32), float("-inf")).to(dtype)
    return [drawn(heads, queries), drawn(shared, keys), drawn(shared, keys), mask]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)


# In several regions: the kernel of one with all of them would spill.
@pytest.mark.parametrize(
    "cases",
    [CASES[:9], CASES[9:15], CASES[15:21], CASES[21:]],
    ids=["few positions", "many positions", "long or shared heads", "few rows"],
)
@pytest.mark.parametrize("dtype, close", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_attention(dtype: torch.dtype, close: float, cases: list[Case]) -> None:
    """Close to float64, with the same bits each time."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    given = [operands(case, dtype) for case in cases]

    def all_of(given: list[list[Tensor]]) -> list[Tensor]:
        return [attend(*one, case[-1] == "causal") for one, case in zip(given, cases, strict=True)]

    with torch.no_grad():
        call = torch.compile(all_of, backend="ark", options={"choose": "ark", "fallback": False}, dynamic=False)
        got, again = call(given), call(given)
    for case, (q, k, v, mask), one, other in zip(cases, given, got, again, strict=True):
        wide = mask.double() if mask is not None and mask.is_floating_point() else mask
        want = attend(q.double(), k.double(), v.double(), wide, case[-1] == "causal")
        assert float((one.double() - want).norm() / want.norm()) < close, case
        assert torch.equal(one, other), case


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
def test_attention_written_as_products(dtype: torch.dtype, close: float) -> None:
    """With every kind of mask; rows without positions are NaN."""
    for form, (call, make) in FUSED.items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        given = [x.cuda().to(dtype) if x.is_floating_point() else x.cuda() for x in make()]
        if form == "triangle":
            given[3][..., 5, :] = 0
        plan = ark_torch.explain(call, *given, target="sm_90a", ark_options={"choose": "ark"}).regions[0].target_plan
        kinds = [stage["kind"] for stage in json.loads(plan)["stages"]]
        assert "attention" in kinds and "matmul" not in kinds, (form, kinds)
        with torch.no_grad():
            got = torch.compile(call, backend="ark", options={"choose": "ark"}, dynamic=False)(*given)
            want = call(*(x.double() if x.is_floating_point() else x for x in given))
        assert torch.equal(got.isnan(), want.isnan()), form
        difference = (got.double() - want).nan_to_num()
        assert float(difference.norm() / want.nan_to_num().norm()) < close, form


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_a_value_with_itself(causal: bool) -> None:
    """Blocks of query rows wait for all rows of the keys."""

    def call(x: Tensor) -> Tensor:
        made = torch.tanh(x) * 2
        return F.scaled_dot_product_attention(made, made, made, is_causal=causal)

    torch.manual_seed(0)
    x = torch.randn(1, 4, 1500, 64, dtype=torch.bfloat16, device="cuda")
    ours = torch.compile(call, backend="ark", options={"choose": "ark", "fallback": False}, dynamic=False)
    with torch.no_grad():
        for _ in range(20):
            x.normal_()
            got, want = ours(x), call(x.double())
            assert float((got.double() - want).norm() / want.norm()) < 1.5e-2


def test_a_boolean_mask_is_read_as_it_is() -> None:
    """PyTorch turns it into numbers, other ones for each implementation that it may choose; rows without a position
    have zeros."""
    q, k, v, mask = operands((1, 4, 4, 256, 256, 64, "rows"), torch.bfloat16)
    assert mask is not None
    mask[..., 7, :] = False
    told = ark_torch.explain(attend, q, k, v, mask, False, target="sm_90a", ark_options={"choose": "ark"})
    stages = json.loads(told.regions[0].target_plan)["stages"]
    assert [stage["kind"] for stage in stages].count("attention") == len(stages), stages
    with torch.no_grad():
        got = torch.compile(attend, backend="ark", options={"choose": "ark", "fallback": False})(q, k, v, mask, False)
    want = attend(q.double(), k.double(), v.double(), mask, False)
    assert not got[..., 7, :].any()
    assert float((got.double() - want).norm() / want.norm()) < 8e-3
