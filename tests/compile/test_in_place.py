"""Mutated inputs: written in place if that cannot be noticed, and correct in any case."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ark_torch.compile import fast_call
from ark_torch.errors import UnsupportedGraph

pytestmark = pytest.mark.timeout(120)


def put(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.index_copy_(1, i, v * 2)
    return cache.sum(1) + 1


def put_twice(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.index_copy_(1, i, v * 2)
    middle = cache.sum(1)
    cache.index_copy_(1, i + 1, v * 3)
    return middle + cache.sum(1)


def read_old_after(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    old = cache * 1
    cache.index_copy_(1, i, v * 2)
    return old.sum(1) + cache.sum(1)


def read_old_view(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    old = cache.clone()
    cache.index_copy_(1, i, v + 1)
    return old.t() @ cache


def slot(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache[:, 2] = v[:, 0] * 2
    return cache * 2


def part(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache[:, 1:3] += v * 2
    return cache.relu()


def shift(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache[:, 1:] = cache[:, :-1].clone()
    return cache + 1


def add(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.add_(1).mul_(2)
    return cache - 1


def transpose_itself(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache[:, :3].copy_(cache[:, :3].t() * 2)
    return cache * 1 + 1


def returned(cache: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    cache.index_copy_(1, i, v * 2)
    return cache, cache[1:]


def through_view(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.t()[i] = v.t() * 2
    return cache.t().reshape(-1) + 1


def twice_the_same_index(cache: Tensor, i: Tensor, v: Tensor) -> Tensor:
    cache.index_copy_(1, i, v + 1)
    cache.index_copy_(1, i, v + 2)
    return cache + 1


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    function.__name__: (function, updates)
    for function, updates in (
        (put, 1),
        (put_twice, 1),
        (read_old_after, 1),
        (read_old_view, 0),
        (slot, 1),
        (part, 1),
        (shift, 0),
        (add, 0),
        (transpose_itself, 0),
        (returned, 1),
        (through_view, 0),
        (twice_the_same_index, 1),
    )
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_update(name: str, strided: bool, plan: str, compiled: Any) -> None:
    function, in_place = CASES[name]
    cache = torch.randn(6, 10)[::2, ::2] if strided else torch.randn(3, 5)
    i, v = torch.tensor([0, 3]), torch.randn(3, 2)
    other = cache.clone() if not strided else torch.zeros(6, 10)[::2, ::2].copy_(cache)
    call, report = compiled(function)
    pointer = cache.data_ptr()
    for step in range(3):
        wanted = function(other, i, v)
        got = call(cache, i, v)
        for one, right in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, wanted)), strict=True):
            torch.testing.assert_close(one, right, msg=lambda m, s=step: f"step {s}: {m}")
        torch.testing.assert_close(cache, other)
        v = v + 1
    assert cache.data_ptr() == pointer
    assert len(report.graphs) == 1 and report.regions
    if in_place:
        assert report.graphs[0].in_place == 1, report


def test_two_views_of_one_tensor(plan: str, compiled: Any) -> None:
    """AOTAutograd merges overlapping inputs: a write through one is seen through the other."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2 + a[0]

    base, other = torch.arange(8.0), torch.arange(8.0)
    call, _ = compiled(function)
    got, wanted = call(base[:6], base[:6].view(6)), function(other[:6], other[:6].view(6))
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(base, other)


def test_parts_of_one_tensor(plan: str, compiled: Any) -> None:
    """The parts interleave without overlapping."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2 + a

    base, other = torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4)
    call, report = compiled(function)
    torch.testing.assert_close(call(base[:, :2], base[:, 2:]), function(other[:, :2], other[:, 2:]))
    torch.testing.assert_close(base, other)
    assert [piece.runs_on for piece in report.graphs[0].pieces] == ["ark"], report


def test_halves_of_one_cache(compiled: Any) -> None:
    def step(k: Tensor, v: Tensor, at: Tensor, x: Tensor) -> Tensor:
        k.index_copy_(0, at, x * 2)
        v.index_copy_(0, at, x * 3)
        return k.sum(0) + v.sum(0)

    call, report = compiled(step, fallback=False)
    ours, theirs = torch.zeros(8, 2, 20), torch.zeros(8, 2, 20)
    for position in range(3):
        x, at = torch.randn(1, 20), torch.tensor([position])
        torch.testing.assert_close(call(ours[:, 0], ours[:, 1], at, x), step(theirs[:, 0], theirs[:, 1], at, x))
        assert torch.equal(ours, theirs)
    assert len(report.regions) == 1


def test_arguments_that_overlap(compiled: Any) -> None:
    """No guard checks that arguments do not overlap, as they did not at compile time.

    The call then runs Dynamo's graph, operator by operator in program order. A region by itself raises an error.
    """

    def step(k: Tensor, v: Tensor, at: Tensor, x: Tensor) -> Tensor:
        k.index_copy_(0, at, x * 2)
        return v.sum(0) + x

    at, x = torch.tensor([3]), torch.randn(1, 5)
    for fallback in (True, False):
        torch._dynamo.reset()
        call, report = compiled(step, fallback=fallback)
        call(torch.zeros(6, 5), torch.zeros(6, 5), at, x)
        (piece,) = report.regions
        ours, theirs = torch.arange(40.0).view(8, 5), torch.arange(40.0).view(8, 5)
        wanted = step(theirs[:6], theirs[2:], at, x)
        if fallback:
            torch.testing.assert_close(call(ours[:6], ours[2:], at, x), wanted)
            assert torch.equal(ours, theirs)
        else:
            with pytest.raises(UnsupportedGraph, match="share memory"):
                call(ours[:6], ours[2:], at, x)
        with pytest.raises(ValueError, match="share memory"):
            piece.region([x, ours[:6], at, ours[2:]])  # in the order in which they are read


@pytest.mark.parametrize("cut", [False, True])
def test_arguments_that_overlap_only_later(compiled: Any, cut: bool) -> None:
    """A read of one argument, after the other was written, gets the written data (PyTorch issue 139789)."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(5)
        return b * 2 + (torch.sort(a).values if cut else 1)

    call, report = compiled(function)
    call(torch.zeros(5), torch.zeros(5))
    assert len(report.regions) >= 1
    for begin in range(8):
        ours, theirs = torch.arange(16.0), torch.arange(16.0)
        got, wanted = call(ours[3:8], ours[begin : begin + 5]), function(theirs[3:8], theirs[begin : begin + 5])
        assert torch.equal(got, wanted) and torch.equal(ours, theirs), begin


def test_inputs_that_differ_later_from_what_was_compiled_for(compiled: Any) -> None:
    """Strides, offset, lazy conjugation and negation, requires_grad, a subclass, inference tensors."""

    class Tagged(Tensor):
        pass

    def function(a: Tensor, b: Tensor) -> Tensor:
        return (a * 2 + b).relu()

    call, _ = compiled(function)
    base = torch.randn(6, 6)
    call(base.clone(), base.clone())
    with torch.inference_mode():
        inferred = torch.randn(6, 6)
    negative = torch.view_as_complex(torch.randn(6, 6, 2)).conj().imag
    assert negative.is_neg()
    others = {
        "strides": base.t(),
        "offset": torch.randn(50)[7:43].view(6, 6),
        "expanded": torch.randn(6, 1).expand(6, 6),
        "negation": negative,
        "gradients": torch.randn(6, 6, requires_grad=True),
        "subclass": torch.randn(6, 6).as_subclass(Tagged),
        "inference": inferred,
        "double": base.double(),
    }
    for name, other in others.items():
        for pair in ((other, base), (base, other)):
            wanted = function(*pair)
            got = call(*pair)
            assert type(got) is type(wanted) and got.dtype == wanted.dtype, name
            torch.testing.assert_close(got.as_subclass(Tensor), wanted.as_subclass(Tensor), msg=name)


def test_inference_tensors_are_written_in_inference_mode_only(compiled: Any) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(b)
        return a * 2

    call, _ = compiled(function)
    with torch.inference_mode():
        tensor = torch.ones(4)
        torch.testing.assert_close(call(tensor, torch.ones(4)), torch.full((4,), 4.0))
    for one in (function, call):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            one(tensor, torch.ones(4))


def test_same_tensor_twice(plan: str, compiled: Any) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        a[0] = 5
        return a + b * 2

    call, _ = compiled(function)
    a, b = torch.ones(3), torch.ones(3)
    torch.testing.assert_close(call(a, a), function(b, b))
    torch.testing.assert_close(a, b)


def test_counter(plan: str, compiled: Any) -> None:
    """An int64 number that each step increments, as in Hugging Face's cache."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("length", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            self.length.add_(1)
            return x * self.length + 1

    model = Model()
    call, _ = compiled(model)
    for step in range(1, 4):
        torch.testing.assert_close(call(torch.ones(2)), torch.full((2,), step + 1.0))
        assert model.length == step


def test_what_is_written_of_tensors_that_consist_of_others() -> None:
    """AOTAutograd's record is of plain tensors: a DTensor counts for its local tensor and its mesh."""
    plain, of_two = types.SimpleNamespace(), types.SimpleNamespace(arg_count=2)
    way = fast_call.Way([None] * 6)
    for given, written, wanted in (
        ([plain] * 3, "001", [2]),
        ([plain, of_two, plain, of_two], "001001", [1, 3]),
        ([of_two, plain], "001", [1]),
        ([of_two, plain], "0010", [0, 1]),  # the record does not fit
        ([plain] * 3, "0000", [0, 1, 2]),
    ):
        info = [types.SimpleNamespace(mutates_data=one == "1") for one in written]
        way._record = types.SimpleNamespace(input_info=info, subclass_inp_meta=given)
        assert way.written(len(given)) == wanted, (given, written)
    way._record = None
    assert way.written(2) == [0, 1]
