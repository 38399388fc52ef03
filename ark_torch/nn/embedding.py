"""Embedding tables that are split over ranks, for models whose ranks each read a mini-batch of their own.

Communication and arithmetic are C++: ark::exchange_bags brings bags to the tables, ark::embedding_bag_all_to_all brings
what is pooled back, and in the backward pass gradients to the tables. Here is which rank has what, and what a
checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ark_torch.nn._fixed_exchange import FixedExchange, rooms_of, trimmed
from ark_torch.nn._shards import TableShard, as_dtensor, balanced, block_of, rows_of
from ark_torch.ops.embedding import name_of, pool, update_of
from ark_torch.ops.optimizers import FusedOptimizer

_NAME = "ark: ShardedEmbeddingBags: "


class ShardedEmbeddingBags(nn.Module):
    """`torch.nn.EmbeddingBag`s of one dimension whose tables are split over a group's ranks.

    Each rank passes the bags of its own samples, for all tables, and gets these pooled; which rank has which rows is
    the module's matter. Collective: all ranks call it, with as many samples each.

    Args:
        tables: `{name: (num_embeddings, embedding_dim)}`, or a list of these pairs, whose names are "0", "1", ...; the
            same on all ranks, all of the same dimension.
        group: a group of the backend "ark"; None: the default group.
        mode: "sum" or "mean".
        sharding: "table_wise": each table is on one rank, the largest given first, each to the rank that has least.
            "row_wise": each table's rows are split over all ranks in equal blocks; a rank's partial sums are rounded to
            the tables' dtype, added in float32 in rank order and rounded once; a mean is divided once, at the end.
        sparse: gradients are sparse, as of `torch.nn.EmbeddingBag(sparse=True)`.
        optimizer_class: `ark_torch.ops.SGD` or `RowwiseAdagrad`: the backward pass updates the rows in place, and
            parameters take no gradients. `optimizer` is the optimizer, for learning rate schedulers.
        optimizer_kwargs: its arguments, such as `{"lr": 0.1}`.
        average_gradients: the loss is the mean over ranks of each rank's own loss, as with DistributedDataParallel;
            False: their sum.
        include_last_offset: offsets hold one more element a table, where the last bag ends.
        max_values: the most indices that a rank has for a table in a call; a number, or one for each table; the same on
            all ranks. On GPUs what ranks send each other then has fixed sizes, as large as that allows (row-wise to
            each rank), the host waits for nothing, and a step may be captured in a CUDA graph
            (`ark_torch.train.capture`). Indices are of one dtype on all ranks, and may have room behind the last one
            that lengths name. More than that many end the GPU's context, as a failed assertion does.
        device, dtype: of the tables; float32, float16 or bfloat16 (on the CPU float64, too).

    Attributes:
        tables: by name, what this rank has of each table: `tables["user"].weight` is `[rows here, dim]`, and `.sum` the
            state of RowwiseAdagrad. Table-wise, only the tables of this rank are there.

    First values are normal, and depend on `torch.initial_seed()` and the table alone, not on ranks or sharding.

    `state_dict()` has `tables.NAME.weight` (and `.sum`): table-wise of this rank's tables, row-wise as DTensors.
    `torch.distributed.checkpoint` saves it, and loads it onto another number of ranks or into the other sharding; and
    `load_state_dict` also takes whole tables, such as those of `nn.ModuleDict` of `nn.EmbeddingBag`.
    DistributedDataParallel is for the rest of a model: wrap the other modules, since parameters here differ by rank.

    Example:
        >>> bags = ark_torch.nn.ShardedEmbeddingBags({"user": (10_000, 64), "item": (500, 64)},
        ...                                          optimizer_class=ark_torch.ops.RowwiseAdagrad,
        ...                                          optimizer_kwargs={"lr": 0.05})
        >>> bags([users, items], [user_offsets, item_offsets]).shape  # of 32 samples
        torch.Size([32, 2, 64])

    Raises:
        ValueError: tables of several dimensions, an unknown sharding, or sparse together with an optimizer.
    """

    _fixed_on_cpus = False  # max_values means the same there, too: for tests
    _like: Tensor  # no elements, of the tables' dtype and device: a rank may have no table

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
        """First row, and how many, of a table on this rank."""
        if not self.row_wise:
            return 0, rows
        block = block_of(rows, self.ranks)
        return min(self.rank * block, rows), max(min(block, rows - self.rank * block), 0)

    def _shards(self) -> list[TableShard]:
        return [shard for shard in self.tables.values() if isinstance(shard, TableShard)]

    def reset_parameters(self) -> None:
        """New first values; the state of an optimizer stays."""
        for shard in self._shards():
            shard.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbeddingBags:
        """Where buffers move, the optimizer's state is what they have become, and its learning rate is beside them."""
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
            indices: int32 or int64, a tensor for each table, in the order of `tables`. Without offsets they are
                `[batch, length]`: bags of one length a table. Or one object with `values()` (all indices, table by
                table), `lengths()` (of the bags: `[tables * batch]`) and perhaps `weights_or_none()`: a
                `torchrec.KeyedJaggedTensor`, whose keys, where it has `keys()`, are the tables' names in their order.
            offsets: for each table where each sample's bag begins, `[batch]`.
            per_sample_weights: a factor for each index, in the shapes of the indices; mode "sum" only. They are data:
                no gradient is made of them.

        Returns:
            `[batch, tables, dim]`, of the tables' dtype.

        Raises:
            IndexError: an index is not a row of its table; names both. On CPU tensors, before anything is sent; on a
                GPU as `ark_torch.ops.embedding_bag_all_to_all` does.
            ValueError, TypeError: another argument will not do.
            torch.distributed.DistBackendError: a rank refused its arguments, or ranks have other numbers of samples.
        """
        values, lengths, weights = self._jagged(indices, offsets, per_sample_weights)
        return self._pool(values, lengths, weights)

    def _jagged(self, indices: Any, offsets: Any, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values and lengths of all tables, one behind the other."""
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
            batch = batches.pop()  # filled on the device: nothing is copied there, which a CUDA graph would repeat
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
        """Indices, offsets and weights of this rank's tables; whether some rank trains."""
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
            values, lengths, weights, name_of(self.group), self.rows, self.owners, self.names,
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
        fixed = self._rooms is not None and (values.is_cuda or self._fixed_on_cpus)  # bags end with an offset, then
        update = update_of(tables, self.sparse, self.optimizer)
        out = pool(
            tables, bags, offsets, factors, like, name_of(self.group), mode, fixed, known, *update,
            met=(lengths.shape[1], self.dim),
        )  # fmt: skip
        if self.average_gradients and self.ranks > 1 and out.requires_grad:
            out.register_hook(lambda gradient: gradient / self.ranks)  # type: ignore[no-untyped-call]
        if self.row_wise:
            return self._added(out, lengths)
        order = sorted(range(len(self.names)), key=lambda t: (self.owners[t], t))
        if order == sorted(order):
            return out
        if out.device not in self._places:  # with the first call, which is not captured
            self._places[out.device] = torch.tensor([order.index(t) for t in range(len(order))], device=out.device)
        return out.index_select(1, self._places[out.device])

    def _added(self, out: Tensor, lengths: Tensor) -> Tensor:
        """Of the ranks' partial sums."""
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
    """Key, name, rows and field of all that tables may have in a state dict."""
    return [
        (f"{prefix}tables.{name}.{field}", name, rows, field)
        for name, rows in zip(module.names, module.rows, strict=True)
        for field in ("weight", "sum")
    ]


def _whole_tables(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Row-wise, a rank says which rows of a table it has."""
    for key, _, rows, _ in _keys(module, prefix):
        if module.row_wise and isinstance(state.get(key), Tensor):
            state[key] = as_dtensor(state[key], rows, module.group)


def _own_rows(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Takes this rank's rows of whole tables; what other ranks have is left out."""
    for key, name, rows, _ in _keys(module, prefix):
        if key not in state:
            continue
        if name not in module.tables:
            del state[key]
        else:
            shard = module.tables[name]
            state[key] = rows_of(state[key], shard, rows, module.row_wise)
