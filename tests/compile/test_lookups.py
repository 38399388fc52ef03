"""Lookups in several dimensions at once, as in the masks and positions of Hugging Face models; uninitialized memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ark_torch.errors import IndexOutOfRange

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape)


ROWS, COLUMNS = torch.tensor([[0], [2], [-1]]), torch.tensor([[3, -4, 1, 0]])

CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "two": (lambda a, i, j: a[i, j], lambda: (numbers(3, 4), ROWS, COLUMNS)),
    "transposed": (lambda a, i, j: a.t()[j, i], lambda: (numbers(3, 4), ROWS, COLUMNS)),
    "of_three": (lambda a, i, j: a[i, j] * 2, lambda: (numbers(3, 4, 5), ROWS, COLUMNS)),
    "last_two": (lambda a, i, j: a[:, i, j], lambda: (numbers(2, 3, 4), ROWS, COLUMNS)),
    "all_three": (lambda a, i, j: a[i, j, j % 2], lambda: (numbers(3, 4, 2), ROWS, COLUMNS % 4)),
    "with_gaps": (lambda a, i, j: a[:, ::2][i, j], lambda: (numbers(3, 8), ROWS, COLUMNS)),
    "expanded": (lambda a, i, j: a.expand(3, 4)[i, j], lambda: (numbers(4), ROWS, COLUMNS)),
    "padding": (lambda a, i, j: a[i, j] & (j <= i), lambda: (torch.rand(3, 4) < 0.5, ROWS, COLUMNS)),
    "gather": (lambda a, i: a.gather(1, i), lambda: (numbers(3, 6), torch.randint(0, 6, (3, 4)))),
    "gather_rows": (lambda a, i: a.gather(0, i), lambda: (numbers(3, 6), torch.randint(0, 3, (5, 4)))),
    "gather_expanded": (
        lambda a, i: a.expand(3, 6).gather(-1, i),
        lambda: (torch.arange(6), torch.randint(0, 6, (3, 4))),
    ),
    "gather_three": (lambda a, i: a.gather(1, i), lambda: (numbers(2, 5, 3), torch.randint(0, 5, (2, 4, 2)))),
    "empty": (lambda a: torch.empty(3, 4).copy_(a) + torch.empty_like(a).fill_(2), lambda: (numbers(3, 4),)),
}


@pytest.mark.parametrize("name", CASES)
def test_lookup(name: str, double: Any, compiled: Any) -> None:
    function, make = CASES[name]
    arguments = make()
    call, report = compiled(function, fallback=False, minimum=1)
    assert torch.equal(call(*arguments), function(*arguments))
    assert len(report.regions) == 1


def test_lookups_in_one_kernel(compiled: Any) -> None:
    arguments = {name: make() for name, (_, make) in CASES.items()}

    def together(given: dict[str, tuple[Any, ...]]) -> dict[str, Tensor]:
        return {name: CASES[name][0](*one) for name, one in given.items()}

    call, report = compiled(together, fallback=False)
    got, wanted = call(arguments), together(arguments)
    assert [name for name in CASES if not torch.equal(got[name], wanted[name])] == []
    assert len(report.regions) == 1


def test_an_index_out_of_range_is_told(compiled: Any) -> None:
    """Another dimension must not hide it. The message has the user's index and dimension, like eager's."""
    call, report = compiled(lambda a, i, j: a[:, i, j] + 1, fallback=False)
    table = numbers(2, 3, 4)
    for i, j, told in ((0, 4, (4, 2, 4)), (0, -5, (-5, 2, 4)), (3, 0, (3, 1, 3)), (-4, 1, (-4, 1, 3))):
        with pytest.raises(IndexError, match="index {} is out of bounds for dimension {} with size {}".format(*told)):
            call(table, torch.tensor([[1], [i]]), torch.tensor([2, j]))
    assert len(report.regions) == 1


def test_handlers_of_either_class_catch_an_index_out_of_range(compiled: Any) -> None:
    """Eager gather raises RuntimeError, eager indexing IndexError."""
    call, report = compiled(lambda a, i: torch.gather(a, 0, i) + 1, fallback=False)
    table, index = numbers(3, 4), torch.full((1, 4), 3)
    for expected in (RuntimeError, IndexError, IndexOutOfRange):
        with pytest.raises(expected, match="out of bounds"):
            call(table, index)
    assert len(report.regions) == 1


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 2, 9, 9], [0, -1, 2, 3]], ids=str)
def test_offsets_that_no_bags_have(offsets: list[int], compiled: Any) -> None:
    """The error is about the offsets, not about an index of the table."""
    call, report = compiled(lambda w, i, o: torch.nn.functional.embedding_bag(i, w, o, mode="sum") * 2)
    table, index = numbers(10, 4), torch.arange(6)
    call(table, index, torch.tensor([0, 2, 2, 6]))
    with pytest.raises(
        IndexOutOfRange, match=r"offsets hold -?\d .*begin at 0, do not fall, and end within the indices"
    ):
        call(table, index, torch.tensor(offsets))
    assert len(report.regions) == 1
