"""Fuses products with adjacent collectives into one operator: ark_torch.ops' matmul_all_reduce and its relatives.

It recognizes the forms that torch.nn.functional.linear with functional collectives, DTensor and Megatron's functions
make in an ATen graph: a product, with a bias or without, views, and an all_reduce or reduce_scatter of sums; or an
all_gather, views, and a product. The scattered or gathered dimension may be the second of three. The bias goes into the
operator, since one rank may add it for all. If gathered rows have several readers, the first product becomes the
operator, and the others read its rows. A product with readers other than its sum stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem, mul
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

import ark_torch.ops  # noqa: F401  (their fake kernels)
from ark_torch.compile.analysis import aten, is_getitem, tensor_of
from ark_torch.compile.graph_edits import VIEWS, NotFused, alone, call, copied_from, erase, inherit, value_of
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
        _skip_copy(wait)
        try:
            found = maker(wait, started, least_rows)
        except (NotFused, Unsupported) as reason:
            told.append(f"{started.name}: not fused with a product: {reason}")
            continue
        if found:
            told.append(f"{started.name}: {found}")
    return told


def _skip_copy(wait: Node) -> None:
    """In-place collectives are functional ones whose result is copied to where it belongs: here it is read itself."""
    if len(wait.users) == 1 and copied_from(copy := next(iter(wait.users))) is wait:
        copy.replace_all_uses_with(wait)
        erase(copy)


def _sizes(node: Node) -> tuple[Any, ...]:
    value = tensor_of(node)
    assert value is not None
    return tuple(value.shape)


def _is_view(node: Node) -> bool:
    """Whether a node has all elements of another in their order. DTensor slices symbolic sizes, to what they are."""
    if node.target is aten.slice.Tensor:
        pairs = zip(_sizes(node), _sizes(node.args[0]), strict=True)  # type: ignore[arg-type]
        return all(statically_known_true(mine == theirs) for mine, theirs in pairs)
    return node.target in VIEWS


def _view(node: Node, shape: Iterable[Any], before: Node) -> Node:
    """A view, in front of a node. Symbolic sizes come from nodes that have them, and one from the others."""
    known: dict[Any, Node] = {}
    for one in node.graph.nodes:
        if one is before:
            break
        if isinstance(size := one.meta.get("val"), torch.SymInt):
            known.setdefault(size.node.expr, one)
    sizes = [n if isinstance(n, int) else known.get(n.node.expr, -1) for n in shape]
    if sizes.count(-1) > 1:
        raise NotFused("its sizes are symbolic")
    return call(node.graph, aten.view.default, node, sizes)


def _turned(node: Node, first: Iterable[Any], before: Node) -> Node:
    """Rows that are an array of these three dimensions are copied with the first two exchanged."""
    graph, columns = node.graph, _sizes(node)[1]
    turned = call(graph, aten.permute.default, _view(node, [*first, columns], before), [1, 0, 2, 3])
    return _view(call(graph, aten.clone.default, turned, memory_format=torch.contiguous_format), [-1, columns], before)


def _start_of(piece: Node) -> tuple[Any, Any, Any]:
    """What a piece is taken of by split or slice, in which dimension, and where it starts; None for other nodes."""
    if is_getitem(piece) and (split := piece.args[0]).target is aten.split.Tensor:  # type: ignore[union-attr]
        source, size, dim = (*split.args, 0)[:3]  # type: ignore[union-attr]
        return source, dim, piece.args[1] * value_of(size)
    if piece.target is aten.slice.Tensor and len(piece.args) < 5:
        source, dim, start = (*piece.args, 0, 0)[:3]
        return source, dim, value_of(start)
    return None, 0, 0


def _pieces_in_order(cat: Node, dim: int, world: int, split_dim: int) -> Node:
    """What was split, if the node is torch.cat of its equal pieces, in order."""
    pieces: Any = cat.args[0]
    at = cat.args[1] if len(cat.args) > 1 else 0
    source = _start_of(pieces[0])[0]
    whole = at == dim and source is not None and len(pieces) == world
    for i, one in enumerate(pieces if whole else ()):
        each = _sizes(one)[split_dim]
        wanted = (source, split_dim, i * each)
        whole = whole and each * world == _sizes(source)[split_dim] and _start_of(one) == wanted
    if not whole:
        raise NotFused("its tensors are put together in another order")
    for one in pieces:
        alone(one)
    splits = [user for user in source.users if user.target is aten.split.Tensor]
    if {*source.users, *(user for split in splits for user in split.users)} != {*splits, *pieces}:
        raise NotFused(f"{source.name} is read by others, too")
    return source  # type: ignore[no-any-return]


_PRODUCTS = (aten.mm.default, aten.addmm.default)


def _product(node: Node) -> Node:
    """The product if the node is just a view or copy of it that keeps the last dimension."""
    columns = _sizes(node)[-1]
    while _is_view(node) or node.target is aten.clone.default:
        alone(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in _PRODUCTS or node.kwargs:  # kwargs scale a bias or product
        raise NotFused(f"it is of {node.name}, no product" if node.op == "call_function" else "it is of no product")
    alone(node)
    if not statically_known_true(_sizes(node)[-1] == columns):
        raise NotFused("a view of the product takes its columns apart")
    return node


def _check(product: Node, least_rows: int) -> None:
    value = tensor_of(product)
    if value is None or value.dtype not in _DTYPES:
        raise NotFused(f"it is of {value.dtype if value is not None else 'no tensor'}")
    rows = _sizes(product)[0]
    if statically_known_true(rows < least_rows):
        raise NotFused(f"it has {rows} rows, which a region's own kernel multiplies")


def _factors(product: Node) -> tuple[Node, Node, Node | None]:
    """Its rows, its columns, and the bias of a linear layer or None."""
    if product.target is aten.mm.default:
        a, b = product.args
        return a, b, None  # type: ignore[return-value]
    bias, a, b = product.args
    if not _is_bias(bias, product):
        raise NotFused(f"{bias} is added to the product and is no bias, an element for each column")
    return a, b, bias  # type: ignore[return-value]


def _is_bias(node: Any, product: Node) -> bool:
    value = tensor_of(node) if isinstance(node, Node) else None
    if value is None or value.dim() != 1 or value.dtype != product.meta["val"].dtype:
        return False
    return statically_known_true(value.shape[0] == _sizes(product)[-1])


def _apart(node: Node) -> tuple[Node, Node | None]:
    """A product and the bias that is added to it, as linear makes of a bias with gaps, or the node and None."""
    if node.target is aten.add.Tensor and not node.kwargs:
        for one, other in (node.args, node.args[::-1]):
            if isinstance(one, Node) and (_is_view(one) or one.target is aten.mm.default) and _is_bias(other, node):
                return one, other  # type: ignore[return-value]
    return node, None


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
        if len(_sizes(source)) != 3 or not statically_known_true(_sizes(source)[1] % world == 0):
            raise NotFused("what is scattered is neither the first dimension nor the second of three")
    elif scatters and not statically_known_true(_sizes(source)[0] % world == 0):
        raise NotFused("its first dimension does not divide by the number of ranks")
    made, added = _apart(source)
    product = _product(made)
    _check(product, least_rows)
    a, b, bias = _factors(product)
    if added is not None and bias is not None:
        raise NotFused("two biases are added to the product")
    bias = bias or added
    turned = middle and not statically_known_true(_sizes(source)[0] == 1)
    if turned and not a.meta["val"].is_contiguous():
        raise NotFused("its rows would have to be put in order, and do not lie in one piece")
    with graph.inserting_before(wait):
        if turned:  # rows in the order of their receiving ranks
            a = _turned(a, [_sizes(source)[0], world, -1], wait)
        target = (torch.ops.ark.matmul_reduce_scatter if scatters else torch.ops.ark.matmul_all_reduce).default
        fused = call(graph, target, a, b, group.group_name, "auto", 0, bias)
        result = _view(fused, _sizes(wait), wait)
    inherit(fused, product)
    wait.replace_all_uses_with(result)
    erase(wait)
    return str(fused.target)


_CONVERSION = torch.ops.prims.convert_element_type.default


def _gathered(wait: Node, world: int) -> tuple[Node, bool]:
    """What is gathered as others read it, and whether it is the second of three dimensions."""
    users = list(wait.users)
    if len(_sizes(wait)) != 3 or any(user.target not in (aten.split.Tensor, aten.slice.Tensor) for user in users):
        return wait, False
    pieces = [piece for user in users for piece in (user.users if user.target is aten.split.Tensor else [user])]
    readers = {reader for piece in pieces for reader in piece.users}
    if len(readers) != 1 or (cat := next(iter(readers))).target is not aten.cat.default:
        raise NotFused("what is gathered is taken apart")
    if _pieces_in_order(cat, 1, world, 0) is not wait:
        raise NotFused("what is gathered is taken apart")
    return cat, True


def _readers(node: Node, depth: Any) -> tuple[list[Node], bool]:
    """The products that read `node`'s rows, through views of them or directly, and whether anything else is read."""
    products, alone_read, todo = [], True, [node]
    while todo:
        rows = todo.pop()
        alone_read = alone_read and len(rows.users) == 1
        for user in rows.users:
            if _is_view(user) and statically_known_true(_sizes(user)[-1] == depth):
                todo.append(user)
            elif user.target in _PRODUCTS and not user.kwargs and user.args[-2] is rows:
                products.append(user)
    return products, not alone_read


def _converted(node: Node, depth: Any) -> Node | None:
    """The only reader of rows, if it is a conversion to fewer bits (autocast's)."""
    while len(node.users) == 1 and _is_view(user := next(iter(node.users))):
        node = user
    for one in list(node.users)[1:]:
        first = next(iter(node.users))
        if first.target is _CONVERSION and one.target is _CONVERSION and one.args == first.args:
            one.replace_all_uses_with(first)
            erase(one)
    user = next(iter(node.users), node)
    if user.target is not _CONVERSION or len(node.users) != 1 or not statically_known_true(_sizes(user)[-1] == depth):
        return None
    return user if user.meta["val"].itemsize < node.meta["val"].itemsize else None


def _gather(wait: Node, started: Node, least_rows: int) -> str:
    """Handles products of gathered rows."""
    source, name = started.args[0], started.args[-1]
    assert isinstance(source, Node)
    group = resolved(name, wait.meta["val"].device)
    world, graph = group.size(), wait.graph
    for node in (started, wait):
        _size_of_source(node, source, world)
    alone(started)
    depth = _sizes(wait)[-1]
    base, middle = _gathered(wait, world)
    turned = middle and not statically_known_true(_sizes(source)[0] == 1)
    _size_of_source(base, source, world)
    conversion = _converted(base, depth)
    _read_once(base, started, source, world)
    read = conversion or base
    order = {one: i for i, one in enumerate(graph.nodes)}
    products, read_too = _readers(read, depth)
    if not products:
        raise NotFused("it is read by no product")
    product = min(products, key=order.__getitem__)
    if not source.meta["val"].is_contiguous():
        raise NotFused("a view takes its rows apart")
    _check(product, least_rows)
    _, b, bias = _factors(product)
    first = min(read.users, key=order.__getitem__) if read_too else product
    _hoist([b, bias], first, read, order)
    with graph.inserting_before(first):
        a = _view(source, [-1, depth], first)
        if conversion is not None:  # before it is sent
            a = call(graph, _CONVERSION, a, conversion.meta["val"].dtype)
        both = call(graph, torch.ops.ark.all_gather_matmul.default, a, b, group.group_name, "auto", 0, read_too, bias)
        result = call(graph, getitem, both, 0)
        again = call(graph, getitem, both, 1) if read_too else None
        if turned:  # as the readers have them
            first_two = [world, _sizes(source)[0], -1]
            result = _turned(result, first_two, first)
            again = _turned(again, first_two, first) if again is not None else None
        if again is not None:
            again = _view(again, _sizes(read), first)
    inherit(both, product)
    product.replace_all_uses_with(result)
    erase(product)
    if again is not None:
        read.replace_all_uses_with(again)
        erase(read)
    return str(both.target)


def _size_of_source(gathered: Node, source: Node, world: int) -> None:
    """Who reads a symbolic size of what is gathered gets it from what is sent."""
    for user in [user for user in gathered.users if user.target is aten.sym_size.int]:
        with gathered.graph.inserting_before(user):
            size = call(gathered.graph, aten.sym_size.int, source, user.args[1])
            if not statically_known_true(size.meta["val"] == user.meta["val"]):
                size = call(gathered.graph, mul, world, size)
        user.replace_all_uses_with(size)
        erase(user)


def _read_once(base: Node, started: Node, source: Node, world: int) -> None:
    """Other gathers of the same rows (DTensor makes one for each layer that reads them) are read from the first."""
    for other in list(source.users):
        if other is started or other.target is not started.target or other.args != started.args:
            continue
        waits = list(other.users)
        if len(waits) != 1 or waits[0].target is not _functional.wait_tensor.default:
            continue
        _skip_copy(waits[0])
        try:
            again, _ = _gathered(waits[0], world)
        except NotFused:
            continue
        again.replace_all_uses_with(base)
        erase(again)


def _hoist(needed: list[Node | None], before: Node, gathered: Node, order: dict[Node, int]) -> None:
    """Moves what these are computed from before that node."""
    todo, late = [one for one in needed if one is not None], set[Node]()
    while todo:
        node = todo.pop()
        if node in late or order[node] < order[before]:
            continue
        plain = getattr(node.target, "namespace", "") in ("aten", "prims") and not node.is_impure()
        size = isinstance(node.meta.get("val"), torch.SymInt)
        if not (plain or size) or gathered in node.all_input_nodes:
            raise NotFused("others read what is gathered before the product's other factor or bias is there")
        late.add(node)
        todo += node.all_input_nodes
    for node in sorted(late, key=order.__getitem__):
        before.prepend(node)


_MAKERS: dict[Any, Any] = {
    _functional.all_reduce.default: _sum,
    _functional.reduce_scatter_tensor.default: _sum,
    _functional.all_gather_into_tensor.default: _gather,
}
