"""Mixtures of experts: the public functions, their fake kernels and their gradients.

The operators themselves are C++ (csrc/ops/moe.hpp). Each direction is the gradient of the other: rows that go to their
experts (`moe_dispatch`, `moe_scatter`) come back summed (`moe_gather`), and vice versa. In an eager call without
`max_tokens`, the ranks first exchange their numbers of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C  # noqa: F401  (defines torch.ops.ark)
from ark_torch.ops.arguments import Group, check_tensors, name_of


class MoeHandle(NamedTuple):
    """Where a dispatch sent each choice; the input of `moe_combine`.

    places: `[2, tokens, k]`, int32: the row on the expert's rank, and the choice's number among this rank's choices in
    expert order; -1: the choice was not sent.
    rank_counts: `[world size, num_experts]`, int32: number of choices that each rank sent to each expert.
    max_tokens: maximum number of tokens of any rank.
    group_name: the group's name.
    """

    places: Tensor
    rank_counts: Tensor
    max_tokens: int
    group_name: str


def moe_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    group: Group = None,
    *,
    num_experts: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> tuple[Tensor, Tensor, MoeHandle]:
    """Sends each token's row to each of its experts, which are spread evenly over the ranks.

    Expert e is on rank `e // (num_experts / world size)`. A row goes directly into its expert's block; there is no
    capacity padding, and no row is dropped. Collective: all ranks call it, in the same order. No host waits for a GPU,
    so CUDA graphs can capture it; replays use the current contents of `topk_ids`.

    Args:
        x: `[tokens, dim]`, float32, float16 or bfloat16 on the CPU or a CUDA device (float64 on the CPU). The number of
            tokens may differ by rank and may be zero.
        topk_ids: `[tokens, k]`, int32 or int64: the experts of each token, at least 0 and less than `num_experts`; -1:
            a choice that is not sent. A token may name an expert more than once.
        group: a group of the backend "ark"; None: the default group.
        num_experts: total over all ranks; a multiple of the group's size.
        max_tokens: maximum number of tokens of any rank, the same on all ranks. None: the hosts exchange it in every
            eager call; under torch.compile all ranks must have the same number of tokens.
        max_rows: maximum number of rows that a rank may receive, the same on all ranks. None: the upper bound, `world
            size * max_tokens * k`; if no token names an expert twice, at most `world size * max_tokens * min(k,
            num_experts / world size)` arrive. Each GPU keeps memory for this many rows, and for the choices of
            `max_tokens` tokens, for all calls of the group.

    Returns:
        rows: `[max_rows, dim]`: sorted by local expert, then by sending rank, token and choice. Rows after the last
            received one are zeros.
        counts: `[num_experts / world size]`, int64, on the device of `x`: number of rows of each local expert.
        handle: the input of `moe_combine` (MoeHandle).

    The gradient of `x` is the sum of its rows' gradients, added in float32 in the order of the choices and rounded
    once. Either all ranks take it, or none.

    Raises:
        IndexError: a number in `topk_ids` is not an expert; names place and value. On the CPU it is raised before
            anything is sent; on a GPU the launch ends the process's CUDA context, like a failed assertion, and the next
            call of the operator raises it.
        ValueError: a rank gets more than `max_rows` (on all ranks; on a GPU as above), another argument is invalid, or
            the group is not ark's.
        TypeError: a dtype is not supported.
        torch.distributed.DistBackendError: another rank rejected its arguments, ranks differ in dtype, dim, k,
            num_experts, max_tokens or max_rows, or the group has failed. If `max_tokens` is given, ranks with CUDA
            tensors compare all of these before the first call that uses them.

    Example:
        >>> rows, counts, handle = ark_torch.ops.moe_dispatch(x, topk_ids, group, num_experts=8)
        >>> y = experts(rows, counts)  # this rank's experts; [max_rows, dim]
        >>> out = ark_torch.ops.moe_combine(y, handle, topk_weights)
    """
    name = name_of(group, "moe_dispatch")
    check_tensors("moe_dispatch", x=x, topk_ids=topk_ids)
    trained = int(torch.is_grad_enabled() and x.requires_grad)
    max_tokens, max_rows, met = _bounds(x, topk_ids, name, num_experts, max_tokens, max_rows, trained)
    rows, counts, places, rank_counts = torch.ops.ark.moe_dispatch(
        x, topk_ids, name, num_experts, max_tokens, max_rows, met, trained
    )
    return rows, counts, MoeHandle(places, rank_counts, max_tokens, name)


def moe_combine(
    y: Tensor, handle: MoeHandle, topk_weights: Tensor | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Returns rows from the experts, and sums each token's rows.

    A row's elements are multiplied by the choice's weight, added in float32 (float64 in float64) in the order of the
    choices, and rounded once to the dtype of `y`. Collective, like `moe_dispatch`.

    Args:
        y: `[max_rows, dim]`, in the row order of `moe_dispatch`; the dtypes and devices of its `x`; dim may differ.
            Rows after the last received one are not read.
        handle: the dispatch's handle, over the same group.
        topk_weights: `[tokens, k]`, any floating point dtype, on the device of `y`; converted to float32 (float64 if
            `y` is float64). None: 1.
        group: the dispatch's group; None: the same.

    Returns:
        `[tokens, dim]`; zeros for a token none of whose choices were sent.

    The gradient of `y` is the token's gradient times the weight, rounded once, and zero after the last received row.
    The gradient of a weight is the dot product of the token's gradient and the row of `y`, for which the rows are
    returned again. Either all ranks take the gradient of `y` (of `topk_weights`), or none.

    Raises:
        ValueError, TypeError: an argument is invalid, or does not belong to this dispatch.
        torch.distributed.DistBackendError: another rank rejected its arguments, ranks differ in dtype or dim or have
            handles of different dispatches (compared on the CPU), or the group has failed.
    """
    if group is not None and name_of(group, "moe_combine") != handle.group_name:
        raise ValueError("ark: moe_combine: the handle is of a dispatch over another group. Pass that group, or none.")
    check_tensors("moe_combine", y=y)
    trained = _trained(y, topk_weights)
    result: Tensor = torch.ops.ark.moe_gather(
        y, handle.places, handle.rank_counts, topk_weights, handle.group_name, handle.max_tokens, True, trained
    )
    return result


def moe_layer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    group: Group = None,
    *,
    activation: str = "silu",
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> Tensor:
    """A mixture of experts with expert parallelism: `moe_dispatch`, this rank's feed-forward networks, `moe_combine`.

    An expert computes `w2 @ activation(w1 @ row)`. If w1 has twice as many rows as w2 has columns, the expert is gated:
    the first half of `w1 @ row` goes through the activation and is multiplied by the second half. Each step is rounded
    to the dtype, as in PyTorch's own operators. Collective, like `moe_dispatch`.

    Args:
        x: `[tokens, dim]`, as in `moe_dispatch`.
        topk_ids: `[tokens, k]`, as in `moe_dispatch`.
        topk_weights: `[tokens, k]`, as in `moe_combine`.
        w1: `[local experts, ffn, dim]`, or `[local experts, 2 * ffn, dim]` with the gate first; with the dtype and
            device of `x`. Each rank has the weights of the same number of experts; `num_experts` is that number times
            the world size.
        w2: `[local experts, dim, ffn]`.
        group: a group of the backend "ark"; None: the default group.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        max_tokens, max_rows: as in `moe_dispatch`.

    Returns:
        `[tokens, dim]`, with the dtype of `x`.

    Gradients of `x`, `topk_weights`, `w1` and `w2`: either all ranks take one, or none.

    On Hopper one kernel multiplies all float16 and bfloat16 experts. PyTorch's grouped product handles bfloat16 on
    later GPUs and in backward passes, if dim and ffn are multiples of 8. All other cases multiply the experts one by
    one, for which the host waits for the counts; in a captured graph each expert then multiplies all rows.

    Raises:
        As `moe_dispatch` and `moe_combine`.
    """
    name = name_of(group, "moe_layer")
    check_tensors("moe_layer", x=x, topk_ids=topk_ids, topk_weights=topk_weights, w1=w1, w2=w2)
    num_experts = w1.shape[0] * _world_of(name) if w1.dim() else 0
    trained = _trained(x, topk_weights, w1, w2)
    layer = (topk_weights, w1, w2, activation)
    max_tokens, max_rows, met = _bounds(x, topk_ids, name, num_experts, max_tokens, max_rows, trained, *layer)
    result: Tensor = torch.ops.ark.moe_layer(
        x, topk_ids, topk_weights, w1, w2, name, num_experts, activation, max_tokens, max_rows, met, trained
    )[0]
    return result


def _world_of(group_name: Any) -> int:
    return dist.distributed_c10d._get_group_size_by_name(group_name)


def _trained(*tensors: Tensor | None) -> int:
    """Which tensors take gradients, one bit each."""
    if not torch.is_grad_enabled():
        return 0
    return sum(1 << i for i, one in enumerate(tensors) if one is not None and one.requires_grad)


def _bounds(
    x: Tensor,
    topk_ids: Tensor,
    name: str,
    num_experts: int,
    max_tokens: int | None,
    max_rows: int | None,
    trained: int,
    topk_weights: Tensor | None = None,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
    activation: str = "",
) -> tuple[int, int, bool]:
    """max_tokens, max_rows, and whether the ranks have exchanged them."""
    met = False
    if max_tokens is None:
        max_tokens = x.shape[0] if x.dim() else 0
        if not torch.compiler.is_compiling():
            told = torch.ops.ark.moe_layout(
                x, topk_ids, name, num_experts, -1 if max_rows is None else max_rows, trained, topk_weights, w1, w2,
                activation,
            )  # fmt: skip
            max_tokens, met = max(told), True
    if max_rows is None:
        max_rows = _world_of(name) * max_tokens * (topk_ids.shape[1] if topk_ids.dim() == 2 else 0)
    return max_tokens, max_rows, met


def _fake_dispatch(
    x: Tensor,
    topk_ids: Tensor,
    group_name: Any,
    num_experts: int,
    max_tokens: Any,
    max_rows: Any,
    met: bool,
    trained: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    world = _world_of(group_name)
    rows = x.new_empty((max_rows, x.shape[1]))
    counts = x.new_empty((num_experts // world,), dtype=torch.int64)
    places = x.new_empty((2, *topk_ids.shape), dtype=torch.int32)
    return rows, counts, places, x.new_empty((world, num_experts), dtype=torch.int32)


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, counts, places, rank_counts = output
    ctx.mark_non_differentiable(counts, places, rank_counts)
    ctx.save_for_backward(places, rank_counts)
    ctx.group_name, ctx.max_tokens = inputs[2], inputs[4]


def _backward_dispatch(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    of_x = torch.ops.ark.moe_gather(
        gradient, *ctx.saved_tensors, None, ctx.group_name, ctx.max_tokens, True, _trained(gradient)
    )
    return of_x, *[None] * 7


def _fake_scatter(
    x: Tensor,
    places: Tensor,
    rank_counts: Tensor,
    topk_weights: Tensor | None,
    group_name: Any,
    max_tokens: Any,
    max_rows: Any,
    trained: int,
) -> Tensor:
    return x.new_empty((max_rows, x.shape[-1]))


def _fake_gather(
    y: Tensor,
    places: Tensor,
    rank_counts: Tensor,
    topk_weights: Tensor | None,
    group_name: Any,
    max_tokens: Any,
    summed: bool,
    trained: int,
) -> Tensor:
    return y.new_empty((*places.shape[1 : 2 if summed else 3], y.shape[1]))


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, places, rank_counts, weights, ctx.group_name, ctx.max_tokens, ctx.more, _ = inputs
    ctx.needs_rows, ctx.needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    # The rows are kept only for the gradient of the weights.
    ctx.save_for_backward(rows if ctx.needs_weights else None, places, rank_counts, weights)
    ctx.rows, ctx.steps = rows.shape[0], rows.dim() == 3


def _product(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of weights: [tokens, k, dim] times [tokens, k or 1, dim]."""
    wide = torch.float64 if one.dtype == torch.float64 else torch.float32
    return (one.to(wide) * other.to(wide)).sum(-1).to(dtype)


def _per_choice(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows.unsqueeze(1)


def _backward_scatter(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, places, rank_counts, weights = ctx.saved_tensors
    more = (places, rank_counts)
    of_x = of_weights = None
    if ctx.needs_rows:
        of_x = torch.ops.ark.moe_gather(
            gradient, *more, weights, ctx.group_name, ctx.max_tokens, not ctx.steps, _trained(gradient, weights)
        )
    if ctx.needs_weights:
        brought = torch.ops.ark.moe_gather(
            gradient, *more, None, ctx.group_name, ctx.max_tokens, False, _trained(gradient)
        )
        of_weights = _product(brought, _per_choice(x), weights.dtype)
    return of_x, None, None, of_weights, *[None] * 4


def _backward_gather(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    y, places, rank_counts, weights = ctx.saved_tensors
    more = (places, rank_counts)
    of_y = of_weights = None
    if ctx.needs_rows:
        of_y = torch.ops.ark.moe_scatter(
            gradient, *more, weights, ctx.group_name, ctx.max_tokens, ctx.rows, _trained(gradient, weights)
        )
    if ctx.needs_weights:
        brought = torch.ops.ark.moe_gather(y, *more, None, ctx.group_name, ctx.max_tokens, False, _trained(y))
        of_weights = _product(brought, _per_choice(gradient), weights.dtype)
    return of_y, None, None, of_weights, *[None] * 4


def _fake_experts(rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, activation: str) -> Tensor:
    return torch.empty_like(rows)


def _fake_experts_backward(
    gradient: Tensor, rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(rows), w1.new_empty(w1.shape), w2.new_empty(w2.shape)


def _save_experts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward_experts(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    of_rows, of_w1, of_w2 = torch.ops.ark.moe_experts_backward(gradient, *ctx.saved_tensors, ctx.activation)
    return of_rows, None, of_w1, of_w2, None


def _fake_layer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    group_name: Any,
    num_experts: int,
    activation: str,
    max_tokens: Any,
    max_rows: Any,
    met: bool,
    trained: int,
) -> tuple[Tensor, ...]:
    saved = _fake_dispatch(x, topk_ids, group_name, num_experts, max_tokens, max_rows, met, trained)
    if not trained:
        saved = tuple(x.new_empty((0,), dtype=one.dtype) for one in saved)  # type: ignore[assignment]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *saved, torch.empty_like(saved[0])


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, topk_weights, w1, w2, ctx.group_name, _, ctx.activation, ctx.max_tokens, *_ = inputs
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(topk_weights, w1, w2, *saved)


def _backward_layer(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
    topk_weights, w1, w2, rows, counts, places, rank_counts, y = ctx.saved_tensors
    more = (places, rank_counts)
    gather = torch.ops.ark.moe_gather
    needs = ctx.needs_input_grad
    of_x = of_weights = of_w1 = of_w2 = None
    if needs[0] or needs[3] or needs[4]:
        of_y = torch.ops.ark.moe_scatter(
            gradient, *more, topk_weights, ctx.group_name, ctx.max_tokens, rows.shape[0], 0
        )
        of_rows, of_w1, of_w2 = torch.ops.ark.moe_experts_backward(of_y, rows, counts, w1, w2, ctx.activation)
        if needs[0]:
            of_x = gather(of_rows, *more, None, ctx.group_name, ctx.max_tokens, True, 0)
    if needs[2]:
        brought = gather(y, *more, None, ctx.group_name, ctx.max_tokens, False, 0)
        of_weights = _product(brought, _per_choice(gradient), topk_weights.dtype)
    return of_x, None, of_weights, of_w1 if needs[3] else None, of_w2 if needs[4] else None, *[None] * 7


for _operator, _fake, _save, _backward in (
    ("ark::moe_dispatch", _fake_dispatch, _save_dispatch, _backward_dispatch),
    ("ark::moe_scatter", _fake_scatter, _save_rows, _backward_scatter),
    ("ark::moe_gather", _fake_gather, _save_rows, _backward_gather),
    ("ark::moe_experts", _fake_experts, _save_experts, _backward_experts),
    ("ark::moe_layer", _fake_layer, _save_layer, _backward_layer),
):
    torch.library.register_fake(_operator, _fake)  # type: ignore[arg-type]
    torch.library.register_autograd(_operator, _backward, setup_context=_save)  # type: ignore[arg-type]
torch.library.register_fake("ark::moe_experts_backward", _fake_experts_backward)
