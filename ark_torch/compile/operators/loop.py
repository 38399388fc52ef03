"""The operator that ends a loop of steps (ark_torch.resident). It returns its operand, so that a graph keeps it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from ark_torch.compile import ir
from ark_torch.compile.ir import Operand
from ark_torch.compile.lowering import Lowering, lowers


@torch.library.custom_op("ark_torch::stop", mutates_args=())
def stop(value: Tensor) -> Tensor:
    """No step follows if the one element of `value` is not zero."""
    return value.clone()


@stop.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@lowers(torch.ops.ark_torch.stop.default)
def lower_stop(low: Lowering, node: Node) -> Operand:
    out = low.copy(low.operand(node.args[0]), low.result(node))
    low.graph.nodes.append(ir.Node("stop", [low.graph.read(out)], [], {}, "stop"))
    return out
