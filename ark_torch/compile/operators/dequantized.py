"""Products with quantized weights (low_bits.py), also of float8 rows, and per-channel scales and biases that follow.

Many models apply the channel's scale after the product: `linear(x, codes.to(x.dtype)) * scales`, and torchao the bias
after that. Each of these is one more factor or summand per column, so a remembered product is emitted again with it;
the previous one is then unread and is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ark_torch.compile import low_bits, scaled_products
from ark_torch.compile.decoding import Leaf, leaf_of
from ark_torch.compile.ir import Operand, Strided, Unsupported
from ark_torch.compile.low_bits import Weight
from ark_torch.compile.lowering import Lowering, contiguous_strides, lowers


@dataclass(frozen=True)
class _Product:
    weight: Weight
    rows: Strided
    versions: tuple[int, int]  # of its operands, and of its result
    scale: Strided | None = None  # per channel, applied after the product
    bias: Operand | None = None


@lowers(low_bits.PACKED, low_bits.BYTES, low_bits.TILES)
def packed(low: Lowering, node: Node) -> Strided:
    return product(low, _weight_of(node), low.result(node), low.operand(node.args[0]))


def _weight_of(node: Node) -> Weight:
    weight = low_bits.weight_of(node)
    if weight is None:
        raise Unsupported("a product of coded weights in a form that ark does not know (explain's weights say why)")
    return weight


@lowers(*scaled_products.OPERATORS)
def scaled(low: Lowering, node: Node) -> Strided:
    """The rows' scale multiplies the sums, which are float32 until the result is rounded."""
    weight, parts, out = _weight_of(node), scaled_products.parts_of(node), low.result(node)
    conversion = scaled_products.conversion_of(parts.rows)
    many = low_bits.multiplies_float8(weight, out.shape[0])
    if not low.is_known(conversion):
        value = conversion.meta["val"]
        rounded = low.fresh(torch.float8_e4m3fn if many else torch.float16, value.shape, value.stride())
        if not rounded.spans_densely():
            raise Unsupported("rows with gaps or overlap that become float8")
        low.define(conversion, low.pointwise("round_e4m3", low.operand(conversion.args[0]), out=rounded))
    if low.stored(low.operand(parts.rows)).dtype == torch.float8_e4m3fn:
        if not many:
            raise Unsupported("float8 rows that another product takes as more rows")
        return _of_float8_rows(low, weight, parts, out)
    sums = product(low, weight, low.fresh(torch.float32, out.shape), low.operand(parts.rows))
    scale = low.operand(parts.row_scale)
    if parts.bias is None:
        return low.pointwise("mul", sums, scale, out=out)
    return low.pointwise("add", low.pointwise("mul", sums, scale), low.operand(parts.bias), out=out)


def _of_float8_rows(low: Lowering, weight: Weight, parts: scaled_products.Parts, out: Strided) -> Strided:
    rows, decoded = low.stored(low.operand(parts.rows)), weight.decoded
    if rows.strides[1] != 1 or decoded.scale is None:
        raise Unsupported("float8 rows that are not adjacent along the depth")
    codes, scale = _of(low, decoded.codes), _of(low, decoded.scale)
    inputs: list[Operand] = [
        rows,
        codes._replace(shape=weight.codes.shape, strides=weight.codes.strides, offset=weight.codes.offset),
        low.stored(low.expand(low.operand(parts.row_scale), (rows.shape[0], 1))),
        scale._replace(shape=(1, decoded.shape[1]), strides=weight.scale),
    ]
    if parts.bias is not None:
        inputs.append(low.stored(low.operand(parts.bias)))
    return low.node("scaled_matmul", inputs, out, fast_accum=parts.fast)


def product(low: Lowering, weight: Weight, out: Strided, rows: Operand, bias: Operand | None = None) -> Strided:
    stored = low.stored(rows)
    if not stored.dtype.is_floating_point:
        raise Unsupported("a product of integers with decoded weights")
    made = _Product(weight, stored, (low.graph.version(stored.buffer), low.graph.version(out.buffer) + 1), None, bias)
    return _write(low, made, out)


def _write(low: Lowering, made: _Product, out: Strided) -> Strided:
    weight, decoded = made.weight, made.weight.decoded
    columns = decoded.shape[1]
    codes = _of(low, decoded.codes)
    inputs: list[Operand] = [
        made.rows,
        codes._replace(shape=weight.codes.shape, strides=weight.codes.strides, offset=weight.codes.offset),
    ]
    if decoded.scale is not None:
        inputs.append(_of(low, decoded.scale)._replace(shape=(weight.groups, columns), strides=weight.scale))
    elif made.scale is not None:
        inputs.append(made.scale)
    if decoded.zero is not None:
        inputs.append(_of(low, decoded.zero)._replace(shape=(weight.groups, columns), strides=weight.zero))
    if made.bias is not None:
        inputs.append(low.stored(made.bias))
    low.node(
        "dequant_matmul",
        inputs,
        out,
        bits=decoded.bits,
        signed=decoded.signed,
        high_first=decoded.high_first,
        offset=decoded.offset,
        scaled=decoded.scale is not None or made.scale is not None,
        zero="" if decoded.zero is None else "after" if decoded.zero_after else "before",
        biased=made.bias is not None,
        block=decoded.block,
    )
    low.notes.setdefault("dequantized", {})[out.buffer] = replace(
        made, versions=(made.versions[0], low.graph.version(out.buffer))
    )
    return out


def _of(low: Lowering, leaf: Leaf) -> Strided:
    source = low.source(leaf.source) if leaf.made is None else low.unpacked(leaf.source, leaf.made)
    return leaf.view._replace(buffer=source.buffer)


def with_channels(low: Lowering, node: Node, op: str) -> Strided | None:
    """The product that includes a multiplication or addition of per-channel numbers to another product; None if `node`
    is something else."""
    known = low.notes.get("dequantized")
    if not known or node.kwargs.get("alpha", 1) != 1:
        return None
    for of, by in (node.args[:2], node.args[1::-1]):
        if not isinstance(of, Node) or not isinstance(by, Node):
            continue
        operand = low.operand(of)
        made = known.get(operand.buffer) if isinstance(operand, Strided) else None
        if made is None or not isinstance(operand, Strided):
            continue
        numbers = _channels(low, by, operand)
        if numbers is not None:
            return _joined(low, node, op, made, operand, numbers)
    return None


def _channels(low: Lowering, by: Node, of: Strided) -> Strided | None:
    """Per-column numbers for a product's result, as given to the graph if that is known."""
    columns = of.shape[-1]
    leaf = leaf_of(by)
    known = leaf is not None and leaf.source not in low.mutated
    numbers: Operand = _of(low, leaf) if leaf is not None and known else low.operand(by)
    if not isinstance(numbers, Strided) or not numbers.dtype.is_floating_point or len(numbers.shape) > len(of.shape):
        return None
    if any(n != 1 for n in numbers.shape[:-1]) or low.graph.buffers[numbers.buffer].mutated:
        return None
    last = (numbers.shape[-1], numbers.strides[-1]) if numbers.shape else (1, 0)
    if last[0] not in (1, columns):
        return None
    return numbers._replace(shape=(1, columns), strides=(0, last[1] if last[0] == columns else 0))


def _joined(low: Lowering, node: Node, op: str, made: _Product, operand: Strided, numbers: Strided) -> Strided | None:
    rows, columns = made.rows.shape[0], made.weight.decoded.shape[1]
    whole = (
        operand.offset == 0 and operand.shape[-1] == columns and operand.strides == contiguous_strides(operand.shape)
    )
    now = (low.graph.version(made.rows.buffer), low.graph.version(operand.buffer))
    if not whole or now != made.versions or made.bias is not None:
        return None
    decoded = made.weight.decoded
    if op == "mul" and (decoded.scale is not None or decoded.zero is not None or made.scale is not None):
        return None
    out = low.result(node)
    if out.shape != operand.shape or out.strides != operand.strides or not out.dtype.is_floating_point:
        return None
    changed: dict[str, Any] = {"scale": numbers} if op == "mul" else {"bias": numbers}
    version = (low.graph.version(made.rows.buffer), 0)
    matrix = out._replace(shape=(rows, columns), strides=(columns, 1))
    _write(low, replace(made, versions=version, **changed), matrix)
    return out
