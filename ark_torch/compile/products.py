"""Fuses products with adjacent collectives into one operator: ark_torch.ops' matmul_all_reduce and its relatives.

It recognizes the forms that torch.nn.functional.linear with the functional collectives, DTensor and Megatron's sequence
parallelism make in an ATen graph: a product, views, and an all_reduce or reduce_scatter of sums; or an all_gather,
views, and a product, whose bias is added after the operator. In both, the scattered or gathered dimension may be the
second of three. If gathered rows have several readers, the first product becomes the operator, and the others read its
rows. A product with readers other than its sum stays unchanged.
"""

from __future__ import annotations

import math
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

import ark_torch.ops  # noqa: F401  (their fake kernels)
from ark_torch.compile.analysis import aten, is_getitem, tensor_of
from ark_torch.compile.graph_edits import VIEWS, NotFused, alone, call, erase, inherit, shape_of
from ark_torch.compile.ir import Unsupported
from ark_torch.compile.operators.collectives import resolved

_functional = torch.ops._c10d_functional
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# With fewer rows a loop kernel's own product and packets are as fast, and the region stays whole.
LEAST_ROWS = 32


def fuse(graph: Graph, device: str = "cuda", least_rows: int = LEAST_ROWS) -> list[str]:
    """Replaces matches on tensors of that device. Returns, for each collective next to a product, what became of
    it.

    Ranks compile the same graph, so all of them call the same operators in the same order.
    """
    told = []
    for wait in list(graph.nodes):
        if wait.target is not _functional.wait_tensor.default:
            continue
        started, value = wait.args[0], tensor_of(wait)
        maker = _MAKERS.get(getattr(started, "target", None))
        if maker is None or value is None or value.device.type != device:
            continue
        try:
            found = maker(wait, started, least_rows)
        except (NotFused, Unsupported) as reason:
            told.append(f"{started.name}: not fused with a product: {reason}")
            continue
        if found:
            told.append(f"{started.name}: {found}")
    return told


def _pieces_in_order(cat: Node, dim: int, world: int, split_dim: int) -> Node:
    """What was split, if the node is torch.cat of a split's equal pieces, in order."""
    pieces = list(cat.args[0])  # type: ignore[arg-type]
    at = cat.args[1] if len(cat.args) > 1 else 0
    split = pieces[0].args[0] if pieces and is_getitem(pieces[0]) else None
    whole = (
        at == dim
        and isinstance(split, Node)
        and split.target is aten.split.Tensor
        and (split.args[2] if len(split.args) > 2 else 0) == split_dim
        and len(pieces) == world
        and all(is_getitem(one) and one.args == (split, i) for i, one in enumerate(pieces))
    )
    if not whole:
        raise NotFused("its tensors are put together in another order")
    assert isinstance(split, Node)
    for one in (split.args[0], *pieces):
        alone(one)
    return split.args[0]  # type: ignore[return-value]


def _product(node: Node) -> Node:
    """The product if the node is just a view of it that keeps the last dimension."""
    columns = shape_of(node)[-1]
    while node.target in VIEWS:
        alone(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.mm.default:
        raise NotFused(f"it is of {node.name}, no product" if node.op == "call_function" else "it is of no product")
    alone(node)
    if shape_of(node)[-1] != columns:
        raise NotFused("a view of the product takes its columns apart")
    return node


def _check(product: Node, least_rows: int) -> None:
    value = tensor_of(product)
    if value is None or value.dtype not in _DTYPES:
        raise NotFused(f"it is of {value.dtype if value is not None else 'no tensor'}")
    if shape_of(product)[0] < least_rows:
        raise NotFused(f"it has {shape_of(product)[0]} rows, which a region's own kernel multiplies")


def _sum(wait: Node, started: Node, least_rows: int) -> str:
    """Handles all_reduce(product) and reduce_scatter_tensor(product)."""
    scatters = started.target is _functional.reduce_scatter_tensor.default
    source, op, name = started.args[0], started.args[1], started.args[-1]
    assert isinstance(source, Node)
    if op != "sum":
        raise NotFused(f"its operation is {op}")
    group = resolved(name, wait.meta["val"].device)
    world, graph = group.size(), wait.graph
    alone(started)
    alone(source)
    middle = False  # whether the second dimension of three is scattered
    if scatters and source.target is aten.cat.default:
        source, middle = _pieces_in_order(source, 0, world, 1), True
        if len(shape_of(source)) != 3 or shape_of(source)[1] % world != 0:
            raise NotFused("what is scattered is neither the first dimension nor the second of three")
    elif scatters and shape_of(source)[0] % world != 0:
        raise NotFused("its first dimension does not divide by the number of ranks")
    product = _product(source)
    _check(product, least_rows)
    a, b = product.args
    assert isinstance(a, Node)
    with graph.inserting_before(wait):
        if middle and shape_of(source)[0] != 1:  # rows in the order of their receiving ranks
            batch, rows, _ = shape_of(source)
            if not a.meta["val"].is_contiguous():
                raise NotFused("its rows would have to be put in order, and do not lie in one piece")
            apart = call(graph, aten.view.default, a, [batch, world, rows // world, shape_of(a)[1]])
            turned = call(graph, aten.permute.default, apart, [1, 0, 2, 3])
            copied = call(graph, aten.clone.default, turned)
            a = call(graph, aten.reshape.default, copied, list(shape_of(a)))
        target = (torch.ops.ark.matmul_reduce_scatter if scatters else torch.ops.ark.matmul_all_reduce).default
        fused = graph.call_function(target, (a, b, group.group_name, "auto", 0))
        rows = shape_of(product)[0] // (world if scatters else 1)
        fused.meta["val"] = product.meta["val"].new_empty((rows, shape_of(product)[1]))
        result = call(graph, aten.view.default, fused, list(shape_of(wait)))
    inherit(fused, product)
    wait.replace_all_uses_with(result)
    erase(wait)
    return str(fused.target)


def _factors(product: Node) -> tuple[Any, Any, Any]:
    """Its rows, its columns, and the bias of a linear layer or None."""
    if product.target is aten.addmm.default:
        bias, a, b = product.args
        return a, b, bias
    a, b = product.args
    return a, b, None


def _reader(node: Node, user: Node) -> Node | None:
    """The product of `node`'s rows that `user` is, or leads to through views that nothing else reads."""
    while user.target in VIEWS and len(user.users) == 1:
        node, user = user, next(iter(user.users))
    if user.target not in (aten.mm.default, aten.addmm.default) or user.kwargs:  # kwargs scale a bias or product
        return None
    a, b, bias = _factors(user)
    return user if a is node and b is not node and bias is not node else None


def _gather(wait: Node, started: Node, least_rows: int) -> str:
    """Handles products of gathered rows."""
    source, name = started.args[0], started.args[-1]
    assert isinstance(source, Node)
    group = resolved(name, wait.meta["val"].device)
    world, graph = group.size(), wait.graph
    alone(started)
    node, middle = wait, False
    depth = shape_of(wait)[-1]
    if len(shape_of(wait)) == 3 and [user.target for user in wait.users] == [aten.split.Tensor]:
        (split,) = wait.users
        readers = {reader for piece in split.users for reader in piece.users}
        if len(readers) != 1 or (cat := next(iter(readers))).target is not aten.cat.default:
            raise NotFused("what is gathered is taken apart")
        if _pieces_in_order(cat, 1, world, 0) is not wait:
            raise NotFused("what is gathered is taken apart")
        node, middle = cat, shape_of(source)[0] != 1
    while len(node.users) == 1 and (user := next(iter(node.users))).target in VIEWS:
        node = user
    order = {one: i for i, one in enumerate(graph.nodes)}
    readers_in_order = sorted(node.users, key=order.__getitem__)
    product = next((found for one in readers_in_order if (found := _reader(node, one)) is not None), None)
    if product is None:
        raise NotFused("it is read by no product")
    read_too = len(node.users) > 1  # by others, which get the rows from the operator
    if read_too and middle:
        raise NotFused(f"what is gathered has {len(node.users)} readers, in another order than it comes in")
    rows_of, b, bias = _factors(product)
    if not source.meta["val"].is_contiguous() or shape_of(rows_of)[-1] != depth:
        raise NotFused("a view takes its rows apart")
    _check(product, least_rows)
    assert isinstance(b, Node)
    first = min([product, *readers_in_order[1:]], key=order.__getitem__) if read_too else product
    if any(order[one] > order[first] for one in (b, bias) if one is not None):
        raise NotFused("others read what is gathered before the product's other factor or bias is there")
    rows = math.prod(shape_of(source)[:-1])
    with graph.inserting_before(first):
        a = call(graph, aten.view.default, source, [rows, depth])
        both = graph.call_function(
            torch.ops.ark.all_gather_matmul.default, (a, b, group.group_name, "auto", 0, read_too)
        )
        value, gathered = product.meta["val"], wait.meta["val"]
        both.meta["val"] = (
            value.new_empty(shape_of(product)),
            gathered.new_empty((world * rows, depth) if read_too else (0,)),
        )
        result = call(graph, getitem, both, 0)
        if read_too:
            again = call(graph, aten.view.default, call(graph, getitem, both, 1), list(shape_of(node)))
        if middle:
            batch, each, _ = shape_of(source)
            apart = call(graph, aten.view.default, result, [world, batch, each, shape_of(product)[1]])
            turned = call(graph, aten.permute.default, apart, [1, 0, 2, 3])
            copied = call(graph, aten.clone.default, turned)
            result = call(graph, aten.reshape.default, copied, list(shape_of(product)))
        if bias is not None:
            result = call(graph, aten.add.Tensor, result, bias)
    inherit(both, product)
    product.replace_all_uses_with(result)
    erase(product)
    if read_too:
        node.replace_all_uses_with(again)
        erase(node)
    return str(both.target)


_MAKERS: dict[Any, Any] = {
    _functional.all_reduce.default: _sum,
    _functional.reduce_scatter_tensor.default: _sum,
    _functional.all_gather_into_tensor.default: _gather,
}
