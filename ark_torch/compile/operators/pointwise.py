"""Pointwise operators. The tables map ATen overloads to operators of the graph (csrc/compiler/graph/pointwise).

Types are PyTorch's: `elementwise_dtypes` gives the type in which an operator computes. The graph computes floating
types in float32 and integers in int64. So an operand is cast only if its kind differs (an int64 with a float), and the
result is rounded once, to the type that PyTorch gives it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes
from torch.fx import Node

from ark_torch.compile.analysis import aten, tensor_of
from ark_torch.compile.ir import Literal, Operand, Strided, Unsupported
from ark_torch.compile.lowering import RULES, Lowering, lowers
from ark_torch.compile.operators import dequantized

prims = torch.ops.prims

# Computed in floating point for any input type.
FLOAT_UNARY: dict[Any, str] = {
    aten.exp.default: "exp",
    aten.log.default: "log",
    aten.log1p.default: "log1p",
    aten.expm1.default: "expm1",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.reciprocal.default: "reciprocal",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.tanh.default: "tanh",
    aten.erf.default: "erf",
    aten.sigmoid.default: "sigmoid",
    **{
        getattr(aten, name).default: name
        for name in (
            *("exp2", "log2", "log10", "erfc", "tan", "asin", "acos", "atan"),
            *("sinh", "cosh", "asinh", "acosh", "atanh"),
        )
    },
}
UNARY: dict[Any, str] = {
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.relu.default: "relu",
    aten.sign.default: "sign",
    aten.sgn.default: "sign",
    aten.bitwise_not.default: "bitwise_not",
}
# The identity for integers.
ROUNDING: dict[Any, str] = {
    aten.floor.default: "floor",
    aten.ceil.default: "ceil",
    aten.round.default: "round",
    aten.trunc.default: "trunc",
}
TESTS: dict[Any, str] = {aten.isnan.default: "isnan", aten.isinf.default: "isinf"}
BINARY: dict[Any, str] = {
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.remainder.Tensor: "remainder",
    aten.remainder.Scalar: "remainder",
    aten.fmod.Tensor: "fmod",
    aten.fmod.Scalar: "fmod",
    aten.pow.Tensor_Tensor: "pow",
    aten.pow.Scalar: "pow",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.floor_divide.default: "floor_divide",
    aten.bitwise_and.Tensor: "bitwise_and",
    aten.bitwise_and.Scalar: "bitwise_and",
    aten.bitwise_or.Tensor: "bitwise_or",
    aten.bitwise_or.Scalar: "bitwise_or",
    aten.bitwise_xor.Tensor: "bitwise_xor",
    aten.bitwise_xor.Scalar: "bitwise_xor",
}
ON_BOOLEANS = {"mul": "logical_and", "add": "logical_or", "maximum": "logical_or", "minimum": "logical_and"}
COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, name), overload): name
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Tensor", "Scalar")
}
LOGICAL: dict[Any, str] = {
    aten.logical_and.default: "logical_and",
    aten.logical_or.default: "logical_or",
    aten.logical_xor.default: "logical_xor",
    aten.logical_not.default: "logical_not",
}


def kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def promoted(node: Node, kind: Promotion, *arguments: Any) -> torch.dtype:
    """The common type of arguments (nodes and numbers), before it is widened for computation."""
    values = [a.meta["val"] if isinstance(a, Node) else a for a in arguments]
    computation, result = elementwise_dtypes(*values, type_promotion_kind=kind)
    if computation not in (torch.float32, torch.int64, torch.int32, torch.bool):
        raise Unsupported(f"computed in {str(computation).removeprefix('torch.')}")
    return result if kind is not Promotion.ALWAYS_BOOL else computation


def operand_as(low: Lowering, argument: Any, dtype: torch.dtype) -> Operand:
    """An operand of the same kind as `dtype`; one that already is stays unchanged, which is exact."""
    operand = low.operand(argument)
    if isinstance(operand, Literal):
        if dtype.is_floating_point:
            return Literal(float(operand.value), torch.float32, operand.shape)
        if dtype == torch.bool:
            return Literal(bool(operand.value), torch.bool, operand.shape)
        return Literal(int(operand.value), torch.int64, operand.shape)
    return operand if kind_of(operand.dtype) == kind_of(dtype) else low.cast(operand, dtype)


def keyword(node: Node, name: str, default: Any) -> Any:
    """An argument by its name in the schema, whether given by position or keyword."""
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, default)
    return default


def into_result(low: Lowering, node: Node, op: str, *inputs: Operand) -> Strided:
    return low.pointwise(op, *inputs, out=low.result(node))


@lowers(*FLOAT_UNARY)
def float_unary(low: Lowering, node: Node) -> Operand:
    dtype = promoted(node, Promotion.INT_TO_FLOAT, node.args[0])
    return into_result(low, node, FLOAT_UNARY[node.target], operand_as(low, node.args[0], dtype))


@lowers(*UNARY)
def unary(low: Lowering, node: Node) -> Operand:
    operand = low.operand(node.args[0])
    op = UNARY[node.target]
    if operand.dtype == torch.bool:
        if op != "bitwise_not":
            raise Unsupported(f"{op} of booleans")
        op = "logical_not"
    return into_result(low, node, op, operand)


@lowers(*ROUNDING)
def rounding(low: Lowering, node: Node) -> Operand:
    operand = low.operand(node.args[0])
    return into_result(low, node, ROUNDING[node.target] if operand.dtype.is_floating_point else "copy", operand)


@lowers(*TESTS)
def test(low: Lowering, node: Node) -> Operand:
    return into_result(low, node, TESTS[node.target], operand_as(low, node.args[0], torch.float32))


def _divides(low: Lowering, dtype: torch.dtype, divisor: Any) -> None:
    """Raises Unsupported if integers may be divided by 0, which in eager mode is a run-time error."""
    if dtype.is_floating_point or dtype == torch.bool:
        return
    operand = low.operand(divisor)
    if not isinstance(operand, Literal):
        raise Unsupported("a division of integers by a tensor, which may hold 0")
    if operand.value == 0:
        raise Unsupported("a division of integers by 0")


def arithmetic(low: Lowering, node: Node, op: str, left: Any, right: Any) -> Strided:
    dtype = promoted(node, Promotion.DEFAULT, left, right)
    if op in ("floor_divide", "remainder", "fmod"):
        _divides(low, dtype, right)
    if dtype == torch.bool and not op.startswith("bitwise"):
        if op not in ON_BOOLEANS:
            raise Unsupported(f"{op} of booleans")
        op = ON_BOOLEANS[op]
    elif dtype == torch.bool:
        op = op.replace("bitwise", "logical")
    return into_result(low, node, op, operand_as(low, left, dtype), operand_as(low, right, dtype))


@lowers(*BINARY)
def binary(low: Lowering, node: Node) -> Operand:
    if node.target is aten.mul.Tensor and (scaled := dequantized.with_channels(low, node, "mul")) is not None:
        return scaled
    return arithmetic(low, node, BINARY[node.target], *node.args[:2])


@lowers(aten.pow.Tensor_Scalar)
def power(low: Lowering, node: Node) -> Operand:
    base, exponent = node.args[:2]
    dtype = promoted(node, Promotion.DEFAULT, base, exponent)
    operand = operand_as(low, base, dtype)
    if not dtype.is_floating_point and isinstance(exponent, int) and exponent < 0:
        raise Unsupported("a negative power of integers")
    # PyTorch computes these, not a power.
    if exponent == 2:
        return into_result(low, node, "mul", operand, operand)
    if exponent == 1:
        return into_result(low, node, "cast" if operand.dtype != dtype else "copy", operand)
    rooted = dtype.is_floating_point and not (dtype == torch.float16 and low.device.type == "cpu")
    if rooted and exponent == 0.5:
        return into_result(low, node, "sqrt", operand)
    if rooted and exponent == -0.5:
        return into_result(low, node, "rsqrt", operand)
    if dtype.is_floating_point and exponent == -1:
        return into_result(low, node, "reciprocal", operand)
    if exponent == 3:
        square = low.pointwise("mul", operand, operand, dtype=torch.float32 if dtype.is_floating_point else dtype)
        return into_result(low, node, "mul", square, operand)
    return arithmetic(low, node, "pow", base, exponent)


@lowers(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar)
def add_or_subtract(low: Lowering, node: Node) -> Operand:
    name = node.target._schema.name  # type: ignore[union-attr]
    op = "add" if name == "aten::add" else "sub"
    left, right = node.args[:2]
    if node.target is aten.add.Tensor and (biased := dequantized.with_channels(low, node, "add")) is not None:
        return biased
    alpha = keyword(node, "alpha", 1)
    dtype = promoted(node, Promotion.DEFAULT, left, right)
    if dtype == torch.bool:
        if op == "sub" or alpha != 1:
            raise Unsupported(f"{op} of booleans")
        op = "logical_or"
    operands = [operand_as(low, left, dtype), operand_as(low, right, dtype)]
    if alpha != 1:
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        number = Literal(float(alpha) if dtype.is_floating_point else int(alpha), wide, ())
        scaled = 0 if name == "aten::rsub" else 1
        operands[scaled] = low.pointwise("mul", operands[scaled], number, dtype=wide)
    if name == "aten::rsub":
        operands.reverse()
    return into_result(low, node, op, *operands)


@lowers(aten.div.Tensor, aten.div.Scalar)
def divide(low: Lowering, node: Node) -> Operand:
    dtype = promoted(node, Promotion.INT_TO_FLOAT, *node.args[:2])
    return into_result(low, node, "div", *(operand_as(low, a, dtype) for a in node.args[:2]))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_rounding(low: Lowering, node: Node) -> Operand:
    mode = node.kwargs.get("rounding_mode")
    if mode is None:
        return divide(low, node)
    dtype = promoted(node, Promotion.DEFAULT, *node.args[:2])
    operands = [operand_as(low, a, dtype) for a in node.args[:2]]
    if mode == "floor":
        _divides(low, dtype, node.args[1])
        return into_result(low, node, "floor_divide", *operands)
    if not dtype.is_floating_point:
        raise Unsupported("integer division that truncates")
    return into_result(low, node, "trunc", low.pointwise("div", *operands))


@lowers(*COMPARISONS)
def comparison(low: Lowering, node: Node) -> Operand:
    dtype = promoted(node, Promotion.ALWAYS_BOOL, *node.args[:2])
    if dtype == torch.bool:
        dtype = torch.int64
    operands = [operand_as(low, a, dtype) for a in node.args[:2]]
    # A number is rounded to the type of the tensor that it is compared with.
    left, right = (a.meta["val"] if isinstance(a, Node) else a for a in node.args[:2])
    common = torch.result_type(left, right)  # type: ignore[arg-type]
    if common in (torch.bfloat16, torch.float16):
        operands = [
            o._replace(value=float(torch.tensor(o.value, dtype=common))) if isinstance(o, Literal) else o
            for o in operands
        ]
    return into_result(low, node, COMPARISONS[node.target], *operands)


@lowers(*LOGICAL)
def logical(low: Lowering, node: Node) -> Operand:
    operands = [low.operand(a) for a in node.args]
    zeros = {"float": Literal(0.0, torch.float32, ()), "int": Literal(0, torch.int64, ())}
    truths = [
        o if o.dtype == torch.bool else low.pointwise("ne", o, zeros[kind_of(o.dtype)], dtype=torch.bool)
        for o in operands
    ]
    return into_result(low, node, LOGICAL[node.target], *truths)


@lowers(aten.where.self)
def where(low: Lowering, node: Node) -> Operand:
    condition, chosen, other = node.args
    dtype = promoted(node, Promotion.DEFAULT, chosen, other)
    truth = low.operand(condition)
    if truth.dtype != torch.bool:
        raise Unsupported("where with a condition that is not boolean")
    return into_result(low, node, "where", truth, operand_as(low, chosen, dtype), operand_as(low, other, dtype))


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(low: Lowering, node: Node) -> Operand:
    base, mask, value = node.args
    dtype = low.operand(base).dtype
    return into_result(
        low, node, "where", low.operand(mask), operand_as(low, value, dtype), operand_as(low, base, dtype)
    )


@lowers(
    *(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default),
    *(aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor),
)
def clamp(low: Lowering, node: Node) -> Operand:
    least, most = keyword(node, "min", None), keyword(node, "max", None)
    given = [a for a in (node.args[0], least, most) if a is not None]
    dtype = promoted(node, Promotion.DEFAULT, *given)
    if dtype == torch.bool:
        raise Unsupported("clamp of booleans")
    # Of two equal values, a zero and its bound, the second argument is chosen: the value if the bound is a number, the
    # bound if it is a tensor.
    by_tensor = "Tensor" in node.target._overloadname  # type: ignore[union-attr]

    def bounded(op: str, value: Operand, bound: Any, **result: Any) -> Strided:
        pair = [operand_as(low, bound, dtype), value]
        return low.pointwise(op, *(reversed(pair) if by_tensor else pair), **result)

    value = operand_as(low, node.args[0], dtype)
    if least is not None and most is not None:
        value = bounded("maximum", value, least, dtype=torch.float32 if dtype.is_floating_point else dtype)
    op, bound = ("maximum", least) if most is None else ("minimum", most)
    return bounded(op, value, bound, out=low.result(node))


@lowers(aten.addcmul.default)
def addcmul(low: Lowering, node: Node) -> Operand:
    dtype = promoted(node, Promotion.DEFAULT, *node.args[:3])
    if not dtype.is_floating_point:
        raise Unsupported("addcmul of integers")
    base, left, right = (operand_as(low, a, dtype) for a in node.args[:3])
    # Eager's order, (value * left) * right: the product alone may overflow or vanish although the whole does not.
    if (value := keyword(node, "value", 1)) != 1:
        left = low.pointwise("mul", left, Literal(float(value), torch.float32, ()))
    return into_result(low, node, "add", base, low.pointwise("mul", left, right))


@lowers(aten.addcdiv.default)
def addcdiv(low: Lowering, node: Node) -> Operand:
    dtype = promoted(node, Promotion.DEFAULT, *node.args[:3])
    if not dtype.is_floating_point:
        raise Unsupported("addcdiv of integers")
    base, left, right = (operand_as(low, a, dtype) for a in node.args[:3])
    if (value := keyword(node, "value", 1)) != 1:
        left = low.pointwise("mul", left, Literal(float(value), torch.float32, ()))
    return into_result(low, node, "add", base, low.pointwise("div", left, right))


@lowers(aten.atan2.default)
def atan2(low: Lowering, node: Node) -> Operand:
    dtype = promoted(node, Promotion.INT_TO_FLOAT, *node.args[:2])
    return into_result(low, node, "atan2", *(operand_as(low, a, dtype) for a in node.args[:2]))


@lowers(aten._assert_async.msg)
def assert_async(low: Lowering, node: Node) -> Operand:
    """A false condition ends the step with an error."""
    condition = low.stored(low.operand(node.args[0]))
    if condition.dtype != torch.bool or math.prod(condition.shape) != 1:
        raise Unsupported("an assertion about something else than one truth value")
    condition = condition._replace(shape=(), strides=())
    return low.node("check", [condition], low.fresh(torch.bool, ()), message=str(node.args[1]))


@lowers(prims.convert_element_type.default, aten._to_copy.default)
def convert(low: Lowering, node: Node) -> Operand:
    given = tensor_of(node.args[0]) if isinstance(node.args[0], Node) else None
    if given is not None and given.device != node.meta["val"].device:
        raise Unsupported("a copy to another device")
    source = low.operand(node.args[0])
    result = node.meta["val"].dtype
    if isinstance(source, Literal) and result.is_floating_point:
        return Literal(float(source.value), result, source.shape) if result == torch.float32 else _store(low, node)
    return _store(low, node)


def _store(low: Lowering, node: Node) -> Strided:
    source = low.operand(node.args[0])
    out = low.result(node)
    if out.dtype == torch.bool and source.dtype != torch.bool:
        zero = Literal(0.0, torch.float32, ()) if source.dtype.is_floating_point else Literal(0, torch.int64, ())
        return low.pointwise("ne", source, zero, out=out)
    return low.copy(source, out)


assert len(RULES) > 50
