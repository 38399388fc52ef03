"""Every pointwise operator on special numbers: signed zeros, denormals, least and greatest, NaN, infinities.

Zero keeps its sign, and NaN and infinities occur where eager PyTorch has them. Other results are close
(test_accuracy.py defines how close). A denormal may become zero, because eager PyTorch's vectors flush some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32]
NAN, INF = float("nan"), float("inf")

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "erf", "sigmoid"),
            *(
                "exp2",
                "log2",
                "log10",
                "erfc",
                "tan",
                "asin",
                "acos",
                "atan",
                "sinh",
                "cosh",
                "asinh",
                "acosh",
                "atanh",
            ),
            *("neg", "abs", "relu", "sign", "floor", "ceil", "round", "trunc", "frac", "square", "isnan", "isinf"),
            *("lgamma", "logical_not", "isfinite", "signbit", "nan_to_num"),
        )
    },
    **{
        name: getattr(F, name)
        for name in (
            *("silu", "gelu", "softplus", "relu6", "hardtanh", "hardswish", "hardsigmoid", "elu", "selu", "mish"),
            *("leaky_relu", "softsign", "tanhshrink", "logsigmoid", "softshrink", "hardshrink", "celu"),
        )
    },
    "gelu(tanh)": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.5, -0.0),
    "clamp(-1, 1)": lambda x: x.clamp(-1, 1),
    "clamp(min=-0.0)": lambda x: x.clamp(min=-0.0),
    "clamp(max=0.0)": lambda x: x.clamp(max=0.0),
    "clamp(min=0.0)": lambda x: x.clamp(min=0.0),
    "clamp(max=-0.0)": lambda x: x.clamp(max=-0.0),
    "clamp(nan, 1)": lambda x: x.clamp(NAN, 1),
    "clamp(max=nan)": lambda x: x.clamp(max=NAN),
    "clamp(min=nan)": lambda x: x.clamp(min=NAN),
    "clamp(inf, -inf)": lambda x: x.clamp(INF, -INF),
    **{f"pow({n})": (lambda x, n=n: x**n) for n in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 2.5, -3, INF, -INF, NAN)},  # type: ignore[misc]
    **{f"{n} ** x": (lambda x, n=n: n**x) for n in (0.0, 1.0, 2.0, -2.0, INF)},  # type: ignore[misc]
    **{f"x % {n}": (lambda x, n=n: x % n) for n in (1, -1, 2.5, INF, -INF)},  # type: ignore[misc]
    **{f"fmod({n})": (lambda x, n=n: torch.fmod(x, n)) for n in (1, -1, 2.5, INF)},  # type: ignore[misc]
    **{f"x // {n}": (lambda x, n=n: x // n) for n in (1, -1, 2.5, INF)},  # type: ignore[misc]
    **{f"x * {n}": (lambda x, n=n: x * n) for n in (0, -1, -0.0, INF)},  # type: ignore[misc]
    **{f"x / {n}": (lambda x, n=n: x / n) for n in (3, -1, 0, INF)},  # type: ignore[misc]
    "0 - x": lambda x: 0 - x,
    "x + 0": lambda x: x + 0,
    "x - 0": lambda x: x - 0,
    "1 / x": lambda x: 1 / x,
    "min of all": lambda x: x.amin(),
    "max of all": lambda x: x.amax(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in (
        *("add", "sub", "mul", "div", "remainder", "fmod", "pow", "maximum", "minimum", "fmax", "fmin", "floor_divide"),
        *("eq", "ne", "lt", "le", "gt", "ge", "atan2", "hypot", "copysign", "logaddexp", "logical_and", "logical_xor"),
        *("xlogy",),
    )
} | {
    "where": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5 if x.dtype.is_floating_point else 2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "clamp(min=y)": lambda x, y: x.clamp(min=y),
    "clamp(max=y)": lambda x, y: x.clamp(max=y),
    "trunc(x / y)": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "floor(x / y)": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "add(alpha)": lambda x, y: torch.add(x, y, alpha=-2),
}
# Composed of several operators. Eager PyTorch rounds to a narrow type in between, compiled code does not.
ROUNDED_BETWEEN = ("tanhshrink",)
ADDED = ("addcmul", "add(alpha)", "lerp")


def unsettled(name: str, dtype: torch.dtype, inputs: tuple[float, ...]) -> bool:
    """Cases where eager PyTorch is no reference, because of vector libraries, fused multiply-adds, or Dynamo's
    rewriting.
    """
    greatest = torch.finfo(dtype).max / 4 if dtype.is_floating_point else 0
    if name in ("remainder", "fmod"):  # NaN if the quotient overflows float32
        return abs(inputs[1]) < 1e-30 or abs(inputs[0]) > 1e30
    if name in ADDED:  # an overflowing product may be rounded before the sum
        return any(greatest < abs(one) < float("inf") for one in inputs)
    if name == "addcdiv":  # Dynamo makes it value * (x / y)
        return 0 < abs(inputs[1]) < 1e-7 or any(greatest < abs(one) < float("inf") for one in inputs)
    if name == "gelu":  # oneDNN's loses the sign of zero and digits
        return dtype == torch.float32
    if name in ("fmax", "fmin"):  # which of two zeros depends on the type
        return inputs == (0, 0)
    if name == "softshrink":  # the sign of zero differs between vectors and tails
        return abs(inputs[0]) <= 0.5
    return name in ROUNDED_BETWEEN and dtype != torch.float32


def specials(dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor(
            [info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, 31, info.max - 1, info.max], dtype=dtype
        )
    info = torch.finfo(dtype)
    least = [info.smallest_normal / 4, info.smallest_normal, info.eps, info.max, info.max / 2]
    some = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 10.0, 20.0, 100.0, *least, INF, NAN]
    return torch.tensor([sign * one for one in some for sign in (1, -1)], dtype=torch.float64).to(dtype)


def differences(name: str, got: Tensor, wanted: Tensor, *inputs: Tensor) -> list[str]:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return [f"{name}: {got.dtype} {list(got.shape)}, not {wanted.dtype} {list(wanted.shape)}"]
    if not wanted.dtype.is_floating_point:
        wrong = got != wanted
    else:
        g, w = got.double(), wanted.double()
        same = (g == w) & (g.signbit() == w.signbit()) | (g.isnan() & w.isnan())
        small = torch.finfo(wanted.dtype).smallest_normal
        near = torch.isclose(g, w, rtol=16 * torch.finfo(wanted.dtype).eps, atol=0.0) & (w != 0)
        flushed = (g.abs() < 2 * small) & (w.abs() < 2 * small) & (g.signbit() == w.signbit()) & (g != w)
        wrong = ~(same | near | flushed)
    if wanted.ndim == 0:
        return [f"{name}: {got}, not {wanted}"] if wrong else []
    told = []
    for i in wrong.nonzero().flatten().tolist():
        numbers = tuple(x[i].item() for x in inputs)
        if not unsettled(name, inputs[0].dtype, numbers):
            told.append(f"{name}{numbers} = {got[i].item()}, not {wanted[i].item()}")
    return told


def divides(name: str) -> bool:
    return any(one in name for one in ("//", "%", "mod", "remainder", "divide", "floor(", "trunc("))


def check(calls: dict[str, Callable[..., Tensor]], inputs: tuple[Tensor, ...], compiled: Any) -> None:
    """Runs on the device of the inputs, and compares with eager PyTorch there."""

    def takes(call: Callable[..., Tensor]) -> bool:
        try:
            call(*inputs)
        except (RuntimeError, TypeError):
            return False
        return True

    # The least integer divided by -1 crashes the process, also in eager PyTorch.
    whole = not inputs[0].dtype.is_floating_point
    chosen = {name: call for name, call in calls.items() if not (whole and divides(name)) and takes(call)}
    call, report = compiled(lambda *x: [one(*x) for one in chosen.values()])
    wrong: list[str] = []
    for (name, one), got in zip(chosen.items(), call(*inputs), strict=True):
        wrong += differences(name, got.cpu(), one(*inputs).cpu(), *(x.cpu() for x in inputs))
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:400])
    assert report.regions


@pytest.mark.by_day("torch.float32")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_of_one(dtype: torch.dtype, compiled: Any) -> None:
    check(UNARY, (specials(dtype),), compiled)


@pytest.mark.by_day("torch.float32")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_of_two(dtype: torch.dtype, compiled: Any) -> None:
    x, y = torch.meshgrid(specials(dtype), specials(dtype), indexing="ij")
    check(BINARY, (x.flatten().contiguous(), y.flatten().contiguous()), compiled)
