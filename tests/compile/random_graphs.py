"""Random programs for torch.compile. hypothesis draws the text of a program and of its arguments.

While a program is drawn, eager PyTorch runs it statement by statement. Operators are chosen by the real shapes, types
and values, so that every program is valid. A statement that eager PyTorch refuses is left out.

A value is *exact* if every correct implementation computes the same bits: an argument, a part of one, the largest of
several. Discontinuous operators (comparisons, floor, argmax, a cast to integers) are applied to exact values only, so
that integers and booleans are always exact. Other values are compared within the limits of rounding (random_checks.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

T = TypeVar("T")
HEAD = """import torch
import torch.nn.functional as F

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
i64, i32, boolean = torch.int64, torch.int32, torch.bool
inf, nan = float("inf"), float("nan")
"""
NAMES: dict[str, Any] = {}
exec(HEAD, NAMES)
TYPES = {NAMES[name]: name for name in ("f64", "f32", "bf16", "f16", "i64", "i32", "boolean")}
FLOATS = ("f32", "f32", "f32", "bf16", "bf16", "f16")
SIZES = (3, 1, 2, 4, 5, 7, 8, 11, 13, 16, 17, 31, 32, 33, 64, 67, 100, 128, 257)
MOST_ELEMENTS = 1 << 15


@dataclass
class Line:
    """One statement. `target` is what it defines, if anything; `reads` are its tensors."""

    target: str
    text: str
    reads: tuple[str, ...]
    rounds: bool = True  # a floating result is rounded, so not exact
    # Known after it ran:
    fresh: bool = False  # the result has its own storage
    exact: bool = False
    before: Tensor | None = None  # a copy of an integer or boolean result at that time

    def __str__(self) -> str:
        return f"{self.target} = {self.text}" if self.target else self.text


@dataclass
class Program:
    bases: list[str] = field(default_factory=list)  # statements that create whole tensors
    views: list[str] = field(default_factory=list)  # statements that create the arguments as views of them
    base_names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    body: list[Line] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"  # where the arguments are; their content is drawn on the CPU

    def source(self) -> str:
        def block(head: str, lines: Iterable[Any], result: Sequence[str]) -> str:
            body = "".join(f"    {line}\n" for line in lines)
            return f"\n\ndef {head}:\n{body}    return {', '.join(result)}{',' if len(result) == 1 else ''}\n"

        names = ", ".join(self.arguments)
        moved = [] if self.device == "cpu" else [f"{b} = {b}.to({self.device!r})" for b in self.base_names]
        bases = ["g = torch.Generator().manual_seed(0)", *self.bases, *moved, *self.views]
        return (
            HEAD
            + block("arguments()", bases, [f"[{', '.join(self.base_names)}]", f"[{names}]"])
            + block(f"program({names})", self.body, self.returns)
        )

    def script(self) -> str:
        """Returns the source with a main part, which reproduces a failure."""
        return (
            f"{self.source()}\n\nwith torch.no_grad():\n"
            f"    compiled = torch.compile(program, backend='ark', options={self.options!r})\n"
            "    for expected, got in zip(program(*arguments()[1]), compiled(*arguments()[1])):\n"
            "        torch.testing.assert_close(got, expected, equal_nan=True)\n"
        )


class Pen:
    """Writes a program. Operator families (random_operators.py) use it to draw and to write."""

    def __init__(self, draw: Callable[[Any], Any], device: str) -> None:
        self._draw = draw
        self.program = Program(device=device)
        self.values: dict[str, Tensor] = {}
        self.inexact: set[int] = set()  # storages
        self._scope = dict(NAMES)
        self._scope["g"] = torch.Generator().manual_seed(0)
        self.sizes = [self.choose(SIZES) for _ in range(3)]
        if self.rarely(20):
            self.sizes[0] = 0
        self.floats = [self.choose(FLOATS) for _ in range(2)]
        self.special = self.rarely(6)  # includes infinities and NaN

    # Choices. A failing program shrinks to the first alternative.

    def choose(self, among: Sequence[T]) -> T:
        result: T = self._draw(st.sampled_from(among))
        return result

    def integer(self, least: int, most: int) -> int:
        return int(self._draw(st.integers(least, most)))

    def rarely(self, one_in: int) -> bool:
        return self.integer(0, one_in - 1) == one_in - 1

    def number(self) -> float:
        """Returns a number that is exact in every floating type."""
        return self.choose((0.5, 2.0, -1.0, 0.25, 3.0, -0.75, 1.0, 0.0, 1.5))

    def float_type(self) -> str:
        return self.choose(self.floats)

    # Tensors.

    def is_exact(self, name: str) -> bool:
        value = self.values[name]
        return not value.is_floating_point() or value.untyped_storage()._cdata not in self.inexact

    def some(self, wanted: Callable[[Tensor], bool] = lambda t: True, exact: bool = False) -> str:
        """Returns an existing tensor, preferably a recent one, or ""."""
        names = [n for n, t in self.values.items() if wanted(t) and (not exact or self.is_exact(n))]
        return self.choose(names[::-1]) if names else ""

    def floating(self, least_rank: int = 0, exact: bool = False) -> str:
        found = self.some(lambda t: t.is_floating_point() and t.dim() >= least_rank, exact)
        return found or self.argument(self.shape(max(2, least_rank)), self.float_type())

    def shape(self, rank: int) -> list[int]:
        shape = [self.choose(self.sizes) for _ in range(rank)]
        while math.prod(shape) > MOST_ELEMENTS:
            shape[shape.index(max(shape))] = 2
        return shape

    def beside(self, name: str) -> str:
        """Returns an operand that broadcasts against `name`: an existing tensor, a new argument, or a number."""
        value = self.values[name]
        kind = self.choose(("tensor", "tensor", "argument", "number"))
        if kind == "number":
            return repr(self.number()) if value.is_floating_point() else str(self.integer(-3, 5))
        if kind == "tensor":

            def fits(other: Tensor) -> bool:
                pairs = zip(reversed(value.shape), reversed(other.shape), strict=False)
                both = zip(reversed(value.shape), reversed(other.shape), strict=False)
                grows = math.prod(max(a, b) for a, b in both) > 4 * MOST_ELEMENTS
                return not grows and all(a == b or a == 1 or b == 1 for a, b in pairs)

            found = self.some(fits)
            if found:
                return found
        shape = [1 if self.rarely(4) else n for n in value.shape][self.integer(0, value.dim()) :]
        return self.argument(shape, TYPES[value.dtype] if not self.rarely(5) else self.float_type())

    def argument(self, shape: Sequence[int], dtype: str, what: str = "", layout: str = "") -> str:
        """Adds an argument. `what` is code that fills it differently from the type's default."""
        number = len(self.program.base_names)
        base, name = f"b{number}", f"a{len(self.program.arguments)}"
        shape = list(shape)
        layout = layout or self.choose(("plain", "plain", "plain", "permuted", "part", "expanded", "window"))
        lengths, view = list(shape), ""
        if layout == "permuted" and len(shape) > 1:
            order = self._draw(st.permutations(range(len(shape))))
            lengths = [0] * len(shape)
            for dim, source in enumerate(order):
                lengths[source] = shape[dim]
            view = f".permute({', '.join(map(str, order))})"
        elif layout == "part" and shape:
            steps = [self.choose((1, 1, 2, 3)) for _ in shape]
            begins = [self.integer(0, 2) for _ in shape]
            lengths = [b + n * s for n, s, b in zip(shape, steps, begins, strict=True)]
            view = f"[{', '.join(f'{b}::{s}' for b, s in zip(begins, steps, strict=True))}]"
        elif layout == "expanded" and shape:
            lengths = [1 if self.integer(0, 1) else n for n in shape]
            view = f".expand({', '.join(map(str, shape))})"
        elif layout == "window" and shape and all(shape):
            lengths = [*shape[:-2], sum(shape[-2:]) - 1] if len(shape) > 1 else shape
            view = f".unfold({len(shape) - 2}, {shape[-1]}, 1)" if len(shape) > 1 else ""
        lines = [f"{base} = {what.format(shape=lengths) if what else self._filling(lengths, dtype)}"]
        if self.special and dtype in FLOATS and math.prod(lengths) and self.integer(0, 1):
            where = self.integer(0, math.prod(lengths) - 1)
            lines.append(f"{base}.view(-1)[{where}] = {self.choose(('nan', 'inf', '-inf'))}")
        view = f"{name} = {base}{view}"
        for line in (*lines, view):
            exec(line, self._scope)
        self.program.bases += lines
        self.program.views.append(view)
        self.program.base_names.append(base)
        self.program.arguments.append(name)
        self.values[name] = self._scope[name]
        return name

    def _filling(self, shape: list[int], dtype: str) -> str:
        if dtype == "boolean":
            return f"torch.rand({shape}, generator=g) < 0.5"
        if dtype in ("i64", "i32"):
            most = 1 << 30 if self.rarely(12) else 9
            return f"torch.randint({-most}, {most}, {shape}, generator=g, dtype={dtype})"
        filling = self.choose(("{}", "{}", "{}.abs() + 0.25", "({} * 4).round()", "{} * 30"))
        text = filling.format(f"torch.randn({shape}, generator=g)")
        return text if dtype == "f32" else f"({text}).to({dtype})"

    def alias(self) -> str:
        """Adds an argument that shares another argument's base tensor."""
        name = self.some(lambda t: t.dim() > 0 and t.shape[0] > 1)
        bases = [b for b in self.program.base_names if self._scope[b].dim() > 0 and self._scope[b].shape[0] > 1]
        if not name or not bases:
            return ""
        base, name = self.choose(bases), f"a{len(self.program.arguments)}"
        middle = self._scope[base].shape[0] // 2
        view = f"{name} = {base}{self.choose((f'[{middle}:]', f'[:{middle}]', '[1:]', '[:]'))}"
        exec(view, self._scope)
        self.program.views.append(view)
        self.program.arguments.append(name)
        self.values[name] = self._scope[name]
        return name

    # Statements.

    def write(self, text: str, reads: Sequence[str], rounds: bool = True, changes: str = "") -> str:
        """Adds a statement: an expression that defines a value, or an update of the tensor `changes` in place.

        Returns the value's name, or "" if eager PyTorch refuses it.
        """
        reads = tuple(dict.fromkeys(n for n in reads if n in self.values))
        target = "" if changes else f"v{sum(bool(line.target) for line in self.program.body)}"
        line = Line(target, text, reads, rounds)
        # A refused update may be half done, so it is tried on a copy first.
        try:
            if changes:
                trial = {n: t.clone() if n in reads else t for n, t in self.values.items()}
                exec(text, {**self._scope, **trial})
                exec(text, self._scope)
                result = self.values[changes]
            else:
                result = eval(text, self._scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return ""
        if not isinstance(result, Tensor) or result.numel() > 8 * MOST_ELEMENTS or result.is_complex():
            return ""
        self._note(line, result, changes)
        self.program.body.append(line)
        if target:
            self.values[target] = self._scope[target] = result
        return target or changes

    def _note(self, line: Line, result: Tensor, changes: str) -> None:
        known = {t.untyped_storage()._cdata for t in self.values.values()}
        known |= {self._scope[b].untyped_storage()._cdata for b in self.program.base_names}
        storage = result.untyped_storage()._cdata
        line.fresh = storage not in known
        operands = [self.values[n] for n in line.reads]
        mixed = any(t.dtype != result.dtype for t in operands if t.is_floating_point())
        kept = not line.rounds and not mixed and all(self.is_exact(n) for n in line.reads)
        line.exact = not result.is_floating_point() or (kept if changes or line.fresh else storage not in self.inexact)
        if not line.exact:
            self.inexact.add(storage)
        if line.fresh and not result.is_floating_point():
            line.before = result.clone()


@st.composite
def programs(draw: Callable[[Any], Any], device: str = "cpu", least: int = 5, most: int = 25) -> Program:
    """Draws a program of about that many operators, for tensors on `device`."""
    from random_operators import FALLBACKS, FAMILIES

    pen = Pen(draw, device)
    for _ in range(pen.integer(1, 3)):
        pen.argument(pen.shape(pen.integer(1, 4)), pen.float_type())
    if pen.rarely(25):
        pen.argument([pen.choose((4099, 5000, 6007)), 3], "f32")
    if pen.rarely(15):
        pen.alias()
    families = FAMILIES + (FALLBACKS if pen.rarely(6) else ())
    wanted = pen.integer(least, most)
    for _ in range(3 * wanted):  # some are refused
        if len(pen.program.body) >= wanted:
            break
        pen.choose(families)(pen)
    program = pen.program
    used = {n for line in program.body for n in line.reads}
    sinks = [line.target for line in program.body if line.target and line.target not in used]
    program.returns = sinks[-8:]
    for _ in range(pen.integer(0, 2)):  # an argument, a value twice, a value with other readers
        program.returns.append(pen.choose([*pen.values]))
    if not program.returns:
        program.returns = [next(iter(pen.values))]
    program.options = {"threads": pen.choose((2, 1, 3)), "minimum": pen.choose((2, 1))}
    return program


__all__ = ["F", "HEAD", "NAMES", "TYPES", "Line", "Pen", "Program", "programs"]
