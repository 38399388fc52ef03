"""The lowered graph in Python, before it is passed to C++ (csrc/compiler/graph/graph.hpp defines each part).

Three things are known only once a region is fully lowered: which buffers are results, how far into each buffer its
values reach, and which nodes have no reader. `emit` then makes the C++ graph; `text` is the canonical form under which
choices are remembered. Values have versions: after a write to a buffer, reading the same strides again makes a new
Value, so every Value is written at most once, and its readers are those after that write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

SCALAR_TYPES = {
    torch.float32: ("float32", 4),
    torch.bfloat16: ("bfloat16", 2),
    torch.float16: ("float16", 2),
    torch.int64: ("int64", 8),
    torch.int32: ("int32", 4),
    torch.bool: ("bool", 1),
}
# Types of weights that products read as codes; nothing else does.
CODE_TYPES = {torch.int8: ("int8", 1), torch.uint8: ("uint8", 1), torch.float8_e4m3fn: ("float8_e4m3fn", 1)}


def scalar_type(dtype: torch.dtype) -> tuple[str, int]:
    """The type's name and size in bytes."""
    return SCALAR_TYPES[dtype] if dtype in SCALAR_TYPES else CODE_TYPES[dtype]


class Unsupported(Exception):
    """Why a node cannot be lowered; the message is shown to users."""


class Strided(NamedTuple):
    """A strided view of a buffer, in elements of `dtype`."""

    buffer: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One past the last element touched."""
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def same_place(self, other: Strided) -> bool:
        """Whether both have the same elements in the same order; strides of dimensions of length 1 are ignored."""
        return self._replace(strides=self._canonical()) == other._replace(strides=other._canonical())

    def _canonical(self) -> tuple[int, ...]:
        return tuple(0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))

    def spans_densely(self) -> bool:
        """Whether the view covers its whole extent, each element once."""
        expected = 1
        dimensions = sorted((s, n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)
        for stride, length in dimensions:
            if stride != expected:
                return False
            expected *= length
        return True

    def may_overlap_itself(self) -> bool:
        """Returns False only if all elements certainly have different addresses."""
        reach = 0
        for stride, length in sorted((s, n) for s, n in zip(self.strides, self.shape, strict=True) if n > 1):
            if stride <= reach:
                return True
            reach += stride * (length - 1)
        return False


class Literal(NamedTuple):
    """One number that fills `shape`."""

    value: float | int | bool
    dtype: torch.dtype
    shape: tuple[int, ...]


Operand = Strided | Literal


@dataclass
class Buffer:
    kind: str  # "input", "output", "temporary"
    argument: int = -1
    bytes: int = 0
    mutated: bool = False
    parameter: bool = False


@dataclass
class Node:
    op: str
    inputs: list[int]
    outputs: list[int]
    attributes: dict[str, Any]
    origin: str


@dataclass
class LoweredGraph:
    buffers: list[Buffer] = field(default_factory=list)
    values: list[Operand] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)  # values that are the region's inputs, in order
    groups: list[str] = field(default_factory=list)  # names of the groups whose collectives are among the nodes
    results: list[int] = field(default_factory=list)  # values, in the order of the region's outputs
    _known: dict[tuple[Operand, int], int] = field(default_factory=dict)
    _writes: dict[int, int] = field(default_factory=dict)  # per buffer

    def add_buffer(self, buffer: Buffer) -> int:
        self.buffers.append(buffer)
        return len(self.buffers) - 1

    def read(self, operand: Operand) -> int:
        """The Value for reading `operand` at this point."""
        version = self._writes.get(operand.buffer, 0) if isinstance(operand, Strided) else 0
        if isinstance(operand, Literal):
            operand = operand._replace(shape=())
        key = (operand, version)
        # 0.0 and -0.0, or 1 and True, are equal as keys but different literals.
        if isinstance(operand, Literal) or key not in self._known:
            self._known[key] = self._add(operand)
        return self._known[key]

    def version(self, buffer: int) -> int:
        """The number of writes so far."""
        return self._writes.get(buffer, 0)

    def write(self, target: Strided) -> int:
        """A new Value that a node writes."""
        self._writes[target.buffer] = self._writes.get(target.buffer, 0) + 1
        value = self._add(target)
        self._known[(target, self._writes[target.buffer])] = value
        return value

    def _add(self, operand: Operand) -> int:
        if isinstance(operand, Strided):
            if operand.offset < 0:
                raise Unsupported("a view that begins before the first element of its tensor")
            buffer = self.buffers[operand.buffer]
            buffer.bytes = max(buffer.bytes, operand.end * scalar_type(operand.dtype)[1])
        self.values.append(operand)
        return len(self.values) - 1

    def buffer_of(self, value: int) -> int:
        operand = self.values[value]
        return operand.buffer if isinstance(operand, Strided) else -1

    def drop_unread(self) -> None:
        """Removes nodes that only write temporaries which nothing reads."""
        needed: set[int] = set()
        kept: list[Node] = []
        for node in reversed(self.nodes):
            written = [self.buffer_of(value) for value in node.outputs]
            acts = "group" in node.attributes or node.op in ("check", "stop")
            if acts or any(self.buffers[b].kind != "temporary" or b in needed for b in written):
                needed.update(self.buffer_of(value) for value in node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]

    def _used(self) -> tuple[dict[int, int], dict[int, int]]:
        """New numbers of the buffers and values in use, which always include inputs and outputs."""
        values: set[int] = {*self.arguments, *self.results}
        for node in self.nodes:
            values.update(node.inputs, node.outputs)
        buffers = {self.buffer_of(value) for value in values}
        kept = [i for i, b in enumerate(self.buffers) if i in buffers or b.kind != "temporary"]
        return {b: i for i, b in enumerate(kept)}, {v: i for i, v in enumerate(sorted(values))}

    def emit(self, graph: Any) -> None:
        """Fills in a C++ graph (or a test double)."""
        buffers, values = self._used()
        for number in buffers:
            b = self.buffers[number]
            graph.buffer(b.kind, b.argument, b.bytes, mutated=b.mutated, parameter=b.parameter)
        for number in values:
            operand = self.values[number]
            name = scalar_type(operand.dtype)[0]
            if isinstance(operand, Literal):
                graph.literal(operand.value, name)
            else:
                graph.value(buffers[operand.buffer], name, list(operand.shape), list(operand.strides), operand.offset)
        for node in self.nodes:
            inputs, outputs = ([values[value] for value in list_] for list_ in (node.inputs, node.outputs))
            graph.node(node.op, inputs, outputs, node.attributes, node.origin)
        for value in self.arguments:
            graph.argument(values[value])
        for value in self.results:
            graph.output(values[value])

    def text(self) -> str:
        """The graph without names of modules and files: equal for equal work."""
        lines: list[str] = []

        class Writer:
            def __getattr__(self, name: str) -> Any:
                return lambda *args, **kwargs: lines.append(f"{name} {args if name != 'node' else args[:4]} {kwargs}")

        self.emit(Writer())
        return "\n".join(lines)
