"""What one call of a compiled graph does, as data: which slots each piece reads and fills, and what is returned.

A call's tensors are in one list of slots: the graph's arguments, then tensors that the graph holds, then the pieces'
results. It is apart from the functions that run the pieces, so that it can be saved and loaded without them
(saved.py); link() joins both, with minimal overhead per call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Slot:
    number: int


@dataclass(frozen=True)
class Held:
    """A value that is no tensor of the graph: a number, or None."""

    value: Any


@dataclass(frozen=True)
class Operator:
    """A function of the torch.ops or operator modules, by name."""

    name: str

    @staticmethod
    def of(target: Any) -> Operator:
        if target is operator.getitem:
            return Operator("getitem")
        return Operator(f"{target._schema.name}.{target._overloadname or 'default'}")

    def function(self) -> Any:
        if self.name == "getitem":
            return operator.getitem
        names, _, overload = self.name.rpartition(".")
        namespace, _, name = names.partition("::")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True)
class Call:
    """Of an operator with a tensor as the first argument, or without one."""

    target: Operator
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Filled:
    """A constant tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    fill: Any


@dataclass(frozen=True)
class Part:
    """A strided view of a slot, in elements from its start."""

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Views:
    """Views of a slot or of a new constant, the first one first. A tensor in `of` is copied."""

    of: int | Call | Filled | torch.Tensor
    chain: list[Call]


Returned = Slot | Held | Part | Views


@dataclass
class Program:
    arguments: int
    constants: list[Any] = field(default_factory=list)
    steps: list[tuple[list[int], int, int]] = field(default_factory=list)  # slots read; first slot filled, and the end
    returned: list[Returned] = field(default_factory=list)


def _taker(slots: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    if not slots:
        return lambda env: []
    if len(slots) == 1:
        only = slots[0]
        return lambda env: [env[only]]
    take = operator.itemgetter(*slots)
    return lambda env: list(take(env))


def _part(of: Part) -> Callable[[list[Any]], Any]:
    slot, shape, strides, offset = of.slot, of.shape, of.strides, of.offset
    return lambda env: torch.as_strided(env[slot], shape, strides, env[slot].storage_offset() + offset)


def _maker(of: Call | Filled | torch.Tensor) -> Callable[[], Any]:
    if isinstance(of, torch.Tensor):
        return of.clone
    if isinstance(of, Call):
        function, arguments, keywords = of.target.function(), of.arguments, of.keywords
        return lambda: function(*arguments, **keywords)
    shape, strides, fill = of.shape, of.strides, of.fill
    like: dict[str, Any] = {"dtype": of.dtype, "device": of.device}
    return lambda: torch.empty_strided(shape, strides, **like).fill_(fill)


def _views(of: Views) -> Callable[[list[Any]], Any]:
    calls = [(one.target.function(), one.arguments, one.keywords) for one in of.chain]
    slot = of.of if isinstance(of.of, int) else None
    make = _maker(of.of) if not isinstance(of.of, int) else None

    def replay(env: list[Any]) -> Any:
        value = make() if make is not None else env[slot]  # type: ignore[index]
        for function, arguments, keywords in calls:
            value = function(value, *arguments, **keywords)
        return value

    return replay


def _returns(one: Returned) -> Callable[[list[Any]], Any]:
    if isinstance(one, Slot):
        return operator.itemgetter(one.number)
    if isinstance(one, Held):
        value = one.value
        return lambda env: value
    return _part(one) if isinstance(one, Part) else _views(one)


def link(program: Program, runs: Sequence[Boxed]) -> Boxed:
    """The function of the graph's arguments; `runs` are the pieces' functions, in order."""
    steps, constants = program.steps, program.constants
    if len(steps) == 1 and not constants:
        taken, first, last = steps[0]
        if program.returned == [Slot(i) for i in range(first, last)]:
            return _single(runs[0], taken, program.arguments)
    linked = [(run, _taker(taken), first, last) for run, (taken, first, last) in zip(runs, steps, strict=True)]
    finish = [_returns(one) for one in program.returned]
    blank = [None] * sum(last - first for _, first, last in steps)

    def call(args: list[Any]) -> Sequence[Any]:
        env = [*args, *constants, *blank]
        args.clear()
        for run, take, first, last in linked:
            env[first:last] = run(take(env))
        return [f(env) for f in finish]

    return call


def _single(run: Boxed, taken: Sequence[int], arguments: int) -> Boxed:
    if list(taken) == list(range(arguments)):

        def straight(args: list[Any]) -> Sequence[Any]:  # `run` may be an object that takes no attributes
            return run(args)

        straight.runs = run  # type: ignore[attr-defined]  # nothing else happens: see ark_torch.compile.fast_call
        return straight
    take = _taker(taken)
    return lambda args: run(take(args))
