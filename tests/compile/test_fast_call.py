"""Calls that bypass AOTAutograd's wrappers: when they do, when they do not, and equal results."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor

from ark_torch.compile import fast_call

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records for each compiled graph whether its calls bypass the wrappers."""
    ways: list[bool] = []
    around = fast_call.around

    def watched(captured: Any, *rest: Any) -> Any:
        chosen = around(captured, *rest)
        ways.append(chosen is not captured)
        return chosen

    monkeypatch.setattr(fast_call, "around", watched)
    return ways


def test_a_decoding_step(compiled: Any, taken: list[bool]) -> None:
    model, twin = models.Llama(models.Config()).eval(), models.Llama(models.Config()).eval()
    twin.load_state_dict(model.state_dict())
    call, _ = compiled(model)
    for position in range(4):
        inputs = torch.tensor([[position + 1]]), torch.tensor([position])
        versions = [cache._version for cache in model.caches()]
        torch.testing.assert_close(call(*inputs), twin(*inputs))
        for cache, other, before in zip(model.caches(), twin.caches(), versions, strict=True):
            torch.testing.assert_close(cache, other)
            assert cache._version > before  # autograd sees the write
    assert taken == [True]


def test_what_needs_the_wrappers(compiled: Any, taken: list[bool]) -> None:
    def view_of_an_argument(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t(), torch.sin(x) * 2 + 1

    x = torch.randn(3, 4)
    call, _ = compiled(view_of_an_argument)
    view, result = call(x)
    assert view.data_ptr() == x.data_ptr() and view.shape == (4, 3)
    torch.testing.assert_close(result, torch.sin(x) * 2 + 1)

    call, _ = compiled(lambda x, y: (torch.sin(x) + y) * 2)
    with torch.autocast("cpu"):
        torch.testing.assert_close(call(x, x), (torch.sin(x) + x) * 2)
    assert taken == [False, False]
    torch.testing.assert_close(call(x, x), (torch.sin(x) + x) * 2)  # the same tensor twice


def test_inference_mode_and_swapped_parameters(compiled: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
    call, _ = compiled(model)
    x = torch.randn(2, 8)
    with torch.inference_mode():
        assert call(x).is_inference()
    before = call(x)
    model[0].weight.data = torch.randn(8, 8)
    torch.testing.assert_close(call(x), model(x))
    assert not torch.equal(before, call(x))


def test_a_wrong_argument_is_an_error(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[Any] = []
    around = fast_call.around
    monkeypatch.setattr(fast_call, "around", lambda *given: functions.append(around(*given)) or functions[-1])
    call, _ = compiled(lambda x, y: (torch.sin(x) + y) * 2)
    x = torch.randn(3, 4)
    call(x, x + 1)
    (function,) = functions
    torch.testing.assert_close(function(x, x)[0], (torch.sin(x) + x) * 2)
    for bad, error in (
        ((x,), ValueError),
        ((x, 1), TypeError),
        ((x, x.double()), ValueError),
        ((x, x[:2]), ValueError),
        ((x, x.to_sparse()), ValueError),  # has no storage
    ):
        with pytest.raises(error):
            function(*bad)
