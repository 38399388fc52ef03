"""What attention reads in place of what a graph makes for it: keys and values before they are repeated for every head
of a group, a boolean mask before it becomes numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from ark_torch.compile import analysis
from ark_torch.compile.analysis import aten
from ark_torch.compile.ir import Literal, Operand, Strided
from ark_torch.compile.lowering import Lowering


def written_between(root: Node, first: Node, last: Node) -> bool:
    """Whether the region writes a root after `first` and before `last`, in program order."""
    inside = False
    for node in first.graph.nodes:
        if node is first:
            inside = True
        elif node is last:
            return False
        elif inside and root in analysis.written_roots(node):
            return True
    return False


def before_repeat(low: Lowering, argument: Any, reader: Node) -> Operand:
    """Keys or values before they are repeated for every head of a group (unsqueeze, expand, clone, view).

    Hugging Face's models repeat them explicitly, which would copy the whole cache in each step; the graph's attention
    repeats implicitly. The copy is then unread and is dropped.
    """
    operand = low.operand(argument)
    view = argument
    if not (isinstance(view, Node) and analysis.is_view(view) and isinstance(view.args[0], Node)):
        return operand
    clone = view.args[0]
    if clone.target is not aten.clone.default or not low.is_member(clone):
        return operand
    expanded = low.operand(clone.args[0])
    root = analysis.root_of(clone.args[0])  # type: ignore[arg-type]
    if not isinstance(expanded, Strided) or len(expanded.shape) != 5 or len(operand.shape) != 4:
        return operand
    batch, groups, repeats, positions, size = expanded.shape
    if operand.shape != (batch, groups * repeats, positions, size) or expanded.strides[2] != 0:
        return operand
    if written_between(root, clone, reader):
        return operand
    return expanded._replace(
        shape=(batch, groups, positions, size), strides=expanded.strides[:2] + expanded.strides[3:]
    )


def boolean_mask(low: Lowering, mask: Any) -> Operand:
    """The condition in where(condition, 0, -inf), which PyTorch makes of a boolean mask for this operator."""
    operand = low.operand(mask)
    node = mask
    while isinstance(node, Node) and node.target is aten.expand.default:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not aten.where.self or not low.is_member(node):
        return operand
    condition, kept, dropped = (low.operand(a) for a in node.args)
    if not (isinstance(kept, Literal) and isinstance(dropped, Literal) and isinstance(condition, Strided)):
        return operand
    if kept.value != 0 or condition.dtype != torch.bool or not _excludes(low, node, dropped):
        return operand
    if analysis.root_of(node.args[0]) in low.mutated:  # type: ignore[arg-type]
        return operand
    return low.expand(low.expand(condition, tuple(node.meta["val"].shape)), operand.shape)


def _excludes(low: Lowering, where: Node, bias: Literal) -> bool:
    """Whether a position with this bias is not attended to.

    For cuDNN, PyTorch up to 2.11 itself writes -65504 for a boolean mask's False (convert_boolean_attn_mask_cudnn). A
    row without any position then has zeros here, as with PyTorch's other implementations; cuDNN ignores its mask.
    """
    made_by = where.meta.get("source_fn_stack") or [(None, None)]
    by_attention = made_by[-1][1] is F.scaled_dot_product_attention
    return bias.value == -math.inf or (by_attention and bias.value == low.constant(-65504.0, bias.dtype).value)
