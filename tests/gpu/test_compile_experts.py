"""Mixtures of experts over two GPUs, found in plain code by backend="ark", with eager PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_gpu import run, start
from support import expert_forms
from support.rank import Rank

pytestmark = pytest.mark.timeout(300)


def _form(rank: Rank, name: str) -> str:
    from ark_torch.compile import backend, options
    from ark_torch.compile.report import Report

    device = start(rank)
    expert_forms.make_groups()
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    torch._dynamo.reset()
    form, _, more = expert_forms.FORMS[name]
    arguments = [one.to(device) for one in expert_forms.given(rank.rank, 64, **more)]
    report, chosen = Report(), options.parse(None, {"choose": "ark"})

    def compile_graph(graph_module: Any, example_inputs: Any) -> Any:
        return backend.compile_graph(graph_module, example_inputs, chosen, report)

    with torch.no_grad():
        wanted = form(*arguments)
        call = torch.compile(form, backend=compile_graph, dynamic=False)
        for _ in range(2):
            got = call(*arguments)
            for one, other in zip(*((y if isinstance(y, tuple) else (y,)) for y in (got, wanted)), strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2 if one.dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    return str(report)


@pytest.mark.parametrize("name", expert_forms.FORMS)
def test_forms(name: str) -> None:
    for told in run(_form, name, world=2):
        assert f"ark.{expert_forms.FORMS[name][1]}.default" in told, told
