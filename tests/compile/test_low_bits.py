"""Weight-only int8, int4 and float8: every form of decoding that is followed, what is not, and values."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from coded import FORMS, coded
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama.quantized import quantize  # lies in examples/

pytestmark = pytest.mark.limit(200)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def right_of(model: nn.Module, x: Tensor) -> Tensor:
    """In float64, of codes and scales as they are."""
    right: Tensor = model(x.double())
    return right


def error(got: Tensor, right: Tensor) -> float:
    return float((got.double() - right).abs().max())


@pytest.mark.by_day("cpp-int4, zeros", "cpp-int8, scaled", "cpp-float8, scaled")
@pytest.mark.parametrize("name", FORMS)
def test_every_form(name: str, plan: str, compiled: Any) -> None:
    """One region, named in the report, for one row to many of each type; the error is beside Inductor's."""
    model, told = coded(name, 37)

    def call(*rows: Tensor) -> list[Tensor]:
        return [F.relu(model(x)) for x in rows]

    rows = [torch.randn(m, 256, dtype=dtype) for dtype in DTYPES for m in (1, 3, 16, 35)]
    ours, report = compiled(call, fallback=False, minimum=1)
    got, again = ours(*rows), ours(*rows)
    inductor = torch.compile(call, backend="inductor", dynamic=False)(*rows)
    assert len(report.regions) == 1 and not report.fallbacks
    assert report.graphs[0].weights == [f"{len(rows)} times: product of {told}"]
    for x, one, other, theirs in zip(rows, got, again, inductor, strict=True):
        right = F.relu(right_of(model, x))
        assert one.dtype == x.dtype and torch.equal(one, other)
        places = 4 if x.dtype == torch.float32 else 1  # of float32 the order of a sum has as many
        place = torch.finfo(x.dtype).eps * float(right.abs().max())
        assert error(one, right) <= 1.5 * error(theirs, right) + places * place, (x.dtype, x.shape)


@pytest.mark.by_day("int4")
@pytest.mark.parametrize("form", ["int8", "int4", "float8"])
def test_a_quantized_llama_is_one_region(form: str, compiled: Any) -> None:
    """Decoding with every linear layer coded: nothing falls back, and logits are beside eager's."""
    model = models.Llama(models.Config(256, 1, 4, 2, 512, 64, 32), 1, torch.bfloat16).eval()
    quantize(model, form)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    call, report = compiled(model, dynamic=False, fallback=False)
    for position in (0, 1, 7):
        ids, where = torch.randint(0, 64, (1, 1)), torch.tensor([position])
        right = exact(ids, where)
        place = torch.finfo(torch.bfloat16).eps * float(right.abs().max())
        assert error(call(ids, where), right) <= 1.5 * error(eager(ids, where), right) + place
    assert len(report.regions) == 1 and not report.fallbacks
    [line] = report.graphs[0].weights
    assert line.startswith(f"{7 + 1} times: product of {form} weights, scale a ")
