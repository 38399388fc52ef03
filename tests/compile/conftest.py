"""Every test of the compiler runs on a fresh Dynamo. The tests of a run share compiled sources.

`plan` is the C++ side: the double in reference.py, or the extension's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cuda_sources import Sources

from ark_torch import _C
from ark_torch.compile import autograd_cache, backend, capture, options
from ark_torch.compile.report import Report

# At night also on the double, which separates faults of the lowering from faults of the planner.
SIDES = [pytest.param("reference", marks=pytest.mark.nightly), "cpp"]
# These test the content of a cache folder, so each gets a new one.
OF_THE_CACHE = ("test_choice", "test_costs", "test_explained", "test_host_compiler", "test_options")
# At night these run with full optimisation, as users do. Otherwise less, because the C++ compiler takes most of the
# time.
FULLY_OPTIMISED = ("test_models", "test_huggingface", "test_operators", "test_host_compiler", "test_integers")


@pytest.hookimpl(hookwrapper=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """By day one worker has all tests whose ranks compile: the process that forks these has imported Inductor."""
    if config.pluginmanager.hasplugin("xdist") and not config.getoption("--night"):
        for item in items:
            ranks = isinstance(item, pytest.Function) and {"run_ranks", "Job"} & vars(item.module).keys()
            if ranks and item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.xdist_group("compiling ranks"))
    yield


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = request.module.__name__
    monkeypatch.setenv("ARK_CACHE", str(tmp_path / "cache") if module in OF_THE_CACHE else os.environ["ARK_TEST_CACHE"])
    # Makes plans the same on every machine, without a measurement in each fresh cache. costs_test.cpp
    # (tests/csrc/compiler/runtime) and test_costs.py do measure.
    monkeypatch.setenv("ARK_COSTS", "assumed")
    if module not in FULLY_OPTIMISED or not request.config.getoption("--night"):
        monkeypatch.setenv("ARK_OPTIMISE", "1")
    # Graphs are lowered, also where another test has compiled the same.
    monkeypatch.setattr(autograd_cache, "_code", lambda: str(tmp_path))
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
    """Only the reference, for tests that look at what was lowered."""
    monkeypatch.setattr(_C, "plan", reference, raising=False)
    return reference.Region


Compile = Callable[..., tuple[Any, Report]]


@pytest.fixture
def compiled() -> Compile:
    """compiled(model, dynamic=None, **options) -> (the compiled model, its report).

    The first call compiles everything. test_background.py tests what users get by default.
    """

    def make(model: Any, dynamic: bool | None = None, **chosen: Any) -> tuple[Any, Report]:
        report = Report()
        parsed = options.parse(None, {"choose": "ark", "wait": True, **chosen})

        def run(graph_module: Any, example_inputs: Any) -> Any:
            return backend.compile_graph(graph_module, example_inputs, parsed, report)

        return torch.compile(model, backend=run, dynamic=dynamic), report

    return make


@pytest.fixture(params=["sm_90a", pytest.param("sm_80", marks=pytest.mark.nightly)])
def sources(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sources:
    """The sources of the regions that the test compiles."""
    made = Sources(monkeypatch)
    made.arch = str(request.param)
    return made
