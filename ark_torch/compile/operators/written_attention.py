"""Attention that a model writes as products and a softmax (softmax_attention.py), as the operator."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ark_torch.compile import analysis, precision
from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided
from ark_torch.compile.lowering import Lowering
from ark_torch.compile.operators.attention_operands import before_repeat, boolean_mask, written_between
from ark_torch.compile.softmax_attention import (
    Mask,
    SoftmaxAttention,
    before_widening,
    is_permuted,
    is_swapped,
    matrices_of,
)

_SPLITS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)  # of the dimension of matrices
_FEW_ROWS = 16  # kernels for as many do not use tensor cores anyway
_BLOCK = 64  # positions that the CPU's kernel scores at once, wanted or not: for fewer, products are faster


def lowered(low: Lowering, product: Node, found: SoftmaxAttention) -> Operand | None:
    """The product's result; None if the operator would not compute it, or more slowly."""
    if not low.is_member(found.scores):
        return None
    found = before_widening(found, low.is_member)
    q_from, k_from, v_from = (matrices_of(one, low.is_member) for one in (found.q, found.k, found.v))
    read = [q_from, k_from, v_from] + ([] if found.mask is None else [found.mask.node])
    if any(written_between(analysis.root_of(one), one, product) for one in read):
        return None
    lead = tuple(q_from.meta["val"].shape[:-2])
    lead = lead if len(lead) == 2 else (1, *lead)
    q = _four(low.operand(q_from), lead)
    k, v = _four(low.operand(k_from), lead), _four(low.operand(v_from), lead)
    mask = None if found.mask is None else low.operand(found.mask.node)
    if found.mask is not None and found.mask.fill is None:
        mask = boolean_mask(low, found.mask.node)
    if q is None or k is None or v is None or not _fits(found.mask, mask, lead):
        return None
    k = _swapped(k) if found.swapped else k
    keys = k_from if not found.swapped else k_from.args[0] if is_swapped(k_from) else None
    if keys is not None:
        repeated = before_repeat(low, keys, product), before_repeat(low, v_from, product)
        if (
            all(isinstance(one, Strided) and len(one.shape) == 4 for one in repeated)
            and repeated[0].shape == repeated[1].shape
        ):
            k, v = repeated  # type: ignore[assignment]
    rows = lead[1] // k.shape[1] * q.shape[2]
    if low.device.type == "cpu" and k.shape[2] < _BLOCK:
        return None
    if q.dtype == torch.float32 and low.device.type == "cuda" and precision.tf32() and rows > _FEW_ROWS:
        return None
    inputs: list[Operand] = [low.stored(one) for one in (q, k, v)]
    if found.mask is not None:
        assert mask is not None
        inputs.append(low.stored(_added(low, found.mask, mask, lead)))
    out = low.result(product)
    whole = _four(out, lead)
    assert whole is not None
    if (read_as := _rows_first(low, product, q.shape)) is not None:
        _, heads, rows, columns = q.shape
        whole = whole._replace(strides=(rows * heads * columns, columns, heads * columns, 1))
        low.define(read_as, whole)
    low.node("attention", inputs, whole, scale=found.scale, causal=False, nan_rows=found.nan_rows)
    return out


def _rows_first(low: Lowering, product: Node, shape: tuple[int, ...]) -> Node | None:
    """The result's only view, if all that is read of it is a copy in the order batch, rows, heads: written in that
    order, it needs no copy."""
    view = _only_reader(product)
    if view is None or view.target not in _SPLITS:
        return None
    permuted = _only_reader(view)
    copy = _only_reader(permuted)
    if permuted is None or copy is None or copy.target is not aten.clone.default:
        return None
    ordered = tuple(view.meta["val"].shape) == shape and is_permuted(permuted, [0, 2, 1, 3])
    return view if ordered and low.belongs(copy) and copy.meta["val"].is_contiguous() else None


def _only_reader(node: Node | None) -> Node | None:
    readers = [] if node is None else list(node.users)
    return readers[0] if len(readers) == 1 and readers[0].op == "call_function" else None


def _four(operand: Operand, lead: tuple[int, ...]) -> Strided | None:
    """[batch, heads, rows, columns] of matrices that stand in one or two dimensions."""
    if not isinstance(operand, Strided):
        return None
    if len(operand.shape) == 4:
        return operand if operand.shape[:2] == lead else None
    if len(operand.shape) != 3 or operand.shape[0] != math.prod(lead):
        return None
    return operand._replace(shape=(*lead, *operand.shape[1:]), strides=(operand.strides[0] * lead[1], *operand.strides))


def _swapped(operand: Strided) -> Strided:
    (*shape, rows, columns), (*strides, row, column) = operand.shape, operand.strides
    return operand._replace(shape=(*shape, columns, rows), strides=(*strides, column, row))


def _fits(mask: Mask | None, operand: Operand | None, lead: tuple[int, ...]) -> bool:
    """Whether the mask is one of [batch, heads, rows, positions]."""
    if mask is None:
        return True
    if not isinstance(operand, Strided) or (mask.fill is not None and operand.dtype != torch.bool):
        return False
    return mask.shape[:-2] == lead if len(mask.shape) == 4 else mask.shape[:-2] == (math.prod(lead),)


def _added(low: Lowering, mask: Mask, operand: Operand, lead: tuple[int, ...]) -> Strided:
    if mask.fill == -math.inf:
        if not mask.kept:
            operand = low.pointwise("logical_not", operand, dtype=torch.bool)
    elif mask.fill is not None:
        zero, fill = Literal(0.0, torch.float32, ()), Literal(mask.fill, torch.float32, ())
        operand = low.pointwise("where", operand, *((zero, fill) if mask.kept else (fill, zero)))
    expanded = _four(low.expand(operand, mask.shape), lead)
    assert expanded is not None
    return expanded
