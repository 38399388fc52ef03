"""ark_torch.nn.ShardedEmbeddingBags on CPU ranks: comparison with one process, inputs, checkpoints, misuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn

from ark_torch.nn import ShardedEmbeddingBags
from ark_torch.ops import SGD, RowwiseAdagrad

pytestmark = [ark_only]
TABLES = {"user": (50, 12), "item": (3, 12), "shop": (17, 12), "day": (7, 12), "one": (1, 12)}
SHARDINGS = ("table_wise", "row_wise")


class Jagged:
    """The interface of TorchRec's KeyedJaggedTensor."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None, keys: list[str]) -> None:
        self._values, self._lengths, self._weights, self._keys = values, lengths, weights, keys

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights


class Batch:
    """Bags of one rank's samples, empty ones and larger ones."""

    def __init__(self, rank: int, seed: int, batch: int = 6, index: torch.dtype = torch.int64) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        self.lengths = torch.randint(0, 4, (len(TABLES), batch), generator=generator)
        counts = self.lengths.sum(1).tolist()
        self.indices = [
            torch.randint(0, rows, (count,), generator=generator).to(index)
            for (rows, _), count in zip(TABLES.values(), counts, strict=True)
        ]
        self.offsets = [(one.cumsum(0) - one).to(index) for one in self.lengths]
        self.weights = [torch.rand(count, generator=generator) + 0.5 for count in counts]
        self.gradient = torch.randn(batch, len(TABLES), 12, generator=generator)

    def jagged(self, weighted: bool) -> Jagged:
        weights = torch.cat(self.weights) if weighted else None
        return Jagged(torch.cat(self.indices), self.lengths.flatten(), weights, list(TABLES))


def alone(mode: str, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """Returns the same tables in one process, as every rank draws them."""
    torch.manual_seed(5)
    return nn.ModuleDict(
        {name: nn.EmbeddingBag(rows, dim, mode=mode, dtype=dtype) for name, (rows, dim) in TABLES.items()}
    )


def pooled(bags: nn.ModuleDict, batch: Batch, weighted: bool) -> Tensor:
    return torch.stack(
        [bags[name](batch.indices[t], batch.offsets[t], batch.weights[t] if weighted else None)
         for t, name in enumerate(TABLES)], 1,
    )  # fmt: skip


def whole(bags: nn.ModuleDict) -> dict[str, Tensor]:
    return {f"tables.{name}.weight": one.weight.detach().clone() for name, one in bags.items()}


def gathered(module: ShardedEmbeddingBags, field: str = "weight") -> dict[str, Tensor]:
    """Returns whole tables on all ranks."""
    mine = {name: (one.first, getattr(one, field).detach()) for name, one in module.tables.items()}
    parts: list[Any] = [None] * module.ranks
    dist.all_gather_object(parts, mine, group=module.group)
    return {
        name: torch.cat(
            [rows for _, rows in sorted((part[name] for part in parts if name in part), key=lambda x: x[0])]
        )
        for name in module.names
    }


def _alike(rank: Rank, sharding: str) -> None:
    """Compares results, dense and sparse gradients, and in-place updates with one process that sees all samples."""
    rank.init()
    torch.set_num_threads(1)
    me, world = rank.rank, rank.world_size
    for mode, weighted in (("sum", False), ("sum", True), ("mean", False)):
        batches = [Batch(r, seed=3) for r in range(world)]
        reference = alone(mode)
        module = ShardedEmbeddingBags(TABLES, mode=mode, sharding=sharding)
        missing = module.load_state_dict(whole(reference))
        assert not missing.missing_keys and not missing.unexpected_keys
        mine = batches[me]
        weights = mine.weights if weighted else None
        out = module(mine.indices, mine.offsets, weights)
        torch.testing.assert_close(out, pooled(reference, mine, weighted))
        out.backward(mine.gradient)
        for batch in batches:
            (pooled(reference, batch, weighted) * batch.gradient / world).sum().backward()
        for name, shard in module.tables.items():
            wanted = reference[name].weight.grad[shard.first : shard.first + len(shard.weight)]
            torch.testing.assert_close(shard.weight.grad, wanted)
        sparse = ShardedEmbeddingBags(TABLES, mode=mode, sharding=sharding, sparse=True)
        sparse.load_state_dict(whole(reference))
        sparse(mine.indices, mine.offsets, weights).backward(mine.gradient)
        for name, shard in module.tables.items():
            assert sparse.tables[name].weight.grad.is_sparse
            torch.testing.assert_close(sparse.tables[name].weight.grad.to_dense(), shard.weight.grad, rtol=0, atol=0)
        updated = ShardedEmbeddingBags(
            TABLES, mode=mode, sharding=sharding, optimizer_class=SGD, optimizer_kwargs={"lr": 0.5}
        )
        updated.load_state_dict(whole(reference))
        updated(mine.indices, mine.offsets, weights).backward(mine.gradient)
        for name, table in gathered(updated).items():
            torch.testing.assert_close(table, reference[name].weight - 0.5 * reference[name].weight.grad)
            assert name not in updated.tables or updated.tables[name].weight.grad is None


@pytest.mark.by_day("2-table_wise", "3-row_wise")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_like_one_process(world: int, sharding: str) -> None:
    run_ranks(_alike, world, sharding)


def _inputs(rank: Rank, sharding: str) -> None:
    """A KeyedJaggedTensor's methods, int32, bags of equal length, a last offset: the same numbers."""
    rank.init()
    torch.set_num_threads(1)
    me = rank.rank
    batch, narrow = Batch(me, seed=4), Batch(me, seed=4, index=torch.int32)
    module = ShardedEmbeddingBags(TABLES, sharding=sharding)
    plain = module(batch.indices, batch.offsets)
    weighted = module(batch.indices, batch.offsets, batch.weights)
    assert not torch.equal(plain, weighted)
    assert torch.equal(module(batch.jagged(False)), plain) and torch.equal(module(batch.jagged(True)), weighted)
    mixed = narrow if me == 0 else batch
    for one in (narrow, mixed):
        assert torch.equal(module(one.indices, one.offsets), plain)
    ends = [torch.cat([begins, begins.new_tensor([len(i)])]) for begins, i in
            zip(batch.offsets, batch.indices, strict=True)]  # fmt: skip
    module.include_last_offset = True
    assert torch.equal(module(batch.indices, ends), plain)
    module.include_last_offset = False
    fixed = [torch.randint(0, rows, (6, 2)) for rows, _ in TABLES.values()]
    begins = torch.arange(0, 12, 2)
    assert torch.equal(module(fixed), module([one.flatten() for one in fixed], [begins] * 5))
    empty = module([batch.indices[0][:0]] * 5, [torch.zeros(6, dtype=torch.int64)] * 5)
    assert empty.shape == (6, 5, 12) and not empty.any()
    assert module([batch.indices[0][:0]] * 5, [batch.offsets[0][:0]] * 5).shape == (0, 5, 12)


@pytest.mark.by_day("row_wise")
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_inputs(sharding: str) -> None:
    run_ranks(_inputs, 2, sharding)


def _fixed_sizes(rank: Rank, sharding: str) -> None:
    """max_values, as on GPUs, gives the bits of exchanges with counts. Data after the indices is not read."""
    rank.init()
    torch.set_num_threads(1)
    batch = Batch(rank.rank, seed=6)
    rooms = [int(one) for one in (18, 19, 18, 25, 30)]
    for mode, weighted in (("sum", False), ("sum", True), ("mean", False)):
        plain = ShardedEmbeddingBags(TABLES, mode=mode, sharding=sharding, optimizer_class=RowwiseAdagrad)
        fixed = ShardedEmbeddingBags(
            TABLES, mode=mode, sharding=sharding, optimizer_class=RowwiseAdagrad, max_values=rooms
        )
        fixed._fixed_on_cpus = True
        for step in range(2):
            jagged = batch.jagged(weighted)
            wanted = plain(jagged)
            behind = torch.full((3 + step,), -7)
            jagged._values = torch.cat([jagged._values, behind])
            jagged._weights = torch.cat([jagged._weights, behind.float()]) if weighted else None
            got = fixed(jagged)
            assert torch.equal(got, wanted), (mode, weighted)
            for out in (wanted, got):
                out.backward(batch.gradient)
            for one, other in zip(plain.parameters(), fixed.parameters(), strict=True):
                assert torch.equal(one, other), (mode, weighted)
    checked = ShardedEmbeddingBags(TABLES, sharding=sharding, max_values=rooms)  # on CPUs the host still counts
    assert torch.equal(
        checked(batch.jagged(False)), ShardedEmbeddingBags(TABLES, sharding=sharding)(batch.jagged(False))
    )
    empty = fixed(Jagged(batch.indices[0][:0], torch.zeros(5 * 6, dtype=torch.int64), None, list(TABLES)))
    assert empty.shape == (6, 5, 12) and not empty.any()
    small = ShardedEmbeddingBags(TABLES, sharding=sharding, max_values=1)
    with pytest.raises(ValueError, match="and max_values says 1"):
        small(batch.jagged(False))
    for wrong in (0, [1, 2], True):
        with pytest.raises(ValueError, match="max_values is"):
            ShardedEmbeddingBags(TABLES, sharding=sharding, max_values=wrong)


@pytest.mark.by_day("2-row_wise", "3-table_wise")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_buffers_of_fixed_sizes(world: int, sharding: str) -> None:
    run_ranks(_fixed_sizes, world, sharding)


def _placed(rank: Rank) -> None:
    """The largest tables come first, to the rank with the least. Initial values do not depend on the sharding."""
    rank.init()
    module = ShardedEmbeddingBags([(10, 4), (100, 4), (60, 4), (45, 4), (1, 4)])
    assert module.owners == [0, 0, 1, 1, 1], module.owners
    assert list(module.tables) == [name for name in "01234" if module.owners[int(name)] == rank.rank]
    big = {"big": (70_000, 2), "small": (9, 2)}
    tables = []
    for sharding in SHARDINGS:
        torch.manual_seed(11)
        tables.append(gathered(ShardedEmbeddingBags(big, sharding=sharding)))
    torch.manual_seed(11)
    group = [dist.new_group([r]) for r in range(rank.world_size)][rank.rank]
    tables.append({name: one.weight.detach() for name, one in ShardedEmbeddingBags(big, group).tables.items()})
    for name in big:
        assert torch.equal(tables[0][name], tables[1][name]) and torch.equal(tables[0][name], tables[2][name])
        assert 0.5 < tables[0][name].std() < 1.5
    assert not torch.equal(tables[0]["big"][:9], tables[0]["small"])
    torch.manual_seed(12)
    assert not torch.equal(gathered(ShardedEmbeddingBags(big))["big"], tables[0]["big"])


def test_which_rank_has_what() -> None:
    run_ranks(_placed, 2)


def trained(rank: Rank, sharding: str, dtype: torch.dtype = torch.float32) -> ShardedEmbeddingBags:
    torch.manual_seed(6)
    module = ShardedEmbeddingBags(
        TABLES, sharding=sharding, optimizer_class=RowwiseAdagrad, optimizer_kwargs={"lr": 0.3}, dtype=dtype
    )
    batch = Batch(rank.rank, seed=8)
    module(batch.indices, batch.offsets).backward(batch.gradient.to(dtype))
    return module


def _save(rank: Rank, sharding: str, folder: str) -> dict[str, dict[str, Tensor]]:
    rank.init()
    torch.set_num_threads(1)
    module = trained(rank, sharding)
    model = nn.ModuleDict({"bags": module})
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    return {field: gathered(module, field) for field in ("weight", "sum")}


def _load(rank: Rank, sharding: str, folder: str, wanted: dict[str, dict[str, Tensor]]) -> None:
    """Loads a state and continues: the update uses it."""
    rank.init()
    torch.set_num_threads(1)
    torch.manual_seed(99)
    module = ShardedEmbeddingBags(
        TABLES, sharding=sharding, optimizer_class=RowwiseAdagrad, optimizer_kwargs={"lr": 0.3}
    )
    model = nn.ModuleDict({"bags": module})
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for field, tables in wanted.items():
        for name, table in gathered(module, field).items():
            assert torch.equal(table, tables[name]), f"{field} of {name}"
    assert any(table.any() for table in wanted["sum"].values())
    for shard in module.tables.values():
        assert module.optimizer.state[shard.weight]["sum"] is shard.sum
    batch = Batch(rank.rank, seed=9)
    module(batch.indices, batch.offsets).backward(batch.gradient)
    assert any(not torch.equal(table, wanted["sum"][name]) for name, table in gathered(module, "sum").items())


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_checkpoint_onto_other_ranks(sharding: str, tmp_path: Path) -> None:
    wanted = run_ranks(_save, 2, sharding, str(tmp_path))[0]
    for world in (1, 3, 4):
        run_ranks(_load, world, sharding, str(tmp_path), wanted)


def test_checkpoint_into_the_other_sharding(tmp_path: Path) -> None:
    for one, other in (SHARDINGS, SHARDINGS[::-1]):
        wanted = run_ranks(_save, 2, one, str(tmp_path / one))[0]
        run_ranks(_load, 2, other, str(tmp_path / one), wanted)


def _moved(rank: Rank) -> None:
    """With another dtype, the state follows its parameters."""
    rank.init()
    for sharding in SHARDINGS:
        module = trained(rank, sharding, torch.bfloat16)
        assert all(one.sum.dtype == torch.float32 and one.weight.dtype == torch.bfloat16 for one in module._shards())
        module.double()
        batch = Batch(rank.rank, seed=8)
        out = module(batch.indices, batch.offsets)
        assert out.dtype == torch.float64
        out.backward(batch.gradient.double())
        frozen = ShardedEmbeddingBags(TABLES, sharding=sharding).requires_grad_(False)
        assert not frozen(batch.indices, batch.offsets).requires_grad
        with torch.no_grad():
            assert not module(batch.indices, batch.offsets).requires_grad
        assert "tables" in repr(module) and sharding in repr(module)


def test_dtypes_and_frozen_tables() -> None:
    run_ranks(_moved, 2)


def _few(rank: Rank) -> None:
    """More ranks than tables and than rows: a rank that has nothing still takes part."""
    rank.init()
    torch.set_num_threads(1)
    tables = {"a": (2, 4)}
    for sharding in SHARDINGS:
        for kind in (None, SGD):
            torch.manual_seed(1)
            module = ShardedEmbeddingBags(tables, sharding=sharding, optimizer_class=kind, average_gradients=False)
            before = gathered(module)["a"]
            out = module([torch.tensor([0, 1, 1])], [torch.tensor([0, 1])])
            torch.testing.assert_close(out[:, 0], torch.stack([before[0], before[1] * 2]))
            assert out.requires_grad
            out.sum().backward()
            if kind is SGD:
                step = 0.01 * rank.world_size * torch.tensor([[1.0], [2.0]])
                torch.testing.assert_close(gathered(module)["a"], before - step)


@pytest.mark.nightly
def test_ranks_that_have_nothing() -> None:
    run_ranks(_few, 4)


def _misuse(rank: Rank) -> None:
    rank.init(timeout=20)
    me = rank.rank
    for text, arguments in {
        "tables have dimensions": {"tables": [(3, 4), (3, 5)]},
        "mode is 'max'": {"tables": TABLES, "mode": "max"},
        "sharding is 'column_wise'": {"tables": TABLES, "sharding": "column_wise"},
        "sparse=True and optimizer_class": {"tables": TABLES, "sparse": True, "optimizer_class": SGD},
    }.items():
        with pytest.raises(ValueError, match=text):
            ShardedEmbeddingBags(**arguments)
    for sharding in SHARDINGS:
        module = ShardedEmbeddingBags(TABLES, sharding=sharding, optimizer_class=SGD)
        good = Batch(me, seed=10)
        before = gathered(module)
        for text, kind, spoil in (
            (r"index 17 is out of bounds .* size 17 of tables\[2\] \('shop'\)", IndexError, "index"),
            (r"index -1 is out of bounds .* tables\[0\] \('user'\)", IndexError, "negative"),
            (r"a bag of tables\[1\] \('item'\) has a length of -", ValueError, "offset"),
            (r"lengths add up to", ValueError, "first"),
            (r"values is torch.float32", TypeError, "dtype"),
        ):
            batch = Batch(me, seed=10)
            if me == 1:
                if spoil == "index":
                    batch.indices[2][0] = 17
                elif spoil == "negative":
                    batch.indices[0][1] = -1
                elif spoil == "offset":
                    batch.offsets[1][2] = 99
                elif spoil == "first":
                    batch.offsets[0] = batch.offsets[0] + 1
                else:
                    batch.indices = [one.float() for one in batch.indices]
            expected = kind if me == 1 else dist.DistBackendError
            with pytest.raises(expected, match=text if me == 1 else "rank 1 refused its arguments") as caught:
                module(batch.indices, batch.offsets)
            assert "exchange_bags" in str(caught.value) and f"[rank {me}]" in str(caught.value)
            assert module(good.indices, good.offsets).shape == (6, 5, 12)
        odd = Batch(me, seed=10, batch=6 + me)
        with pytest.raises(dist.DistBackendError, match="rank 1 has 7 samples, rank 0 6"):
            module(odd.indices, odd.offsets)
        with pytest.raises(dist.DistBackendError, match="rank 1 has weights"):
            module(good.indices, good.offsets, good.weights if me == 1 else None)
        with pytest.raises(ValueError, match="indices has 4 entries, and there are 5 tables"):
            module(good.indices[:4], good.offsets)
        with pytest.raises(ValueError, match=r"indices without offsets are to be \[batch, length\]"):
            module(good.indices)
        with pytest.raises(ValueError, match="keys are"):
            module(Jagged(torch.cat(good.indices), good.lengths.flatten(), None, list(TABLES)[::-1]))
        with pytest.raises(ValueError, match="require gradients"):
            module(good.indices, good.offsets, [one.requires_grad_() for one in good.weights])
        for name, table in gathered(module).items():
            assert torch.equal(table, before[name])


def test_misuse() -> None:
    run_ranks(_misuse, 2)
