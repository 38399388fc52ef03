"""Every test of the compiler runs on a fresh Dynamo. Compiled sources are shared by the tests of a run.

`plan` is the C++ side: the double in reference.py, and the extension's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch

from ark_torch import _C
from ark_torch.compile import backend, capture, options
from ark_torch.compile.report import Report

# At night also on the double, which tells faults of the lowering from the planner's.
SIDES = [pytest.param("reference", marks=pytest.mark.nightly), "cpp"]
# What a cache folder keeps is what these test: each has a new one.
OF_THE_CACHE = ("test_choice", "test_costs", "test_explained", "test_host_compiler", "test_options")
# Models and operators as users get them, at night; the C++ compiler takes most of the time, and optimises less here.
FULLY_OPTIMISED = ("test_models", "test_huggingface", "test_operators", "test_host_compiler", "test_integers")


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = request.module.__name__
    monkeypatch.setenv("ARK_CACHE", str(tmp_path / "cache") if module in OF_THE_CACHE else os.environ["ARK_TEST_CACHE"])
    # Plans that are the same on every machine, and nothing to measure in each fresh cache;
    # tests/csrc/compiler/runtime/costs_test.cpp and test_costs.py measure.
    monkeypatch.setenv("ARK_COSTS", "assumed")
    if module not in FULLY_OPTIMISED or not request.config.getoption("--night"):
        monkeypatch.setenv("ARK_OPTIMISE", "1")
    torch._dynamo.reset()
    torch.manual_seed(0)
    capture.say_once.cache_clear()
    reference.Region.made.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture(params=SIDES)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(_C, "plan", reference, raising=False)
    return str(request.param)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[reference.Region]:
    """The reference alone, for tests that look at what was lowered."""
    monkeypatch.setattr(_C, "plan", reference, raising=False)
    return reference.Region


Compile = Callable[..., tuple[Any, Report]]


@pytest.fixture
def compiled() -> Compile:
    """compiled(model, dynamic=None, **options) -> (the compiled model, its report). All is compiled by the first call;
    test_background.py has what users get by default."""

    def make(model: Any, dynamic: bool | None = None, **chosen: Any) -> tuple[Any, Report]:
        report = Report()
        parsed = options.parse(None, {"choose": "ark", "wait": True, **chosen})

        def run(graph_module: Any, example_inputs: Any) -> Any:
            return backend.compile_graph(graph_module, example_inputs, parsed, report)

        return torch.compile(model, backend=run, dynamic=dynamic), report

    return make
