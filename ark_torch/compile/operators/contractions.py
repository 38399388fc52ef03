"""Products and attention."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ark_torch.compile import low_bits, precision, softmax_attention
from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, lowers
from ark_torch.compile.operators import dequantized, experts, written_attention
from ark_torch.compile.operators.attention_operands import before_repeat, boolean_mask
from ark_torch.compile.operators.pointwise import keyword

# A row's running result stays in registers (csrc/compiler/emit/cuda/emit_cuda_attention.cpp).
LARGEST_HEAD = 512


def _matmul(low: Lowering, out: Strided, left: Operand, right: Operand, bias: Operand | None = None) -> Strided:
    operands = [low.stored(o) for o in (left, right)]
    if any(not o.dtype.is_floating_point for o in operands) or operands[0].dtype != operands[1].dtype:
        raise Unsupported("a matrix product of integers or of mixed types")
    if bias is None and experts.grouped(low, out, *operands):
        return out
    allowed = {"tf32": True} if operands[0].dtype == torch.float32 and precision.tf32() else {}
    return low.node("matmul", operands if bias is None else [*operands, low.stored(bias)], out, **allowed)


@lowers(aten.mm.default, aten.bmm.default)
def mm(low: Lowering, node: Node) -> Operand:
    if (weight := low_bits.weight_of(node)) is not None:
        return dequantized.product(low, weight, low.result(node), low.operand(node.args[0]))
    found = softmax_attention.attention_of(node)
    if found is not None and (result := written_attention.lowered(low, node, found)) is not None:
        return result
    return _matmul(low, low.result(node), low.operand(node.args[0]), low.operand(node.args[1]))


@lowers(aten.addmm.default, aten.baddbmm.default)
def addmm(low: Lowering, node: Node) -> Operand:
    if (weight := low_bits.weight_of(node)) is not None:
        return dequantized.product(low, weight, low.result(node), low.operand(node.args[1]), low.operand(node.args[0]))
    bias, left, right = (low.operand(a) for a in node.args[:3])
    alpha, beta = float(keyword(node, "alpha", 1)), float(keyword(node, "beta", 1))
    out = low.result(node)
    if alpha == 1 and beta == 1:
        return _matmul(low, out, left, right, bias)
    product: Operand = _matmul(low, low.fresh(torch.float32, out.shape), left, right)
    if alpha != 1:
        product = low.pointwise("mul", product, Literal(alpha, torch.float32, ()), out=out if beta == 0 else None)
    if beta == 0:  # the bias must not be read: it may hold NaN
        return product if alpha != 1 else low.copy(product, out)
    if beta != 1:
        bias = low.pointwise("mul", bias, Literal(beta, torch.float32, ()))
    return low.pointwise("add", product, bias, out=out)


@lowers(aten.mv.default, aten.dot.default)
def matrix_vector(low: Lowering, node: Node) -> Operand:
    """A product with one row or column: views with a dimension of length 1."""
    left, right = (low.stored(low.operand(a)) for a in node.args[:2])
    out = low.result(node)
    row = (
        left if len(left.shape) == 2 else left._replace(shape=(1, *left.shape), strides=(left.shape[0], *left.strides))
    )
    column = right._replace(shape=(*right.shape, 1), strides=(*right.strides, 1))
    whole = out._replace(shape=(row.shape[0], 1), strides=(out.strides[0] if out.strides else 1, 1))
    _matmul(low, whole, row, column)
    return out


_ON_CPU = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
_ON_GPU = (  # those that PyTorch chooses from
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def skips_positions(node: Node) -> bool:
    """Whether this is attention that skips positions that its mask excludes, even if they are NaN."""
    if node.target not in (*_ON_CPU, *_ON_GPU):
        return False
    mask = keyword(node, "attn_mask", keyword(node, "attn_bias", None))
    return mask is not None or bool(keyword(node, "is_causal", False))


@lowers(*_ON_CPU)
def flash_attention(low: Lowering, node: Node) -> tuple[Operand | None, ...]:
    if float(keyword(node, "dropout_p", 0.0)) != 0:
        raise Unsupported("attention with dropout")
    return _attention(low, node, low.result(node, 0)), None  # the logarithms of sums, which inference does not use


@lowers(*_ON_GPU)
def gpu_attention(low: Lowering, node: Node) -> tuple[Operand | None, ...]:
    """All results but the first are for backward passes."""
    if float(keyword(node, "dropout_p", 0.0)) != 0:
        raise Unsupported("attention with dropout")
    if keyword(node, "return_debug_mask", False):
        raise Unsupported("attention that is asked for its debug mask")
    return _attention(low, node, low.result(node, 0)), *([None] * (len(node.meta["val"]) - 1))


def _attention(low: Lowering, node: Node, out: Strided) -> Strided:
    q = low.stored(low.operand(node.args[0]))
    k, v = (low.stored(before_repeat(low, a, node)) for a in node.args[1:3])
    if k.shape[1] != v.shape[1]:
        k, v = (low.stored(low.operand(a)) for a in node.args[1:3])
    if len(q.shape) != 4 or not q.dtype.is_floating_point or not q.dtype == k.dtype == v.dtype:
        raise Unsupported("attention that is not over [batch, heads, positions, size] of one floating type")
    if q.shape[1] % k.shape[1] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[3] != q.shape[3]:
        raise Unsupported("attention whose keys or values are shaped unlike its queries")
    if q.shape[3] > LARGEST_HEAD:
        raise Unsupported(f"attention with heads of more than {LARGEST_HEAD} numbers (here {q.shape[3]})")
    causal = bool(keyword(node, "is_causal", False))
    mask = keyword(node, "attn_mask", keyword(node, "attn_bias", None))
    scale = keyword(node, "scale", None)
    inputs: list[Operand] = [q, k, v]
    if mask is not None:
        inputs.append(low.stored(boolean_mask(low, mask)))
    return low.node(
        "attention", inputs, out, scale=float(scale) if scale is not None else 1 / math.sqrt(q.shape[3]), causal=causal
    )
