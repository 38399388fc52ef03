"""What an inference engine such as vLLM does with a backend's name (docs/serving.md), without the engine.

It compiles with fullgraph=True and dynamic=False, marks the number of tokens as dynamic, drops guards, and calls its
attention as an opaque operator that writes its result.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytestmark = pytest.mark.timeout(200)


@torch.library.custom_op("engine::attention_with_output", mutates_args={"output"})
def attention_with_output(q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    output.copy_(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])


class Layer(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, 64, bias=False), nn.Linear(hidden, 64, bias=False)
        self.down = nn.Linear(64, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split(x.shape[1], 1)
        output = torch.empty_like(q)
        torch.ops.engine.attention_with_output(q.contiguous(), k.contiguous(), v.contiguous(), output)
        x = x + output
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def compiled_by_an_engine(layer: nn.Module, **options: Any) -> Any:
    """The call in vllm/compilation/wrapper.py; "ark" is among torch._dynamo.list_backends(), so it stays a string."""
    assert "ark" in torch._dynamo.list_backends(exclude_tags=())
    guards = {
        "guard_filter_fn": getattr(torch.compiler, "skip_all_guards_unsafe", lambda entries: [False] * len(entries))
    }
    return torch.compile(layer.forward, fullgraph=True, dynamic=False, backend="ark", options={**guards, **options})


def test_a_dynamic_number_of_tokens_is_inductors_and_right(caplog: pytest.LogCaptureFixture) -> None:
    layer, call = Layer().eval(), None
    with caplog.at_level(logging.INFO, "ark_torch.compile"):
        for tokens in (5, 9, 17):
            x = torch.randn(tokens, 32)
            if call is None:
                torch._dynamo.mark_dynamic(x, 0)
                call = compiled_by_an_engine(layer, choose="ark")
            torch.testing.assert_close(call(x), layer(x), rtol=1e-4, atol=1e-5)
    assert "sizes are symbolic" in caplog.text


@pytest.mark.nightly
def test_a_fixed_number_of_tokens_leaves_only_attention_to_others(compiled: Any) -> None:
    layer, x = Layer().eval(), torch.randn(4, 32)
    call, report = compiled(layer, dynamic=False, minimum=1)
    torch.testing.assert_close(call(x), layer(x), rtol=1e-4, atol=1e-5)
    [graph] = report.graphs
    assert [piece.runs_on for piece in graph.pieces if piece.runs_on == "ark"] == ["ark"] * 2, report
    assert [fallback.operator for fallback in graph.fallbacks] == ["engine.attention_with_output.default"]


@pytest.mark.nightly
def test_ahead_of_time_a_dynamic_graph_is_saved_as_inductors(tmp_path: Path) -> None:
    """vLLM's second mode calls aot_compile() on what torch.compile returns, and loads it in its next run."""
    layer, x = Layer().eval(), torch.randn(5, 32)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), torch._dynamo.config.patch(enable_aot_compile=True):
        made = compiled_by_an_engine(layer).aot_compile(((x,), {}))
        made.save_compiled_function(str(tmp_path / "model"))
        with (tmp_path / "model").open("rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
        for call in (made, loaded):
            for tokens in (5, 9):
                given = torch.randn(tokens, 32)
                torch.testing.assert_close(call(layer, given), layer(given), rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()
        torch._dynamo.mark_dynamic(x, 0)
        with pytest.raises(Exception, match="sizes are symbolic"):
            compiled_by_an_engine(layer, choose="ark").aot_compile(((x,), {}))
