"""Operator families of random programs (random_operators.py): order, running sums, lookups, sums by element."""

from __future__ import annotations

from random_graphs import TYPES, Pen


def _dim(pen: Pen, x: str) -> int:
    return pen.integer(0, pen.values[x].dim() - 1)


def ordered(pen: Pen) -> object:
    """Positions only for exact values, with equal values only where their order is defined (a stable sort)."""
    x = pen.floating(1)
    value, dim = pen.values[x], _dim(pen, x)
    largest = pen.choose((True, False))
    if pen.is_exact(x) and pen.integer(0, 1):
        return pen.write(f"torch.sort({x}, dim={dim}, stable=True, descending={largest})[1]", [x], False)
    forms = [
        f"torch.topk({x}, {pen.integer(1, max(1, min(5, value.shape[dim])))}, {dim}, largest={largest})[0]",
        f"torch.sort({x}, {dim}, descending={largest})[0]",
    ]
    return pen.write(pen.choose(forms), [x], False)


def running(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0) or pen.floating(1)
    name = pen.choose(("cumsum", "cumsum", "cumprod"))
    if name == "cumprod" and not pen.values[x].is_floating_point():
        name = "cumsum"
    return pen.write(f"torch.{name}({x}, {_dim(pen, x)})", [x])


def _positions(pen: Pen, shape: list[int], below: int, unique: int = -1) -> str:
    """Returns indices below a number, unique along the dimension `unique` (-1: none)."""
    if unique < 0:
        return pen.argument(shape, "i64", f"torch.randint(0, {below}, {{shape}}, generator=g)")
    count = shape[unique]
    filling = f"torch.rand({[*shape[:unique], below, *shape[unique + 1 :]]}, generator=g).argsort({unique})"
    return pen.argument(shape, "i64", f"{filling}.narrow({unique}, 0, {count}).contiguous()", layout="plain")


def by_element(pen: Pen) -> object:
    x = pen.floating(1)
    value, dim = pen.values[x], _dim(pen, x)
    if not value.numel():
        return ""
    length = value.shape[dim]
    shape = [max(1, n - pen.integer(0, 1)) for n in value.shape]
    shape[dim] = pen.integer(1, min(length, 6))
    form = pen.choose(("gather", "scatter", "scatter_add", "scatter_number", "amax"))
    if form == "gather":
        i = _positions(pen, shape, length)
        return pen.write(f"torch.gather({x}, {dim}, {i})", [x, i], False)
    i = _positions(pen, shape, length, unique=dim if form.startswith("scatter") and form != "scatter_add" else -1)
    if form == "scatter_number":
        return pen.write(f"torch.scatter({x}, {dim}, {i}, {pen.number()})", [x, i], False)
    source = pen.argument(shape, TYPES[value.dtype])
    if form == "amax":
        return pen.write(f"{x}.scatter_reduce({dim}, {i}, {source}, 'amax')", [x, i, source], False)
    return pen.write(f"torch.{form}({x}, {dim}, {i}, {source})", [x, i, source], form == "scatter_add")


def sums_by_index(pen: Pen) -> object:
    """Indices may repeat."""
    x = pen.floating(1)
    value, dim = pen.values[x], _dim(pen, x)
    if not value.numel():
        return ""
    shape = list(value.shape)
    shape[dim] = pen.choose((5, 1, 9))
    i = _positions(pen, [shape[dim]], value.shape[dim])
    source = pen.argument(shape, TYPES[value.dtype])
    if dim == 0 and pen.integer(0, 1):
        return pen.write(f"{x}.index_put(({i},), {source}, accumulate=True)", [x, i, source])
    return pen.write(f"torch.index_add({x}, {dim}, {i}, {source})", [x, i, source])


def bags(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() == 2 and t.is_floating_point() and t.numel() > 0)
    x = x or pen.argument([13, pen.choose((4, 7, 32))], "f32")
    rows = pen.values[x].shape[0]
    i = _positions(pen, [pen.choose((12, 6))], rows)
    offsets = pen.argument([3], "i64", "torch.tensor([0, 2, 2])", layout="plain")
    mode = pen.choose(("sum", "mean", "sum"))
    return pen.write(f"F.embedding_bag({i}, {x}, {offsets}, mode='{mode}')", [x, i, offsets])


def halves(pen: Pen) -> object:
    x = pen.floating(1)
    dims = [d for d, n in enumerate(pen.values[x].shape) if n % 2 == 0 and n]
    return pen.write(f"F.glu({x}, {pen.choose(dims)})", [x]) if dims else ""


def flips(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0) or pen.floating(1)
    return pen.write(f"torch.flip({x}, {sorted({_dim(pen, x), _dim(pen, x)})})", [x], False)


FAMILIES = (ordered, running, by_element, sums_by_index, bags, halves, flips)
