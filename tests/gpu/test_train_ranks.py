"""The captured step over several GPUs: FSDP2, ranks that disagree, and a peer that dies during replays."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run, start
from support import recommending
from support import training as small
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_support import (
    adam,
    assert_equal_runs,
    batch_of,
    begin,
    by_hand,
    kill_the_last,
    model_of,
    until_a_peer_dies,
)

from ark_torch.distributed import compression
from ark_torch.train import capture


def _item(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    if value.detach().item() > 1e9:
        raise AssertionError
    return value


def _sharded(rank: Rank, compresses: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = begin(rank, WORLD)
    mesh = init_device_mesh("cuda", (rank.world_size,))
    results = []
    for captured in (False, True):
        model = model_of("gpt2", device)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if compresses:
            compression.fsdp(model, compression.State(bits=4, exact_below=256))
        optimizer = adam(model, device, same_form=not captured)
        step = capture(model, optimizer, small.loss, max_norm=0.5) if captured else None
        for number in range(10):
            batch = batch_of("gpt2", number, rank.rank, device)
            if step is not None:
                step(batch)
                continue
            optimizer.zero_grad()
            small.loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert step is None or step.captured, step and step.reason
        results.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(results[0], results[1]), (results[0] - results[1]).abs().max()


@pytest.mark.parametrize("compresses", [False, True])
def test_fully_shard(compresses: bool) -> None:
    run(_sharded, compresses, own=True)  # DTensor's caches keep meshes, whose groups end with the body


def _scaled(rank: Rank) -> float:
    """Gradients overflow in one step, and in one rank's shard alone: all ranks leave that step out."""
    from torch.distributed.fsdp import fully_shard

    device = begin(rank, WORLD)
    torch.manual_seed(0)
    model = nn.Linear(8 * WORLD, 8 * WORLD, bias=False, device=device)
    weights = model.weight.detach().clone()
    fully_shard(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=100)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        value: Tensor = (model(batch[0]) * batch[1]).sum()
        return value

    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, scaler=scaler)
    for number in range(8):
        factors = torch.ones(8 * WORLD)
        if number == 5:
            factors[-1] = float("inf")  # of the last row, which the last rank holds
        step((torch.ones(4, 8 * WORLD), factors))
    assert step.captured, step.reason
    torch.testing.assert_close(model.weight.full_tensor(), weights - 7 * 0.1 * 4)  # type: ignore[operator]
    return scaler.get_scale()


def test_an_overflow_in_one_shard_is_left_out_by_all() -> None:
    assert run(_scaled, own=True) == [2.0] * WORLD


def _tables(rank: Rank, sharding: str, adapts: bool) -> None:
    """Embedding tables distributed over the ranks: the host counts nothing in the step, which is one graph."""
    from ark_torch.ops import RowwiseAdagrad

    device = begin(rank, WORLD)
    kwargs: dict[str, Any] = {"sharding": sharding}
    if adapts:
        kwargs |= {"optimizer_class": RowwiseAdagrad, "optimizer_kwargs": {"lr": 0.05}}
    looped, stepped = (recommending.Recommender(device, **kwargs) for _ in range(2))
    wanted = recommending.in_a_loop(looped, 10, rank.rank, device, fused=True)
    step = capture(stepped, recommending.optimizer_of(stepped, fused=True), recommending.loss)
    losses = [step(recommending.batch(number, rank.rank, device)) for number in range(10)]
    assert step.captured, step.reason
    assert torch.equal(torch.stack(losses), torch.stack(wanted))
    for (name, one), other in zip(stepped.named_parameters(), looped.parameters(), strict=True):
        assert torch.equal(one, other), name
    step.close()


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_tables_that_are_split(sharding: str, adapts: bool) -> None:
    run(_tables, sharding, adapts)


def _compressed(rank: Rank, bits: int, on_host: bool) -> None:
    """DDP's compression hook: replays have the bits of eager steps over the same buckets."""
    if on_host:
        os.environ["ARK_DISABLE_P2P"] = "1"
    device = begin(rank, WORLD)
    weights = []
    for warmup in (2, 100):
        model = model_of("gpt2", device)
        ddp = DistributedDataParallel(model, device_ids=[device.index])
        state = compression.State(bits=bits, rounding="nearest", module=ddp, exact_below=256)
        ddp.register_comm_hook(state, compression.hook)
        step = capture(ddp, adam(ddp, device), small.loss, bucket_mb=0.05, warmup=warmup)
        losses = [step(batch_of("gpt2", number, rank.rank, device)) for number in range(10)]
        assert step.captured == (warmup == 2), step.reason
        assert torch.stack(losses).isfinite().all() and 0 < 2 * state.bytes_sent < state.bytes_exact
        assert (bits == 8) == all(layer.residual is None for layer in state.layers)
        weights.append(small.weights(model).to(device))
        step.close()
    assert torch.equal(weights[0], weights[1]), (weights[0] - weights[1]).abs().max()
    every = [torch.empty_like(weights[0]) for _ in range(WORLD)]
    dist.all_gather(every, weights[0])
    assert all(torch.equal(one, weights[0]) for one in every)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_gradients(bits: int, on_host: bool) -> None:
    run(_compressed, bits, on_host, own=on_host)


def _one_cannot(rank: Rank) -> str:
    device = begin(rank, WORLD)
    model = model_of("gpt2", device)
    loss = _item if rank.rank == WORLD - 1 else small.loss
    step = capture(model, adam(model, device), loss, bucket_mb=0.02)
    for number in range(8):
        step(batch_of("gpt2", number, rank.rank, device))
    assert not step.captured
    values = small.weights(model).to(device)
    every = [torch.empty_like(values) for _ in range(WORLD)]
    dist.all_gather(every, values)
    assert all(torch.equal(one, values) for one in every)
    return step.reason


def test_one_rank_that_cannot_capture() -> None:
    reasons = run(_one_cannot)
    assert "item()" in reasons[-1] and reasons[0] == f"on rank {WORLD - 1}: {reasons[-1]}"


def _captures_more(model: Any, batch: Any) -> Tensor:
    value = small.loss(model, batch)
    if dist.get_rank() == WORLD - 1 and torch.cuda.is_current_stream_capturing():
        dist.all_reduce(torch.ones(3, device=value.device))
    return value


def _graphs_differ(rank: Rank) -> str:
    """The last rank's graph has a collective that the others' have not: nothing replays, and eager steps go on."""
    device = begin(rank, WORLD)
    expected = by_hand(rank, WORLD, "gpt2", device, steps=8)
    model = model_of("gpt2", device)
    step = capture(model, adam(model, device), _captures_more, bucket_mb=0.02)
    losses = [step(batch_of("gpt2", number, rank.rank, device)) for number in range(8)]
    assert not step.captured
    assert_equal_runs((torch.stack(losses).cpu(), small.weights(model)), expected)
    return step.reason


def test_graphs_that_differ_are_named_on_both_sides() -> None:
    reasons = run(_graphs_differ)
    assert len(set(reasons)) == 1
    more = f"is all_reduce(3 x float32, SUM) on rank {WORLD - 1} "
    assert reasons[0].startswith("the ranks' graphs differ: collective 1 of group") and more in reasons[0], reasons[0]


def _shapes(rank: Rank) -> list[bool]:
    """Rank 1 gets a new shape while the others replay."""
    device = begin(rank, WORLD)
    model = model_of("gpt2", device)
    step = capture(model, adam(model, device), small.loss, bucket_mb=0.02)
    captured = []
    for number in range(9):
        length = 10 if rank.rank == 1 and number in (4, 6, 7) else 8
        step(batch_of("gpt2", number, rank.rank, device, length=length))
        captured.append(step.captured)
    step.close()
    return captured


def test_ranks_with_other_shapes() -> None:
    assert run(_shapes) == [[False] * 3 + [True, False] + [True] * 4] * WORLD


def _endless(rank: Rank, steps: int) -> float:
    device = start(rank, timeout=120)
    model = model_of("gpt2", device)
    step = capture(model, adam(model, device), small.loss, steps=steps, bucket_mb=0.02)

    def call(number: int) -> None:
        batches = [batch_of("gpt2", steps * number + n, rank.rank, device) for n in range(steps)]
        step(batches if steps > 1 else batches[0])

    return until_a_peer_dies(rank, device, call, step)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_peer_killed_during_replays(steps: int) -> None:
    kill_the_last(_endless, steps, case=f"captured step of {steps}")
