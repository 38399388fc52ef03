"""Finds attention that a model writes as two products with a softmax between them.

bmm(softmax(scale bmm(q, k') + mask), v), as it arrives after PyTorch's decompositions (amax, sub, exp, sum, div), with
views, copies and changes of floating type between. Lowerings then compute it as one operator, as they do
scaled_dot_product_attention: the scores are not stored, and positions that the mask leaves out are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from ark_torch.compile.analysis import aten

_FOUND = "ark_softmax_attention"
LARGEST_HEAD = 256  # of a GPU's kernels
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# where(condition, scores, fill) differs from scores + where(condition, 0, fill) by rounding unless the fill is as low.
_LOW = -1e20

_CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_VIEWS = (aten.view.default, aten.expand.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Mask:
    """What is added to the scores: `node`, or, if `fill` is set, 0 where the condition `node` equals `kept`, `fill`
    elsewhere. `shape`: of the scores there, to which it is broadcast."""

    node: Node
    shape: tuple[int, ...]
    fill: float | None = None
    kept: bool = True


@dataclass(frozen=True)
class SoftmaxAttention:
    """q [.., T, D], v [.., S, D] and k: [.., D, S] as the product reads it if `swapped`, else [.., S, D]."""

    scores: Node  # the product of queries and keys
    q: Node
    k: Node
    v: Node
    scale: float = 1.0
    mask: Mask | None = None
    nan_rows: bool = True
    swapped: bool = True
    by_operator: bool = False  # of scaled_dot_product_attention: before_widening() may find other operands


def attention_of(product: Node) -> SoftmaxAttention | None:
    """The attention whose last product this is."""
    found: SoftmaxAttention | None = product.meta.get(_FOUND)
    return found


def mark(graph: Graph, masked: bool) -> None:
    """Marks the last products. `masked`: also where a mask may leave positions out."""
    for product in graph.find_nodes(op="call_function", target=aten.bmm.default):
        found = _match(product)
        if found is not None and (masked or found.mask is None):
            product.meta[_FOUND] = found


def _tensor(node: object) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) and all(type(n) is int for n in value.shape) else None


def _match(product: Node) -> SoftmaxAttention | None:
    weights, v = product.args
    found = _softmax(weights, product)
    out, values = _tensor(product), _tensor(v)
    if found is None or out is None or values is None:
        return None
    q, k = _tensor(found.q), _tensor(found.k)
    if q is None or k is None:
        return None
    if not q.dtype == k.dtype == values.dtype == out.dtype or q.dtype not in _TYPES:
        return None
    (count, rows, size), positions = q.shape, k.shape[-1]
    shapes = [(count, size, positions), (count, positions, size), (count, rows, size)]
    if size > LARGEST_HEAD or [tuple(x.shape) for x in (k, values, out)] != shapes:  # a mask may add rows
        return None
    assert isinstance(v, Node)
    return replace(found, v=v, by_operator=_by_operator(product))


def _by_operator(product: Node) -> bool:
    """Whether PyTorch made it of scaled_dot_product_attention, because none of its own kernels takes the arguments."""
    made_by = product.meta.get("source_fn_stack") or [(None, None)]
    return made_by[-1][1] is F.scaled_dot_product_attention


def before_widening(found: SoftmaxAttention, member: Callable[[Node], bool]) -> SoftmaxAttention:
    """The same of the half types that PyTorch made float32 for lack of a kernel, which other kernels multiply as they
    are. q and k are scaled then. `member`: whether an operator may be passed over."""
    if not found.by_operator:
        return found
    narrow, scale = [], found.scale
    for operand, swaps in ((found.q, False), (found.k, True), (found.v, False)):
        wide = matrices_of(operand, member)
        if wide.target is aten.mul.Scalar and member(wide) and (factor := _number(wide.args[1])) is not None:
            wide, scale = wide.args[0], scale * factor  # type: ignore[assignment]
        if swaps:
            if not is_swapped(wide):
                return found
            wide = wide.args[0]  # type: ignore[assignment]
        if wide.target not in _CONVERSIONS or not member(wide) or not isinstance(wide.args[0], Node):
            return found
        narrow.append(wide.args[0])
    types = {given.dtype if (given := _tensor(one)) is not None else None for one in narrow}
    if len(types) != 1 or not types <= {torch.bfloat16, torch.float16}:
        return found
    q, k, v = narrow
    return replace(found, q=q, k=k, v=v, scale=scale, swapped=False)


def _through(argument: object, reader: Node) -> Node | None:
    """The node before views of whole matrices, copies and changes of floating type; None if one of them, or that node,
    has another reader."""
    node: Any = argument
    while isinstance(node, Node):
        if set(node.users) != {reader}:
            return None
        if not _passes(node):
            return node
        node, reader = node.args[0], node
    return None


def _passes(node: Node) -> bool:
    before, after = _tensor(node.args[0]) if node.args else None, _tensor(node)
    if before is None or after is None or before.numel() != after.numel():
        return False
    if node.target in _CONVERSIONS:
        return before.dtype.is_floating_point and after.dtype.is_floating_point
    return _keeps_matrices(node, before, after)


def _keeps_matrices(node: Node, before: Tensor, after: Tensor) -> bool:
    return node.target is aten.clone.default or (node.target in _VIEWS and before.shape[-2:] == after.shape[-2:])


def _softmax(weights: object, product: Node) -> SoftmaxAttention | None:
    node = _through(weights, product)
    if node is None:
        return None
    tests: list[Node] = []  # whether a row has a position, in a softmax that gives zeros if not
    if node.target is aten.where.self:
        condition: Any = node.args[0]
        zero, quotient = node.args[1:]
        if not isinstance(quotient, Node) or _number(zero) != 0 or set(quotient.users) != {node}:
            return None
        for target in (aten.logical_not.default, aten.any.dim, aten.logical_not.default, aten.eq.Scalar):
            if not _is(condition, target) or len(condition.users) != 1:
                return None
            tests.append(condition)
            condition = condition.args[0]
        if not _along_rows(tests[1]) or tests[3].args[1] != -math.inf:
            return None
        node = quotient
    exp, total = node.args if node.target is aten.div.Tensor and not node.kwargs else (None, None)
    if not (_is(exp, aten.exp.default) and _is(total, aten.sum.dim_IntList) and _along_rows(total)):
        return None
    shifted = exp.args[0]
    if not _is(shifted, aten.sub.Tensor) or shifted.kwargs:
        return None
    scores, top = shifted.args
    if not (_is(top, aten.amax.default) and _along_rows(top) and isinstance(scores, Node)):
        return None
    if total.args[0] is not exp or top.args[0] is not scores or any(test.args[0] is not scores for test in tests[3:]):
        return None
    inner = {exp: {total, node}, total: {node}, shifted: {exp}, top: {shifted}, scores: {shifted, top, *tests[3:]}}
    if any(set(one.users) != users for one, users in inner.items()):
        return None
    found = _scores(scores)
    return None if found is None else replace(found, nan_rows=not tests)


def _is(node: object, target: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and node.target is target


def _along_rows(reduction: Node) -> bool:
    """Whether it is along the last dimension, which remains."""
    given = _tensor(reduction.args[0])
    if given is None or len(reduction.args) < 3 or reduction.args[2] is not True or reduction.kwargs:
        return False
    dims: Any = reduction.args[1]
    dim = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    return dim in (-1, given.dim() - 1)


def _number(argument: object) -> float | None:
    """A number, or the one that a constant has everywhere."""
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return float(argument)
    if not isinstance(argument, Node) or argument.op != "call_function":
        return None
    while argument.target is aten.expand.default and isinstance(argument.args[0], Node):
        argument = argument.args[0]
    full = argument.target in (aten.full.default, aten.full_like.default)
    number = _number(argument.args[1 if full else 0]) if full or argument.target is aten.scalar_tensor.default else None
    return None if number is None else _rounded(number, argument)


def _rounded(number: float, node: Node) -> float | None:
    """The number as the node's type has it."""
    given = _tensor(node)
    return None if given is None else float(torch.tensor(number, dtype=torch.float64).to(given.dtype))


def _scores(node: Node) -> SoftmaxAttention | None:
    """What the scores are made of, from the softmax back to the product. Readers of `node` itself were checked."""
    step = _STEPS.get(node.target) if node.op == "call_function" else None
    if step is not None:
        return step(node)
    if not _passes(node):
        return None
    found, before, after = _before(node.args[0], node), _tensor(node.args[0]), _tensor(node)
    assert before is not None and after is not None
    narrows = after.dtype.itemsize < before.dtype.itemsize  # the lowest numbers become -inf, and rows of them NaN
    return None if found is not None and found.mask is not None and narrows else found


def _before(argument: object, reader: Node) -> SoftmaxAttention | None:
    if not isinstance(argument, Node) or set(argument.users) != {reader}:
        return None
    return _scores(argument)


def _product(node: Node) -> SoftmaxAttention | None:
    q, k = node.args
    return SoftmaxAttention(node, q, k, k) if isinstance(q, Node) and isinstance(k, Node) else None


def _added_product(node: Node) -> SoftmaxAttention | None:
    added, q, k = node.args[:3]
    scale, beta = (_number(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
    out = _tensor(node)
    if scale is None or beta not in (0, 1) or out is None or not (isinstance(q, Node) and isinstance(k, Node)):
        return None
    found = SoftmaxAttention(node, q, k, k, scale)
    if beta == 0 or _number(added) == 0:
        return found
    return replace(found, mask=Mask(added, tuple(out.shape))) if isinstance(added, Node) else None


def _scaled(node: Node) -> SoftmaxAttention | None:
    divides = node.target is aten.div.Tensor
    given = [(node.args[0], node.args[1])] + ([] if divides else [(node.args[1], node.args[0])])
    for scores, factor in given:
        number = _number(factor)
        if number is None or number == 0 or not math.isfinite(number) or node.kwargs:
            continue
        found = _before(scores, node)
        if found is not None and found.mask is None:
            return replace(found, scale=found.scale / number if divides else found.scale * number)
    return None


def _masked(node: Node, scores: object, mask: Mask) -> SoftmaxAttention | None:
    found = _before(scores, node)
    return replace(found, mask=mask) if found is not None and found.mask is None else None


def _sum(node: Node) -> SoftmaxAttention | None:
    out = _tensor(node)
    for scores, added in (node.args, node.args[::-1]):
        given = _tensor(added)
        if out is None or given is None or given.dtype not in _TYPES or node.kwargs:
            continue
        assert isinstance(added, Node)
        if (found := _masked(node, scores, Mask(added, tuple(out.shape)))) is not None:
            return found
    return None


def _chosen(node: Node) -> SoftmaxAttention | None:
    condition, first, second = node.args
    out = _tensor(node)
    if out is None or not isinstance(condition, Node):
        return None
    for scores, other, kept in ((first, second, True), (second, first, False)):
        fill = _number(other)
        fill = None if fill is None else _rounded(fill, node)
        if fill is not None and fill <= _LOW:
            return _masked(node, scores, Mask(condition, tuple(out.shape), fill, kept))
    return None


_STEPS: dict[object, Callable[[Node], SoftmaxAttention | None]] = {
    aten.bmm.default: _product,
    aten.baddbmm.default: _added_product,
    aten.mul.Tensor: _scaled,
    aten.mul.Scalar: _scaled,
    aten.div.Tensor: _scaled,
    aten.add.Tensor: _sum,
    aten.where.self: _chosen,
}


def is_swapped(node: Node) -> bool:
    """Whether it is a view whose last two dimensions are another tensor's in reverse."""
    given = _tensor(node.args[0]) if node.op == "call_function" and node.args else None
    if given is None:
        return False
    last = given.dim() - 1
    return is_permuted(node, [*range(last - 1), last, last - 1])


def is_permuted(node: Node, order: list[int]) -> bool:
    """Whether it is the view with dimensions in this order."""
    given = _tensor(node.args[0]) if node.op == "call_function" and node.args else None
    if given is None or given.dim() != len(order):
        return False
    found = list(range(given.dim()))
    if node.target is aten.transpose.int:
        one, other = (int(d) % len(found) for d in node.args[1:])  # type: ignore[arg-type]
        found[one], found[other] = other, one
    elif node.target is aten.permute.default:
        dims: Any = node.args[1]
        found = [d % len(found) for d in dims]
    else:
        return False
    return found == order


def matrices_of(node: Node, member: Callable[[Node], bool]) -> Node:
    """The tensor of four dimensions whose matrices a product's operand is views or copies of; the operand itself if
    there is none. `member`: whether a copy may be passed over. What another region copies may be written since."""
    found = node
    while node.args and isinstance(node.args[0], Node):
        before, after = _tensor(node.args[0]), _tensor(node)
        if before is None or after is None or before.numel() != after.numel() or before.dtype != after.dtype:
            break
        if not _keeps_matrices(node, before, after) or before.dim() not in (3, 4):
            break
        if node.target is aten.clone.default and not member(node):
            break
        node = node.args[0]
        if before.dim() == 4:
            found = node
    return found
