"""Embedding bags (2-D indices arrive as offsets, too) and averages over windows."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, lowers
from ark_torch.compile.operators.pointwise import into_result, keyword

MODES = ("sum", "mean", "max")
MOST_TERMS = 16  # of a window that is averaged: each is an addition of its own


def _integers(low: Lowering, argument: Any) -> Strided:
    operand = low.stored(low.operand(argument))
    if operand.dtype not in (torch.int64, torch.int32) or len(operand.shape) != 1:
        raise Unsupported("indices of bags that are not integers of one dimension")
    return operand


@lowers(aten._embedding_bag_forward_only.default, aten._embedding_bag.default)
def embedding_bag(low: Lowering, node: Node) -> tuple[Operand | None, ...]:
    """Returns the pooled rows; the operator's other results are for gradients only."""
    table = low.stored(low.operand(node.args[0]))
    index, offsets = _integers(low, node.args[1]), _integers(low, node.args[2])
    if not table.dtype.is_floating_point or len(table.shape) != 2:
        raise Unsupported("a table of bags that is not floating and of two dimensions")
    inputs: list[Operand] = [table, index, offsets]
    mode = MODES[int(keyword(node, "mode", 0))]
    weights = keyword(node, "per_sample_weights", None)
    if weights is not None:
        if mode != "sum":
            raise Unsupported("weights of samples that are not summed")
        inputs.append(low.stored(low.operand(weights)))
    out = low.node(
        "embedding_bag",
        inputs,
        low.result(node, 0),
        mode=mode,
        padding_idx=int(keyword(node, "padding_idx", -1)),
        include_last_offset=bool(keyword(node, "include_last_offset", False)),
    )
    return out, None, None, None


@lowers(aten.avg_pool2d.default)
def average_pool(low: Lowering, node: Node) -> Operand:
    """The sum of one strided view of the input for each position in the window: pointwise, so it fuses."""
    x, size = low.stored(low.operand(node.args[0])), _pair(node.args[1])
    step = _pair(keyword(node, "stride", []) or size)
    if not x.dtype.is_floating_point:
        raise Unsupported("an average of integers")
    if any(_pair(keyword(node, "padding", 0))) or keyword(node, "ceil_mode", False):
        raise Unsupported("an average over windows that reach beyond the tensor")
    if keyword(node, "divisor_override", None) is not None or size[0] * size[1] > MOST_TERMS:
        raise Unsupported(f"an average with a divisor of its own or over more than {MOST_TERMS} elements")
    *outer, row, column = x.strides
    strides = (*outer, row * step[0], column * step[1])
    shape = tuple(node.meta["val"].shape)
    places = [x.offset + i * row + j * column for i in range(size[0]) for j in range(size[1])]
    total, *others = (x._replace(shape=shape, strides=strides, offset=place) for place in places)
    for other in others:
        total = low.pointwise("add", total, other)
    return into_result(low, node, "div", total, Literal(float(len(places)), torch.float32, ()))


def _pair(given: Any) -> tuple[int, int]:
    both = [given] if isinstance(given, int) else list(given)
    return (int(both[0]), int(both[-1]))
