"""Errors of single operators against float64, in units of the result type's rounding.

Many cases form one graph, which is compiled once. The reference is eager PyTorch on the same inputs in float64. If a
call names a type, that becomes float64, too. Each case has two figures, each as root mean square and maximum:

- `scale`: differences relative to the size of the whole result (its root mean square; its maximum for the maximum),
  times 2^23 (float32), 2^7 (bfloat16) or 2^10 (float16);
- `element`, if elements have accurate digits of their own: each difference relative to the unit in the last place of
  the correct value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import accuracy_cases
import torch
from accuracy_inputs import Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Figures = dict[str, float]
FACTOR, FLOOR = 1.5, 0.25  # times the other's error, plus the cost of one more rounding, in units


class Float64(TorchDispatchMode):
    """Replaces requests for another floating type by float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wider(argument: Any) -> Any:
            named = isinstance(argument, torch.dtype) and argument.is_floating_point
            return torch.float64 if named else argument

        return func(*map(wider, args), **{name: wider(argument) for name, argument in (kwargs or {}).items()})


def tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [t for one in results for t in tensors(one)]


def drawn(dtype: torch.dtype) -> tuple[list[Case], list[list[Tensor]]]:
    """Returns all cases of a type and their arguments, the same on each call."""
    torch.manual_seed(0)
    cases = accuracy_cases.cases(dtype)
    assert len({case.name for case in cases}) == len(cases)
    return cases, [[make(dtype) for make in case.make] for case in cases]


def copied(given: list[list[Tensor]]) -> list[list[Tensor]]:
    """Copies the arguments for a call that writes some of them."""
    return [[tensor.clone() for tensor in one] for one in given]


def together(cases: Sequence[Case]) -> Callable[[list[list[Tensor]]], list[Any]]:
    def call(given: list[list[Tensor]]) -> list[Any]:
        return [case.call(*one) for case, one in zip(cases, given, strict=True)]

    return call


def exact(cases: Sequence[Case], given: list[list[Tensor]]) -> list[list[Tensor]]:
    results = []
    for case, one in zip(cases, copied(given), strict=True):
        wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in one]
        with Float64():
            results.append(tensors((case.exact or case.call)(*wide)))
    return results


def figures(case: Case, got: Sequence[Tensor], wanted: Sequence[Tensor]) -> Figures:
    """Returns the figures over all results of a case. Results that are not floating must be equal."""
    floating = [(a, b) for a, b in zip(got, wanted, strict=True) if a.is_floating_point()]
    wrong = sum(int((a != b).sum()) for a, b in zip(got, wanted, strict=True) if not a.is_floating_point())
    if not floating:
        return {"wrong": wrong}
    eps = torch.finfo(floating[0][0].dtype).eps
    right = torch.cat([b.flatten() for _, b in floating])
    difference = torch.cat([a.double().flatten() for a, _ in floating]) - right
    assert difference.isfinite().all(), case.name
    found = {
        "wrong": wrong,
        "scale": float(difference.norm() / right.norm()) / eps,
        "scale_worst": float(difference.abs().max() / right.abs().max()) / eps,
    }
    if case.elementwise:
        least = torch.finfo(floating[0][0].dtype).tiny
        units = difference / (eps * torch.exp2(right.abs().clamp_min(least).log2().floor()))
        found |= {"element": float(units.square().mean().sqrt()), "element_worst": float(units.abs().max())}
    return found


def nearness(mine: Figures, other: Figures) -> float:
    """Returns the root mean square error relative to its limit. Above 1 is too much."""
    if mine["wrong"]:
        return float("inf")
    return max(
        (mine[kind] / (FACTOR * other[kind] + FLOOR) for kind in ("scale", "element") if kind in mine), default=0
    )
