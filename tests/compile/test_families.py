"""Model families that no other test names: results are eager PyTorch's, and the same bits at each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed (make setup does): no families are tested")

pytestmark = pytest.mark.timeout(300)


def tensors(value: Any) -> list[Tensor]:
    """All floating tensors in a model's output."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if hasattr(value, "values") else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.by_day("qwen3")
@pytest.mark.parametrize("name", FAMILIES)
def test_as_eager_pytorch(name: str, compiled: Any) -> None:
    model, given = FAMILIES[name]()
    wanted = tensors(model(**given))
    call, report = compiled(model, dynamic=False)
    got, again = tensors(call(**given)), tensors(call(**given))
    assert report.regions, report
    for one, other, right in zip(got, again, wanted, strict=True):
        assert one.shape == right.shape and one.dtype == right.dtype
        finite = right[right.isfinite()]
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4 * float(finite.abs().max()) + 1e-6, equal_nan=True)
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
