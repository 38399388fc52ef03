"""Products of float8 rows with float8 weights: torch._scaled_mm and torch.nn.functional.scaled_mm.

torchao's Float8DynamicActivationFloat8WeightConfig makes them. A graph converts its rows to float8 right before the
product. ark rounds the rows to float8 numbers. It holds few rows as float16, which is exact, and multiplies them with
decoded weights; many rows stay float8, which tensor cores multiply (operators/dequantized.py). So the conversion
becomes free, like the operators that decode weights (low_bits.py), and the product's lowering rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ark_torch.compile import analysis
from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.decoding import CONVERSIONS, NotTaken
from ark_torch.compile.ir import SCALAR_TYPES

OPERATORS: tuple[Any, ...] = (aten._scaled_mm.default,)
if hasattr(aten, "_scaled_mm_v2"):
    OPERATORS += (aten._scaled_mm_v2.default,)


class Parts(NamedTuple):
    rows: Node
    weight: Node
    row_scale: Node
    weight_scale: Node
    bias: Node | None
    fast: bool  # whether the sum may be less exact than one of float32


def parts_of(product: Node) -> Parts:
    """The arguments that matter."""
    names = [argument.name for argument in product.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = {**dict(zip(names, product.args, strict=False)), **product.kwargs}
    scales = [given["scale_a"], given["scale_b"]]
    for i, scale in enumerate(scales):
        if isinstance(scale, list | tuple):  # of the second operator
            if len(scale) != 1:
                raise NotTaken("its scales have two levels")
            scales[i] = scale[0]
    if given.get("scale_result") is not None:
        raise NotTaken("its result is scaled")
    if given.get("contraction_dim"):
        raise NotTaken("it says along which dimension it sums")
    fast = bool(given.get("use_fast_accum", False))
    return Parts(given["self"], given["mat2"], scales[0], scales[1], given.get("bias"), fast)


def conversion_of(rows: Node) -> Node:
    """The conversion to float8 that rows are a view of."""
    node = rows
    while analysis.is_view(node) and not analysis.is_getitem(node):
        node = node.args[0]  # type: ignore[assignment]
    value = tensor_of(node)
    if value is None or value.dtype != torch.float8_e4m3fn:
        raise NotTaken("its rows are not float8_e4m3fn")
    if node.target not in CONVERSIONS:
        raise NotTaken("its rows are not converted to float8 in the graph")
    given = tensor_of(node.args[0])  # type: ignore[arg-type]
    if given is None or given.dtype not in SCALAR_TYPES or not given.dtype.is_floating_point:
        raise NotTaken("its rows are converted from no floating type that ark knows")
    return node


def check_rows(product: Node, written: set[Node]) -> None:
    """Raises NotTaken if rows or their scale are not of a known form. `written`: roots that the graph writes."""
    parts, value = parts_of(product), tensor_of(product)
    conversion, scale = conversion_of(parts.rows), tensor_of(parts.row_scale)
    if analysis.root_of(conversion.args[0]) in written:  # type: ignore[arg-type]
        raise NotTaken("its rows are of a tensor that the graph writes")
    assert value is not None and scale is not None
    if scale.dtype != torch.float32 or (scale.numel() != 1 and tuple(scale.shape) != (value.shape[0], 1)):
        raise NotTaken("its scales belong neither to rows nor to the whole tensor")


def share_rows(graph: Graph, written: set[Node]) -> None:
    """Lets products share rows and scales that are computed alike: torchao quantizes the rows of queries, keys and
    values once for each."""
    made_of = {node for node in graph.nodes if node.target in OPERATORS}
    for node in reversed(graph.nodes):
        if node in made_of:
            made_of.update(node.all_input_nodes)
    first: dict[tuple[Any, str, str], Node] = {}
    for node in list(graph.nodes):
        if node in made_of and node.target not in OPERATORS and _is_pure(node, written):
            same = first.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_pure(node: Node, written: set[Node]) -> bool:
    """Whether it gives the same at any place of the graph, and no one outside gets its result."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or any(user.op == "output" for user in node.users):
        return False
    roots = {analysis.root_of(node), *map(analysis.root_of, node.all_input_nodes)}
    return node.target.namespace in ("aten", "prims") and not roots & written


def free_conversions(products: Sequence[Node]) -> None:
    """Marks conversions that only these products read."""
    known = set(products)

    def read_elsewhere(node: Node) -> bool:
        return any(
            read_elsewhere(user)
            if analysis.is_view(user)
            else user not in known or any(one is node for one in user.all_input_nodes if one is not user.args[0])
            for user in node.users
        )

    for conversion in dict.fromkeys(conversion_of(parts_of(product).rows) for product in products):
        if not read_elsewhere(conversion):
            conversion.meta[analysis.DECODES] = True
