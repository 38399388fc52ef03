"""Products with quantized weights: which operators of a graph decode a weight, and what it is before.

Ordinary operators decode a weight of int8, float8 or 4 bits (a conversion, subtraction of a zero, multiplication by a
scale, views in any order), and a product reads the result. mark() follows these from each product back to the codes. If
it understands all of them, they become *free*, like views (analysis.py): they belong to no region, the product's
lowering reads the codes itself, and a piece that goes to Inductor keeps the operators. One rule covers hand-written
modules and torchao's tensor subclasses. PyTorch's own products with codes are found too (scaled_products.py: those of
float8 rows, whose conversion becomes free as well).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from ark_torch.compile import analysis, scaled_products, tinygemm
from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.decoding import (
    Decoded,
    Factor,
    Leaf,
    NotTaken,
    follow,
    joined,
    leaf_of,
    may_decode,
    scaled_by,
)
from ark_torch.compile.ir import Strided, Unsupported

MOST_ROWS = 16  # on a GPU: kTensorRows of kernels/cuda/loop
LINE = 16  # float8 rows are multiplied as such if they are of a multiple of this
GROUPS = 32  # the size of a group is a multiple of this
CODES = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "float8"}
PACKED = aten._weight_int4pack_mm_for_cpu.default
BYTES = aten._weight_int8pack_mm.default
TILES = aten._weight_int4pack_mm.default
_WEIGHT = "ark_weight"  # key in a product's meta: its weight


@dataclass(frozen=True)
class Weight:
    """A product's weight, [depth, columns]. Strides of scale and zero: [groups, columns]."""

    codes: Strided  # of bytes
    decoded: Decoded
    group: int
    groups: int
    scale: tuple[int, int]
    zero: tuple[int, int]
    behind: bool = False  # if it has no scale: scaled after the product

    def __str__(self) -> str:
        of = self.decoded
        name = "int4" if of.bits == 4 else CODES[of.codes.view.dtype]
        per = "a channel" if self.groups == 1 else f"a group of {self.group}"
        if of.scale is not None and self.groups == 1 and self.scale[1] == 0:
            per = "a tensor"
        scales = f"scale {per}" if of.scale is not None or self.behind else "no scale"
        return f"{name} weights, {scales}{', and a zero' if of.zero is not None else ''}"


def weight_of(product: Node) -> Weight | None:
    weight: Weight | None = product.meta.get(_WEIGHT)
    return weight


def multiplies_float8(weight: Weight, rows: int) -> bool:
    """Whether a product of float8 rows with the weight is one of float8 numbers, not one of decoded weights."""
    depth = weight.codes.shape[0]
    return rows > MOST_ROWS and depth % LINE == 0 and weight.groups == 1 and weight.decoded.codes.made is None


def mark(graph: Graph, static: Iterable[Node], forced: bool = False) -> list[str]:
    """Marks products and the operators that decode their weights. Returns how many there are of each form, and why
    others are not fused. `static`: inputs that are the same tensors in each call. `forced`: ark runs all that it can,
    also what was not measured to be faster."""
    told: Counter[str] = Counter()
    found: dict[Node, Weight] = {}
    coded: dict[Node, bool] = {}
    written = {root for node in graph.nodes for root in analysis.written_roots(node)}
    fixed = frozenset(static) - written
    scaled_products.share_rows(graph, written)
    for product in graph.nodes:
        try:
            if product.target in _OWN:
                weight = _OWN[product.target](product, fixed)
                _check_rows(product, weight, forced)
                product.meta[_WEIGHT] = weight
                told[f"product of {weight_of(product)}"] += 1
            elif product.target in scaled_products.OPERATORS:
                found[product] = _scaled(product, written, forced)
            elif product.target in (aten.mm.default, aten.addmm.default) and may_decode(product.args[-1], coded):
                weight = weight_of_product(product)
                _check_rows(product, weight, forced)
                found[product] = weight
        except (NotTaken, Unsupported) as reason:
            told[f"a product of coded weights is not ark's: {reason}"] += 1
    chains = {product: _chain(_weight_argument(product)) for product in found}
    # A value with other readers must be computed anyway, and a written one has an order.
    while others := _with_other_readers(chains, written):
        for product in others:
            del chains[product]
            told["a product of coded weights is not ark's: others read what it decodes, or it is written"] += 1
    for product, chain in chains.items():
        product.meta[_WEIGHT] = found[product]
        of_rows = "float8 rows and " if product.target in scaled_products.OPERATORS else ""
        told[f"product of {of_rows}{found[product]}"] += 1
        for node in chain:
            if not analysis.is_free(node):
                node.meta[analysis.DECODES] = True
    scaled_products.free_conversions([product for product in chains if product.target in scaled_products.OPERATORS])
    return [f"{count} times: {line}" if count > 1 else line for line, count in told.items()]


def _weight_argument(product: Node) -> Node:
    """What a product reads as its weight."""
    weight = product.args[1 if product.target in scaled_products.OPERATORS else -1]
    assert isinstance(weight, Node)
    return weight


def _rows_of(product: Node) -> tuple[int, torch.device]:
    value = tensor_of(product)
    if value is None or any(type(n) is not int for n in value.shape):
        raise NotTaken("its sizes are symbolic")
    return value.shape[0], value.device


def _check_rows(product: Node, weight: Weight, forced: bool, float8_rows: bool = False) -> None:
    """Raises NotTaken if a GPU has no kernel for many rows, or one that nobody has measured yet: then only those who
    force ark get it."""
    rows, device = _rows_of(product)
    if device.type != "cuda" or rows <= MOST_ROWS:
        return
    many = f"it has more than {MOST_ROWS} rows ({rows})"
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise NotTaken(f"{many}, and its GPU is not of compute capability 9.0")
    if float8_rows and not multiplies_float8(weight, rows):
        raise NotTaken(f"{many}, of a depth that is no multiple of {LINE}")
    if not float8_rows and not _decoded_in_tiles(product, weight):
        raise NotTaken(f"{many}, which are no half types, or lie where tensor cores cannot copy them from")
    if not forced:
        raise NotTaken(f'{many}, and options={{"choose": "ark"}} is not given')


def _decoded_in_tiles(product: Node, weight: Weight) -> bool:
    """As decoded_in_tiles() of csrc/compiler/passes/matmul_tiling.cpp."""
    value, codes, depth = tensor_of(product), weight.codes, weight.group * weight.groups
    return (
        value is not None
        and value.dtype.itemsize == 2
        and weight.decoded.block == 0
        and depth % LINE == 0
        and (codes.strides[1] % LINE, codes.offset % LINE) == (0, 0)
    )


def _scaled(product: Node, written: set[Node], forced: bool) -> Weight:
    """The weight of a product of float8 rows (scaled_products.py)."""
    _rows_of(product)
    scaled_products.check_rows(product, written)
    decoded, scale = follow(_weight_argument(product)), leaf_of(scaled_products.parts_of(product).weight_scale)
    if decoded is None or decoded.scale is not None or decoded.zero is not None:
        raise NotTaken("its weights are not given to the graph as float8")
    if scale is None:
        raise NotTaken("its scales are computed in the graph")
    weight = _as_matrix(scaled_by(decoded, scale))
    _check_rows(product, weight, forced, float8_rows=True)
    return weight


def of_bytes(product: Node, _fixed: Collection[Node]) -> Weight:
    """The weight of PyTorch's own operator for int8 in plain order, with a scale a channel."""
    _rows_of(product)
    codes, scale = (leaf_of(one) for one in product.args[1:])
    if codes is None or scale is None or codes.view.dtype != torch.int8 or len(codes.view.shape) != 2:
        raise NotTaken("its codes or scales are computed in the graph")
    dims = tuple((Factor(n, s),) for n, s in zip(codes.view.shape, codes.view.strides, strict=True))
    return _as_matrix(scaled_by(Decoded(dims[::-1], codes), scale))


def in_tiles(product: Node, fixed: Collection[Node]) -> Weight:
    """The weight of PyTorch's own operator for int4 on GPUs. Scales are read by column if they are `fixed`."""
    _rows_of(product)
    _, codes, group, scales = product.args
    value = tensor_of(codes) if isinstance(codes, Node) else None
    scale = leaf_of(scales)
    if value is None or scale is None or not analysis.is_source(codes) or not isinstance(group, int):  # type: ignore[arg-type]
        raise NotTaken("its packed codes or scales are computed in the graph")
    sizes = tinygemm.sizes(value)
    if sizes is None or not value.is_contiguous():
        raise NotTaken("its codes are packed in an order that ark does not know")
    columns, depth = sizes
    if group % GROUPS or depth % group:
        raise NotTaken(f"its groups of {group} are not of a multiple of {GROUPS}")
    if scale.view.shape != (depth // group, columns, 2):
        raise NotTaken(f"its scales are of shape {list(scale.view.shape)}")
    if scales in fixed:
        made = scale.view._replace(
            shape=(2, columns, depth // group), strides=(depth // group * columns, depth // group, 1)
        )
        scale = Leaf(scale.source, made._replace(offset=0), made)
        of_kind, of_column, of_group = made.strides
    else:
        of_group, of_column, of_kind = scale.view.strides
    zero = replace(scale, view=scale.view._replace(offset=scale.view.offset + of_kind))
    assert isinstance(codes, Node)
    unpacked = Strided(0, torch.uint8, (columns, depth // 2), (depth // 2, 1), 0)
    rows = Leaf(codes, unpacked, unpacked)
    dims = ((Factor(depth, 1),), (Factor(columns, depth),))
    decoded = Decoded(dims, rows, 4, offset=8, scale=scale, zero=zero, zero_after=True)
    view = rows.view._replace(shape=(depth // 2, columns), strides=(1, depth // 2))
    strides = (of_group, of_column)
    return Weight(view, decoded, group, depth // group, strides, strides)


def packed(product: Node, _fixed: Collection[Node]) -> Weight:
    """The weight of PyTorch's own operator for CPUs, which torchao calls. Its packing depends on the instruction set:
    64 or 32 columns side by side with vectors."""
    _, codes, group, scales = product.args
    value, scale = leaf_of(codes), leaf_of(scales)
    block = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability(), 0)
    if value is None or scale is None or not isinstance(group, int):
        raise NotTaken("its packed codes or scales are computed in the graph")
    columns, depth = value.view.shape[0], value.view.shape[1] * 2
    dense = (depth // 2, 1) == value.view.strides and value.view.offset == 0
    if block == 0 or columns % block or not dense:
        raise NotTaken("its codes are packed in an order that ark does not know")
    if group % GROUPS or depth % group:
        raise NotTaken(f"its groups of {group} are not of a multiple of {GROUPS}")
    of_group, of_column, of_kind = scale.view.strides
    zero = Leaf(scale.source, scale.view._replace(offset=scale.view.offset + of_kind))
    dims = ((Factor(depth, 1),), (Factor(columns, depth),))
    decoded = Decoded(dims, value, 4, offset=8, scale=scale, zero=zero, zero_after=True, block=block)
    view = value.view._replace(shape=(columns // block, depth, block // 2), strides=(depth * block // 2, block // 2, 1))
    strides = (of_group, of_column)
    return Weight(view, decoded, group, depth // group, strides, strides)


def _chain(weight: Node) -> list[Node]:
    """The operators between the codes and what a product reads; views are free anyway."""
    chain: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if analysis.is_source(node) or analysis.is_constant(node) or node in chain:
            return
        chain[node] = None
        for one in node.all_input_nodes:
            visit(one)

    visit(weight)
    return list(chain)


def _with_other_readers(chains: dict[Node, list[Node]], written: set[Node]) -> list[Node]:
    known = {one for chain in chains.values() for one in chain}

    def read_elsewhere(node: Node) -> bool:
        if analysis.is_source(analysis.root_of(node)):  # a view of a graph input, whoever reads it
            return analysis.root_of(node) in written
        return any(
            user not in known and (user not in chains or node is not _weight_argument(user)) for user in node.users
        )

    return [
        product
        for product, chain in chains.items()
        if any(read_elsewhere(one) or any(analysis.root_of(n) in written for n in one.all_input_nodes) for one in chain)
    ]


def weight_of_product(product: Node) -> Weight:
    rows, weight = product.args[-2:]
    given = tensor_of(rows)  # type: ignore[arg-type]
    assert isinstance(weight, Node)
    if given is None or any(type(n) is not int for n in given.shape):
        raise NotTaken("its sizes are symbolic")
    if any(product.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        raise NotTaken("its sum is scaled")
    _rows_of(product)
    decoded = follow(weight)
    if decoded is None:
        raise NotTaken("its weights are not decoded by operators that ark knows")
    return replace(_as_matrix(decoded), behind=decoded.scale is None and _is_scaled(product))


def _is_scaled(product: Node) -> bool:
    """Whether the product is followed by a multiplication with per-channel numbers (operators/dequantized.py)."""
    while len(product.users) == 1:
        [user] = product.users
        if user.target is aten.mul.Tensor:
            [by] = [one for one in user.args if one is not product] or [None]
            leaf, value = leaf_of(by), tensor_of(product)
            return leaf is not None and value is not None and leaf.view.shape[-1:] in ((1,), value.shape[-1:])
        if not analysis.is_view(user):
            break
        product = user
    return False


def _as_matrix(of: Decoded) -> Weight:
    if of.half:
        raise NotTaken("halves of bytes are its numbers, and not both")
    if of.codes.view.dtype == torch.uint8 and of.bits == 8:
        raise NotTaken("its codes are uint8")
    depth, columns = (joined(dim) for dim in of.dims)
    if len(columns) > 1:
        raise NotTaken("its columns are spread over several dimensions")
    column = columns[0] if columns else Factor(1, 0)
    if not depth:
        raise NotTaken("its depth is 1")
    outer, inner = (depth[0], depth[1]) if len(depth) == 2 else (Factor(1, 0), depth[0])
    if len(depth) > 2 or inner.scale or inner.zero or (len(depth) == 2 and outer.code != inner.length * inner.code):
        raise NotTaken("its scales do not belong to channels or to groups of a channel's depth")
    if inner.code != 1:
        raise NotTaken("its codes are not adjacent along the depth")
    if outer.length > 1 and inner.length % GROUPS:
        raise NotTaken(f"its groups of {inner.length} are not of a multiple of {GROUPS}")
    whole = outer.length * inner.length
    if of.bits == 4 and (whole % 2 or column.code % 2):
        raise NotTaken("its columns do not begin with a byte")
    if of.bits == 8 and abs(of.offset) > 128:
        raise NotTaken(f"{of.offset} is subtracted from its codes")
    if not 0 <= of.offset + (8 if of.signed else 0) <= 128 and of.bits == 4:
        raise NotTaken(f"{of.offset} is subtracted from its codes")
    per_byte = 8 // of.bits
    codes = of.codes.view._replace(
        shape=(whole // per_byte, column.length), strides=(1, column.code // per_byte if column.length > 1 else whole)
    )
    return Weight(codes, of, inner.length, outer.length, (outer.scale, column.scale), (outer.zero, column.zero))


# PyTorch's own products with codes that it packs.
_OWN = {PACKED: packed, BYTES: of_bytes, TILES: in_tiles}
