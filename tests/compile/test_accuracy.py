"""Errors of single operators against float64, compared with Inductor's figures for the same inputs.

benchmarks/compile_accuracy.py has recorded those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accuracy
import accuracy_cases
import accuracy_inputs
import pytest
import torch

from ark_torch.compile import lowering

pytestmark = pytest.mark.timeout(200)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "compile_accuracy.json"


@pytest.mark.quick
def test_every_operator_has_a_case() -> None:
    covered = {case.operator for dtype in accuracy_inputs.FLOATS for case in accuracy_cases.cases(dtype)}
    elsewhere = accuracy_cases.WITHOUT_ROUNDING | accuracy_cases.ON_A_GPU | accuracy_cases.CODED
    assert set(lowering.RULES) == covered | elsewhere


# Operators that approximate, add or accumulate; in half types, those that must not round in between.
ROUNDING = {
    torch.float32: {
        *("exp", "log", "log1p", "expm1", "sin", "cos", "tanh", "erf", "erfc", "sigmoid", "log10", "sinh", "pow"),
        *("sum", "mean", "var", "softmax", "native_layer_norm", "mm", "cumsum"),
    },
    torch.bfloat16: {"sum", "mean", "mm", "scatter_add", "index_add", "cumsum"},
}


@pytest.mark.by_day("dtype1")
@pytest.mark.parametrize("dtype", ROUNDING)
def test_no_less_exact_than_inductor(dtype: torch.dtype, compiled: Any) -> None:
    recorded = {
        f"{row['operator']} {row['layout']}": row["inductor"]
        for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
        if row["type"] == str(dtype).removeprefix("torch.")
    }
    chosen = [
        (case, given)
        for case, given in zip(*accuracy.drawn(dtype), strict=True)
        if str(case.operator).split(".")[1].strip("_") in ROUNDING[dtype]
    ]
    assert {str(case.operator).split(".")[1].strip("_") for case, _ in chosen} == ROUNDING[dtype]
    cases, given = [list(one) for one in zip(*chosen, strict=True)]
    wanted = accuracy.exact(cases, given)
    call, report = compiled(accuracy.together(cases), fallback=False, minimum=1)
    results = [accuracy.tensors(one) for one in call(accuracy.copied(given))]
    assert len(report.regions) == 1
    for case, got, right in zip(cases, results, wanted, strict=True):
        found = accuracy.figures(case, got, right)
        assert accuracy.nearness(found, recorded[case.name]) <= 1, (case.name, found, recorded[case.name])


@pytest.mark.by_day("dtype0")
@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_returned_is_rounded_for_its_other_readers(dtype: torch.dtype, compiled: Any) -> None:
    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * a
        return y, (y - b).float()

    x, a = (torch.randn(64, 100, generator=torch.Generator().manual_seed(s)).to(dtype) for s in range(2))
    call, report = compiled(f, fallback=False, minimum=1)
    y, left = call(x, a, x * a)
    assert len(report.regions) == 1
    assert torch.equal(y, x * a)
    assert not left.any(), left.abs().max()
