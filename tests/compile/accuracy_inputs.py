"""Building blocks of the cases in accuracy_cases.py: random numbers of an operator's domain, never zero, and layouts.

Numbers are drawn in float64 and rounded to the type, so that all types get the same distribution. Operators with a
single result number are called on several inputs, because the rounding of one number is luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
FLOATS = (f32, bf16, f16)

Make = Callable[[torch.dtype], Tensor]
Draw = Callable[..., Make]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    operator: Any  # a key of lowering.RULES
    layout: str
    call: Call
    make: tuple[Make, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    elementwise: bool = False  # each element depends on few numbers and has accurate digits
    exact: Call | None = None  # the call in float64, if the operator has none

    @property
    def name(self) -> str:
        return f"{self.operator} {self.layout}"


def case(operator: Any, layout: str, *make: Make, call: Call | None = None, **options: Any) -> Case:
    return Case(operator, layout, call or operator, make, **options)


# Calls.


def bound(operator: Any, *after: Any, **named: Any) -> Call:
    """Binds these arguments after the tensors."""
    return lambda *tensors: operator(*tensors, *after, **named)


def first(call: Call) -> Call:
    return lambda *tensors: call(*tensors)[0]


def negated(call: Call) -> Call:
    """Negates, which is exact. It does not return what the call updates in place, so that the update stays one."""
    return lambda *tensors: call(*tensors).neg()


# Numbers.


def normal(*shape: int) -> Make:
    return lambda dtype: torch.randn(shape, dtype=torch.float64).to(dtype)


def changed(draw: Draw, change: Callable[[Tensor], Tensor]) -> Draw:
    return lambda *shape: lambda dtype: change(draw(*shape)(torch.float64)).to(dtype)


def _uniform(*shape: int) -> Make:
    return lambda dtype: torch.rand(shape, dtype=torch.float64).to(dtype)


def between(least: float, most: float) -> Draw:
    return changed(_uniform, lambda x: least + (most - least) * x)


def magnitudes(least: float, most: float, signed: bool = True) -> Draw:
    """Draws logarithmically: as many numbers between 1/8 and 1/4 as between 2 and 4."""

    def make(*shape: int) -> Make:
        def draw(dtype: torch.dtype) -> Tensor:
            size = torch.exp2(math.log2(least) + math.log2(most / least) * torch.rand(shape, dtype=torch.float64))
            return (size * (torch.randint(0, 2, shape) * 2 - 1) if signed else size).to(dtype)

        return draw

    return make


wide, positive = magnitudes(2**-10, 8), magnitudes(2**-10, 2**10, signed=False)
moderate = magnitudes(1 / 4, 4, signed=False)  # its seventh power is finite in float16


def at(limit: int, *shape: int) -> Make:
    return lambda _: torch.randint(0, limit, shape)


def each(*shape: int, most: int | None = None) -> Make:
    """Each index once along the last dimension, or `most` of them."""
    return lambda _: torch.rand(shape).argsort(-1)[..., :most]


def truths(*shape: int) -> Make:
    return lambda _: torch.rand(shape) < 0.5


def integers(*shape: int) -> Make:
    return at(99, *shape)


# Layouts.


def _noted(layout: str, *numbers: Any) -> str:
    return " ".join([layout, *map(str, numbers)])


def unary(operator: Any, draw: Draw, *rest: Any, dtypes: Any = FLOATS, **named: Any) -> list[Case]:
    call, given = bound(operator, *rest, **named), (*rest, *named.values())
    options: dict[str, Any] = dict(dtypes=dtypes, elementwise=True)
    return [
        case(operator, _noted("flat", *given), draw(4099), call=call, **options),
        case(operator, _noted("odd", *given), draw(7, 37), call=call, **options),
        case(operator, _noted("strided", *given), draw(38, 9), call=lambda a: call(a.t()[:, ::2]), **options),
    ]


def binary(operator: Any, left: Draw, right: Draw | None = None, dtypes: Any = FLOATS, **named: Any) -> list[Case]:
    call, given, right = bound(operator, **named), named.values(), right or left
    views = (left(38, 9), right(19, 9))
    options: dict[str, Any] = dict(dtypes=dtypes, elementwise=True)
    return [
        case(operator, _noted("flat", *given), left(4099), right(4099), call=call, **options),
        case(operator, _noted("broadcast", *given), left(5, 1, 33), right(17, 1), call=call, **options),
        case(operator, _noted("strided", *given), *views, call=lambda a, b: call(a[::2], b), **options),
    ]


def reduction(operator: Any, draw: Draw, after: Callable[[int], tuple[Any, ...]]) -> list[Case]:
    """`after` gives the arguments after the tensor, by the reduced dimension."""
    rows, columns = bound(operator, *after(1)), bound(operator, *after(0))
    return [
        *(case(operator, f"rows of {n}", draw(m, n), call=rows) for m, n in ((301, 7), (97, 1021), (33, 40009))),
        case(operator, "columns of 4099", draw(4099, 65), call=columns),
        case(operator, "strided", draw(3001, 40), call=lambda a: rows(a.t()[:, ::3])),
    ]


def whole(operator: Any, draw: Draw) -> list[Case]:
    """Reduces a whole tensor to one number."""

    def several(a: Tensor) -> list[Any]:
        return [operator(one) for one in a.unbind(0)]

    return [
        case(operator, "of 21", draw(24, 3, 7), call=several),
        case(operator, "of 20011", draw(24, 20011), call=several),
    ]
