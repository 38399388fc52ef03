"""What ark does not run, and the reasons that it gives."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import models
import pytest
import torch
from support import start
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ark_torch import _C
from ark_torch.compile import decompositions
from ark_torch.errors import CompileError

pytestmark = pytest.mark.timeout(120)
aten = torch.ops.aten


def test_fallback_false_names_operator_module_and_line(double: Any, compiled: Any) -> None:
    call, _ = compiled(models.ResidualBlock(transposed=True).eval(), fallback=False)
    with pytest.raises(Exception) as error:
        call(torch.randn(1, 8, 5, 5))
    text = str(error.value)
    assert "aten.convolution.default: a transposed convolution" in text and "c1" in text and "models.py:" in text, text


UNSUPPORTED = {
    "float64": (lambda a: a.double() * 2 + 1, lambda: (torch.randn(4),), "float64"),
    "complex": (lambda a: torch.view_as_real(a * 2) + 1, lambda: (torch.randn(4, dtype=torch.complex64),), "complex64"),
    "uint8": (lambda a: a + 1 - 2, lambda: (torch.ones(4, dtype=torch.uint8),), "uint8"),
    "empty": (lambda a: a * 2 + 1, lambda: (torch.ones(0, 4),), "without elements"),
    "apart": (lambda a, i: a[i, :, i] * 2 + 1, lambda: (torch.randn(4, 4, 4), torch.tensor([1, 2])), "neighbours"),
    "mask_index": (
        lambda a, m: torch.ops.aten.index_put(a, [m], torch.tensor(0.0)) * 2 + 1,
        lambda: (torch.randn(4), torch.tensor([True, False, True, False])),
        "",
    ),
    "greatest_of_a_place": (
        lambda a, i: a.scatter_reduce(0, i, torch.ones(2), "amax") * 2 + 1,
        lambda: (torch.randn(4), torch.tensor([1, 1])),
        "does not add",
    ),
    "int_by_tensor": (lambda a, b: (a + 1) // b * 2, lambda: (torch.arange(4), torch.tensor([1, -2, 3, 2])), "hold 0"),
    "int_rest": (lambda a, b: (a + 1) % b * 2, lambda: (torch.arange(4), torch.tensor([1, -2, 3, 2])), "hold 0"),
    "int_floor": (
        lambda a, b: torch.div(a + 1, b, rounding_mode="floor") * 2,
        lambda: (torch.arange(4), torch.tensor([1, -2, 3, 2])),
        "hold 0",
    ),
    "large_integer": (lambda a: (a * 2) + ((1 << 53) + 1), lambda: (torch.arange(4),), "the integer 9007199254740993"),
    "wide_heads": (
        lambda q: torch.nn.functional.scaled_dot_product_attention(q * 2, q, q) + 1,
        lambda: (torch.randn(1, 2, 3, 520),),
        "heads of more than 512",
    ),
    "dtype_view": (lambda a: a.view(torch.int32) + 1 - 2, lambda: (torch.randn(4),), "element type"),
    "median": (lambda a: a.median(0)[0] * 2 + 1, lambda: (torch.randn(9),), "no lowering"),
    "kthvalue": (lambda a: (a * 2 + 1).kthvalue(3)[1] + 1, lambda: (torch.randn(9),), "no lowering"),
    "long_topk": (lambda a: a.topk(3)[0] * 2 + 1, lambda: (torch.randn((1 << 18) + 1),), "sorting rows of"),
}


@pytest.mark.by_day(
    "cpp-complex",
    "cpp-empty",
    "cpp-apart",
    "cpp-mask_index",
    "cpp-int_rest",
    "cpp-large_integer",
    "cpp-wide_heads",
    "cpp-kthvalue",
)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_right_all_the_same(name: str, plan: str, compiled: Any) -> None:
    function, make, reason = UNSUPPORTED[name]
    arguments = make()
    call, report = compiled(function)
    torch.testing.assert_close(call(*arguments), function(*arguments))
    shown = str(report)
    assert reason in shown, shown


@pytest.mark.nightly
def test_pooling_is_captured_before_inductor_is_loaded() -> None:
    """In a fresh process, where nothing has been compiled: only the pooling falls back, not the graph."""
    code = (
        "import torch, ark_torch\n"
        "model = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.MaxPool2d(2), torch.nn.SiLU(), torch.nn.Softplus())\n"
        "x = torch.randn(1, 3, 8, 8)\n"
        "report = ark_torch.explain(model, x, ark_options={'choose': 'ark', 'minimum': 1})\n"
        "assert report.regions and not report.graphs[0].whole, report\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=start.base_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_random_numbers_are_inductors(plan: str, compiled: Any) -> None:
    def function(a: Tensor) -> Tensor:
        return torch.rand(100) + a * 2 - 1

    call, report = compiled(function)
    got = call(torch.ones(100))
    assert got.min() >= 1 and got.max() < 2 and got.unique().numel() > 50
    assert any("rand" in f.operator for f in report.fallbacks)


def test_two_layers_around_an_operator(plan: str, compiled: Any) -> None:
    """ark, Inductor, ark, with shared inputs, views across the cut, and an input mutated on both sides."""

    def function(a: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b = a * 2 + 1
        state[0] = b[0, :4] + 1
        c = b.t().cummax(0)[0]
        d = c[1:] * b.t()[1:] + state[0, 0]
        state[1] = d[0, :4] - 1
        return d, b.t(), state[0] * 2 + 1

    a, state = torch.randn(5, 5), torch.zeros(3, 4)
    other = state.clone()
    wanted = function(a, other)
    call, report = compiled(function)
    pointer = state.data_ptr()
    got = call(a, state)
    for one, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, right)
        assert one.stride() == right.stride()
    torch.testing.assert_close(state, other)
    assert state.data_ptr() == pointer
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark", "inductor", "ark"], report


def test_too_small_is_not_worth_a_call(plan: str, compiled: Any) -> None:
    call, report = compiled(lambda a: a + 1)
    torch.testing.assert_close(call(torch.ones(3)), torch.full((3,), 2.0))
    assert "too few" in report.graphs[0].whole


def test_nothing_to_compute(plan: str, compiled: Any) -> None:
    call, _ = compiled(lambda a: a.t()[1:])
    torch.testing.assert_close(call(torch.arange(6.0).view(2, 3)), torch.tensor([[1.0, 4.0], [2.0, 5.0]]))


class _NoCompiler:
    class Graph:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: 0

    @staticmethod
    def Region(*_: Any) -> Any:
        raise CompileError("no C++ compiler is found: install g++ or set CXX")


def test_without_a_compiler(compiled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One log line, then Inductor."""
    monkeypatch.setattr(_C, "plan", _NoCompiler, raising=False)
    call, report = compiled(lambda a: a * 2 + 1)
    with caplog.at_level(logging.WARNING, "ark_torch.compile"):
        torch.testing.assert_close(call(torch.ones(3)), torch.full((3,), 3.0))
    said = [r.getMessage() for r in caplog.records if r.name == "ark_torch.compile"]
    assert said == [
        "test_fallback.<lambda>[0/0], piece 0 falls back to Inductor: "
        "CompileError: no C++ compiler is found: install g++ or set CXX"
    ]
    assert report.graphs[0].pieces[0].runs_on == "inductor"


def test_inductor_by_choice(compiled: Any) -> None:
    call, report = compiled(lambda a: a * 2 + 1, choose="inductor")
    torch.testing.assert_close(call(torch.ones(3)), torch.full((3,), 3.0))
    assert "choose" in report.graphs[0].whole


def test_products_of_one_row_are_sums_in_inductors_pieces_only() -> None:
    """coordinate_descent_tuning, which torchao sets, makes sums of them on GPUs: not for ark, and as Inductor has them
    for its pieces."""

    def products(*given: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d, rows = given
        return a @ b, torch.bmm(c, d), rows @ b

    shapes = [(1, 64), (64, 8), (3, 5, 64), (3, 64, 1), (2, 64)]
    with FakeTensorMode(), inductor_config.patch(coordinate_descent_tuning=True):
        fakes = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        theirs = make_fx(products, decomposition_table=select_decomp_table())(*fakes)
        ours = make_fx(products, decomposition_table=decompositions.table())(*fakes)
        kept = [node.target for node in ours.graph.nodes if node.target in (aten.mm.default, aten.bmm.default)]
        decompositions.for_inductor(ours.graph)
    assert kept == [aten.mm.default, aten.bmm.default, aten.mm.default]
    for made in (ours, theirs):
        made.graph.eliminate_dead_code()
        made.recompile()

    def computed(made: torch.fx.GraphModule) -> list[str]:
        nodes = [node for node in made.graph.nodes if node.op == "call_function"]
        return sorted(f"{node.target} {node.meta['val'].shape} {node.meta['val'].dtype}" for node in nodes)

    assert computed(ours) == computed(theirs)
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    for one, other in zip(ours(*given), theirs(*given), strict=True):
        assert torch.equal(one, other)
