"""Lowers FX nodes to the lowered graph: the tools for operators' lowerings, and the walk over a region.

A lowering is a function of (Lowering, node) that returns the node's Operand (or several, for several results),
registered with @lowers(overload, ...). It raises Unsupported with the reason if it cannot. The same function decides
whether a node is supported, so the decision always matches: a graph that `lower_whole` lowers as one region is
supported, and is not lowered again. Only for a graph that has to be cut, `reason_against` runs the function of each
node on a throw-away Lowering that takes every argument as an input. Views are not lowered: `operand` computes their
positions (views.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.fx import Node

from ark_torch.compile import analysis
from ark_torch.compile.ir import (
    CODE_TYPES,
    SCALAR_TYPES,
    Buffer,
    Literal,
    LoweredGraph,
    Operand,
    Strided,
    Unsupported,
    scalar_type,
)
from ark_torch.compile.ir import Node as GraphNode
from ark_torch.compile.report import log
from ark_torch.compile.views import view_of

CPU = torch.device("cpu")
Rule = Callable[["Lowering", Node], Operand | tuple[Operand | None, ...]]
RULES: dict[Any, Rule] = {}
# Rules for operators of other libraries, which may be absent, by qualified name.
NAMED_RULES: dict[str, Rule] = {}


RuleType = TypeVar("RuleType", bound=Rule)


def lowers(*overloads: Any) -> Callable[[RuleType], RuleType]:
    """Registers a function as the lowering of these ATen overloads."""

    def register(rule: RuleType) -> RuleType:
        for overload in overloads:
            assert overload not in RULES, overload
            RULES[overload] = rule
        return rule

    return register


def rule_of(target: Any) -> Rule | None:
    rule = RULES.get(target)
    if rule is None and NAMED_RULES and isinstance(target, torch._ops.OpOverload):
        rule = NAMED_RULES.get(f"{target._schema.name}.{target._overloadname}")
    return rule


def check_tensor(tensor: torch.Tensor, device: torch.device | None, codes: bool = False) -> None:
    """Raises Unsupported for a tensor that cannot be a value of the graph; device None: tensors without memory may be
    anywhere. `codes`: it may be what a product decodes."""
    if tensor.layout != torch.strided:
        raise Unsupported(f"a tensor of layout {tensor.layout}")
    if type(tensor.numel()) is not int or any(type(n) is not int for n in (*tensor.shape, *tensor.stride())):
        raise Unsupported("a symbolic size (dynamic shapes)")
    if device is not None and tensor.device != device:
        raise Unsupported(f"a tensor on {tensor.device}, in a graph that ark runs on {device}")
    if tensor.dtype not in SCALAR_TYPES and not (codes and tensor.dtype in CODE_TYPES):
        raise Unsupported(f"a tensor of type {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.numel() == 0:
        raise Unsupported("a tensor without elements")
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise Unsupported("a quantized, conjugated or negated tensor")


def check_apart(target: Strided) -> None:
    """Raises Unsupported if two elements of the target may share an address, as the result of a write is undefined."""
    span = 1
    for stride, length in sorted((s, n) for n, s in zip(target.shape, target.strides, strict=True) if n > 1):
        if stride < span:
            raise Unsupported("a write into a tensor that overlaps itself")
        span += stride * (length - 1)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


class Lowering:
    """Lowers one region (or one node, to find out whether it can)."""

    def __init__(
        self,
        parameters: Iterable[Node] = (),
        mutated: Iterable[Node] = (),
        device: torch.device = CPU,
    ) -> None:
        self.graph = LoweredGraph()
        self.device = device
        self.inputs: list[Node] = []  # roots, in the order of the region's arguments
        self.outputs: list[Node] = []  # roots, in the order of the region's results
        self._operands: dict[Node, Any] = {}
        self._parameters = set(parameters)
        self.mutated = frozenset(mutated)  # roots that the whole graph writes somewhere
        self._origin = ""
        self._members: frozenset[Node] = frozenset()
        self.unpacks: dict[Node, tuple[int, Strided]] = {}  # weights that a region gets unpacked: position and operand
        self.notes: dict[str, dict[Any, Any]] = {}  # state that lowerings keep within a region

    # ---- The walk

    def lower_all(self, nodes: Sequence[Node]) -> None:
        """Lowers a region's nodes in order."""
        self._members = frozenset(nodes)
        for node in nodes:
            self.lower(node)

    def finish(self, results: Sequence[Node]) -> None:
        """`results`: the roots that others need."""
        for root in results:
            self._declare(root)
        self.graph.drop_unread()

    def lower(self, node: Node) -> None:
        rule = rule_of(node.target)
        if rule is None:
            own = getattr(node.target, "namespace", "") == "ark"
            raise Unsupported("a kernel of its own" if own else "no lowering for this operator")
        for result in _results(node):
            check_tensor(result, self.device)
        self._origin = analysis.origin_of(node)
        self._operands[node] = rule(self, node)

    def check_results(self, node: Node) -> None:
        """Raises Unsupported if someone reads a result that the node's lowering does not make."""
        for user in node.users:
            if analysis.is_getitem(user) and (user.users or isinstance(self._operands[node], Strided)):
                self.operand(user)

    def _declare(self, root: Node) -> None:
        operand = self.operand(root)
        if isinstance(operand, Literal) or not self._is_whole_temporary(operand):
            operand = self.copy(operand, self.result(root))
        buffer = self.graph.buffers[operand.buffer]
        buffer.kind, buffer.argument = "output", len(self.outputs)
        self.outputs.append(root)
        self.graph.results.append(self.graph.read(operand))

    def _is_whole_temporary(self, operand: Strided) -> bool:
        """Whether the operand is a whole temporary, not a part of one: a result's tensor is as large as its value."""
        buffer = self.graph.buffers[operand.buffer]
        size = math.prod(operand.shape) * SCALAR_TYPES[operand.dtype][1]
        return buffer.kind == "temporary" and operand.offset == 0 and operand.spans_densely() and size == buffer.bytes

    # ---- Operands of nodes

    def is_member(self, node: Node) -> bool:
        """Whether the node belongs to the region and has been lowered."""
        return node in self._members and node in self._operands

    def belongs(self, node: Node) -> bool:
        """Whether the node belongs to the region, lowered or not."""
        return node in self._members

    def is_known(self, node: Node) -> bool:
        """Whether the node's operand was read or made already."""
        return node in self._operands

    def define(self, node: Node, operand: Operand) -> None:
        """What others read for a node that is not lowered itself."""
        self._operands[node] = operand

    def operand(self, argument: Any) -> Operand:
        """What a lowering reads for an argument: a node's view or a number."""
        if isinstance(argument, bool | int | float):
            dtype = {bool: torch.bool, int: torch.int64, float: torch.float32}[type(argument)]
            return Literal(self._number(argument), dtype, ())
        if not isinstance(argument, Node):
            raise Unsupported(f"an argument that is neither tensor nor number: {argument!r}")
        if argument not in self._operands:
            self._operands[argument] = self._resolve(argument)
        operand = self._operands[argument]
        if not isinstance(operand, Strided | Literal):
            raise Unsupported(f"{argument.target} in place of a tensor")
        return operand

    def _resolve(self, node: Node) -> Any:
        if analysis.is_view(node):
            return self._view(node)
        if analysis.is_constant(node):
            return self._constant(node)
        if analysis.is_getitem(node):
            several = self._operands.get(cast(Node, node.args[0]))
            if several is not None:
                if several[node.args[1]] is None:
                    raise Unsupported(f"result {node.args[1]} of {node.args[0].target}")  # type: ignore[union-attr]
                return several[node.args[1]]
        base = analysis.base_of(node)
        return self._input(node) if base is None else self.operand(base)

    def source(self, node: Node) -> Strided:
        """A tensor given to the graph, including codes."""
        if node not in self._operands:
            self._operands[node] = self._input(node, codes=True)
        return cast(Strided, self._operands[node])

    def unpacked(self, node: Node, view: Strided) -> Strided:
        """A weight, or its scales, given to the graph in an order of its own, as the input that tinygemm.py makes."""
        if node not in self.unpacks:
            if node in self.mutated:
                raise Unsupported("a packed weight that the graph writes")
            tensor = analysis.tensor_of(node)
            assert tensor is not None
            check_tensor(tensor, self.device)
            self.unpacks[node] = (len(self.inputs), self._new_input(node, view))
        return self.unpacks[node][1]

    def _input(self, node: Node, codes: bool = False) -> Strided:
        tensor = analysis.tensor_of(node)
        if tensor is None:
            raise Unsupported(f"an argument that is no tensor: {node.name}")
        check_tensor(tensor, self.device, codes)
        return self._new_input(node, Strided(-1, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), 0))

    def _new_input(self, node: Node, view: Strided) -> Strided:
        mutated = node in self.mutated
        buffer = self.graph.add_buffer(
            Buffer("input", len(self.inputs), 0, mutated, node in self._parameters and not mutated)
        )
        self.inputs.append(node)
        operand = view._replace(buffer=buffer)
        self.graph.buffers[buffer].bytes = operand.end * scalar_type(view.dtype)[1]
        self.graph.arguments.append(self.graph.read(operand))
        return operand

    def _view(self, node: Node) -> Any:
        if analysis.is_getitem(node):
            several = self._operands.get(cast(Node, node.args[0]))
            if several is None:
                several = self._operands[node.args[0]] = self._view(node.args[0])  # type: ignore[arg-type, index]
            return several[node.args[1]]
        base = self.operand(node.args[0])
        if isinstance(base, Literal):
            shape = analysis.tensor_of(node)
            if shape is None:
                raise Unsupported("a constant that is split")
            return base._replace(shape=tuple(shape.shape))
        arguments = torch.fx.node.map_arg(tuple(node.args[1:]), _no_tensor)
        if node.target is torch.ops.aten.as_strided.default:
            arguments = self._from_the_root(node, arguments)
        return view_of(node.target, base, arguments, node.kwargs)

    def _from_the_root(self, node: Node, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """as_strided's offset counts from the start of the storage; this counts from the start of the root's buffer,
        which may be anywhere in it, since a copy equal to its source is dropped."""
        root = analysis.root_of(node)
        if analysis.is_source(root):
            raise Unsupported("as_strided of an argument, whose place in its storage may change from call to call")
        whole = self.operand(root)
        if len(arguments) < 3 or arguments[2] is None or not isinstance(whole, Strided):
            return arguments
        return (*arguments[:2], arguments[2] + whole.offset)

    def _constant(self, node: Node) -> Literal:
        tensor = analysis.tensor_of(node)
        assert tensor is not None
        check_tensor(tensor, None)
        name = node.target._schema.name  # type: ignore[union-attr]
        held = analysis.held_number(node)
        if held is not None:
            value: Any = held.item()
        elif name.endswith(("zeros", "zeros_like", "new_zeros")) or "empty" in name:
            value = 0
        elif name.endswith(("ones", "ones_like", "new_ones")):
            value = 1
        else:
            value = node.kwargs.get("fill_value", node.args[0 if "scalar_tensor" in name else -1])
        if not isinstance(value, bool | int | float):
            raise Unsupported(f"a constant of {value!r}")
        return self.constant(value, tensor.dtype, tuple(tensor.shape))

    def constant(self, value: float | int | bool, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> Literal:
        """A number as PyTorch stores it in a tensor of that type."""
        if dtype == torch.bool:
            value = bool(value)
        elif dtype.is_floating_point:
            value = float(torch.tensor(float(value), dtype=dtype).item())
        elif isinstance(value, float) and not math.isfinite(value):
            raise Unsupported(f"{value} as an integer")
        else:
            value = self._number(int(value))
        return Literal(value, dtype, shape)

    def _number(self, value: float | int | bool) -> float | int | bool:
        if isinstance(value, int) and abs(value) > 1 << 53:
            raise Unsupported(f"the integer {value}, which a literal does not hold")
        return value

    # ---- What lowerings make

    def result(self, node: Node, index: int | None = None) -> Strided:
        """A new buffer for a node's result, with PyTorch's layout."""
        value = node.meta["val"] if index is None else node.meta["val"][index]
        check_tensor(value, self.device)
        operand = Strided(-1, value.dtype, tuple(value.shape), tuple(value.stride()), 0)
        if not operand.spans_densely():
            raise Unsupported(f"a result with gaps or overlap (strides {list(value.stride())})")
        return self.fresh(operand.dtype, operand.shape, operand.strides)

    def fresh(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> Strided:
        buffer = self.graph.add_buffer(Buffer("temporary"))
        strides = contiguous_strides(shape) if strides is None else strides
        return Strided(buffer, dtype, tuple(shape), tuple(strides), 0)

    def node(self, op: str, inputs: Sequence[Operand], out: Strided, **attributes: Any) -> Strided:
        """Appends a node that writes `out`; returns `out`."""
        if out.may_overlap_itself():
            raise Unsupported("a write into a tensor that may hold an element twice")
        read = [self.graph.read(operand) for operand in inputs]
        self.graph.nodes.append(GraphNode(op, read, [self.graph.write(out)], attributes, self._origin))
        return out

    def group(self, name: str) -> int:
        """The number of a process group in the region."""
        if name not in self.graph.groups:
            self.graph.groups.append(name)
        return self.graph.groups.index(name)

    def pointwise(
        self, op: str, *inputs: Operand, dtype: torch.dtype = torch.float32, out: Strided | None = None
    ) -> Strided:
        """Writes into `out`, or into a new value of `dtype` with the shape that the inputs broadcast to."""
        if out is None:
            out = self.fresh(
                dtype,
                torch.broadcast_shapes(*(operand.shape for operand in inputs)),  # type: ignore[no-untyped-call]
            )
        return self.node(op, inputs, out)

    def copy(self, source: Operand, out: Strided) -> Strided:
        """Copies if the types are equal, else casts, which rounds."""
        return self.node("copy" if source.dtype == out.dtype else "cast", [source], out)

    def cast(self, source: Operand, dtype: torch.dtype) -> Operand:
        if source.dtype == dtype:
            return source
        if isinstance(source, Literal) and dtype.is_floating_point and not source.dtype.is_floating_point:
            return Literal(float(source.value), dtype, source.shape)
        return self.copy(source, self.fresh(dtype, source.shape))

    def stored(self, operand: Operand) -> Strided:
        """For operators that read memory: writes out a literal first."""
        return operand if isinstance(operand, Strided) else self.copy(operand, self.fresh(operand.dtype, operand.shape))

    def expand(self, operand: Operand, shape: Sequence[int]) -> Operand:
        """A view broadcast to `shape`."""
        shape = tuple(shape)
        if isinstance(operand, Literal):
            return operand._replace(shape=shape)
        if len(operand.shape) > len(shape):
            raise Unsupported(f"{list(operand.shape)} does not broadcast to {list(shape)}")
        missing = len(shape) - len(operand.shape)
        lengths = (1,) * missing + operand.shape
        strides = (0,) * missing + operand.strides
        if any(have not in (1, want) for have, want in zip(lengths, shape, strict=True)):
            raise Unsupported(f"{list(operand.shape)} does not broadcast to {list(shape)}")
        strides = tuple(0 if have == 1 else s for have, s in zip(lengths, strides, strict=True))
        return operand._replace(shape=shape, strides=strides)


def _no_tensor(node: Node) -> Any:
    raise Unsupported("a view whose sizes are computed in the graph")


def _results(node: Node) -> list[torch.Tensor]:
    """The results that are read, if there are several: others may be anything, even empty."""
    value = node.meta.get("val")
    if not isinstance(value, tuple | list):
        return [value] if isinstance(value, torch.Tensor) else []
    read = {user.args[1] for user in node.users if analysis.is_getitem(user) and user.users}
    return [t for i, t in enumerate(value) if i in read and isinstance(t, torch.Tensor)]


def register_rules() -> None:
    from ark_torch.compile import operators

    del operators


def lower_whole(
    nodes: Sequence[Node], parameters: Iterable[Node], mutated: Iterable[Node], device: torch.device
) -> Lowering | None:
    """All nodes as one region, still without results; None if one of them cannot be lowered, in no matter what way."""
    register_rules()
    if any(rule_of(node.target) is None for node in nodes):
        return None
    whole = Lowering(parameters, mutated, device)
    try:
        whole.lower_all(nodes)
        for node in nodes:
            whole.check_results(node)
    except Exception:  # `reason_against` says which node it is and why
        return None
    return whole


def reason_against(node: Node, mutated: Iterable[Node] = (), device: torch.device = CPU) -> str | None:
    """Why a node cannot be lowered; None if it can."""
    register_rules()
    try:
        trial = Lowering(mutated=mutated, device=device)
        trial.lower(node)
        trial.check_results(node)
    except Unsupported as reason:
        return str(reason)
    except Exception as error:  # a defect of ark: this operator falls back, not the graph
        log.debug("the lowering of %s failed", node.target, exc_info=True)
        return f"its lowering failed ({type(error).__name__}: {error})"
    return None
