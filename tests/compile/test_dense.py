"""Results with gaps (a copy of a part, with the part's layout) become dense, in one region, with eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.timeout(120)


def written(change: Callable[..., Any], *, last: bool = False) -> Callable[..., Tensor]:
    """Returns the first argument, doubled, after `change` has written parts of it."""

    def run(x: Tensor, *more: Tensor) -> Tensor:
        z = x * 2
        if last:
            z = z.to(memory_format=torch.channels_last)
        change(z, *more)
        return z + 1

    return run


def every_second(z: Tensor, y: Tensor) -> None:
    z[:, ::2].copy_(y)


def nested(z: Tensor, y: Tensor) -> None:
    z[:, ::2, 1:3] = y


def of_a_transpose(z: Tensor, y: Tensor) -> None:
    z.transpose(0, 2)[1::3] = y.sin()


def in_turns(z: Tensor, y: Tensor) -> None:
    z[..., 1::2] = z[..., 0::2].sin()
    z[..., 0::2] = y.cos() * z[..., 1::2]


def column(z: Tensor, y: Tensor) -> None:
    z[:, :, 3] = y
    z[:, 1] = z[:, 2]


def through_a_view(z: Tensor, y: Tensor) -> None:
    part = z[:, ::2]
    part.clamp_(min=0)
    part.index_copy_(1, torch.tensor([0, 2]), y)
    part.index_add_(1, torch.tensor([1, 1]), y)


FORMS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "every second": (written(every_second), lambda: (torch.randn(4, 6), torch.randn(4, 3))),
    "broadcast": (written(every_second), lambda: (torch.randn(4, 6), torch.randn(3))),
    "other types": (written(every_second), lambda: (torch.randn(4, 6), torch.arange(12).view(4, 3))),
    "to halves": (written(every_second), lambda: (torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(4, 1))),
    "nested": (written(nested), lambda: (torch.randn(4, 6, 8), torch.randn(4, 3, 2))),
    "of a transpose": (written(of_a_transpose), lambda: (torch.randn(4, 6, 8), torch.randn(3, 6, 4))),
    "in turns": (written(in_turns), lambda: (torch.randn(4, 6, 8), torch.randn(4, 6, 4))),
    "columns": (written(column), lambda: (torch.randn(4, 6, 8), torch.randn(4, 6))),
    "through a view": (written(through_a_view), lambda: (torch.randn(4, 6, 8), torch.randn(4, 2, 8))),
    "channels last": (
        written(lambda z, y: z[:, ::2, 1:].copy_(y), last=True),
        lambda: (torch.randn(2, 6, 5, 3), torch.randn(2, 3, 4, 3)),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_one_region(name: str, compiled: Any) -> None:
    function, make = FORMS[name]
    arguments = make()
    call, report = compiled(function)
    got, right = call(*arguments), function(*arguments)
    torch.testing.assert_close(got, right)
    assert got.stride() == right.stride()
    assert not report.fallbacks and len(report.regions) == 1, report


def test_an_argument_with_gaps_is_written_where_it_lies(compiled: Any) -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x[:, 1::2] = y.exp()
        x.mul_(2)
        return x.sum(0)

    call, report = compiled(step)
    whole, y = torch.randn(4, 9, 5), torch.randn(4, 2, 3)
    ours, theirs = whole.clone(), whole.clone()
    for _ in range(2):
        got, right = call(ours[:, :5, ::2], y), step(theirs[:, :5, ::2], y)
        torch.testing.assert_close(got, right)
        torch.testing.assert_close(ours, theirs)
    assert not report.fallbacks, report


def test_layouts_that_others_see_stay(compiled: Any) -> None:
    """The caller gets eager's layout, and as_strided's offsets refer to the part's layout."""

    def returned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        part = torch.ops.aten.copy(x[:, ::2], y)
        return part, part * 2 + 1

    def counted(x: Tensor, y: Tensor) -> Tensor:
        part = torch.ops.aten.copy(x[:, ::2], y)
        return part.as_strided((4, 2), (6, 4)) * 2 + 1

    for function in (returned, counted):
        torch._dynamo.reset()
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        call, report = compiled(function)
        got, right = call(x, y), function(x, y)
        for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, right)), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
        assert any("aten.copy.default: a result with gaps" in str(f) for f in report.fallbacks), report


def test_the_next_piece_knows_the_layout(compiled: Any) -> None:
    """Inductor's pieces are on both sides of a copy, and one of them reads it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        part = torch.ops.aten.copy(x.double().float()[:, ::2], y * 2 + 1)
        middle = part.median(0)[0]
        return (part.view(-1) * 2).view(4, 3) + middle + part.double().float().t().contiguous().t()

    x, y = torch.randn(4, 6), torch.randn(4, 3)
    call, report = compiled(function, minimum=1)
    torch.testing.assert_close(call(x, y), function(x, y))
    assert {piece.runs_on for piece in report.graphs[0].pieces} == {"ark", "inductor"}
    assert not any("gaps" in str(f) for f in report.fallbacks), report
