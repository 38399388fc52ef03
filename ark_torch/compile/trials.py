"""Numbers for the sizes of a graph, for passes that run moves of elements on real tensors to see where these go.

Fixed sizes are their own numbers. Sizes that depend on one symbol, as those of a batch, get numbers from two values of
it. What the moves do for both is taken to hold for all: strides and bounds of views are polynomials in the symbol, and
the values are neither small nor equal to other sizes. Other symbols, as a number of tables, have the value that they
have in this call, and fix() makes the graph's guards hold it: a number is a symbol on some ranks and fixed on others
(torch._dynamo has no symbols for 0 and 1), and all ranks must fuse or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ark_torch.compile.analysis import tensor_of
from ark_torch.compile.graph_edits import NotFused, value_of

_FIRST, _LAST = 5, 10_000  # values of a symbol that are tried


class Trial:
    """One number for each size. `value`: of the symbol, if there is one."""

    def __init__(self, symbol: Any = None, value: int = 0) -> None:
        self._values = {} if symbol is None else {symbol: value}
        self._taken: dict[Any, Any] = {}  # other symbols -> whose they are (torch's ShapeEnv)

    def __call__(self, size: Any) -> int:
        """Takes a number, a symbolic size, or the node of one."""
        size = value_of(size)
        if isinstance(size, int):
            return size
        if not isinstance(size, torch.SymInt):
            raise NotFused("its moves read other tensors")
        number, shapes = size.node.expr.subs(self._values), size.node.shape_env
        known = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val  # by version
        others = {symbol: known[symbol] for symbol in number.free_symbols if symbol in known}
        number = number.subs(others)
        if not number.is_Integer or (others and shapes.frozen):
            raise NotFused("its sizes depend on several symbols, or not on its batch")
        self._taken.update(dict.fromkeys(others, shapes))
        return int(number)

    def fix(self) -> None:
        """Compiles the graph again when a symbol beside the batch's, of those that were met, has another value."""
        for symbol, shapes in self._taken.items():
            shapes.evaluate_expr(symbol)

    def shape(self, node: Node) -> tuple[int, ...]:
        value = tensor_of(node)
        if value is None:
            raise NotFused(f"{node.name} is no tensor")
        return tuple(self(n) for n in value.shape)


def trials_of(whole: Any, parts: int) -> list[Trial]:
    """Trials in which the size is divided into so many equal parts."""
    if isinstance(whole, int):
        return [Trial()]
    symbols = whole.node.expr.free_symbols
    if len(symbols) != 1:
        raise NotFused("its batch depends on several symbols")
    (symbol,) = symbols
    found = list[Trial]()
    for value in range(_FIRST, _LAST):
        trial = Trial(symbol, value)
        number = trial(whole)
        if number >= _FIRST * parts and number % parts == 0:
            found.append(trial)
            if len(found) == 2:
                return found
    raise NotFused(f"its batch, {whole}, is not known to be divided into {parts}")


def known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes, or anything else, are known to be equal."""
    symbolic = isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt)
    return bool(statically_known_true(one == other) if symbolic else one == other)


def is_size(node: Node) -> bool:
    """Whether a node is a symbolic size, not a tensor."""
    return isinstance(node.meta.get("val"), torch.SymInt | int)
