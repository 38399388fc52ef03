"""Every operator with a lowering, compared with eager PyTorch: types, broadcasting, odd strides, single numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases_indexed
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.timeout(200)

f32, bf16, f16, i64, i32 = torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32


def x(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, shape, dtype=dtype)
    return torch.randn(shape).to(dtype)


def positive(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return (torch.rand(shape) + 0.3).to(dtype)


POINTWISE: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    **{
        name: (getattr(torch, name), lambda: (x(3, 5),))
        for name in ("neg", "abs", "exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "relu", "reciprocal")
    },
    **{name: (getattr(torch, name), lambda: (positive(3, 5),)) for name in ("log", "log1p", "sqrt", "rsqrt")},
    **{name: (getattr(torch, name), lambda: (x(3, 5) * 4,)) for name in ("floor", "ceil", "round", "trunc", "sign")},
    **{f"{name}_int": (getattr(torch, name), lambda: (x(3, 5, dtype=i64),)) for name in ("floor", "sign", "abs")},
    "exp_int": (torch.exp, lambda: (x(3, 5, dtype=i32),)),
    "bitwise_not": (torch.bitwise_not, lambda: (x(3, 5, dtype=i32),)),
    "not_bool": (torch.bitwise_not, lambda: (x(3, 5, dtype=torch.bool),)),
    "isnan": (torch.isnan, lambda: (torch.tensor([1.0, torch.nan, torch.inf]),)),
    "isinf": (torch.isinf, lambda: (torch.tensor([1.0, torch.nan, -torch.inf]),)),
    "add": (torch.add, lambda: (x(4, 1, 5), x(3, 1))),
    "add_alpha": (lambda a, b: torch.add(a, b, alpha=0.7), lambda: (x(4, 5), x(5))),
    "add_number": (lambda a: a + 2, lambda: (x(4, 5, dtype=bf16),)),
    "add_half_number": (lambda a: a + 0.1, lambda: (x(4, 5, dtype=f16),)),
    "add_bool": (torch.add, lambda: (x(9, dtype=torch.bool), x(9, dtype=torch.bool))),
    "add_int_to_bf16": (torch.add, lambda: (x(4, 5, dtype=bf16), x(5, dtype=i64) * 1001)),
    "add_f32_to_bf16": (torch.add, lambda: (x(4, 5, dtype=bf16), x(4, 5))),
    "add_zero_dim": (torch.add, lambda: (x(4, 5, dtype=bf16), torch.tensor(0.1))),
    "sub_int": (torch.sub, lambda: (x(4, 5, dtype=i64), x(5, dtype=i32))),
    "rsub": (lambda a: 1.5 - a, lambda: (x(4, 5),)),
    "rsub_alpha": (lambda a, b: torch.rsub(a, b, alpha=2), lambda: (x(4, 5), x(4, 5))),
    "int_times_float": (lambda a: a * 0.5, lambda: (x(4, 5, dtype=i64),)),
    "mul_bool": (torch.mul, lambda: (x(9, dtype=torch.bool), x(9, dtype=torch.bool))),
    "mul_bool_int": (torch.mul, lambda: (x(9, dtype=torch.bool), x(9, dtype=i64))),
    "div": (torch.div, lambda: (x(4, 5), positive(5))),
    "avg_pool2d": (lambda a: F.avg_pool2d(a, 2), lambda: (x(2, 3, 8, 6),)),
    "avg_pool2d_overlapping": (lambda a: F.avg_pool2d(a, (3, 2), (2, 1)), lambda: (x(3, 9, 5, dtype=bf16),)),
    "avg_pool2d_of_a_view": (lambda a: F.avg_pool2d(a.mT * 2, 2), lambda: (x(2, 3, 8, 6),)),
    "div_int": (torch.div, lambda: (x(4, 5, dtype=i64), x(5, dtype=i64).abs() + 1)),
    "div_floor": (lambda a, b: torch.div(a, b, rounding_mode="floor"), lambda: (x(4, 5) * 9, positive(5))),
    "div_trunc": (lambda a, b: torch.div(a, b, rounding_mode="trunc"), lambda: (x(4, 5) * 9, positive(5))),
    "floor_divide_int": (lambda a: a // 3, lambda: (x(40, dtype=i64),)),
    "remainder": (torch.remainder, lambda: (x(4, 5) * 9, positive(5))),
    "remainder_int": (lambda a: a % 4, lambda: (x(40, dtype=i64),)),
    **{f"pow_{e}": (lambda a, e=e: torch.pow(a, e), lambda: (positive(4, 5),)) for e in (2, 3, 1, 0.5, -0.5, -1, 2.7)},
    "pow_bf16": (lambda a: a.pow(3), lambda: (x(4, 5, dtype=bf16),)),
    "pow_int": (lambda a: a**2, lambda: (x(9, dtype=i64),)),
    "pow_int_5": (lambda a: a**5, lambda: (x(9, dtype=i32),)),
    "pow_int_tensor": (torch.pow, lambda: (x(9, dtype=i64), x(9, dtype=i64))),
    "pow_int_scalar": (lambda a: 3**a, lambda: (x(9, dtype=i64).abs(),)),
    "floor_divide_minus_1": (lambda a: a // -1 + a % -1, lambda: (torch.tensor([5, -7, 0, 1 << 62]),)),
    "pow_tensor": (torch.pow, lambda: (positive(4, 5), x(5))),
    "pow_scalar": (lambda a: 2.0**a, lambda: (x(4, 5),)),
    "maximum": (torch.maximum, lambda: (x(4, 5), x(5))),
    "minimum_int": (torch.minimum, lambda: (x(4, 5, dtype=i32), x(5, dtype=i64))),
    **{
        f"{name}_{kind}": (getattr(torch, name), make)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind, make in (
            ("float", lambda: (x(4, 5), x(5))),
            ("mixed", lambda: (x(4, 5, dtype=i64), x(5))),
            ("number", lambda: (x(4, 5, dtype=i64), 2)),
        )
    },
    "eq_bool": (torch.eq, lambda: (x(9, dtype=torch.bool), x(9, dtype=torch.bool))),
    "int_lt_half": (lambda a: a < 0.5, lambda: (x(9, dtype=i64),)),
    **{
        name: (getattr(torch, name), lambda: (x(4, 5), x(5, dtype=i64)))
        for name in ("logical_and", "logical_or", "logical_xor")
    },
    "logical_not": (torch.logical_not, lambda: (x(9, dtype=i64),)),
    **{
        f"{name}_{dtype}": (
            getattr(torch, name),
            (lambda d: lambda: (x(4, 5, dtype=d), x(5, dtype=d)))(dtype),
        )
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor")
        for dtype in (i32, torch.bool)
    },
    "where": (torch.where, lambda: (x(4, 5, dtype=torch.bool), x(4, 5), x(5))),
    "where_mixed": (torch.where, lambda: (x(4, 5, dtype=torch.bool), x(4, 5, dtype=bf16), x(5))),
    "where_numbers": (lambda c: torch.where(c, 0.0, -torch.inf), lambda: (x(4, 5, dtype=torch.bool),)),
    "masked_fill": (lambda a, m: a.masked_fill(m, -1e9), lambda: (x(4, 5), x(5, dtype=torch.bool))),
    "clamp": (lambda a: a.clamp(-0.5, 0.5), lambda: (x(4, 5),)),
    "clamp_min_int": (lambda a: a.clamp_min(0), lambda: (x(9, dtype=i64),)),
    "clamp_tensor": (torch.clamp, lambda: (x(4, 5), x(5) - 1, x(5) + 1)),
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=0.5), lambda: (x(4, 5), x(5), x(4, 1))),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), lambda: (x(4, 5), x(4, 5))),
    "to_bf16": (lambda a: a.to(bf16), lambda: (x(4, 5),)),
    "to_int": (lambda a: a.to(i64), lambda: (x(4, 5) * 5,)),
    "to_bool": (lambda a: a.to(torch.bool), lambda: (x(9, dtype=i64),)),
    "bool_to_float": (lambda a: a.float(), lambda: (x(9, dtype=torch.bool),)),
    "silu": (F.silu, lambda: (x(4, 5),)),
    "silu_bf16": (F.silu, lambda: (x(4, 5, dtype=bf16),)),
    "gelu": (F.gelu, lambda: (x(4, 5),)),
    "gelu_tanh": (lambda a: F.gelu(a, approximate="tanh"), lambda: (x(4, 5),)),
    "hardtanh": (F.hardtanh, lambda: (x(4, 5),)),
    "softplus": (F.softplus, lambda: (x(4, 5),)),
    "leaky_relu": (F.leaky_relu, lambda: (x(4, 5),)),
    "zero_dim": (lambda a, b: a * b + 1, lambda: (torch.tensor(2.0), torch.tensor(3.0))),
    "odd_strides": (lambda a, b: a.t() + b[::2, 1:6], lambda: (x(5, 4), x(8, 7))),
    "expanded": (lambda a, b: a.expand(4, 5) * b, lambda: (x(1, 5), x(4, 5))),
    "as_strided": (lambda a: torch.as_strided(a + 1, (3, 4), (2, 1), 1) * 2, lambda: (x(5, 4),)),
    "offset_input": (lambda a: a + 1, lambda: (x(40)[7:19].view(3, 4),)),
    "literal_bf16": (lambda a: a * torch.full((5,), 0.1, dtype=bf16), lambda: (x(4, 5, dtype=bf16),)),
}

REDUCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    **{
        f"{name}_{dims}_{keep}": (
            (lambda n, d, k: lambda a: getattr(torch, n)(a, dim=d, keepdim=k))(name, dims, keep),
            lambda: (x(3, 4, 5),),
        )
        for name in ("sum", "mean", "amax", "amin")
        for dims, keep in (((-1,), True), ((0, 2), False), ((0, 1, 2), False), ((1,), False))
    },
    "sum_all": (torch.sum, lambda: (x(3, 4),)),
    "sum_int": (torch.sum, lambda: (x(3, 4, dtype=i32),)),
    "sum_bool": (lambda a: a.sum(-1), lambda: (x(3, 4, dtype=torch.bool),)),
    "sum_dtype": (lambda a: a.sum(-1, dtype=f32), lambda: (x(3, 400, dtype=bf16),)),
    "sum_bf16": (lambda a: a.sum(-1), lambda: (x(3, 40, dtype=bf16),)),
    "sum_number": (lambda a: (a * 2).sum(), lambda: (torch.tensor(2.0),)),
    "mean_all": (torch.mean, lambda: (x(3, 4),)),
    "mean_strided": (lambda a: a.transpose(0, 1).mean(1), lambda: (x(3, 4),)),
    "max_all": (torch.max, lambda: (x(3, 4),)),
    "max_dim": (lambda a: tuple(torch.max(a, 1)), lambda: (x(3, 9),)),
    "argmax": (lambda a: a.argmax(-1), lambda: (x(3, 9),)),
    "argmax_keep": (lambda a: a.argmax(0, keepdim=True), lambda: (x(3, 9),)),
    "argmax_all": (torch.argmax, lambda: (x(3, 9),)),
    "argmax_all_strided": (lambda a: a.t().argmax(), lambda: (x(3, 9),)),
    "argmax_ties": (lambda a: a.argmax(-1), lambda: (torch.tensor([[1, 3, 3, 2], [2, 2, 1, 0]]),)),
    "any": (torch.any, lambda: (x(3, 4, dtype=torch.bool),)),
    "any_dim": (lambda a: (a > 1).any(-1), lambda: (x(3, 4),)),
    "any_float": (lambda a: a.any(1, keepdim=True), lambda: (torch.tensor([[0.0, 1.0], [0.0, 0.0]]),)),
    "all": (lambda a: (a > -1).all(), lambda: (x(3, 4),)),
    "all_dim": (lambda a: (a > -1).all(0), lambda: (x(3, 4),)),
    "var": (lambda a: a.var(-1), lambda: (x(3, 40),)),
    "var_mean": (lambda a: torch.var_mean(a, (0, 1), correction=0), lambda: (x(3, 4, 5),)),
    "std": (lambda a: a.std(-1, keepdim=True), lambda: (x(3, 40),)),
    "softmax": (lambda a: a.softmax(-1), lambda: (x(3, 9),)),
    "softmax_middle_bf16": (lambda a: a.softmax(1), lambda: (x(3, 9, 2, dtype=bf16),)),
    "log_softmax": (lambda a: a.log_softmax(-1), lambda: (x(3, 9),)),
    "logsumexp": (lambda a: a.logsumexp(-1), lambda: (x(3, 9),)),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (9,), w, b), lambda: (x(3, 9), x(9), x(9))),
    "rms_norm": (lambda a, w: F.rms_norm(a, (9,), w, 1e-6), lambda: (x(3, 9), x(9))),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=-1), lambda: (x(3, 9),)),
}

PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "mm": (torch.mm, lambda: (x(3, 4), x(4, 5))),
    "mm_transposed": (lambda a, b: a.t() @ b.t(), lambda: (x(4, 3), x(5, 4))),
    "mm_bf16": (torch.mm, lambda: (x(3, 40, dtype=bf16), x(40, 5, dtype=bf16))),
    "bmm": (torch.bmm, lambda: (x(2, 3, 4), x(2, 4, 5))),
    "matmul_broadcast": (torch.matmul, lambda: (x(2, 1, 3, 4), x(6, 4, 5))),
    "linear": (F.linear, lambda: (x(2, 3, 4), x(5, 4), x(5))),
    "addmm_scaled": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), lambda: (x(5), x(3, 4), x(4, 5))),
    "addmm_no_bias": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0, alpha=2.0),
        lambda: (torch.full((5,), torch.nan), x(3, 4), x(4, 5)),
    ),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), lambda: (x(2, 3, 5), x(2, 3, 4), x(2, 4, 5))),
    "mv": (torch.mv, lambda: (x(3, 4), x(4))),
    "dot": (torch.dot, lambda: (x(4), x(4))),
    "attention": (F.scaled_dot_product_attention, lambda: (x(2, 4, 3, 8), x(2, 4, 7, 8), x(2, 4, 7, 8))),
    "attention_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (x(2, 4, 7, 8), x(2, 4, 7, 8), x(2, 4, 7, 8)),
    ),
    "attention_grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3),
        lambda: (x(2, 4, 3, 8), x(2, 2, 7, 8), x(2, 2, 7, 8)),
    ),
    "attention_bool_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda: (x(2, 4, 3, 8), x(2, 4, 7, 8), x(2, 4, 7, 8), torch.ones(3, 7, dtype=torch.bool).tril(2)),
    ),
    "attention_float_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda: (x(2, 4, 3, 8), x(2, 4, 7, 8), x(2, 4, 7, 8), x(2, 1, 3, 7)),
    ),
    "attention_repeated": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q,
            k[:, :, None].expand(2, 2, 3, 7, 8).reshape(2, 6, 7, 8),
            v[:, :, None].expand(2, 2, 3, 7, 8).reshape(2, 6, 7, 8),
        ),
        lambda: (x(2, 6, 3, 8), x(2, 2, 7, 8), x(2, 2, 7, 8)),
    ),
}

INDEXING: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "embedding": (F.embedding, lambda: (torch.randint(0, 9, (2, 3)), x(9, 4))),
    "index_first": (lambda a, i: a[i], lambda: (x(5, 4), torch.tensor([3, 0, 3]))),
    "index_negative": (lambda a, i: a[i], lambda: (x(5, 4), torch.tensor([-1, 0, -5]))),
    "index_middle": (lambda a, i: a[:, i], lambda: (x(3, 5, 4), torch.tensor([[3, 0], [1, 1]]))),
    "index_number": (lambda a, i: torch.ops.aten.index(a, [i]), lambda: (x(5, 4), torch.tensor(2))),
    "index_select": (lambda a, i: a.index_select(-1, i), lambda: (x(3, 5), torch.tensor([4, 0], dtype=i32))),
    "index_put": (lambda a, i, v: a.index_put((i,), v), lambda: (x(5, 4), torch.tensor([3, 0]), x(2, 4))),
    "index_put_negative": (lambda a, i, v: a.index_put((i,), v), lambda: (x(5, 4), torch.tensor([-1, 0]), x(2, 4))),
    "index_put_number": (lambda a, i: a.index_put((i,), torch.tensor(7.0)), lambda: (x(5, 4), torch.tensor([3, 0]))),
    "index_copy": (lambda a, i, v: a.index_copy(1, i, v), lambda: (x(5, 4), torch.tensor([3, 0]), x(5, 2))),
    "cat": (lambda a, b: torch.cat([a, b * 2], 1), lambda: (x(3, 4), x(3, 2))),
    "cat_mixed": (lambda a, b: torch.cat([a, b], -1), lambda: (x(3, 4), x(3, 2, dtype=bf16))),
    "stack": (lambda a, b: torch.stack([a, b + 1], 1), lambda: (x(3, 4), x(3, 4))),
    "split": (lambda a: [t * 2 for t in a.split([1, 3], 1)], lambda: (x(3, 4),)),
    "unbind": (lambda a: a.unbind(0)[1] + 1, lambda: (x(3, 4),)),
    "clone_layout": (lambda a: (a * 2).t().contiguous(), lambda: (x(3, 4),)),
    "clone_input": (lambda a: a.clone(), lambda: (x(3, 4),)),
    "reshape_copies": (lambda a: a.t().reshape(-1) * 2, lambda: (x(3, 4),)),
    "repeat": (lambda a: a.repeat(2, 3), lambda: (x(3, 4),)),
    "pad": (lambda a: F.pad(a, (1, 2, 0, 1), value=3.0), lambda: (x(3, 4),)),
    "arange": (lambda a: a + torch.arange(4), lambda: (x(3, 4),)),
    "arange_float": (lambda a: a * torch.arange(1, 9, 2, dtype=f32), lambda: (x(3, 4),)),
    "zeros_result": (lambda a: (a * 2, torch.zeros(3, dtype=i64)), lambda: (x(3),)),
    "constant_view_result": (lambda a: (a * 2, torch.ones(1, 4).expand(3, 4)), lambda: (x(3),)),
    "ones_like": (lambda a: torch.ones_like(a) + a, lambda: (x(3, 4),)),
    "tril": (torch.tril, lambda: (x(4, 4),)),
    "select_scatter": (lambda a, b: torch.select_scatter(a, b, 0, 1), lambda: (x(3, 4), x(4))),
    "slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 1, 1, 3), lambda: (x(3, 4), x(3, 2))),
    "results_twice": (lambda a: (b := a * 2, b, b.t(), b[1:]), lambda: (x(3, 4),)),
    "input_returned": (lambda a: (a * 2, a.t(), a), lambda: (x(3, 4),)),
}

CASES = {**POINTWISE, **REDUCTIONS, **PRODUCTS, **INDEXING, **cases_indexed.CASES}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # Half types: one rounding may differ if eager rounds in between and the graph does not.
    return {bf16: dict(rtol=1.6e-2, atol=1e-2), f16: dict(rtol=2e-3, atol=1e-3)}.get(dtype, dict(rtol=1e-5, atol=2e-6))


def compare(got: Any, wanted: Any, name: str) -> None:
    if isinstance(wanted, Tensor):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        torch.testing.assert_close(
            got, wanted, equal_nan=True, msg=lambda text: f"{name}: {text}", **tolerance(wanted.dtype)
        )
    elif isinstance(wanted, tuple | list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            compare(one, other, name)
    else:
        assert got == wanted


@pytest.mark.changed("ark_torch/compile/*", "tests/compile/*")
@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_lowered(name: str, double: Any, compiled: Any) -> None:
    """Each operator alone. PyTorch runs its lowered graph."""
    function, make = CASES[name]
    arguments = make()
    wanted = function(*arguments)
    call, report = compiled(function, fallback=False, minimum=1)
    for _ in range(2):
        compare(call(*arguments), wanted, name)
    assert len(report.graphs) == 1 and not report.fallbacks and report.regions, report


GROUPS = [list(CASES)[i::12] for i in range(12)]


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_kernel(group: int, compiled: Any) -> None:
    """Many operators in one kernel. The planner decides fusion, tiles and order."""
    functions = [CASES[name][0] for name in GROUPS[group]]
    arguments = [CASES[name][1]() for name in GROUPS[group]]

    def together(given: list[tuple[Any, ...]]) -> list[Any]:
        return [function(*one) for function, one in zip(functions, given, strict=True)]

    wanted = together(arguments)
    call, report = compiled(together, fallback=False, minimum=1)
    for _ in range(2):
        for name, got, right in zip(GROUPS[group], call(arguments), wanted, strict=True):
            compare(got, right, name)
    assert len(report.graphs) == 1 and len(report.regions) == 1, report


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_kernel_alone(name: str, compiled: Any) -> None:
    function, make = CASES[name]
    arguments = make()
    call, report = compiled(function, fallback=False, minimum=1)
    compare(call(*arguments), function(*arguments), name)
    assert report.regions, report


@pytest.mark.by_day("extra0")
@pytest.mark.parametrize("extra", [{"padding": 1}, {"ceil_mode": True}, {"divisor_override": 3}, {"kernel_size": 5}])
def test_what_no_average_of_views_is_falls_back(extra: dict[str, Any], compiled: Any) -> None:
    arguments = {"kernel_size": 3, **extra}
    call, report = compiled(lambda a: F.avg_pool2d(a + 1, **arguments) * 2, minimum=1)
    a = x(2, 3, 11, 12)
    torch.testing.assert_close(call(a), F.avg_pool2d(a + 1, **arguments) * 2)
    [fallback] = report.graphs[0].fallbacks
    assert "an average" in fallback.reason, fallback.reason
