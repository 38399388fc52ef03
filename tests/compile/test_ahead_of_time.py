"""Ahead-of-time compilation: ark's regions cannot be saved yet, and the error names the option that avoids them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ark_torch._support import minor_of

ASKS = tuple(int(part) for part in minor_of(torch.__version__).split(".")) >= (2, 14)
pytestmark = pytest.mark.skipif(not ASKS, reason="PyTorch before 2.14 asks no backend for what can be saved")


def step(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + 1


def _ahead(**options: str) -> object:
    compiled = torch.compile(step, backend="ark", fullgraph=True, options=options)
    return compiled.aot_compile(((torch.linspace(-1, 1, 12),), {}))


def test_regions_are_refused_with_the_option_that_helps() -> None:
    with pytest.raises(Exception, match=r"aot_compile.*options=\{\"choose\": \"inductor\"\}"):
        _ahead(choose="ark")


def test_with_that_option_it_is_saved_and_loaded(tmp_path: Path) -> None:
    saved = _ahead(choose="inductor")
    x = torch.linspace(-2, 2, 12)
    torch.testing.assert_close(saved(x), step(x))  # type: ignore[operator]
    path = tmp_path / "step.pt"
    saved.save_compiled_function(str(path))  # type: ignore[attr-defined]
    with path.open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    torch.testing.assert_close(loaded(x), step(x))


def test_compiling_as_usual_is_as_before() -> None:
    x = torch.linspace(-2, 2, 12)
    compiled = torch.compile(step, backend="ark", options={"choose": "ark", "fallback": False})
    torch.testing.assert_close(compiled(x), step(x))
