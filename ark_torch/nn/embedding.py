"""Embedding tables sharded over ranks, for models whose ranks each read their own mini-batch.

Communication and arithmetic are C++: ark::exchange_bags sends bags to the tables; ark::embedding_bag_all_to_all returns
the pooled results and, in the backward pass, sends gradients to the tables. This module decides which rank holds which
rows, and what a checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ark_torch.nn._fixed_exchange import FixedExchange, rooms_of, trimmed
from ark_torch.nn._shards import TableShard, as_dtensor, balanced, block_of, rows_of
from ark_torch.ops.arguments import name_of
from ark_torch.ops.embedding import pool, update_of
from ark_torch.ops.optimizers import FusedOptimizer

_NAME = "ark: ShardedEmbeddingBags: "


class ShardedEmbeddingBags(nn.Module):
    """`torch.nn.EmbeddingBag`s of one dimension whose tables are sharded over a group's ranks.

    Each rank passes the bags of its own samples for all tables and gets them pooled; the module handles the placement
    of rows. Collective: all ranks call it, with the same number of samples.

    Args:
        tables: `{name: (num_embeddings, embedding_dim)}`, or a list of these pairs, named "0", "1", ...; the same on
            all ranks, all with the same dimension.
        group: a group of the backend "ark"; None: the default group.
        mode: "sum" or "mean".
        sharding: "table_wise": each table is on one rank; the largest are assigned first, each to the least loaded
            rank. "row_wise": each table's rows are split over all ranks in equal blocks; a rank's partial sums are
            rounded to the tables' dtype, added in float32 in rank order and rounded once; a mean is divided once, at
            the end.
        sparse: whether gradients are sparse, as with `torch.nn.EmbeddingBag(sparse=True)`.
        optimizer_class: `ark_torch.ops.SGD` or `RowwiseAdagrad`: the backward pass updates the rows in place, and
            parameters get no gradients. The attribute `optimizer` is the optimizer, for learning rate schedulers.
        optimizer_kwargs: its arguments, such as `{"lr": 0.1}`.
        average_gradients: whether the loss is the mean over ranks of each rank's own loss, as with
            DistributedDataParallel; False: their sum.
        include_last_offset: whether offsets hold one more element per table, the end of the last bag.
        max_values: maximum number of indices that a rank passes for a table in one call; a number, or one per table;
            the same on all ranks. On GPUs messages then have a fixed size, as large as this limit (row-wise: to each
            rank), the host never waits, and a CUDA graph can capture the step (`ark_torch.train.capture`). Indices must
            have one dtype on all ranks, and may have unused room after the last one counted by lengths. Exceeding the
            limit ends the GPU's context, like a failed assertion.
        device, dtype: device and dtype of the tables; float32, float16 or bfloat16 (on the CPU float64, too).

    Attributes:
        tables: this rank's part of each table, by name: `tables["user"].weight` is `[local rows, dim]`, and `.sum` the
            state of RowwiseAdagrad. Table-wise, it contains only this rank's tables.

    Initial values are normal and depend only on `torch.initial_seed()` and the table, not on ranks or sharding.

    `state_dict()` has `tables.NAME.weight` (and `.sum`): of this rank's tables (table-wise), or as DTensors (row-wise).
    `torch.distributed.checkpoint` saves it, and loads it with another number of ranks or the other sharding.
    `load_state_dict` also accepts whole tables, such as those of an `nn.ModuleDict` of `nn.EmbeddingBag`. Wrap only the
    other modules of a model in DistributedDataParallel, since these parameters differ by rank.

    Example:
        >>> bags = ark_torch.nn.ShardedEmbeddingBags({"user": (10_000, 64), "item": (500, 64)},
        ...                                          optimizer_class=ark_torch.ops.RowwiseAdagrad,
        ...                                          optimizer_kwargs={"lr": 0.05})
        >>> bags([users, items], [user_offsets, item_offsets]).shape  # 32 samples
        torch.Size([32, 2, 64])

    Raises:
        ValueError: tables have several dimensions, the sharding is unknown, or sparse is combined with an optimizer.
    """

    _fixed_on_cpus = False  # for tests: max_values has the same effect on CPUs
    _like: Tensor  # empty; has the tables' dtype and device, since a rank may have no table

    def __init__(
        self,
        tables: Mapping[str, tuple[int, int]] | Sequence[tuple[int, int]],
        group: dist.ProcessGroup | None = None,
        *,
        mode: str = "sum",
        sharding: str = "table_wise",
        sparse: bool = False,
        optimizer_class: type[FusedOptimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        average_gradients: bool = True,
        include_last_offset: bool = False,
        max_values: int | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        named = dict(tables) if isinstance(tables, Mapping) else {str(i): table for i, table in enumerate(tables)}
        dims = {dim for _, dim in named.values()}
        if len(dims) != 1:
            raise ValueError(f"{_NAME}tables have dimensions {sorted(dims)}. Make a module for each dimension.")
        if mode not in ("sum", "mean"):
            raise ValueError(f"{_NAME}mode is {mode!r}. Pass 'sum' or 'mean'.")
        if sharding not in ("table_wise", "row_wise"):
            raise ValueError(f"{_NAME}sharding is {sharding!r}. Pass 'table_wise' or 'row_wise'.")
        if sparse and optimizer_class is not None:
            raise ValueError(f"{_NAME}sparse=True and optimizer_class are given. Pass one of them.")
        self.names, self.rows, self.dim = list(named), [rows for rows, _ in named.values()], dims.pop()
        self.mode, self.row_wise, self.sparse = mode, sharding == "row_wise", sparse
        self.average_gradients, self.include_last_offset, self.group = average_gradients, include_last_offset, group
        self._rooms = None if max_values is None else rooms_of(max_values, len(named), _NAME)
        self._exchanges: dict[torch.device, FixedExchange] = {}
        self._places: dict[torch.device, Tensor] = {}
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"{_NAME}this process is not in the group. Make the module on the group's ranks alone.")
        self.owners = [] if self.row_wise else balanced([rows * self.dim for rows in self.rows], self.ranks)
        self.tables = nn.ModuleDict()
        for number, (name, rows) in enumerate(zip(self.names, self.rows, strict=True)):
            first, count = self._share(number, rows)
            if self.row_wise or self.owners[number] == self.rank:
                weight = torch.empty(count, self.dim, device=device, dtype=dtype)
                self.tables[name] = TableShard(number, rows, first, weight)
        self.register_buffer("_like", torch.empty(0, device=device, dtype=dtype), persistent=False)
        self.reset_parameters()
        self.optimizer: FusedOptimizer | None = None
        if optimizer_class is not None:
            weights = [shard.weight.requires_grad_(False) for shard in self._shards()]
            self.optimizer = optimizer_class(weights, **(optimizer_kwargs or {}))
            for shard in self._shards():
                shard.sum = self.optimizer.state.get(shard.weight, {}).get("sum")
        self.register_state_dict_post_hook(_whole_tables)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_own_rows)  # type: ignore[no-untyped-call]

    def _share(self, table: int, rows: int) -> tuple[int, int]:
        """First row and number of rows of a table on this rank."""
        if not self.row_wise:
            return 0, rows
        block = block_of(rows, self.ranks)
        return min(self.rank * block, rows), max(min(block, rows - self.rank * block), 0)

    def _shards(self) -> list[TableShard]:
        return [shard for shard in self.tables.values() if isinstance(shard, TableShard)]

    def reset_parameters(self) -> None:
        """Draws new initial values; the optimizer's state is kept."""
        for shard in self._shards():
            shard.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbeddingBags:
        """After buffers move, points the optimizer's state at the new ones and places its learning rate beside them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            for shard in self._shards():
                if shard.sum is not None:
                    self.optimizer.state[shard.weight]["sum"] = shard.sum
            self.optimizer._place_rate()
        return self

    def forward(
        self,
        indices: Any,
        offsets: Sequence[Tensor] | None = None,
        per_sample_weights: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Pools the bags of this rank's own samples.

        Args:
            indices: int32 or int64, one tensor per table, in the order of `tables`. Without offsets they are `[batch,
                length]`: bags of one length per table. Or one object with `values()` (all indices, table by table),
                `lengths()` (of the bags: `[tables * batch]`) and optionally `weights_or_none()`: a
                `torchrec.KeyedJaggedTensor`, whose keys, if it has `keys()`, must be the tables' names in their order.
            offsets: for each table, the start of each sample's bag, `[batch]`.
            per_sample_weights: a factor for each index, with the shapes of the indices; mode "sum" only. They get no
                gradient.

        Returns:
            `[batch, tables, dim]`, in the tables' dtype.

        Raises:
            IndexError: an index is not a row of its table; names both. On CPU tensors it is raised before anything is
                sent; on a GPU as in `ark_torch.ops.embedding_bag_all_to_all`.
            ValueError, TypeError: another argument is invalid.
            torch.distributed.DistBackendError: a rank rejected its arguments, or ranks have different numbers of
                samples.
        """
        values, lengths, weights = self._jagged(indices, offsets, per_sample_weights)
        return self._pool(values, lengths, weights)

    def _jagged(self, indices: Any, offsets: Any, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Concatenated values and lengths of all tables."""
        count = len(self.names)
        if hasattr(indices, "lengths") and hasattr(indices, "values") and not isinstance(indices, Tensor):
            keys = list(indices.keys()) if hasattr(indices, "keys") else self.names
            if keys != self.names:
                raise ValueError(f"{_NAME}keys are {keys}, and tables {self.names}. Permute them into this order.")
            if weights is None and hasattr(indices, "weights_or_none"):
                weights = indices.weights_or_none()
            lengths = indices.lengths()
            if lengths.numel() % count != 0:
                raise ValueError(
                    f"{_NAME}lengths has {lengths.numel()} elements, and there are {count} tables. Pass lengths of all "
                    "tables, of the same samples."
                )
            return indices.values(), lengths.reshape(count, -1), weights
        for name, given in (("indices", indices), ("offsets", offsets), ("per_sample_weights", weights)):
            if given is not None and len(given) != count:
                raise ValueError(
                    f"{_NAME}{name} has {len(given)} entries, and there are {count} tables. Pass one each."
                )
        if offsets is None:
            if any(table.dim() != 2 for table in indices):
                raise ValueError(f"{_NAME}indices without offsets are to be [batch, length]. Pass offsets, too.")
            batches = {len(table) for table in indices}
            if len(batches) != 1:
                raise ValueError(
                    f"{_NAME}indices have {sorted(batches)} rows. Give all tables bags of the same samples."
                )
            batch = batches.pop()  # filled on the device: a CUDA graph would repeat a copy from the host
            lengths = torch.stack([table.new_full((batch,), table.shape[1]) for table in indices])
        else:
            if len({begins.numel() for begins in offsets}) != 1:
                sizes = [begins.numel() for begins in offsets]
                raise ValueError(f"{_NAME}offsets have {sizes} elements. Give all tables bags of the same samples.")
            ends = [begins.new_full((1,), table.numel()) for begins, table in zip(offsets, indices, strict=True)]
            whole = offsets if self.include_last_offset else map(torch.cat, zip(offsets, ends, strict=True))
            lengths = torch.stack([begins.diff() for begins in whole])
        flat = torch.cat([table.reshape(-1) for table in indices])
        return flat, lengths, None if weights is None else torch.cat([one.reshape(-1) for one in weights])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exchange(self, values: Tensor, lengths: Tensor, weights: Tensor | None) -> Any:
        """Indices, offsets and weights of this rank's tables, and whether any rank trains."""
        if weights is not None:
            if self.mode == "mean":
                raise ValueError(f"{_NAME}per_sample_weights are given, and mode is 'mean'. Pass mode='sum', or none.")
            if weights.requires_grad:
                raise ValueError(f"{_NAME}per_sample_weights require gradients, which are not made. Detach them.")
            weights = weights.to(self._like.dtype)
        shards = self._shards()
        in_training = self.optimizer is not None or any(shard.weight.requires_grad for shard in shards)
        if self._rooms is not None:
            if values.is_cuda or self._fixed_on_cpus:
                bags = self._exchange_on(values.device)(values, lengths, weights)
                return *bags, torch.is_grad_enabled() and (in_training or not shards)
            values, lengths, weights = trimmed(values, lengths, weights, self._rooms, self.names, _NAME)
        return torch.ops.ark.exchange_bags(
            values, lengths, weights, name_of(self.group, "ShardedEmbeddingBags"), self.rows, self.owners, self.names,
            torch.is_grad_enabled() and in_training,
        )  # fmt: skip

    def _exchange_on(self, device: torch.device) -> FixedExchange:
        if device not in self._exchanges:
            assert self._rooms is not None
            self._exchanges[device] = FixedExchange(self.rows, self.owners, self._rooms, self.group, device)
        return self._exchanges[device]

    def _pool(self, values: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        bags, offsets, factors, trained = self._exchange(values, lengths, weights)
        tables: list[Tensor] = [shard.weight for shard in self._shards()]
        known = [len(self.names) if self.row_wise else self.owners.count(r) for r in range(self.ranks)]
        like = torch.empty_like(self._like, requires_grad=trained)
        mode = "sum" if self.row_wise else self.mode
        fixed = self._rooms is not None and (values.is_cuda or self._fixed_on_cpus)  # bags then end with an offset
        update = update_of(tables, self.sparse, self.optimizer)
        out = pool(
            tables, bags, offsets, factors, like, name_of(self.group, "ShardedEmbeddingBags"), mode, fixed, known,
            *update, met=(lengths.shape[1], self.dim),
        )  # fmt: skip
        if self.average_gradients and self.ranks > 1 and out.requires_grad:
            out.register_hook(lambda gradient: gradient / self.ranks)  # type: ignore[no-untyped-call]
        if self.row_wise:
            return self._added(out, lengths)
        order = sorted(range(len(self.names)), key=lambda t: (self.owners[t], t))
        if order == sorted(order):
            return out
        if out.device not in self._places:  # created in the first call, which is not captured
            self._places[out.device] = torch.tensor([order.index(t) for t in range(len(order))], device=out.device)
        return out.index_select(1, self._places[out.device])

    def _added(self, out: Tensor, lengths: Tensor) -> Tensor:
        """The sum or mean over the ranks' partial sums."""
        if self.ranks == 1 and self.mode == "sum":
            return out
        wide = torch.promote_types(out.dtype, torch.float32)
        parts = out.view(len(out), self.ranks, len(self.names), self.dim).unbind(1)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part
        if self.mode == "mean":
            total = total / lengths.t().clamp(min=1).to(wide)[..., None]
        return total.to(out.dtype)

    def extra_repr(self) -> str:
        kind = "row_wise" if self.row_wise else "table_wise"
        return f"{len(self.names)} tables, dim={self.dim}, mode={self.mode!r}, sharding={kind!r}, ranks={self.ranks}"


def _keys(module: ShardedEmbeddingBags, prefix: str) -> list[tuple[str, str, int, str]]:
    """Key, name, rows and field of every entry that tables may have in a state dict."""
    return [
        (f"{prefix}tables.{name}.{field}", name, rows, field)
        for name, rows in zip(module.names, module.rows, strict=True)
        for field in ("weight", "sum")
    ]


def _whole_tables(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Row-wise: replaces a rank's rows by a DTensor of the whole table."""
    for key, _, rows, _ in _keys(module, prefix):
        if module.row_wise and isinstance(state.get(key), Tensor):
            state[key] = as_dtensor(state[key], rows, module.group)


def _own_rows(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Takes this rank's rows of whole tables, and drops the tables of other ranks."""
    for key, name, rows, _ in _keys(module, prefix):
        if key not in state:
            continue
        if name not in module.tables:
            del state[key]
        else:
            shard = module.tables[name]
            state[key] = rows_of(state[key], shard, rows, module.row_wise)
