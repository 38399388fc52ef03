"""Loop kernels on an unsuitable pretended GPU: another backend gets the region, and the error gives the number.

Shapes and numbers stay on the CPU. Only the region is made for the GPU, and no kernel runs.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from support import pretended
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank

from ark_torch.compile import backend, build, capture, options
from ark_torch.compile.lowering import Lowering
from ark_torch.compile.report import Report

pytestmark = [ark_only]

TOO_SMALL = {
    "shared memory": (
        "pretend_shared",
        32768,
        r"needs \d{5,6} bytes of shared memory a block, and the device has 32768",
    ),
    "registers": ("pretend_local", 4096, r"keeps 4096 bytes of each thread in memory: .* registers"),
    "blocks": ("pretend_resident", 0, r"needs \d+ blocks at once, and the device holds 0"),
}


def _made_for_the_gpu(lowering: Lowering, *given: Any) -> Any:
    lowering.device = torch.device("cuda", 0)
    return _make_region(lowering, *given)


_make_region = build.make_region


def _refused(rank: Rank, setter: str, value: int) -> str:
    pretended.enter()
    getattr(pretended.driver, setter)(value)
    build.make_region = _made_for_the_gpu
    torch.cuda.get_device_name = lambda *_: "pretended"
    report, parsed = Report(), options.parse(None, {"choose": "ark"})

    def compiler(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, parsed, report)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2 + 1, -1)

    x = torch.randn(64, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(call, backend=compiler)(x), call(x))
    ((piece,),) = [graph.pieces for graph in report.graphs]
    assert piece.runs_on == "inductor"
    return piece.reason


@pytest.mark.nightly
@pytest.mark.parametrize("what", TOO_SMALL)
def test_a_plan_that_needs_more_than_the_gpu_has(pretended_gpu: Any, what: str) -> None:
    setter, value, told = TOO_SMALL[what]
    (reason,) = run_ranks(_refused, 1, setter, value, env=pretended_gpu)
    assert re.search(told, reason), reason


def _said(rank: Rank, version: int, capability: tuple[int, int]) -> list[str]:
    pretended.enter()
    pretended.driver.pretend_version(version)
    torch.cuda.get_device_capability = lambda *_: capability
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ark_torch.compile").addHandler(handler)
    assert [capture._runs_loop_kernels(0) for _ in range(3)] == [False] * 3
    return said


@pytest.mark.parametrize(
    "version, capability, told",
    [(11080, (9, 0), r"driver supports CUDA 11\.8, and ark needs 12\.4"), (13000, (7, 5), r"7\.5, .* need 8\.0")],
    ids=["old driver", "old device"],
)
def test_what_is_too_old(pretended_gpu: Any, version: int, capability: tuple[int, int], told: str) -> None:
    """One sentence, logged once."""
    ((one,),) = run_ranks(_said, 1, version, capability, env=pretended_gpu)
    assert re.search(told, one) and "\n" not in one, one
