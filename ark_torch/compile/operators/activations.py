"""Activations and softmax that a graph still contains as a whole: several pointwise nodes, in float32 in between."""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Unsupported
from ark_torch.compile.lowering import Lowering, lowers
from ark_torch.compile.operators.pointwise import into_result, keyword
from ark_torch.compile.operators.reductions import reduce_float


def number(value: float) -> Literal:
    return Literal(value, torch.float32, ())


def floating(low: Lowering, node: Node) -> Operand:
    operand = low.operand(node.args[0])
    if not operand.dtype.is_floating_point:
        raise Unsupported("an activation of integers")
    return operand


@lowers(aten.silu.default)
def silu(low: Lowering, node: Node) -> Operand:
    x = floating(low, node)
    return into_result(low, node, "mul", x, low.pointwise("sigmoid", x))


@lowers(aten.gelu.default)
def gelu(low: Lowering, node: Node) -> Operand:
    x = floating(low, node)
    if keyword(node, "approximate", "none") == "tanh":
        cube = low.pointwise("mul", low.pointwise("mul", low.pointwise("mul", x, x), x), number(0.044715))
        inner = low.pointwise("mul", low.pointwise("add", x, cube), number(math.sqrt(2 / math.pi)))
        curve = low.pointwise("tanh", inner)
    else:
        curve = low.pointwise("erf", low.pointwise("mul", x, number(math.sqrt(0.5))))
    half = low.pointwise("mul", x, number(0.5))
    return into_result(low, node, "mul", half, low.pointwise("add", curve, number(1.0)))


@lowers(aten.glu.default)
def glu(low: Lowering, node: Node) -> Operand:
    x = low.stored(floating(low, node))
    dim = int(keyword(node, "dim", -1)) % max(len(x.shape), 1)
    half = x.shape[dim] // 2
    first = x._replace(shape=(*x.shape[:dim], half, *x.shape[dim + 1 :]))
    second = first._replace(offset=first.offset + half * x.strides[dim])
    return into_result(low, node, "mul", first, low.pointwise("sigmoid", second))


@lowers(aten._softmax.default, aten._log_softmax.default)
def softmax(low: Lowering, node: Node) -> Operand:
    x = floating(low, node)
    dim = [int(node.args[1])]  # type: ignore[arg-type]
    shifted = low.pointwise("sub", x, reduce_float(low, "amax", x, dim))
    exponents = low.pointwise("exp", shifted)
    total = reduce_float(low, "sum", exponents, dim)
    if node.target is aten._log_softmax.default:
        return into_result(low, node, "sub", shifted, low.pointwise("log", total))
    return into_result(low, node, "div", exponents, total)


@lowers(aten.native_layer_norm.default)
def layer_norm(low: Lowering, node: Node) -> tuple[Operand, ...]:
    x, shape, weight, bias, eps = node.args
    operand = low.operand(x)
    dims = list(range(len(operand.shape) - len(shape), len(operand.shape)))  # type: ignore[arg-type]
    mean = reduce_float(low, "mean", operand, dims)
    centred = low.pointwise("sub", operand, mean)
    variance = reduce_float(low, "mean", low.pointwise("mul", centred, centred), dims)
    scale = low.pointwise("rsqrt", low.pointwise("add", variance, number(float(eps))))  # type: ignore[arg-type]
    y = low.pointwise("mul", centred, scale)
    if weight is not None:
        y = low.pointwise("mul", y, low.operand(weight))
    if bias is not None:
        y = low.pointwise("add", y, low.operand(bias))
    return (
        low.copy(y, low.result(node, 0)),
        low.copy(mean, low.result(node, 1)),
        low.copy(scale, low.result(node, 2)),
    )
