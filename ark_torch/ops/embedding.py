"""Pooled embeddings fused with the all-to-all: the public function, its fake kernel and its gradient.

The operator itself is C++ (csrc/ops). Before an eager call the ranks exchange their tables' layouts here, so that
autograd knows on every rank whether a backward pass will follow; a rank without tables takes part in it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C  # noqa: F401  (defines torch.ops.ark)
from ark_torch.ops.arguments import Group, name_of, tensors_of
from ark_torch.ops.optimizers import FusedOptimizer

_OPERATOR = "ark::embedding_bag_all_to_all"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def embedding_bag_all_to_all(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    group: Group = None,
    *,
    mode: str = "sum",
    per_sample_weights: Sequence[Tensor] | None = None,
    include_last_offset: bool = False,
    tables_per_rank: Sequence[int] | None = None,
    like: Tensor | None = None,
    sparse: bool = False,
    optimizer: FusedOptimizer | None = None,
) -> Tensor:
    """Pools the bags of this rank's tables for the samples of all ranks, and returns the bags of this rank's samples.

    Equivalent to `F.embedding_bag` of every table, stacked, then an all-to-all over the samples and a permute. On GPUs
    one kernel stores each bag at its final place, on this GPU or a peer's. Rows are added in float32 (float64 in
    float64) in the order of the indices and rounded once. Collective: all ranks call it, in the same order.

    Args:
        tables: this rank's embedding tables, `[rows, dim]` each, contiguous, with the same dim on all ranks; float32,
            float16 or bfloat16 (on CPU float64, too). A rank may have none.
        indices: the bags' rows, int32 or int64, one-dimensional, one tensor per table.
        offsets: the start of each bag in the table's indices, as in `F.embedding_bag`: world size times B bags, the B
            samples of rank 0 first. An empty bag gives zeros.
        group: a group of the backend "ark"; None: the default group.
        mode: "sum" or "mean".
        per_sample_weights: a factor for each index, with the tables' dtype and the indices' shapes; mode "sum" only.
        include_last_offset: whether offsets hold one more element, the end of the last bag.
        tables_per_rank: number of tables of each rank. If it is given and every rank has a table, CUDA calls need no
            message between the ranks' hosts, and torch.compile knows the result's shape.
        like: on a rank without tables, under torch.compile: a tensor with the tables' dtype and device.
        sparse: whether gradients of tables are coalesced sparse tensors (`torch.sparse_coo`), as with
            `torch.nn.EmbeddingBag(sparse=True)`, for `torch.optim.SparseAdam` or `SGD`. The host reads their number of
            rows from the GPU, so a CUDA graph cannot capture them, and torch.compile runs the call in eager PyTorch.
        optimizer: `SGD` or `RowwiseAdagrad` of this package, made for these tables: the backward pass updates the rows
            in place, and tables get no gradient, whether or not they require one. All ranks pass one, or none does.
            Only `loss.backward()` updates, not `torch.autograd.grad` of other tensors.

    Returns:
        `[B, tables of rank 0 + of rank 1 + ..., dim]`, for this rank's samples, with the tables' dtype and device.

    A row's gradient is summed over the bags in float32 in the order of the indices (more than 64 indices: in groups of
    64, and these sums in order) and rounded once, so that gradients and updates are the same in every run. Either all
    ranks that have tables train them, or none. A table that is updated in place may take part in only one call until
    its backward pass is done; autograd raises if it has changed in between.

    Raises:
        IndexError: an index is not a row of its table; names table and index. On the CPU it is raised before anything
            is written; on a GPU the launch ends the process's CUDA context, like a failed assertion, and the next call
            of the operator raises it.
        ValueError, TypeError: another argument is invalid, or the group is not ark's.
        torch.distributed.DistBackendError: a rank rejected its arguments, ranks differ in batch, dim, dtype, mode or in
            whether they train, or the group has failed.

    Example:
        >>> out = ark_torch.ops.embedding_bag_all_to_all([users, items], [u, i], [u_offsets, i_offsets], group)
        >>> out.shape  # 2 ranks with 2 tables each, 64 samples per rank, rows of 128 columns
        torch.Size([64, 4, 128])
    """
    operator = "embedding_bag_all_to_all"
    name = name_of(group, operator)
    tables = tensors_of(operator, "tables", tables)
    weights = tensors_of(operator, "per_sample_weights", () if per_sample_weights is None else per_sample_weights)
    bags = tensors_of(operator, "indices", indices), tensors_of(operator, "offsets", offsets)
    known = list(tables_per_rank) if tables_per_rank is not None else None
    call = (tables, *bags, weights, like, name, mode, include_last_offset, known)
    update = update_of(tables, sparse, optimizer)
    return _pool_eagerly(*call, *update) if sparse else pool(*call, *update)


def update_of(
    tables: list[Tensor], sparse: bool, optimizer: FusedOptimizer | None
) -> tuple[str, list[Tensor], Tensor | None, float, Tensor | None]:
    """The backward pass's update, as arguments of `pool`."""
    if optimizer is None:
        return "sparse" if sparse else "dense", [], None, 0.0, None
    if sparse:
        raise ValueError(
            "ark: embedding_bag_all_to_all: sparse=True and optimizer= are given. Pass one: with an optimizer there "
            "are no gradients."
        )
    return *optimizer.update_of(tables), optimizer.trigger


def pool(
    tables: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    like: Tensor | None,
    name: str,
    mode: str,
    include_last_offset: bool,
    known: list[int] | None,
    update: str,
    state: list[Tensor],
    rate: Tensor | None,
    eps: float,
    trigger: Tensor | None,
    met: tuple[int, int] | None = None,
) -> Tensor:
    """Calls the operator; `met`: batch and dim, if the ranks have already exchanged these and `known`."""
    in_place = trigger is not None
    training = torch.is_grad_enabled()
    trained = training and (in_place or any(one.requires_grad for one in (*tables, *weights)))
    batch, dim = met or (-1, -1)
    if in_place:
        tables = [table.detach() for table in tables]
    if met is None and not torch.compiler.is_compiling() and not _needs_no_word(tables, known):
        batch, dim, dtype, device, trained, *known = torch.ops.ark.embedding_bag_layout(
            tables, indices, offsets, weights, like, name, mode, include_last_offset, known, trained, update, state,
            rate, eps,
        )  # fmt: skip
        met = batch, dim
        if not tables:
            where = like.device if like is not None else torch.device("cuda" if device else "cpu")
            like = torch.empty(0, dtype=_DTYPES[dtype], device=where, requires_grad=bool(training and trained))
    if tables and in_place:
        like = trigger
    result: Tensor = torch.ops.ark.embedding_bag_all_to_all(
        tables, indices, offsets, weights, like, name, mode, include_last_offset, known, batch, dim,
        met is not None, update, state, rate, eps,
    )  # fmt: skip
    return result


# A compiled graph cannot hold gradients whose size depends on the data.
_pool_eagerly: Callable[..., Tensor] = torch.compiler.disable(pool)  # type: ignore[no-untyped-call]


def _needs_no_word(tables: list[Tensor], tables_per_rank: list[int] | None) -> bool:
    """Whether no exchange between hosts is needed. Depends only on values equal on all ranks."""
    return tables_per_rank is not None and all(tables_per_rank) and bool(tables) and tables[0].is_cuda


def _fake(
    tables: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    like: Tensor | None,
    group_name: Any,
    mode: str,
    include_last_offset: bool,
    tables_per_rank: list[int] | None,
    batch: Any,
    dim: Any,
    met: bool,
    *_: Any,
) -> Tensor:
    example = tables[0] if tables else like
    if example is None:
        raise ValueError(
            "ark: embedding_bag_all_to_all under torch.compile on a rank without tables: pass like=, a tensor with the "
            "dtype and the device of the tables."
        )
    world = dist.distributed_c10d._get_group_size_by_name(group_name)
    size = torch.library.get_ctx().new_dynamic_size
    if tables:
        batch, dim = (offsets[0].numel() - int(include_last_offset)) // world, tables[0].shape[1]
    else:
        batch, dim = (size() if known == -1 else known for known in (batch, dim))
    if tables_per_rank is not None:
        total: Any = sum(tables_per_rank)
    else:
        total = len(tables) if world == 1 else size()
    return example.new_empty((batch, total, dim))


def _fake_backward(
    gradient: Tensor,
    tables: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    like: Tensor | None,
    group_name: Any,
    mode: str,
    include_last_offset: bool,
    tables_per_rank: list[int] | None,
    batch: Any,
    dim: Any,
    met: bool,
    update: str,
    of_weights: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.empty_like(one) for one in tables], [torch.empty_like(one) for one in weights if of_weights]


def _fake_update(
    gradient: Tensor, tables: Any, indices: Any, offsets: Any, weights: list[Tensor], *rest: Any
) -> Tensor:
    return gradient.new_empty((sum(one.numel() for one in weights) if rest[-1] else 0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tables, indices, offsets, weights, like, *ctx.rest, ctx.update, state, rate, ctx.eps = inputs
    ctx.count, ctx.weighted, ctx.like = len(tables), len(weights), like
    ctx.of_weights = any(one.requires_grad for one in weights)
    ctx.save_for_backward(*tables, *indices, *offsets, *weights, *state, rate)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    count, saved = ctx.count, list(ctx.saved_tensors)
    tables, indices, offsets = (saved[i * count : (i + 1) * count] for i in range(3))
    weights, state = saved[3 * count :][: ctx.weighted], saved[3 * count + ctx.weighted : -1]
    call = (gradient, tables, indices, offsets, weights, ctx.like, *ctx.rest, ctx.update)
    none: list[Tensor | None] = [None] * count
    if ctx.update in ("dense", "sparse"):
        of_tables, of_weights = torch.ops.ark.embedding_bag_all_to_all_backward(*call, ctx.of_weights)
    else:
        of_tables = none
        flat = torch.ops.ark.embedding_bag_all_to_all_update(*call, state, saved[-1], ctx.eps, ctx.of_weights)
        of_weights = list(flat.split([one.numel() for one in weights])) if ctx.of_weights else []
    rest = [None] * (len(ctx.rest) + 1)
    no_state = [None] * len(state)
    return of_tables, none, none, of_weights or [None] * ctx.weighted, None, *rest, no_state, None, None


torch.library.register_fake(_OPERATOR, _fake)
torch.library.register_fake(f"{_OPERATOR}_backward", _fake_backward)
torch.library.register_fake(f"{_OPERATOR}_update", _fake_update)
torch.library.register_autograd(_OPERATOR, _backward, setup_context=_save)
