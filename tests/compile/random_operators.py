"""Operator families of random programs. A family is a function of a Pen (random_graphs.py).

It writes one statement, or none if nothing fits. FAMILIES have lowerings in ark, in the forms that people write.
FALLBACKS are a few that ark leaves to Inductor, so that programs are cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from random_graphs import NAMES, TYPES, Pen
from random_layouts import broadcasts, join, layout, lookup, put, strided, update, view
from random_selecting import FAMILIES as SELECTING

Family = Callable[[Pen], object]


def unary(pen: Pen) -> object:
    x = pen.floating()
    name = pen.choose(
        (
            *("torch.neg", "torch.abs", "torch.exp", "torch.tanh", "torch.sigmoid", "torch.relu", "F.silu", "F.gelu"),
            *("torch.sin", "torch.cos", "torch.erf", "torch.log", "torch.sqrt", "torch.rsqrt", "torch.reciprocal"),
            *("torch.log1p", "torch.expm1", "torch.square", "F.softplus", "F.leaky_relu", "F.hardswish", "F.elu"),
        )
    )
    return pen.write(f"{name}({x})", [x], name not in ("torch.neg", "torch.abs", "torch.relu"))


def gelu_tanh(pen: Pen) -> object:
    x = pen.floating()
    return pen.write(f"F.gelu({x}, approximate='tanh')", [x])


def jumping(pen: Pen) -> object:
    """Discontinuous functions of exact values."""
    x = pen.floating(exact=True)
    name = pen.choose(("floor", "ceil", "round", "trunc", "sign", "isnan", "isinf", "isfinite", "frac"))
    return pen.write(f"torch.{name}({x})", [x], False)


def whole(pen: Pen) -> object:
    """Integers and booleans."""
    x = pen.some(lambda t: not t.is_floating_point())
    if not x:
        return pen.argument(pen.shape(2), pen.choose(("i64", "i32", "boolean")))
    name = pen.choose(("torch.neg", "torch.abs", "torch.bitwise_not", "torch.logical_not", "torch.sign", "torch.exp"))
    return pen.write(f"{name}({x})", [x])


def binary(pen: Pen) -> object:
    x = pen.floating()
    y = pen.beside(x)
    if pen.rarely(3):
        x, y = y, x
    form = pen.choose(("{} + {}", "{} * {}", "{} - {}", "{} / {}", "torch.add({}, {}, alpha=0.5)"))
    return pen.write(form.format(x, y), [x, y])


def extremes(pen: Pen) -> object:
    x = pen.floating()
    y = pen.some(lambda t: t.dtype == pen.values[x].dtype and t.shape == pen.values[x].shape) or x
    return pen.write(f"{pen.choose(('torch.maximum', 'torch.minimum'))}({x}, {y})", [x, y], False)


def integers(pen: Pen) -> object:
    x = pen.some(lambda t: t.dtype in (torch.int64, torch.int32)) or pen.argument(pen.shape(2), "i64")
    y = pen.beside(x)
    if y in pen.values and pen.values[y].is_floating_point():
        return pen.write(f"{x} * {y}", [x, y])
    form = pen.choose(
        ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({0}, {0} + {1})", "{} & {}", "{} | {}", "{} ^ {}", "{} / {}")
    )
    return pen.write(form.format(x, y), [x, y])


def division(pen: Pen) -> object:
    """Rounding to integers, of exact values, and without integer division by zero."""
    x = pen.some(lambda t: t.dtype != torch.bool, exact=True) or pen.floating(exact=True)
    y = pen.choose(("3", "-2", "4", "1"))
    if pen.values[x].is_floating_point():
        y = pen.choose(("0.5", "-2.0", "3", "0.25"))
    found = pen.some(lambda t: t.dtype == pen.values[x].dtype and t.shape == pen.values[x].shape, exact=True)
    if pen.rarely(3) and found and bool(pen.values[found].ne(0).all()):
        y = found
    form = pen.choose(
        (
            "torch.floor_divide({}, {})",
            "torch.remainder({}, {})",
            "torch.div({}, {}, rounding_mode='floor')",
            "torch.div({}, {}, rounding_mode='trunc')",
            "{} % {}",
        )
    )
    return pen.write(form.format(x, y), [x, y])


def power(pen: Pen) -> object:
    x = pen.floating()
    exponent = pen.choose(("2", "3", "0.5", "-0.5", "-1", "1", "2.5", "0", "4", "-2"))
    return pen.write(pen.choose((f"{x} ** {exponent}", f"torch.pow({x}, {exponent})", f"2.0 ** {x}")), [x])


def compare(pen: Pen) -> object:
    x = pen.some(lambda t: t.dtype != torch.bool, exact=True) or pen.floating(exact=True)
    y = pen.beside(x)
    if y in pen.values and not pen.is_exact(y):
        y = repr(pen.number())
    name = pen.choose(("lt", "le", "gt", "ge", "eq", "ne"))
    return pen.write(f"torch.{name}({x}, {y})", [x, y])


def logic(pen: Pen) -> object:
    x = pen.some(lambda t: t.dtype == torch.bool) or pen.argument(pen.shape(2), "boolean")
    y = pen.some(lambda t: t.dtype == torch.bool and t.shape == pen.values[x].shape) or x
    form = pen.choose(("{} & {}", "{} | {}", "{} ^ {}", "torch.logical_and({}, {})", "~{}", "{} + {}", "{} * {}"))
    return pen.write(form.format(x, y), [x, y])


def choice(pen: Pen) -> object:
    x = pen.floating()
    value = pen.values[x]
    condition = pen.some(lambda t: t.dtype == torch.bool and broadcasts(t, value))
    condition = condition or pen.argument([1 if pen.rarely(3) else n for n in value.shape], "boolean")
    y = pen.beside(x)
    if pen.rarely(3):
        return pen.write(f"{x}.masked_fill({condition}, {pen.choose(('0.0', '-inf', '1.5'))})", [x, condition], False)
    return pen.write(f"torch.where({condition}, {x}, {y})", [x, y, condition], False)


def three(pen: Pen) -> object:
    x = pen.floating()
    y, z = pen.beside(x), pen.beside(x)
    form = pen.choose(
        (
            f"torch.clamp({x}, min={pen.choose(('-0.5', '0.0'))})",
            f"torch.clamp({x}, -1.0, {pen.choose(('1.0', '2.5'))})",
            f"torch.addcmul({x}, {y}, {z}, value=0.5)",
            f"torch.addcdiv({x}, {y}, {z})",
            f"torch.lerp({x}, {y}, 0.25)",
            f"{x} * {y} + {z}",
        )
    )
    return pen.write(form, [x, y, z])


def cast(pen: Pen) -> object:
    x = pen.some() or pen.floating()
    value = pen.values[x]
    names = ["f32", "bf16", "f16"]
    tame = value.numel() == 0 or bool((value.abs() < 1e6).all() if value.dtype != torch.bool else True)
    if pen.is_exact(x):
        names += ["i64", "i32"] if tame else []
        names.append("boolean")
    return pen.write(f"{x}.to({pen.choose(names)})", [x])


def _dims(pen: Pen, x: str) -> str:
    rank = pen.values[x].dim()
    dims = [d for d in range(rank) if pen.integer(0, 1)] or [rank - 1]
    return str([d - rank if pen.rarely(3) else d for d in dims])


def reduction(pen: Pen) -> object:
    x = pen.floating(1)
    keep = pen.choose((False, True))
    name = pen.choose(("sum", "mean", "amax", "amin", "sum", "logsumexp", "linalg.vector_norm"))
    if pen.rarely(5) and name in ("sum", "mean", "amax", "amin"):
        return pen.write(f"torch.{name.replace('a', '', name[:2] == 'am')}({x})", [x], not name.startswith("am"))
    dims = f"dim={_dims(pen, x)}"
    return pen.write(f"torch.{name}({x}, {dims}, keepdim={keep})", [x], not name.startswith("am"))


def reduction_of_whole(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0 and not t.is_floating_point()) or pen.argument(pen.shape(2), "i64")
    names = ("any", "all", "sum") if pen.values[x].dtype == torch.bool else ("sum", "amax", "amin", "any", "all")
    name = pen.choose(names)
    return pen.write(f"torch.{name}({x}, dim={_dims(pen, x)}, keepdim={pen.choose((False, True))})", [x])


def variance(pen: Pen) -> object:
    x = pen.floating(1)
    name = pen.choose(("var", "std", "var"))
    return pen.write(f"torch.{name}({x}, dim={_dims(pen, x)}, correction={pen.choose((1, 0))}, keepdim=True)", [x])


def position(pen: Pen) -> object:
    x = pen.some(lambda t: t.dim() > 0 and t.dtype != torch.bool, exact=True) or pen.floating(1, exact=True)
    dim = pen.integer(0, pen.values[x].dim() - 1)
    form = pen.choose((f"torch.argmax({x}, {dim})", f"torch.argmax({x})", f"torch.max({x}, {dim}, keepdim=True)[0]"))
    if pen.rarely(3):
        form = f"torch.max({x}, {dim})[1]"
    return pen.write(form, [x], False)


def softmax(pen: Pen) -> object:
    x = pen.floating(1)
    dim = pen.integer(0, pen.values[x].dim() - 1)
    return pen.write(f"{pen.choose(('torch.softmax', 'torch.log_softmax', 'F.softmin'))}({x}, {dim})", [x])


def norm(pen: Pen) -> object:
    x = pen.floating(1)
    value = pen.values[x]
    shape = list(value.shape[value.dim() - pen.integer(1, min(2, value.dim())) :])
    weight = pen.argument(shape, TYPES[value.dtype]) if pen.integer(0, 1) else "None"
    if pen.integer(0, 1):
        return pen.write(f"F.rms_norm({x}, {shape}, {weight}, 1e-5)", [x, weight])
    bias = pen.argument(shape, TYPES[value.dtype]) if weight != "None" else "None"
    return pen.write(f"F.layer_norm({x}, {shape}, {weight}, {bias})", [x, weight, bias])


def product(pen: Pen) -> object:
    x = pen.floating(2)
    value = pen.values[x]
    dtype, k, n = TYPES[value.dtype], value.shape[-1], pen.choose(pen.sizes)
    form = pen.choose(("linear", "linear", "matmul", "batched", "addmm", "baddbmm", "mv", "einsum"))
    if form == "linear":
        weight = pen.argument([n, k], dtype)
        bias = pen.argument([n], dtype) if pen.integer(0, 1) else "None"
        return pen.write(f"F.linear({x}, {weight}, {bias})", [x, weight, bias])
    if form == "mv":
        vector = pen.argument([k], dtype)
        return pen.write(f"{x} @ {vector}", [x, vector])
    if form == "einsum":
        other = pen.argument([n, k], dtype)
        return pen.write(f"torch.einsum('...k,nk->...n', {x}, {other})", [x, other])
    if form == "batched" and value.dim() > 2:
        other = pen.argument([*value.shape[:-2], k, n], dtype)
    elif form == "baddbmm" and value.dim() == 3:
        other, bias = pen.argument([value.shape[0], k, n], dtype), pen.argument([1, n], dtype)
        text = f"torch.baddbmm({bias}, {x}, {other}, beta={pen.choose((1, 0.5, 0))}, alpha={pen.choose((1, 2.0))})"
        return pen.write(text, [x, other, bias])
    elif form == "addmm" and value.dim() == 2:
        other, bias = pen.argument([k, n], dtype), pen.argument([n], dtype)
        text = f"torch.addmm({bias}, {x}, {other}, beta={pen.choose((1, 0.5, 0))}, alpha={pen.choose((1, 2.0))})"
        return pen.write(text, [x, other, bias])
    else:
        other = pen.argument([k, n], dtype)
    return pen.write(f"torch.matmul({x}, {other})", [x, other])


def attention(pen: Pen) -> object:
    batch, groups, repeats, size = pen.choose((1, 2)), pen.choose((1, 2, 3)), pen.choose((1, 2)), pen.choose((8, 4, 16))
    queries, keys = pen.choose((1, 3, 17)), pen.choose((5, 33, 1, 64))
    dtype = pen.float_type()
    # No windows: for overlapping queries eager PyTorch's result is wrong. On a GPU, PyTorch 2.11's attention (eager, or
    # in a graph that ark leaves to it) loses the context for some operands with rows that are not aligned to 16 bytes.
    # test_compile.py tests those.
    on_cpu = pen.program.device == "cpu"
    even = on_cpu or size * NAMES[dtype].itemsize % 16 == 0
    layouts = ("plain", "permuted" if even else "plain", "part" if on_cpu else "plain")
    # No NaN or infinities either: PyTorch's kernels disagree on their effect, masked or not.
    special, pen.special = pen.special, False
    q = pen.argument([batch, groups * repeats, queries, size], dtype, layout=pen.choose(layouts))
    k, v = (pen.argument([batch, groups, keys, size], dtype, layout=pen.choose(layouts)) for _ in "kv")
    mask = pen.choose(("None", "boolean", dtype, "causal"))
    text, reads = f"{q}, {k}, {v}, enable_gqa={repeats > 1}", [q, k, v]
    if mask == "causal":
        text += ", is_causal=True"
    elif mask != "None":
        what = "torch.ones({shape}, dtype=boolean).tril(2)" if mask == "boolean" else ""
        reads.append(pen.argument([queries, keys], mask, what, layout="plain"))
        text += f", attn_mask={reads[-1]}"
    pen.special = special
    return pen.write(f"F.scaled_dot_product_attention({text})", reads)


def inputs(pen: Pen) -> object:
    kind = pen.choose((pen.float_type(), "i64", "i32", "boolean", "f64" if pen.rarely(8) else "f32"))
    shape = pen.shape(pen.integer(0, 4))
    return pen.argument(shape, kind) if math.prod(shape) >= 0 else ""


def other(pen: Pen) -> object:
    """An operator without a lowering."""
    x = pen.floating(1)
    dim = pen.values[x].dim() - 1
    forms = (
        f"torch.median({x}, {dim})[0]",
        f"torch.cummax({x}, {dim})[0]",
        f"torch.tan({x})",
        f"torch.atan2({x}, {x})",
        f"torch.prod({x}, {dim})",
        f"torch.digamma({x})",
        f"torch.logaddexp({x}, {x})",
        f"{x}.double()",
    )
    return pen.write(pen.choose(forms), [x])


FAMILIES: tuple[Family, ...] = (
    *(binary, unary, reduction, view, binary, unary, view, softmax, norm, product, choice, update, update),
    *(extremes, jumping, whole, integers, division, power, compare, logic, three, cast, reduction_of_whole, gelu_tanh),
    *(variance, position, attention, strided, join, layout, lookup, lookup, put, inputs),
    *SELECTING,
)
FALLBACKS: tuple[Family, ...] = (other, other, other)
assert set(TYPES.values()) >= {"f32", "i64"}
