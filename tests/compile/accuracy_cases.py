"""Cases for every operator that has a lowering and rounds or moves numbers. accuracy.py measures them.

A case is a call of one overload in one layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accuracy_indexed import indexed, moving
from accuracy_inputs import (
    FLOATS,
    Case,
    between,
    binary,
    bound,
    case,
    changed,
    each,
    f32,
    first,
    integers,
    moderate,
    normal,
    positive,
    reduction,
    truths,
    unary,
    whole,
    wide,
)
from accuracy_products import averages, convolutions, products

from ark_torch.compile import scaled_products
from ark_torch.compile.operators import loop

aten, prims, functional = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional

# Without cases: collectives add as their groups do, and two operators compute nothing.
WITHOUT_ROUNDING = {
    *(getattr(functional, name).default for name in ("wait_tensor", "all_to_all_single")),
    *(
        getattr(functional, name + suffix).default
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        for suffix in ("", "_coalesced")
    ),
    torch.ops.ark_torch.stop.default,
    aten._assert_async.msg,
}
# The names of attention on a GPU, where tests/gpu/compile_operators.py runs the CPU's cases.
ON_A_GPU = {getattr(aten, f"_scaled_dot_product_{kind}_attention").default for kind in ("flash", "efficient", "cudnn")}
# They take codes, some in a device-specific order. test_low_bits.py and test_scaled_products.py compare them with
# float64.
CODED = {
    *(aten._weight_int4pack_mm_for_cpu.default, aten._weight_int8pack_mm.default, aten._weight_int4pack_mm.default),
    *scaled_products.OPERATORS,
}
assert loop  # its import registers ark_torch::stop


def functions() -> Iterator[list[Case]]:
    """Functions of one or two numbers."""
    for name in ("sin", "cos", "tanh", "erf", "sigmoid", "expm1", "atan", "asinh", "sinh", "cosh", "exp", "exp2"):
        yield unary(getattr(aten, name).default, wide)
    for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"):
        yield unary(getattr(aten, name).default, positive)
    for name in ("asin", "acos", "atanh"):
        yield unary(getattr(aten, name).default, between(-0.95, 0.95))
    yield unary(aten.acosh.default, between(1.1, 9))
    yield unary(aten.tan.default, between(-1.4, 1.4))
    yield unary(aten.erfc.default, between(-3, 3))
    for name in ("silu", "gelu"):
        yield unary(getattr(aten, name).default, wide)
    yield unary(aten.gelu.default, wide, approximate="tanh")
    yield [case(aten.glu.default, "rows", normal(33, 74))]
    yield [case(aten.glu.default, "columns", normal(34, 37), call=bound(aten.glu.default, 0))]
    yield binary(aten.atan2.default, wide)
    yield binary(aten.pow.Tensor_Tensor, moderate, between(-4, 4))
    yield [case(aten.pow.Scalar, "odd", wide(7, 137), call=lambda a: aten.pow.Scalar(1.75, a), elementwise=True)]
    for exponent in (2, 3, 4, 7, -1, -2, -3, 0.5, -0.5, 1.75, 1):
        yield unary(aten.pow.Tensor_Scalar, moderate, exponent)


def arithmetic() -> Iterator[list[Case]]:
    """Constants in the program are exact in every type."""
    for name in ("neg", "abs", "relu", "sign", "sgn", "floor", "ceil", "round", "trunc", "isnan", "isinf"):
        yield unary(getattr(aten, name).default, wide)
    for name in ("mul", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "div"):
        yield binary(getattr(aten, name).Tensor, wide, moderate)
        yield unary(getattr(aten, name).Scalar, wide, 0.75)
    for name in ("add", "sub", "rsub"):
        yield binary(getattr(aten, name).Tensor, wide, alpha=0.375)
    for mode in ("floor", "trunc"):
        yield binary(aten.div.Tensor_mode, wide, moderate, rounding_mode=mode)
        yield unary(aten.div.Scalar_mode, wide, 0.75, rounding_mode=mode)
    yield binary(aten.floor_divide.default, wide, moderate)
    for name in ("maximum", "minimum"):
        yield binary(getattr(aten, name).default, wide)
    for name in ("logical_and", "logical_or", "logical_xor"):
        yield binary(getattr(aten, name).default, truths, dtypes=(f32,))
    yield unary(aten.logical_not.default, truths, dtypes=(f32,))
    yield unary(aten.bitwise_not.default, integers, dtypes=(f32,))
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield binary(getattr(aten, name).Tensor, integers, dtypes=(f32,))
        yield unary(getattr(aten, name).Scalar, integers, 6, dtypes=(f32,))
    yield [case(aten.where.self, "broadcast", truths(17, 1), wide(5, 17, 33), wide(33))]
    filled = (wide(7, 37), truths(37))
    yield [case(aten.masked_fill.Scalar, "odd", *filled, call=bound(aten.masked_fill.Scalar, 0.375))]
    yield [case(aten.masked_fill.Tensor, "odd", *filled, wide())]
    yield unary(aten.clamp.default, wide, -0.5, 0.75)
    yield [case(aten.clamp.Tensor, "broadcast", wide(7, 37), between(-2, -1)(37), moderate(7, 1))]
    for name in ("clamp_min", "clamp_max"):
        yield unary(getattr(aten, name).default, wide, 0.75)
        yield binary(getattr(aten, name).Tensor, wide)
    for operator in (aten.addcmul.default, aten.addcdiv.default):
        three = (wide(65, 33), wide(33), moderate(65, 1))
        yield [case(operator, "broadcast", *three, call=bound(operator, value=0.375))]
    for target in FLOATS:
        yield unary(prims.convert_element_type.default, wide, target)
        yield unary(aten._to_copy.default, wide, dtype=target)


def reductions() -> Iterator[Case]:
    yield from reduction(aten.sum.dim_IntList, normal, lambda d: ([d],))
    yield from reduction(aten.mean.dim, moderate, lambda d: ([d], True))
    yield from whole(aten.sum.default, normal)
    yield from whole(aten.mean.default, moderate)
    yield from reduction(aten.var.correction, changed(normal, lambda x: x + 3), lambda d: ([d],))
    yield from reduction(aten.var_mean.correction, normal, lambda d: ([d],))
    for name in ("amax", "amin"):
        operator = getattr(aten, name).default
        yield case(operator, "columns", normal(4099, 65), call=bound(operator, [0]))
    for operator in (aten.max, aten.min):
        yield from whole(operator.default, normal)
        yield case(operator.dim, "rows", normal(65, 37), call=bound(operator.dim, 1))
    for operator in (aten.argmax.default, aten.argmin.default):
        yield case(operator, "rows", each(65, 37), call=bound(operator, 1))
    for operator in (aten.any, aten.all):
        yield case(operator.default, "odd", truths(5, 3, 7))
        yield case(operator.dim, "odd", truths(5, 3, 7), call=bound(operator.dim, 1))
        yield case(operator.dims, "odd", truths(5, 3, 7), call=bound(operator.dims, [0, 2]))
    for operator in (aten._softmax.default, aten._log_softmax.default):
        yield from reduction(operator, normal, lambda d: (d, False))
        far = changed(normal, lambda x: 9 * x)
        yield case(operator, "wide", far(65, 301), call=bound(operator, -1, False))
    for width in (7, 8192):
        norm = bound(lambda x, w, b, n: aten.native_layer_norm.default(x, [n], w, b, 1e-5), width)
        rows = (normal(65, width), normal(width), normal(width))
        yield case(aten.native_layer_norm.default, f"rows of {width}", *rows, call=first(norm))
    yield from reduction(aten.cumsum.default, normal, lambda d: (d,))
    yield case(aten.cumprod.default, "rows", between(0.8, 1.25)(65, 37), call=bound(aten.cumprod.default, 1))
    yield case(aten.histc.default, "flat", normal(4099), call=bound(aten.histc.default, 9, -2, 2), dtypes=(f32,))


def cases(dtype: torch.dtype) -> list[Case]:
    """Returns all cases. A pointwise operator gets one layout in turn: all use the same function of 16 lanes."""
    pointwise = [group[i % len(group)] for i, group in enumerate([*functions(), *arithmetic()])]
    every = (*pointwise, *reductions(), *products(), *indexed(), *moving(), *convolutions(), *averages())
    return [one for one in every if dtype in one.dtypes]
