"""Operator families of random programs (random_operators.py): views, joins, copies, lookups, updates in place."""

from __future__ import annotations

import torch
from random_graphs import TYPES, Pen


def view(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0) or pen.floating(1)
    value = pen.values[x]
    rank = value.dim()
    dim = pen.integer(0, rank - 1)
    length = value.shape[dim]
    begin = pen.integer(0, max(length - 1, 0))
    other = pen.integer(0, rank - 1)
    forms = [
        f"{x}.transpose({dim}, {other})",
        f"{x}.reshape(-1)",
        f"{x}.flatten({min(dim, other)}, {max(dim, other)})",
        f"{x}.unsqueeze({dim})",
        f"{x}.squeeze()",
        f"{x}.select({dim}, {begin})",
        f"{x}.narrow({dim}, {begin}, {max(1, (length - begin) // 2)})",
        f"{x}[{':, ' * dim}{begin}::{pen.choose((1, 2, 3))}]",
        f"{x}.permute({', '.join(map(str, reversed(range(rank))))})",
        f"{x}.movedim({dim}, {other})",
        f"torch.split({x}, {max(1, length // 2)}, {dim})[0]",
        f"torch.chunk({x}, 3, {dim})[-1]",
        f"torch.unbind({x}, {dim})[{begin}]",
        f"{x}.unsqueeze(0).expand(2, {', '.join(['-1'] * rank)})",
        f"{x}.diagonal(0, {dim}, {other})",
        f"{x}.unflatten({dim}, (-1, {next(n for n in (3, 2, 5, 7, 1) if length % n == 0)}))",
        f"{x}.view({', '.join(map(str, _regrouped(value)))})",
    ]
    return pen.write(pen.choose(forms), [x], False)


def _regrouped(value: torch.Tensor) -> list[int]:
    shape = list(value.shape)
    return [shape[0] * shape[1], *shape[2:]] if len(shape) > 1 else [*shape, 1]


def strided(pen: Pen) -> object:
    """Applies as_strided to a contiguous argument or to a value."""
    x = pen.some(lambda t: t.numel() > 8 and t.is_contiguous()) if pen.rarely(3) else ""
    if not x:
        return ""
    n = pen.values[x].numel()
    rows, step = pen.choose((2, 3)), pen.choose((1, 2))
    text = f"torch.as_strided({x}, ({rows}, 2), ({step}, 1), {pen.integer(0, n - rows * step - 2)})"
    return pen.write(text, [x], False)


def join(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0) or pen.floating(1)
    value = pen.values[x]
    dim = pen.integer(0, value.dim() - 1)

    def fits(t: torch.Tensor) -> bool:
        alike = t.dim() == value.dim() and t.dtype == value.dtype
        return alike and all(i == dim or a == b for i, (a, b) in enumerate(zip(t.shape, value.shape, strict=True)))

    y = pen.some(fits)
    z = pen.some(lambda t: t.shape == value.shape and t.dtype == value.dtype)
    form = pen.choose((f"torch.cat([{x}, {y}, {x}], {dim})", f"torch.stack([{x}, {z}], {dim})"))
    return pen.write(form, [x, y, z], False)


def layout(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0) or pen.floating(1)
    dim = pen.integer(0, pen.values[x].dim() - 1)
    forms = (
        f"{x}.clone()",
        f"{x}.contiguous()",
        f"torch.flip({x}, [{dim}])",
        f"{x}.repeat(2, {', '.join(['1'] * pen.values[x].dim())})",
        f"torch.roll({x}, 1, {dim})",
        f"F.pad({x}, (1, 2))",
        f"torch.tril({x})",
        f"torch.repeat_interleave({x}, 2, {dim})",
        f"torch.zeros_like({x}) + {x}",
        f"torch.ones_like({x})",
        f"{x}.new_full(({pen.choose(pen.sizes)},), 2)",
        f"torch.arange({pen.choose(pen.sizes)}, device={x}.device)",
    )
    return pen.write(pen.choose(forms), [x], False)


def _index(pen: Pen, length: int, least: int = 0, unique: bool = False, rank: int = 1) -> str:
    """Returns a tensor of positions below `length`, an existing one or a new argument."""
    if length == 0:
        return ""

    def fits(t: torch.Tensor) -> bool:
        whole = t.dtype == torch.int64 and t.dim() == rank and 0 < t.numel() <= 300
        return whole and bool(((t >= least) & (t < length)).all()) and (not unique or t.unique().numel() == t.numel())

    if not unique and (found := pen.some(fits)):
        return found
    if unique:
        count = pen.integer(1, min(length, 9))
        return pen.argument([count], "i64", f"torch.randperm({length}, generator=g)[:{count}]", layout="plain")
    shape = [pen.choose((3, 1, 7)) for _ in range(rank)]
    dtype = pen.choose(("i64", "i64", "i32"))
    filling = f"torch.randint({least}, {length}, {{shape}}, generator=g, dtype={dtype})"
    return pen.argument(shape, dtype, filling)


def lookup(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0) or pen.floating(1)
    value = pen.values[x]
    dim = pen.integer(0, value.dim() - 1)
    length = value.shape[dim]
    form = pen.choose(("index", "index_select", "embedding", "gather", "index of two"))
    negative = -length if form == "index" else 0
    rank = (0 if pen.rarely(20) else pen.choose((1, 2))) if form in ("index", "embedding") else 1
    i = _index(pen, length if form != "embedding" else value.shape[0], negative, rank=rank)
    if not i:
        return ""
    if form == "index":
        return pen.write(f"{x}[{':, ' * dim}{i}]", [x, i], False)
    if form == "embedding":
        return pen.write(f"F.embedding({i}, {x})", [x, i], False)
    if form == "gather":
        shape = ", ".join("-1" if d == dim else str(n) for d, n in enumerate(value.shape))
        ones = ", ".join("-1" if d == dim else "1" for d in range(value.dim()))
        text = f"torch.gather({x}, {dim}, {i}.to(i64).view({ones}).expand({shape}))"
        return pen.write(text, [x, i], False)
    if form == "index of two" and value.dim() > 1:
        j = _index(pen, value.shape[1 if dim == 0 else 0])
        first, second = (i, j) if dim == 0 else (j, i)
        return pen.write(f"{x}[{first}, {second}]", [x, i, j], False) if dim < 2 and j else ""
    return pen.write(f"torch.index_select({x}, {dim}, {i})", [x, i], False)


def _rows(pen: Pen, x: str, dim: int, count: int) -> str:
    """Returns values for `count` positions of `x` along `dim`."""
    shape = list(pen.values[x].shape)
    shape[dim] = count
    wanted = torch.Size(shape)
    found = pen.some(lambda t: t.shape == wanted and t.dtype == pen.values[x].dtype)
    return found or pen.argument(shape, TYPES[pen.values[x].dtype])


def put(pen: Pen) -> object:
    """Writes new tensors with some positions replaced or added to."""
    x = pen.floating(1)
    dim = pen.integer(0, pen.values[x].dim() - 1)
    i = _index(pen, pen.values[x].shape[dim], unique=True)
    if not i:
        return ""
    rows = _rows(pen, x, dim, pen.values[i].numel())
    forms = [f"torch.index_copy({x}, {dim}, {i}, {rows})", f"torch.index_add({x}, {dim}, {i}, {rows})"]
    if dim == 0:
        forms += [f"{x}.index_put(({i},), {rows})", f"{x}.index_put(({i},), {rows}, accumulate=True)"]
    form = pen.choose(forms)
    return pen.write(form, [x, i, rows], "add" in form or "accumulate" in form)


def update(pen: Pen) -> object:
    """Changes an argument or a value in place, as a whole or in part."""
    arguments = [n for n in pen.program.arguments if pen.values[n].dim() > 0 and pen.values[n].dtype != torch.bool]
    x = pen.choose(arguments) if arguments and not pen.rarely(4) else pen.some(lambda t: t.dim() > 0)
    if not x:
        return ""
    value = pen.values[x]
    if _overlaps(value) or not value.numel():
        return ""
    length, dim = value.shape[0], pen.integer(0, value.dim() - 1)
    begin = pen.integer(0, max(0, length - 1))
    form = pen.choose(("whole", "slice", "rows", "row", "put", "number", "column"))
    y = repr(pen.number()) if value.is_floating_point() else str(pen.integer(-3, 3))
    if form == "whole":
        other = pen.some(lambda t: broadcasts(t, value) and (t.dtype == value.dtype or value.is_floating_point())) or y
        text = pen.choose((f"{x}.add_({other})", f"{x}.copy_({other})", f"{x}.mul_({other})", f"{x}.sub_({other})"))
        if "copy" in text and other not in pen.values:
            text = f"{x}.fill_({other})"
        return pen.write(text, [x, other], "copy" not in text and "fill" not in text, changes=x)
    if form in ("slice", "row", "column"):
        places = {"slice": f"{begin}::{pen.choose((1, 2))}", "row": f"{begin}", "column": "..., 0"}[form]
        part = eval(f"x[{places}]", {"x": value})
        other = pen.some(lambda t: broadcasts(t, part) and t.dtype == value.dtype) or y
        sign = pen.choose(("=", "=", "+=", "*="))
        return pen.write(f"{x}[{places}] {sign} {other}", [x, other], sign != "=", changes=x)
    if form == "number":
        text = pen.choose((f"{x}.fill_({y})", f"{x}.mul_({y})", f"{x}.zero_()", f"{x}.clamp_(max={y})"))
        return pen.write(text, [x], "mul" in text, changes=x)
    i = _index(pen, value.shape[dim], unique=True)
    if not i:
        return ""
    rows = _rows(pen, x, dim, pen.values[i].numel())
    if form == "put" and dim == 0:
        accumulate = pen.rarely(3)
        return pen.write(f"{x}.index_put_(({i},), {rows}, {accumulate})", [x, i, rows], accumulate, changes=x)
    return pen.write(f"{x}.index_copy_({dim}, {i}, {rows})", [x, i, rows], False, changes=x)


def _overlaps(t: torch.Tensor) -> bool:
    """Returns whether a tensor may contain an element twice. Writes to such a tensor are undefined."""
    reach = 0
    for stride, length in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def broadcasts(t: torch.Tensor, to: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(t.shape, to.shape) == to.shape
    except RuntimeError:
        return False
