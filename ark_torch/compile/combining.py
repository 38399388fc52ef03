"""The ends of a mixture of experts: rows taken from tokens, and rows weighted and summed into tokens.

Both are recognized only if the operator gives the same result: one row per choice, in the order of choices or sorted by
expert; products of rows and weights, and their sums, in float32 with one rounding. PyTorch promises no order for sums
over a dimension; those of index_add and scatter_add are in expert order.
"""

from __future__ import annotations

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.choices import (
    CASTS,
    Choices,
    argument,
    divisor,
    is_called,
    is_full,
    numbers_up,
    plain,
    sorts_up,
    taken,
)
from ark_torch.compile.graph_edits import VIEWS

_WIDE = (torch.float32, torch.float64)


class Tokens(NamedTuple):
    x: Any  # [tokens, columns]
    k: int
    order: Node | None  # the permutation that sorts the choices; None: rows are in the order of choices


class Combined(NamedTuple):
    node: Any  # [tokens, columns]
    weights: Node  # a number per choice, in the order of choices
    by_expert: bool  # sums are in expert order, else in the order of choices


def tokens_of(rows: Any, choices: Choices, in_order: bool) -> Tokens | None:
    """The tokens that rows are copies of."""
    while is_called(rows, aten.clone.default):
        rows = rows.args[0]
    found = taken(rows)
    if in_order:
        if found is None:
            return None
        x, token = found
        divided = plain(token)
        k = divisor(divided)
        if k is None or not choices.order(divided.args[0]):
            return None
        return _fitting(x, k, choices, divided.args[0])
    node: Any = rows
    while is_called(node, *VIEWS, aten.clone.default):
        node = node.args[0]
    if not is_called(node, aten.expand.default) or not is_called(node.args[0], aten.unsqueeze.default):
        return None
    column, wide = node.args[0], tensor_of(node)
    x = column.args[0]
    if column.args[1] % 3 != 1 or wide is None or wide.dim() != 3 or x.meta["val"].dim() != 2:
        return None
    return _fitting(x, wide.shape[1], choices, None)


def _fitting(x: Any, k: Any, choices: Choices, order: Any) -> Tokens | None:
    value, flat = tensor_of(x), tensor_of(choices.flat)
    if value is None or flat is None or value.dim() != 2 or not isinstance(k, int):
        return None
    fits = flat.dim() != 2 or flat.shape[1] == k
    return Tokens(x, k, order) if fits and statically_known_true(value.shape[0] * k == flat.numel()) else None


def combined(rows: Any, choices: Choices, in_order: bool, tokens: Tokens) -> Combined | None:
    """The sums that rows end in, if nothing else reads them."""
    dtype = rows.meta["val"].dtype
    node, weights, wide = rows, None, dtype
    while len(node.users) == 1:
        (user,) = node.users
        found = _summed(user, node, choices, in_order, tokens)
        if found:
            return _rounded(user, dtype, weights, in_order) if weights is not None and wide in _WIDE else None
        if is_called(user, *CASTS):
            if weights is not None or user.meta["val"].dtype not in _WIDE:
                return None
            wide = user.meta["val"].dtype
        elif user.target is aten.mul.Tensor and weights is None:
            other = user.args[1] if user.args[0] is node else user.args[0]
            weights = _weights(other, choices, in_order, tokens, node)
            wide = user.meta["val"].dtype
            if weights is None or wide not in _WIDE or user.meta["val"].dim() != node.meta["val"].dim():
                return None
        elif in_order and _unsorts(user, node, choices):
            in_order = False
        elif not (not in_order and user.target in VIEWS):
            return None
        node = user
    return None


def _rounded(node: Any, dtype: torch.dtype, weights: Node, by_expert: bool) -> Combined | None:
    """Includes the rounding that follows."""
    if node.meta["val"].dtype == dtype:
        return Combined(node, weights, by_expert)
    users = list(node.users)
    if len(users) == 1 and is_called(users[0], *CASTS) and users[0].meta["val"].dtype == dtype:
        return Combined(users[0], weights, by_expert)
    return None


def _weights(other: Any, choices: Choices, in_order: bool, tokens: Tokens, rows: Any) -> Any:
    """The choices' numbers, in their order, given [..., 1] with a number per row."""
    value, number = tensor_of(other), tensor_of(choices.flat)
    if (
        value is None
        or number is None
        or value.shape[-1] != 1
        or value.dtype not in (*_WIDE, torch.bfloat16, torch.float16)
    ):
        return None
    if value.dtype == torch.float64 and rows.meta["val"].dtype != torch.float64:
        return None
    if value.dim() not in (2, 3) or not statically_known_true(value.numel() == number.numel()):
        return None
    if (value.dim() == 3 and in_order) or rows.meta["val"].dim() != value.dim():
        return None
    if not in_order:
        return other
    while is_called(other, *VIEWS, aten.unsqueeze.default, aten.clone.default):
        other = other.args[0]
    found = taken(other)
    if found is None or not choices.order(found[1]):
        return None
    whole = statically_known_true(found[0].meta["val"].numel() == number.numel())
    return found[0] if found[0].meta["val"].dim() == 1 and whole else None


def _unsorts(user: Any, rows: Any, choices: Choices) -> bool:
    """Whether the node brings sorted rows into the order of choices."""
    if user.target is aten.index_copy.default:
        return user.args[1] == 0 and user.args[3] is rows and choices.order(user.args[2])
    if user.target is aten.index_put.default and len(user.args) == 3:
        index: Any = user.args[1]
        return len(index) == 1 and user.args[2] is rows and choices.order(index[0])
    found = taken(user)
    if found is None or found[0] is not rows:
        return False
    back = plain(found[1])
    return (
        is_called(back, getitem)
        and back.args[1] == 1
        and sorts_up(back.args[0])
        and (choices.order(back.args[0].args[0]))
    )


def _summed(user: Any, rows: Any, choices: Choices, in_order: bool, tokens: Tokens) -> bool:
    value = tensor_of(rows)
    if value is None or value.dtype not in _WIDE:
        return False
    if user.target is aten.sum.dim_IntList:
        dims, dtype = user.args[1], user.kwargs.get("dtype")
        three = value.dim() == 3 and value.shape[1] == tokens.k and dims in ([1], [-2])
        return three and not in_order and not argument(user, 2, "keepdim", False) and dtype in (None, value.dtype)
    if user.target not in (aten.index_add.default, aten.scatter_add.default) or user.args[1] != 0 or user.kwargs:
        return False
    base, _, index, source = user.args
    if source is not rows or not is_full(base, 0) or not _alike(tensor_of(base), tokens.x.meta["val"]):
        return False
    if user.target is aten.scatter_add.default:
        wide = tensor_of(index)
        if wide is None or not is_called(index, aten.expand.default) or wide.shape[-1] != value.shape[-1]:
            return False
        index = index.args[0]
        if index.meta["val"].shape[1:] != (1,):
            return False
    token = plain(index)
    if divisor(token) != tokens.k:
        return False
    return choices.order(token.args[0]) if in_order else numbers_up(token.args[0])


def _alike(one: Any, other: Any) -> bool:
    return one.dim() == other.dim() and all(
        statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True)
    )
