"""Embedding bags. 2-D indices arrive as offsets, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Operand, Strided, Unsupported
from ark_torch.compile.lowering import Lowering, lowers
from ark_torch.compile.operators.pointwise import keyword

MODES = ("sum", "mean", "max")


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
