"""Cases of test_operators.py that follow indices (routing, embeddings, sorting, updates), and rarer functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

f32, bf16, f16, i64, i32 = torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32

Cases = dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]]


def x(*shape: int, dtype: torch.dtype = f32) -> Tensor:
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-9, 10, shape, dtype=dtype)


def at(limit: int, *shape: int, dtype: torch.dtype = i64) -> Tensor:
    return torch.randint(0, limit, shape, dtype=dtype)


def ties(*shape: int) -> Tensor:
    return torch.randint(0, 4, shape).float()


def holes(*shape: int) -> Tensor:
    values = torch.randn(shape)
    values.view(-1)[::3] = torch.nan
    return values


SELECTING: Cases = {
    "topk": (lambda a: tuple(torch.topk(a, 2)), lambda: (x(5, 8),)),
    "topk_middle_least": (lambda a: tuple(torch.topk(a, 3, 1, largest=False)), lambda: (x(3, 7, 2),)),
    "topk_strided_half": (lambda a: tuple(torch.topk(a.t(), 2)), lambda: (x(9, 5, dtype=f16),)),
    # Among equal values, the choice must be eager's, which has two algorithms.
    "topk_ties": (lambda a: tuple(torch.topk(a, 5)), lambda: (ties(7, 40),)),
    "topk_ties_long": (lambda a: tuple(torch.topk(a, 3)), lambda: (ties(3, 900),)),
    "topk_ties_all": (lambda a: tuple(torch.topk(a, 33, largest=False)), lambda: (ties(3, 33),)),
    "topk_nan": (lambda a: tuple(torch.topk(a, 4)), lambda: (holes(5, 9),)),
    "topk_nan_least": (lambda a: tuple(torch.topk(a, 4, largest=False)), lambda: (holes(5, 9),)),
    "topk_int": (lambda a: tuple(torch.topk(a, 4)), lambda: (torch.randperm(11) + 2**40,)),
    "sort": (lambda a: tuple(torch.sort(a, 0)), lambda: (x(9, 3, dtype=bf16).float(),)),
    "sort_stable": (lambda a: tuple(torch.sort(a, descending=True, stable=True)), lambda: (ties(3, 50),)),
    "sort_nan": (lambda a: torch.sort(a)[0], lambda: (holes(4, 9),)),
    "argsort": (lambda a: torch.argsort(a, stable=True), lambda: (at(4, 30),)),
    "cumsum": (lambda a: a.cumsum(1), lambda: (x(3, 70, 2),)),
    "cumsum_bf16": (lambda a: a.cumsum(-1), lambda: (x(3, 70, dtype=bf16),)),
    "cumsum_bool": (lambda a: (a > 0).cumsum(0), lambda: (x(9, 3),)),
    "cumsum_to_i32": (lambda a: a.cumsum(0, dtype=i32), lambda: (at(9, 7),)),
    "cumprod": (lambda a: a.cumprod(-1), lambda: (x(3, 7),)),
    "histc": (lambda a: torch.histc(a, 5, 0, 4), lambda: (at(6, 40).float() - 0.25 * at(2, 40),)),
    "argmin": (lambda a: a.argmin(-1), lambda: (ties(5, 9),)),
    "argmin_nan": (lambda a: a.argmin(0, keepdim=True), lambda: (holes(5, 7),)),
    "argmin_all_int": (torch.argmin, lambda: (at(9, 3, 5, dtype=i32),)),
    "min_dim": (lambda a: tuple(a.min(1, keepdim=True)), lambda: (ties(5, 9),)),
    "one_hot": (lambda i: F.one_hot(i, 7), lambda: (at(7, 3, 2),)),
}

MOVING: Cases = {
    "gather": (lambda a, i: a.gather(1, i), lambda: (x(5, 8), at(8, 4, 3))),
    "gather_first_strided": (lambda a, i: a.t().gather(0, i), lambda: (x(5, 8), at(8, 9, 5, dtype=i64))),
    "take_along_dim": (lambda a, i: torch.take_along_dim(a, i, -1), lambda: (x(5, 8), at(8, 5, 3))),
    "scatter": (lambda a, i, v: a.scatter(1, i, v), lambda: (x(5, 8), torch.tensor([[1, 3], [0, 7]]), x(4, 3))),
    "scatter_number": (lambda a, i: a.scatter(0, i, 2.5), lambda: (x(5, 8, dtype=bf16), at(5, 3, 8))),
    "scatter_add": (lambda a, i, v: a.scatter_add(1, i, v), lambda: (x(5, 8), at(8, 5, 30), x(5, 30))),
    "scatter_add_int": (lambda a, i, v: a.scatter_add(0, i, v), lambda: (at(9, 5), at(5, 30), at(9, 30))),
    "scatter_reduce": (
        lambda a, i, v: a.scatter_reduce(1, i, v, "sum"),
        lambda: (x(5, 8), at(8, 5, 30), x(5, 30)),
    ),
    "index_add": (lambda a, i, v: a.index_add(0, i, v), lambda: (x(5, 19), at(5, 30), x(30, 19))),
    "index_add_last": (lambda a, i, v: a.index_add(1, i, v, alpha=2), lambda: (x(5, 7), at(7, 30), x(5, 30))),
    "index_add_half": (
        lambda a, i, v: a.index_add(0, i, v),
        lambda: (x(5, 9, dtype=f16), at(5, 4), x(4, 9, dtype=f16)),
    ),
    "index_add_bf16": (
        lambda a, i, v: a.index_add(0, i, v, alpha=2),
        lambda: (x(5, 9, dtype=bf16), torch.tensor([3, 1]), x(2, 9, dtype=bf16)),
    ),
    "index_put_add_2d": (
        lambda a, i, v: a.index_put((i,), v, accumulate=True),
        lambda: (x(5, 7), at(5, 3, 4), x(3, 4, 7)),
    ),
    "index_put_2d": (
        lambda a, i, v: a.index_put((i,), v),
        lambda: (x(9, 7), torch.randperm(9)[:6].view(3, 2), x(3, 2, 7)),
    ),
    "index_pairs": (
        lambda a, i, j: a[:, i, j],
        lambda: (x(3, 4, 5), torch.tensor([1, -1, 2]), torch.tensor([[0], [-5]])),
    ),
    "index_pairs_strided": (lambda a, i, j: a.t()[i, j], lambda: (x(4, 5), at(5, 9), at(4, 9))),
    "upper_pairs": (lambda a: a[:, [0, 0, 1], [1, 2, 2]], lambda: (x(4, 3, 3),)),
    "flip": (lambda a: a.flip(0, 2), lambda: (x(3, 2, 5),)),
    "roll": (lambda a: a.roll((1, -2), (0, 1)), lambda: (x(3, 5),)),
    "interpolate": (lambda a: F.interpolate(a, scale_factor=2), lambda: (x(1, 2, 3, 3),)),
}

BAGS: Cases = {
    "bag_mean": (
        lambda w, i, o: F.embedding_bag(i, w, o),
        lambda: (x(9, 5), at(9, 12), torch.tensor([0, 3, 3, 11])),
    ),
    "bag_sum_wide": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"),
        lambda: (x(90, 150), at(90, 60), torch.tensor([0, 30, 60, 60])),
    ),
    "bag_max_padding": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="max", padding_idx=2),
        lambda: (x(3, 70), at(3, 12), torch.tensor([0, 2, 9])),
    ),
    "bag_mean_padding_last": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="mean", padding_idx=-1, include_last_offset=True),
        lambda: (x(4, 7), at(4, 12), torch.tensor([0, 4, 4, 12])),
    ),
    "bag_weights": (
        lambda w, i, o, p: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p),
        lambda: (x(9, 20), at(9, 12), torch.tensor([0, 5, 5]), x(12)),
    ),
    "bag_2d": (lambda w, i: F.embedding_bag(i, w, mode="sum"), lambda: (x(9, 6), at(9, 4, 3))),
    "bag_one": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"),
        lambda: (x(9, 64), at(9, 5, dtype=i32), torch.tensor([0], dtype=i32)),
    ),
    "bag_bf16": (
        lambda w, i, o: F.embedding_bag(i, w, o, mode="sum"),
        lambda: (x(9, 20, dtype=bf16), at(9, 12), torch.tensor([0, 5, 6])),
    ),
}

EXPERTS: Cases = {
    "experts_left": (
        lambda a, w, i: torch.bmm(w[i], a.unsqueeze(-1)).squeeze(-1),
        lambda: (x(5, 19), x(4, 33, 19), at(4, 5)),
    ),
    "experts_right_bf16": (
        lambda a, w, i: torch.bmm(a.unsqueeze(1), w[i]),
        lambda: (x(5, 18, dtype=bf16), x(4, 18, 40, dtype=bf16), at(4, 5)),
    ),
    "experts_up": (
        lambda a, w, i: torch.einsum("ti,taoi->tao", a, w[i]),
        lambda: (x(5, 18), x(4, 21, 18), at(4, 5, 2)),
    ),
    "experts_down": (
        lambda a, w, i: torch.einsum("tao,taio->tai", a, w[i]),
        lambda: (x(5, 2, 21), x(4, 18, 21), at(4, 5, 2)),
    ),
    "experts_halves": (
        lambda a, w, i: [torch.bmm(a.unsqueeze(1), half.transpose(1, 2)) for half in w[i].chunk(2, 1)],
        lambda: (x(5, 18), x(4, 22, 18), at(4, 5)),
    ),
    "experts_rows": (lambda a, w, i: torch.bmm(a, w[i]), lambda: (x(3, 7, 18), x(4, 18, 21), at(4, 3))),
    "experts_many": (
        lambda a, w, i: torch.bmm(a.unsqueeze(1), w[i]),
        lambda: (x(130, 20), x(2, 20, 300), at(2, 130)),
    ),
    "experts_strided_index": (
        lambda a, w, i: torch.bmm(a.unsqueeze(1), w[i[:, 1]]),
        lambda: (x(5, 18), x(4, 18, 21), at(4, 5, 2)),
    ),
    # Not products of whole looked-up matrices.
    "experts_partial": (
        lambda a, w, i: torch.einsum("tki,tio->tko", a, w[i].view(5, 36, 10)),
        lambda: (x(5, 3, 36), x(4, 18, 20), at(4, 5)),
    ),
    "grouped_mm": (
        lambda a, w, o: torch._grouped_mm(a, w.transpose(-2, -1), offs=o),
        lambda: (x(9, 16, dtype=bf16), x(4, 24, 16, dtype=bf16), torch.tensor([2, 2, 5, 9], dtype=i32)),
    ),
}

RARER: Cases = {
    **{
        name: (getattr(torch, name), lambda: (torch.rand(3, 50) * 1.8 - 0.9,))
        for name in ("exp2", "erfc", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "atanh")
    },
    **{name: (getattr(torch, name), lambda: (torch.rand(3, 50) + 1.1,)) for name in ("log2", "log10", "acosh")},
    "atan2": (torch.atan2, lambda: (x(4, 5), x(5))),
    "fmod": (torch.fmod, lambda: (x(4, 5) * 9, x(5))),
    "fmod_number": (lambda a: torch.fmod(a, 2.5), lambda: (x(4, 5) * 9,)),
    "fmod_int": (lambda a: torch.fmod(a, -4), lambda: (x(40, dtype=i64),)),
    "pow_int_5": (lambda a: a**5, lambda: (x(9, dtype=i64),)),
    "addcdiv": (lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), lambda: (x(4, 5), x(5), torch.rand(4, 1) + 1)),
    **{
        name: (getattr(F, name), lambda: (x(4, 6) * 4,))
        for name in ("mish", "hardswish", "elu", "selu", "hardsigmoid", "relu6", "logsigmoid", "softsign", "glu")
    },
    **{f"{name}_bf16": (getattr(F, name), lambda: (x(4, 6, dtype=bf16),)) for name in ("mish", "hardswish", "glu")},
    "group_norm": (
        lambda a, w, b: F.group_norm(a, 3, w, b),
        lambda: (x(2, 6, 5), x(6), x(6)),
    ),
    "layer_norm_dims": (lambda a, w: F.layer_norm(a, (3, 7), w), lambda: (x(2, 3, 7), x(3, 7))),
    "softmax_first": (lambda a: a.softmax(0), lambda: (x(7, 3),)),
    "logsumexp_dims": (lambda a: a.logsumexp((0, 2)), lambda: (x(3, 4, 5),)),
    "std_dims": (lambda a: a.std((0, 2)), lambda: (x(3, 4, 5),)),
    "cross_entropy": (F.cross_entropy, lambda: (x(5, 8), at(8, 5))),
}

CASES: Cases = {**SELECTING, **MOVING, **BAGS, **EXPERTS, **RARER}
