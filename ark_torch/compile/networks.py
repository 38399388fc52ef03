"""What experts compute, as a tree, and whether that is a feed-forward network.

A tree describes the computation on each row: `("in",)`, `("mm", weight, rows, dtype)`, `("part", rows, number)` for one
of two halves of columns, and `("op", target, args, kwargs)` for everything else. A weight is `("all", node)`, [experts,
in, out], or `("each", ((expert, node), ...))`, [in, out] each. Activations are compared with PyTorch's own, traced with
the same decompositions, so that all their roundings are the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from ark_torch.compile import decompositions
from ark_torch.compile.analysis import aten
from ark_torch.compile.choices import same
from ark_torch.compile.graph_edits import NotFused

Tree = tuple[Any, ...]
ROWS: Tree = ("in",)
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Network(NamedTuple):
    activation: str
    gate: Any  # the weight of the activated half: [in, out] per expert
    factor: Any  # the weight of what multiplies it, or None
    whole: bool  # both are one weight, the gate first
    down: Any
    halves: tuple[int, int] | None  # both are one weight: which half is which


def merged(trees: list[Any]) -> Any:
    """Merges trees that differ only in the experts whose weights they use."""
    first = trees[0]
    if all(tree == first for tree in trees):
        return first
    if any(not isinstance(tree, tuple) or len(tree) != len(first) for tree in trees) or not isinstance(first, tuple):
        raise NotFused("its experts compute different things")
    if first[0] == "each":
        weights: dict[int, Node] = {}
        for _, pairs in trees:
            for expert, node in pairs:
                if not same(weights.setdefault(expert, node), node):
                    raise NotFused("rows of one expert are multiplied by different weights")
        return ("each", tuple(sorted(weights.items(), key=lambda pair: pair[0])))
    return tuple(merged([tree[i] for tree in trees]) for i in range(len(first)))


def network_of(tree: Tree) -> Network:
    if tree[0] != "mm" or tree[2][0] == "in":
        raise NotFused("its experts do not end in a product of what an activation gave")
    _, down, inner, dtype = tree
    products = _products(inner)
    if len(products) == 1:
        (hidden,) = products
        name = _activation(inner, hidden, dtype)
        if name is not None and hidden[0] == "mm":
            return Network(name, hidden[1], None, False, down, None)
    elif len(products) == 2 and inner[0] == "op" and inner[1] is aten.mul.Tensor and not inner[3]:
        for through, factor in (inner[2], inner[2][::-1]):
            if factor not in products:
                continue
            (hidden,) = products - {factor}
            name = _activation(through, hidden, dtype)
            if name is None or hidden[0] != factor[0]:
                continue
            if hidden[0] == "mm":
                return Network(name, hidden[1], factor[1], False, down, None)
            if hidden[1] == factor[1] and hidden[2] != factor[2]:
                return Network(name, hidden[1][1], None, hidden[2] == 0, down, (hidden[2], factor[2]))
    raise NotFused(
        "its experts are no feed-forward networks: two or three products without biases, and silu, gelu or relu"
    )


def _products(tree: Any) -> frozenset[Tree]:
    """The products of rows in the tree, or halves of one, from which the rest is computed."""
    if not isinstance(tree, tuple) or not tree:
        return frozenset()
    if (tree[0] == "mm" and tree[2] == ROWS) or (tree[0] == "part" and tree[1][0] == "mm" and tree[1][2] == ROWS):
        return frozenset({tree})
    return frozenset().union(*map(_products, tree))


def _activation(tree: Tree, hidden: Tree, dtype: torch.dtype) -> str | None:
    for name, reference in _references(dtype):
        if _with(reference, hidden) == tree:
            return name
    return None


def _with(reference: Any, hidden: Tree) -> Any:
    if reference == ROWS:
        return hidden
    return tuple(_with(part, hidden) for part in reference) if isinstance(reference, tuple) else reference


@functools.cache
def _references(dtype: torch.dtype) -> list[tuple[str, Tree]]:
    """Trees of the activations: decomposed as ark and Inductor do, and whole."""
    found = []
    with unset_fake_temporarily(), torch.no_grad():
        for name, function in _ACTIVATIONS.items():
            for table in (decompositions.table(), {}):
                traced = _traced(function, table, dtype)
                trees: dict[Node, Any] = {}
                for node in traced.graph.nodes:
                    if node.op == "placeholder":
                        trees[node] = ROWS
                    elif node.op == "output":
                        found.append((name, trees[node.args[0]]))
                    else:
                        trees[node] = operation(node, trees)
    return found


def _traced(function: Any, table: Any, dtype: torch.dtype) -> Any:
    def run(x: torch.Tensor) -> Any:
        return function(x)

    return make_fx(run, decomposition_table=table)(torch.ones(2, 2, dtype=dtype))


def operation(node: Any, trees: Any) -> Tree:
    args = torch.fx.node.map_arg(node.args, trees.__getitem__)
    return ("op", node.target, tuple(args), tuple(sorted(node.kwargs.items())))
