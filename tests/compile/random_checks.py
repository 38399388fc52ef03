"""Runs a random program with eager PyTorch and with ark, and compares both with each other and with float64.

The expectation comes from three kinds of runs: eager (types, shapes, strides, storage sharing, integers and booleans),
float64 (the values), and several float64 runs in which every operand and result is perturbed by up to one rounding of
its type. The spread of the last shows the error that rounding can cause in any implementation. A larger error must be
at most 1.5 times eager's own error, or Inductor's.

On a GPU, eager and Inductor run there too, and float64 on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from random_float64 import wide
from random_graphs import NAMES, Program
from torch import Tensor

from ark_torch.compile import backend, options
from ark_torch.compile.report import Report

WANDERINGS = 4


@dataclass
class Outcome:
    """The outcome of one program: what ran where."""

    regions: int = 0
    operators: int = 0  # run by ark
    fallen: list[str] = field(default_factory=list)  # reasons for fallbacks
    inductor_asked: str = ""  # why Inductor's result was needed
    refused: bool = False  # eager PyTorch refuses it on this device, so nothing was compared


class Wrong(AssertionError):
    pass


def arguments(scope: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    bases, given = scope["arguments"]()
    return bases, given


def run(program: Any, scope: dict[str, Any]) -> list[Tensor]:
    """Returns the results, followed by the base tensors of the arguments."""
    bases, given = arguments(scope)
    return [*program(*given), *bases]


# Comparing.


def _classes(t: Tensor) -> Tensor:
    """Returns 0 for numbers, otherwise which of NaN, inf and -inf."""
    return torch.isnan(t) * 1 + torch.isposinf(t) * 2 + torch.isneginf(t) * 3


def wrong_elements(got: Tensor, eager: Tensor, exact: Tensor, wandered: Sequence[Tensor]) -> Tensor:
    """Returns where a floating result is farther from `exact` than rounding explains."""
    limits = torch.finfo(eager.dtype)
    g, e = got.double(), eager.double()
    spread = torch.stack([(w - exact).abs() for w in wandered]).amax(0)
    spread = torch.maximum(spread, torch.nan_to_num(spread).mean() * 0.25)
    allowed = 8 * spread + 4 * limits.eps * exact.abs() + 8 * limits.smallest_normal * limits.eps
    allowed = torch.maximum(allowed, 1.5 * (e - exact).abs())
    close = (g - exact).abs() <= allowed
    kinds = _classes(exact)
    shaky = torch.stack([_classes(w) != kinds for w in wandered]).any(0)
    same = (_classes(g) == kinds) & (kinds > 0)
    as_eager = (_classes(g) == _classes(e)) & (_classes(e) > 0)
    # Beyond the type's range, or so close that rounding decides: eager may overflow where a wider type does not.
    overflow = exact.abs() * (1 + 8 * limits.eps) + allowed.nan_to_num(0) >= limits.max
    eager_overflows = (_classes(e) > 0) & (kinds == 0) & ((_classes(g) == 0) & close)
    return ~(close | same | as_eager | shaky | (overflow & (g.abs() >= limits.max * 0.9)) | eager_overflows)


def errors(got: Tensor, exact: Tensor) -> float:
    difference = (got.double() - exact).abs()
    finite = difference[torch.isfinite(exact) & torch.isfinite(difference)]
    return float(finite.max()) if finite.numel() else 0.0


def _strides(t: Tensor) -> list[int]:
    return [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] if t.numel() else []


def _places(tensors: Sequence[Tensor]) -> list[Any]:
    """Returns for each tensor the first one that shares its storage, and its place there."""
    first: dict[int, int] = {}
    found = []
    for i, t in enumerate(tensors):
        owner = first.setdefault(t.untyped_storage()._cdata, i)
        found.append((owner, t.storage_offset() - tensors[owner].storage_offset() if t.numel() else 0))
    return found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    left, right = (t.contiguous().view(kinds[t.element_size()]) if t.dim() else t.reshape(1) for t in (a, b))
    if not a.dim():
        left, right = (t.view(kinds[t.element_size()]) for t in (left, right))
    return torch.equal(left, right)


def _sound(program: Program) -> None:
    """Raises pending errors of earlier GPU launches."""
    if program.device != "cpu":
        torch.cuda.synchronize()


def _leave(program: Program, whose: str, error: BaseException) -> NoReturn:
    """Ends the process when the GPU's context is lost. Later failures would hide the cause."""
    print(program.script(), f"the GPU's context was lost in {whose}: {error}", sep="\n", file=sys.stderr, flush=True)
    os._exit(4)


class Check:
    """Checks one program. `verify` raises Wrong, or any error of the compiler."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._alone = True  # only ark's kernels ran
        self.scope: dict[str, Any] = {}
        exec(program.source(), self.scope)
        self.outcome = Outcome()
        self._inductor: list[Tensor] | None = None

    def inductor(self, why: str) -> list[Tensor]:
        """Returns Inductor's results, for cases that eager's alone do not decide."""
        if self._inductor is None:
            torch._dynamo.reset()
            self.outcome.inductor_asked = why
            self._inductor = run(torch.compile(self.scope["program"], backend="inductor"), self.scope)
        return self._inductor

    def verify(self) -> Outcome:
        try:
            expected = run(self.scope["program"], self.scope)
            _sound(self.program)
        except (RuntimeError, NotImplementedError):  # the CPU, where the program was drawn, supports it
            try:
                _sound(self.program)
            except RuntimeError as lost:
                _leave(self.program, "eager PyTorch", lost)
            if self.program.device == "cpu":
                raise
            self.outcome.refused = True
            return self.outcome
        torch._dynamo.reset()
        report = Report()
        chosen = options.parse(None, {"choose": "ark", **self.program.options})

        def compiler(graph_module: Any, example_inputs: Any) -> Any:
            return backend.compile_graph(graph_module, example_inputs, chosen, report)

        compiled = torch.compile(self.scope["program"], backend=compiler)
        try:
            got = run(compiled, self.scope)
            again = run(compiled, self.scope)
            _sound(self.program)
        except Exception as error:
            try:
                _sound(self.program)
            except RuntimeError:
                on_ark = any(piece.runs_on == "ark" for graph in report.graphs for piece in graph.pieces)
                _leave(self.program, "what ark compiled" if on_ark else "what ark left to PyTorch", error)
            try:
                self.inductor("ark raises")
            except Exception:  # Inductor fails as well
                return self.outcome
            raise Wrong(f"raises {type(error).__name__}: {error}") from error
        self._look_at_report(report)
        self._compare_forms(got, expected)
        for i, (one, two) in enumerate(zip(got, again, strict=True)):
            # On a GPU, other kernels may add in any order.
            if not _same_bits(one, two) and (self._alone or self.program.device == "cpu"):
                raise Wrong(f"{self._name(i)} differs from run to run\n{report}")
        self._compare_values([t.cpu() for t in got], [t.cpu() for t in expected], report)
        return self.outcome

    def _name(self, i: int) -> str:
        returns = self.program.returns
        if i < len(returns):
            return f"result {i} ({returns[i]})"
        return f"argument base {self.program.base_names[i - len(returns)]}"

    def _look_at_report(self, report: Report) -> None:
        for graph in report.graphs:
            self._alone &= not graph.whole and all(piece.runs_on == "ark" for piece in graph.pieces)
            if graph.whole:
                self.outcome.fallen.append(graph.whole)
                if "ark failed" in graph.whole:
                    raise Wrong(graph.whole)
            for fallback in graph.fallbacks:
                if not fallback.reason:
                    raise Wrong(f"falls back without a reason: {fallback}")
                self.outcome.fallen.append(f"{fallback.operator}: {fallback.reason}")
            for piece in graph.pieces:
                if piece.runs_on == "ark":
                    self.outcome.regions += 1
                    self.outcome.operators += piece.nodes
                elif ": " in piece.reason and not piece.reason.startswith("Unsupported"):  # an exception
                    raise Wrong(f"a region falls back: {piece.reason}")
                elif not piece.reason:
                    raise Wrong(f"a piece falls back without a reason: {piece}")

    def _compare_forms(self, got: list[Tensor], expected: list[Tensor]) -> None:
        if len(got) != len(expected):
            raise Wrong(f"{len(got)} results, not {len(expected)}")
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            for what, a, b in (("type", g.dtype, e.dtype), ("shape", g.shape, e.shape), ("device", g.device, e.device)):
                if a != b:
                    raise Wrong(f"{self._name(i)}: its {what} is {a}, not {b}")
            if _strides(g) != _strides(e) and _strides(g) != _strides(other := self.inductor("strides")[i]):
                raise Wrong(f"{self._name(i)}: its strides are {g.stride()}, not {e.stride()} ({other.stride()})")
        if _places(got) != _places(expected) and _places(got) != _places(self.inductor("aliases")):
            raise Wrong(f"results lie in {_places(got)}, not in {_places(expected)}")

    def _compare_values(self, got: list[Tensor], expected: list[Tensor], report: Report) -> None:
        types = {line.target: v for line, v in zip(self.program.body, self._types(), strict=True)}
        types.update({n: t.dtype for n, t in zip(self.program.arguments, arguments(self.scope)[1], strict=True)})
        runs = [wide(self.program, types, i) for i in range(WANDERINGS + 1)]
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            if not e.is_floating_point():
                if not torch.equal(g, e) and not torch.equal(g, self.inductor("integers")[i].cpu()):
                    raise Wrong(f"{self._name(i)} is\n{g}\nnot\n{e}\n{report}")
                continue
            exact = runs[0][i]
            wrong = wrong_elements(g, e, exact, [r[i] for r in runs[1:]])
            if not bool(wrong.any()):
                continue
            theirs = self.inductor("errors")[i].cpu()
            allowed = 1.5 * max(errors(e, exact), errors(theirs, exact))
            if bool((_classes(g) == _classes(theirs)).all()) and errors(g, exact) <= allowed:
                continue
            where = wrong.nonzero()[:5].tolist()
            lines = "\n".join(
                f"  {at}: {float(g[tuple(at)])!r}, eager {float(e[tuple(at)])!r}, float64 {float(exact[tuple(at)])!r}, "
                f"Inductor {float(theirs[tuple(at)])!r}"
                for at in where
            )
            raise Wrong(f"{self._name(i)} is wrong at {int(wrong.sum())} of {wrong.numel()} places\n{lines}\n{report}")

    def _types(self) -> list[torch.dtype]:
        """Returns the types that each statement defines."""
        scope: dict[str, Any] = dict(NAMES)
        scope.update(zip(self.program.arguments, arguments(self.scope)[1], strict=True))
        found = []
        for line in self.program.body:
            exec(str(line), scope)
            found.append(scope[line.target].dtype if line.target else torch.float32)
        return found
