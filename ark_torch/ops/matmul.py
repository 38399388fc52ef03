"""Products fused with a collective: the public functions, their fake kernels and their gradients.

The operators themselves are C++ (csrc/ops). Each gradient consists of the other operators: that of a reduce_scatter is
an all_gather and vice versa; after an all_reduce every rank has the whole gradient, so only products remain (Megatron's
g). The backward pass of `all_gather_matmul` gathers `a` again: keeping all ranks' rows would lose the memory that
sequence parallelism saves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C  # noqa: F401  (defines torch.ops.ark)
from ark_torch.ops.arguments import Group, name_of


def matmul_all_reduce(
    a: Tensor,
    b: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    form: str = "auto",
) -> Tensor:
    """The sum of all ranks' products `a @ b`, as in a linear layer split along its inputs.

    Products are rounded to the dtype, added in float32 in rank order and rounded once. Form "unfused", and CPU ranks,
    give the same bits as `torch.mm(a, b)` followed by the group's `all_reduce`. Collective: all ranks call it, in the
    same order.

    Args:
        a: `[m, k]`, float32, float16, bfloat16 or float64, on the CPU or a CUDA device; any strides. k may differ by
            rank.
        b: `[k, n]`, with the dtype and device of `a`; any strides: pass a weight of `torch.nn.Linear` as `weight.t()`.
        group: a group of the backend "ark", its name, a device mesh of one dimension, or a mesh and the number of a
            dimension; None: the default group.
        bias: `[n]`, added to this rank's product before it is rounded, as by `torch.addmm`. Ranks may or may not have
            one: what is to be added once, one rank passes, or is added to the result.
        form: "unfused": PyTorch's product, then ark's collective. "fused": one kernel that sends each tile when it is
            finished (float16 and bfloat16 on Hopper; sums of at most 2048 tiles of 128 x 256 for each rank).
            "auto": the faster one by measurement.

    Returns:
        `[m, n]`, the same on all ranks.

    The gradients are `grad @ b^T`, `a^T @ grad` and `grad.sum(0)`, without communication.

    Raises:
        ValueError, TypeError: an argument is invalid, or the group is not ark's.
        torch.distributed.DistBackendError: another rank rejected its arguments, ranks differ in m, n, dtype or form, or
            the group has failed. On CUDA devices ranks compare before the first call of a shape.

    Example:
        >>> out = ark_torch.ops.matmul_all_reduce(hidden, down.weight.t(), group)
    """
    name = name_of(group, "matmul_all_reduce")
    a, b = _tensor(a), _tensor(b)
    result: Tensor = torch.ops.ark.matmul_all_reduce(a, b, name, form, _trained(a, b, bias), bias)
    return result


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    form: str = "auto",
) -> Tensor:
    """The sum of all ranks' products `a @ b`, of which each rank gets its part of the rows.

    Like `matmul_all_reduce`, with `reduce_scatter_tensor` instead of `all_reduce`.

    Args:
        a: `[m, k]`; m is a multiple of the group's size. k may differ by rank.
        b: `[k, n]`.
        group, bias, form: as in `matmul_all_reduce`.

    Returns:
        `[m / world size, n]`: rank r gets the rows from `r * m / world size`.

    The gradients are `all_gather_matmul(grad, b^T)`, `a^T @ all_gather(grad)` and `all_gather(grad).sum(0)`: either all
    ranks take the gradient of `a` (of `b` or `bias`), or none.

    Raises:
        As `matmul_all_reduce`.
    """
    name = name_of(group, "matmul_reduce_scatter")
    a, b = _tensor(a), _tensor(b)
    result: Tensor = torch.ops.ark.matmul_reduce_scatter(a, b, name, form, _trained(a, b, bias), bias)
    return result


def all_gather_matmul(
    a: Tensor,
    b: Tensor,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    form: str = "auto",
) -> Tensor:
    """The product of all ranks' rows with this rank's `b`.

    Form "unfused", and CPU ranks, give the same bits as `all_gather_into_tensor` followed by `torch.mm`. The fused
    kernel starts with the rank's own rows and continues as others arrive.

    Args:
        a: `[m, k]`, the same shape on all ranks.
        b: `[k, n]`; n may differ by rank.
        group, bias, form: as in `matmul_all_reduce`.

    Returns:
        `[world size * m, n]`, rank 0's rows first.

    The gradients are `matmul_reduce_scatter(grad, b^T)`, `all_gather(a)^T @ grad`, for which `a` is gathered again, and
    `grad.sum(0)`: either all ranks take the gradient of `a` (of `b`), or none.

    Raises:
        As `matmul_all_reduce`; ranks must agree in m, k, dtype and form.
    """
    name = name_of(group, "all_gather_matmul")
    a, b = _tensor(a), _tensor(b)
    trained = _trained(a, b)  # no collective follows from the bias
    result: Tensor = torch.ops.ark.all_gather_matmul(a, b, name, form, trained, False, bias)[0]
    return result


def _tensor(given: Any) -> Any:
    """What is no tensor is None for C++, which refuses it and tells the other ranks."""
    return given if isinstance(given, Tensor) else None


def _trained(*factors: Tensor | None) -> int:
    """Whether `a`, and whether any of the others, take gradients; ranks compare it if the backward pass has a
    collective. After a reduce_scatter the same one serves b and bias."""
    if not torch.is_grad_enabled():
        return 0
    a, *others = (one is not None and one.requires_grad for one in factors)
    return int(a) + 2 * any(others)


def _gathered(a: Tensor, group_name: Any) -> Tensor:
    """The rows of all ranks."""
    world = dist.distributed_c10d._get_group_size_by_name(group_name)
    made = torch.ops._c10d_functional_autograd.all_gather_into_tensor(a.contiguous(), world, group_name)
    gathered: Tensor = torch.ops._c10d_functional.wait_tensor(made)
    return gathered


def _check_devices(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """A call with one meta tensor comes here, not to C++."""
    for name, one in (("b", b), ("bias", bias)):
        if one is not None and one.device.type != a.device.type:
            raise ValueError(f"ark: {name} is on {one.device} but a is on {a.device}. Move it there.")


def _fake_all_reduce(a: Tensor, b: Tensor, group_name: Any, form: str, trained: int, bias: Any = None) -> Tensor:
    _check_devices(a, b, bias)
    return a.new_empty((a.shape[0], b.shape[1]))


def _fake_reduce_scatter(a: Tensor, b: Tensor, group_name: Any, form: str, trained: int, bias: Any = None) -> Tensor:
    _check_devices(a, b, bias)
    world = dist.distributed_c10d._get_group_size_by_name(group_name)
    return a.new_empty((a.shape[0] // world, b.shape[1]))


def _fake_all_gather(
    a: Tensor, b: Tensor, group_name: Any, form: str, trained: int, return_gathered: bool, bias: Any = None
) -> tuple[Tensor, Tensor]:
    _check_devices(a, b, bias)
    world = dist.distributed_c10d._get_group_size_by_name(group_name)
    gathered = (world * a.shape[0], a.shape[1]) if return_gathered else (0,)
    return a.new_empty((world * a.shape[0], b.shape[1])), a.new_empty(gathered)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.group_name, ctx.form, *_ = inputs
    ctx.save_for_backward(a, b)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def _backward_all_reduce(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    of_a = torch.mm(gradient, b.t()) if ctx.needs_input_grad[0] else None
    of_b = torch.mm(a.t(), gradient) if ctx.needs_input_grad[1] else None
    return of_a, of_b, None, None, None, _of_bias(ctx, gradient)


def _backward_reduce_scatter(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    needs_rows = needs_b or ctx.needs_input_grad[-1]
    of_a = of_b = None
    gathered: Any = None
    if needs_a:
        of_a, gathered = torch.ops.ark.all_gather_matmul(
            gradient, b.t(), ctx.group_name, ctx.form, _trained(gradient, b), needs_rows and not _trained(gradient, b)
        )
    # The operator's own gathered rows are not differentiable; a double backward needs a differentiable copy.
    if needs_rows and (not needs_a or _trained(gradient, b)):
        gathered = _gathered(gradient, ctx.group_name)
    if needs_b:
        of_b = torch.mm(a.t(), gathered)
    return of_a, of_b, None, None, None, _of_bias(ctx, gathered)


def _backward_all_gather(ctx: Any, gradient: Tensor, of_gathered: Any) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    of_a = of_b = None
    if ctx.needs_input_grad[0]:
        of_a = torch.ops.ark.matmul_reduce_scatter(gradient, b.t(), ctx.group_name, ctx.form, _trained(gradient, b))
    if ctx.needs_input_grad[1]:
        of_b = torch.mm(_gathered(a, ctx.group_name).t(), gradient)
    return of_a, of_b, None, None, None, None, _of_bias(ctx, gradient)


def _of_bias(ctx: Any, gradient: Tensor | None) -> Tensor | None:
    return gradient.sum(0) if ctx.needs_input_grad[-1] and gradient is not None else None


for _operator, _fake, _backward in (
    ("ark::matmul_all_reduce", _fake_all_reduce, _backward_all_reduce),
    ("ark::matmul_reduce_scatter", _fake_reduce_scatter, _backward_reduce_scatter),
    ("ark::all_gather_matmul", _fake_all_gather, _backward_all_gather),
):
    torch.library.register_fake(_operator, _fake)
    torch.library.register_autograd(_operator, _backward, setup_context=_save)
