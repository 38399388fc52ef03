"""Programs from a review that were wrong, crashed or were refused. Each runs on ark if possible, and equals eager."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class FirstToken(nn.Module):
    """Its result is the beginning of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(torch.tanh(self.linear(x))[:, 0])
        return result


BF16 = torch.tensor([0.1, 256.0, 0.3, 257.0, -0.1], dtype=torch.bfloat16)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a clone of a part": (lambda x: torch.tanh(x * 2)[:8].clone(), (torch.randn(512, 64),)),
    "as_strided of an argument": (
        lambda a: torch.as_strided(a * 1, (3, 4), (2, 1), 1) * 2,
        (torch.arange(40.0)[7:27],),
    ),
    "as_strided where it lies": (lambda a: torch.as_strided(a, (3, 4), (2, 1), 1) * 2 + 1, (torch.arange(40.0)[7:27],)),
    "as_strided of a copy of a part": (
        lambda a: torch.as_strided((a * 1)[3:].clone(), (3, 2), (2, 1), 1) * 2,
        (torch.arange(20.0),),
    ),
    "as_strided of a result, returned": (
        lambda a: (a + 1, torch.as_strided(a * 2, (2, 2), (2, 1), 1)),
        (torch.randn(9),),
    ),
    "a window that is written": (lambda a: (a.fill_(2), a * 3 + 1)[1], (torch.arange(9.0).unfold(0, 3, 1),)),
    "bfloat16 beside numbers": (lambda x: ((x == 0.1), (x <= 0.1), (x < 257), (x == 257), (x * 2) > 0.6), (BF16,)),
    "70 operands": (lambda *xs: functools.reduce(operator.add, xs), tuple(torch.randn(64, 64) for _ in range(70))),
    "130 operands": (lambda *xs: functools.reduce(operator.mul, xs), tuple(torch.rand(8, 8) + 0.5 for _ in range(130))),
    "a long sum": (lambda x: x.sum() * 1 + 0, (torch.full((1 << 22,), 0.1),)),
    "a long sum of infinity": (lambda x: x.sum(-1) * 1, (torch.full((3, 5000), float("inf")),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, compiled: Any) -> None:
    program, inputs = PROGRAMS[name]
    call, _ = compiled(program)
    torch.testing.assert_close(call(*inputs), program(*inputs), rtol=2e-6, atol=1e-6)


def test_the_beginning_of_a_tensor(compiled: Any) -> None:
    model = FirstToken().eval()
    call, _ = compiled(model)
    x = torch.randn(1, 512, 64)
    torch.testing.assert_close(call(x), model(x))


def test_a_position_in_a_tensor_is_measured(compiled: Any) -> None:
    """Measuring runs the step many times, and the position must stay within the cache."""

    def step(cache: Tensor, position: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, position, x * 2)
        position.add_(1)
        return cache.sum(0) + x

    call, report = compiled(step, choose="measure")
    ours = torch.zeros(16, 32), torch.zeros(1, dtype=torch.int64)
    theirs = torch.zeros(16, 32), torch.zeros(1, dtype=torch.int64)
    for count in range(1, 5):
        x = torch.randn(1, 32)
        torch.testing.assert_close(call(*ours, x), step(*theirs, x))
        assert torch.equal(ours[0], theirs[0]) and ours[1].tolist() == [count]
    assert set(report.graphs[0].choice.us) == {"ark", "inductor", "eager"}


def test_a_cache_with_gaps_is_measured(compiled: Any) -> None:
    def step(cache: Tensor, position: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, position, x * 2)
        return cache.sum(0) + x

    call, report = compiled(step, choose="measure")
    whole = torch.zeros(16, 64)
    x = torch.randn(1, 32)
    torch.testing.assert_close(
        call(whole[:, :32], torch.tensor([3]), x), step(torch.zeros(16, 32), torch.tensor([3]), x)
    )
    assert not whole[:, 32:].any()
    assert report.graphs[0].choice is not None


LOOKUPS: dict[str, tuple[Callable[..., Any], str]] = {
    "embedding": (lambda t, i, s: torch.nn.functional.embedding(i, t) * 2 + 1, "embedding"),
    "index": (lambda t, i, s: t[i] * 2 + 1, "index"),
    "index_select": (lambda t, i, s: t.index_select(0, i) * 2 + 1, "index_select"),
    "index_put_": (lambda t, i, s: t.index_put_((i,), s * 2) + 1, "index_put_"),
    "index_copy_": (lambda t, i, s: t.index_copy_(0, i, s * 2) + 1, "index_copy_"),
    "index_copy_one": (lambda t, i, s: t.index_copy_(0, i[1:2], s[:1] * 2) + 1, "index_copy_"),
    "index_put_one": (lambda t, i, s: t.index_put_((i[1:2],), s[:1] * 2) + 1, "index_put_"),
    "index_copy": (lambda t, i, s: t.index_copy(0, i, s * 2) + 1, "index_copy"),
    "index_add_": (lambda t, i, s: t.index_add_(0, i, s * 2) + 1, "index_add_"),
    "index_add_half": (lambda t, i, s: t.bfloat16().index_add(0, i, s.bfloat16(), alpha=2) + 1, "index_add"),
    "index_put_sums": (lambda t, i, s: t.index_put((i,), s * 2, accumulate=True) + 1, "index_put"),
    "gather": (lambda t, i, s: t.gather(0, i[:, None].repeat(1, 4)) * 2 + 1, "gather"),
    "scatter": (lambda t, i, s: t.scatter(0, i[:, None].repeat(1, 4), s) + 1, "scatter"),
    "scatter_add_": (lambda t, i, s: t.scatter_add_(0, i[:, None].repeat(1, 4), s) + 1, "scatter_add_"),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_is_what_it_is_in_eager(name: str, compiled: Any) -> None:
    """Gives the same result, or an IndexError that names the user's value, the operator and its line."""
    program, operator_name = LOOKUPS[name]
    call, report = compiled(program)
    source = torch.randn(3, 4)
    good = torch.tensor([0, 6, 2])
    for bad in (6, 7, -1, -7, -8, 1 << 40):
        index = torch.tensor([3, bad, 0]) if bad != 6 else good
        ours, theirs = torch.arange(28.0).view(7, 4), torch.arange(28.0).view(7, 4)
        try:
            wanted = program(theirs, index, source)
        except (IndexError, RuntimeError):
            assert index is not good
            told = rf"index {bad} is out of bounds for dimension 0 with size 7 in {operator_name} "
            with pytest.raises(IndexError, match=told + r"\(.*test_corners.py:\d+\)"):
                call(ours, index, source)
        else:
            torch.testing.assert_close(call(ours, index, source), wanted)
            assert torch.equal(ours, theirs)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"], report


def test_inductors_pieces_have_every_lookup(compiled: Any) -> None:
    """Operators that only ark takes whole are decomposed for Inductor, which gets what is too small for a region."""

    def program(t: Tensor, u: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        r = torch.linalg.qr(((s.tanh() + 1).cos() * 2 + s).sin())[1]
        t.index_copy_(-2, i, r)
        u.index_add_(-2, i, r, alpha=3)
        return t.index_select(-2, i), t.index_add(0, i, r), u.scatter_add_(0, i[:, None].repeat(1, 3), r).neg()

    call, report = compiled(program, minimum=7)
    i, s = torch.tensor([4, 0, 6]), torch.randn(3, 3)
    ours, theirs = ([torch.zeros(7, 3), torch.ones(7, 3)] for _ in range(2))
    for got, wanted in zip(call(*ours, i, s), program(*theirs, i, s), strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(ours, theirs)
    pieces = report.graphs[0].pieces
    assert sorted({piece.runs_on for piece in pieces}) == ["ark", "inductor"], report
    (rest,) = [piece for piece in pieces if piece.runs_on == "inductor" and "index_select" in piece.operators]
    assert {"index_copy_", "index_add", "index_add_"} <= set(rest.operators), rest


@pytest.mark.parametrize("view", [lambda b: b, lambda b: b.view(-1), lambda b: b.t()[1:]], ids=["all", "flat", "part"])
def test_a_copy_that_is_returned_is_no_alias(view: Callable[[Tensor], Tensor], compiled: Any) -> None:
    """A copy over a whole tensor can be removed, unless its reader could then write the original."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        b = torch.empty_like(x) * 0
        b.copy_(x)
        return view(b), x * 2 + 1

    call, _ = compiled(program)
    x = torch.arange(12.0).view(3, 4)
    got = call(x)[0]
    torch.testing.assert_close(got, program(x)[0])
    got.zero_()
    assert torch.equal(x, torch.arange(12.0).view(3, 4))


def test_a_part_put_back_where_it_was_is_no_alias(compiled: Any) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.slice_scatter(x, x[1:3], 0, 1, 3)
        return whole.view(-1), x * 2 + 1

    call, _ = compiled(program)
    x = torch.arange(12.0).view(3, 4)
    call(x)[0].zero_()
    assert torch.equal(x, torch.arange(12.0).view(3, 4))


def test_arguments_that_overlapped_and_do_so_no_more() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(b)
        return a * 2

    pairs = [((0, 6), (0, 6)), ((0, 6), (6, 12)), ((2, 8), (2, 8)), ((4, 10), (4, 10))]
    compiled = torch.compile(step, backend="ark", options={"choose": "ark", "minimum": 1})
    for first, second in pairs:
        base, want = torch.arange(12.0), torch.arange(12.0)
        expected = step(want[slice(*first)], want[slice(*second)].clone())
        assert torch.equal(compiled(base[slice(*first)], base[slice(*second)]), expected), (first, second)
        assert torch.equal(base, want), (first, second)
    separate = torch.arange(6.0), torch.arange(6.0) + 10
    assert torch.equal(compiled(*separate), (torch.arange(6.0) * 2 + 10) * 2)


def test_index_fill_takes_negative_indices() -> None:
    def fill(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return t.index_fill(0, index, 2.0) * 3

    def fill_in_place(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return t.index_fill_(1, index, 2.0) * 3

    index = torch.tensor([-1, 2])
    for function in (fill, fill_in_place):
        compiled = torch.compile(function, backend="ark", options={"choose": "ark", "fallback": False})
        value = torch.randn(10, 8)
        assert torch.equal(compiled(value.clone(), index), function(value.clone(), index))


def test_fractions_as_booleans() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    functions = (
        lambda x: torch.full_like(x, 0.5, dtype=torch.bool) & (x == 0),
        lambda x: (x > 5).fill_(0.5).float(),
        lambda x: torch.nn.functional.pad(x > 0, (1, 1), value=0.5) | False,
    )
    for function in functions:
        compiled = torch.compile(function, backend="ark", options={"choose": "ark", "minimum": 1})
        assert torch.equal(compiled(x), function(x))


def test_numbers_that_a_graph_holds_are_no_arguments(double: Any, compiled: Any) -> None:
    """On a GPU they are in other memory than the rest. A returned one is new in each call."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        x, number = x * 2, torch.tensor(2.5)
        x[0] = 1.5
        return x + number, number

    call, report = compiled(program)
    x = torch.randn(4, 5)
    for _ in range(2):
        got, wanted = call(x), program(x)
        torch.testing.assert_close(got, wanted)
        got[1].add_(1)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"], report
    (region,) = double.made
    assert sum(buffer["kind"] == "input" for buffer in region.graph.buffers) == 1
