"""A random program in float64: its values, and how much rounding can change them.

Integers and booleans are eager PyTorch's, because they are computed from exact values (random_graphs.py).
"""

from __future__ import annotations

from typing import Any

import torch
from random_graphs import NAMES, Line, Program
from torch import Tensor

WIDE = {**NAMES, **{name: torch.float64 for name in ("f32", "bf16", "f16")}}


def _whole(tensor: Tensor) -> Tensor:
    return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _factors(whole: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
    noise = torch.rand(whole.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return noise.mul_(epsilon).add_(1)


def _shift(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Perturbs a whole storage by a rounding to `dtype`, relative and at its smallest numbers."""
    whole, limits = _whole(tensor), torch.finfo(dtype)
    tiny = (torch.rand(whole.shape, generator=generator, dtype=torch.float64) - 0.5) * limits.smallest_normal
    whole.mul_(_factors(whole, limits.eps, generator)).add_(tiny * limits.eps)


def _shifted(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a copy perturbed by a rounding to float32, with the original's layout."""
    whole = _whole(tensor)
    copy = whole * _factors(whole, torch.finfo(torch.float32).eps, generator)
    return torch.as_strided(copy, tensor.shape, tensor.stride(), tensor.storage_offset())


def _own(result: Tensor, scope: dict[str, Any]) -> Tensor:
    """Clones a result that shares an operand's storage because a cast to float64 did nothing."""
    known = {t.untyped_storage()._cdata for t in scope.values() if isinstance(t, Tensor)}
    return result.clone() if result.untyped_storage()._cdata in known else result


def wide(program: Program, types: dict[str, torch.dtype], wandering: int) -> list[Tensor]:
    """Runs the program in float64. With `wandering` > 0, adds rounding errors."""
    generator = torch.Generator().manual_seed(wandering)
    scope: dict[str, Any] = dict(WIDE)
    made: dict[str, Any] = {**NAMES, "g": torch.Generator().manual_seed(0)}
    for text in program.bases:
        exec(text, made)
    for name in program.base_names:
        made[name] = made[name].double() if made[name].is_floating_point() else made[name]
    for text in program.views:
        exec(text, made)
    scope.update({name: made[name] for name in program.arguments})
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the type of integer division
    try:
        for line in program.body:
            _step(line, scope, types, generator if wandering else None)
    finally:
        torch.set_default_dtype(usual)
    return [*(scope[name] for name in program.returns), *(made[name] for name in program.base_names)]


def _step(line: Line, scope: dict[str, Any], types: dict[str, torch.dtype], generator: Any) -> None:
    if line.before is not None:
        scope[line.target] = line.before.clone()
        return
    noisy = generator is not None and not line.exact
    if not line.target:
        exec(line.text, scope)
        changed = scope[line.reads[0]]
        if noisy and changed.is_floating_point():
            _shift(changed, types[line.reads[0]], generator)
        return
    given = dict(scope)
    if noisy and line.fresh:  # sums are rounded at every term
        for name in line.reads:
            if scope[name].is_floating_point():
                given[name] = _shifted(scope[name], generator)
    result = eval(line.text, given)
    if line.fresh:
        result = _own(result, scope)
    scope[line.target] = result
    if noisy and line.fresh and result.is_floating_point():
        _shift(result, types[line.target], generator)
