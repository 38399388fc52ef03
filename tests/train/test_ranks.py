"""The captured step on two ranks: the bits of DistributedDataParallel over the same group, and ranks that disagree."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import fake_graphs
import pytest
import torch
import torch.distributed as dist
from support import training as small
from support.crew import crew_of
from support.groups import ark_only
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.train import capture, graphs
from ark_torch.train.agreement import Agreement

pytestmark = [ark_only]
STEPS = 20


def run(body: Callable[..., Any], *args: Any, world: int = 2) -> list[Any]:
    return crew_of(world, {}).run(body, *args)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _ddp(rank: Rank, name: str, dropout: float, max_norm: float | None = None, parts: int = 1) -> tuple[Tensor, Tensor]:
    """The loop that the step replaces. Returns losses and weights."""
    torch.manual_seed(5 + rank.rank)
    ddp = DDP(small.make(name, dropout))
    torch.manual_seed(77 + rank.rank)
    optimizer, losses = _adam(ddp), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in range(parts):
            with ddp.no_sync() if part + 1 < parts else contextlib.nullcontext():
                loss = small.loss(ddp, small.batch(name, step, 10 * part + rank.rank)) / parts
                loss.backward()
                total += loss.detach()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
        optimizer.step()
        losses.append(total)
    return torch.stack(losses), small.weights(ddp.module)


def _captured(
    rank: Rank, name: str, dropout: float, wrapped: bool, max_norm: float | None = None, parts: int = 1
) -> tuple[Tensor, Tensor]:
    model = small.make(name, dropout)
    subject = DDP(model) if wrapped else model
    step = capture(subject, _adam(model), small.loss, max_norm=max_norm, accumulate=parts, bucket_mb=0.02)
    torch.manual_seed(77 + rank.rank)
    losses = []
    for number in range(STEPS):
        batches = [small.batch(name, number, 10 * part + rank.rank) for part in range(parts)]
        losses.append(step(batches if parts > 1 else batches[0]))
    assert step._step.buckets is not None and len(step._step.buckets.buckets) > 3
    step.close()
    return torch.stack(losses), small.weights(model)


def _like_ddp(rank: Rank, name: str, dropout: float, wrapped: bool) -> None:
    rank.init()
    expected, ours = _ddp(rank, name, dropout), _captured(rank, name, dropout, wrapped)
    assert torch.equal(ours[0], expected[0]), (ours[0] - expected[0]).abs().max()
    if wrapped or name != "vit":  # its running statistics differ between ranks without the wrapper
        assert torch.equal(ours[1], expected[1])


@pytest.mark.by_day(
    "gpt2-plain-exact", "gpt2-ddp-dropout", "bert-plain-dropout", "bert-ddp-exact", "vit-plain-exact", "vit-ddp-dropout"
)
@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["exact", "dropout"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("name", small.NAMES)
def test_the_bits_of_ddp(name: str, wrapped: bool, dropout: float) -> None:
    run(_like_ddp, name, dropout, wrapped)


def _options(rank: Rank) -> None:
    rank.init()
    for max_norm, parts in ((0.3, 1), (0.3, 3), (None, 2)):
        expected = _ddp(rank, "bert", 0.1, max_norm, parts)
        ours = _captured(rank, "bert", 0.1, False, max_norm, parts)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), (max_norm, parts)


def test_clipping_and_accumulation_as_with_ddp() -> None:
    run(_options)


def _one_process(rank: Rank) -> None:
    rank.init()
    model, alone = small.make("gpt2"), small.make("gpt2")
    step = capture(model, torch.optim.SGD(model.parameters(), lr=0.1), small.loss)  # Adam amplifies rounding
    for number in range(STEPS):
        step(small.batch("gpt2", number, rank.rank))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for other in range(rank.world_size):
            (small.loss(alone, small.batch("gpt2", step, other)) / rank.world_size).backward()
        optimizer.step()
    torch.testing.assert_close(small.weights(model), small.weights(alone), rtol=1e-4, atol=1e-6)


def test_close_to_one_process() -> None:
    run(_one_process)


def test_three_ranks_close_to_one_process() -> None:
    run(_one_process, world=3)


def _resume(rank: Rank) -> None:
    rank.init()

    def train(steps: range, model: nn.Module, optimizer: Any) -> list[float]:
        step = capture(model, optimizer, small.loss)
        losses = [step(small.batch("bert", number, rank.rank)).item() for number in steps]
        step.close()
        return losses

    def fresh() -> Any:
        model = small.make("bert", 0.1)
        torch.manual_seed(31 + rank.rank)
        return model, _adam(model)

    whole = train(range(10), *fresh())
    model, optimizer = fresh()
    first = train(range(5), model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    model, optimizer = fresh()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    assert first + train(range(5, 10), model, optimizer) == whole


def test_a_checkpoint_in_the_middle_gives_the_same_curve() -> None:
    run(_resume)


class _Branches(nn.Module):
    """Each rank uses its own branch, one branch is unused, and one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.low = nn.Linear(6, 6).to(torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.branches[which](self.into(x)).relu() * self.frozen
        return self.out(self.low(x.bfloat16()).float())


def _unused(rank: Rank) -> None:
    rank.init()
    x = [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * s + rank.rank)) for s in range(6)]
    model, ddp = _Branches(), DDP(_Branches(), find_unused_parameters=True)
    step = capture(model, _adam(model), lambda m, b: m(*b).square().mean())
    optimizer = _adam(ddp)
    for number in range(5):
        step((x[number], rank.rank))
        optimizer.zero_grad()
        ddp(x[number], rank.rank).square().mean().backward()
        optimizer.step()
    assert torch.equal(small.weights(model), small.weights(ddp.module))
    assert model.branches[2].weight.grad is None
    with pytest.raises(RuntimeError, match=r"'branches.2.\w+' had no gradient in the first step on any rank"):
        step((x[5], 2))


def test_parameters_without_gradients() -> None:
    run_ranks(_unused, 2)


def _wrapper(rank: Rank) -> None:
    """The wrapper works before, beside and after the step. Its misuse is an error."""
    rank.init()
    ddp = DDP(small.make("gpt2"), gradient_as_bucket_view=True, static_graph=True)
    optimizer = _adam(ddp)
    step = capture(ddp, optimizer, small.loss)
    step(small.batch("gpt2", 0, rank.rank))
    with torch.no_grad():
        assert small.loss(ddp, small.batch("gpt2", 1)).isfinite()
    with ddp.no_sync(), pytest.raises(RuntimeError, match=r"under no_sync\(\): a step ends with an update"):
        step(small.batch("gpt2", 1, rank.rank))
    wrong = capture(ddp, optimizer, lambda m, b: small.loss(ddp, b))
    with pytest.raises(RuntimeError, match=r"loss\(\) called the DistributedDataParallel object"):
        wrong(small.batch("gpt2", 1, rank.rank))
    wrong.close()
    step.close()
    reference = DDP(copy.deepcopy(ddp.module))
    for number in range(3):
        for one in (ddp, reference):
            one.zero_grad()
            small.loss(one, small.batch("gpt2", number, rank.rank)).backward()
    for ours, theirs in zip(ddp.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group is not that of the DistributedDataParallel"):
        capture(ddp, optimizer, small.loss, group=dist.new_group())


def test_the_wrapper_stays_usable() -> None:
    run(_wrapper)


def _hook(rank: Rank) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank.init()
    fake_graphs.use()
    ddp = DDP(small.make("gpt2"))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    step = capture(ddp, _adam(ddp), small.loss, accumulate=2)
    with pytest.warns(UserWarning, match="runs steps eagerly: DistributedDataParallel has a communication hook"):
        for number in range(3):
            step([small.batch("gpt2", number, 10 * part + rank.rank) for part in range(2)])
    graphs.recorder_for = _REAL
    assert "fp16_compress_hook" in step.reason and not step.captured
    assert _same_everywhere(small.weights(ddp.module))


def test_a_communication_hook_runs_eagerly() -> None:
    run(_hook)


def _same_everywhere(values: Tensor) -> bool:
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return all(torch.equal(one, values) for one in every)


def _plain_weights(rank: Rank) -> None:
    """A plain module gets rank 0's weights, as in DDP. In a group of one rank it keeps its own."""
    rank.init()
    model = small.make("gpt2", seed=rank.rank)
    step = capture(model, _adam(model), small.loss)
    step(small.batch("gpt2", 0, rank.rank))
    assert _same_everywhere(small.weights(model))
    groups = [dist.new_group([member]) for member in range(rank.world_size)]
    model = small.make("gpt2", seed=rank.rank)
    step = capture(model, _adam(model), small.loss, group=groups[rank.rank])
    step(small.batch("gpt2", 0, rank.rank))
    assert not _same_everywhere(small.weights(model)) and step._step.buckets is None


def test_weights_and_groups() -> None:
    run(_plain_weights)


def _gloo(rank: Rank) -> None:
    rank.init("gloo")
    expected = _ddp(rank, "gpt2", 0.0)
    ours = _captured(rank, "gpt2", 0.0, False)
    torch.testing.assert_close(ours[1], expected[1], rtol=2e-3, atol=2e-5)
    assert _same_everywhere(ours[1])


def test_gloo_has_no_average() -> None:
    run(_gloo)


def _sharded(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank.init()
    mesh = init_device_mesh("cpu", (rank.world_size,))
    results = []
    for captured in (False, True):
        model = small.make("gpt2")
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = _adam(model)
        step = capture(model, optimizer, small.loss, max_norm=0.5, accumulate=2) if captured else None
        for number in range(6):
            parts = [small.batch("gpt2", number, 10 * part + rank.rank) for part in range(2)]
            if step is not None:
                step(parts)
                continue
            optimizer.zero_grad()
            for part, batch in enumerate(parts):
                model.set_requires_gradient_sync(part == 1)
                (small.loss(model, batch) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        results.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(results[0], results[1])


def test_fully_shard() -> None:
    run_ranks(_sharded, 2)  # DTensor's caches keep meshes, whose groups end with the body


def _tensor_parallel(rank: Rank) -> None:
    """On 2 x 2 ranks: DTensors over the inner dimension of a mesh, gradients averaged over the outer one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})

    def loss(model: Any, x: Tensor) -> Tensor:
        return model["down"](model["up"](x).relu()).square().mean()

    model = parallelize_module(fresh(), mesh["tensor"], plan)
    step = capture(model, _adam(model), loss, group=mesh["data"].get_group(), max_norm=0.1)
    alone = fresh()
    optimizer = _adam(alone)
    for number in range(5):
        x = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + d)) for d in range(2)]
        step(x[mesh.get_local_rank("data")])
        optimizer.zero_grad()
        (sum(loss(alone, one) for one in x) / 2).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-3, atol=1e-5)


def test_tensor_parallel() -> None:
    run_ranks(_tensor_parallel, 4)


# --- ranks that disagree ---


def _different(rank: Rank, what: str) -> str:
    rank.init()
    other = rank.rank == 1
    model: nn.Module = small.make("gpt2")
    options: dict[str, Any] = {}
    if what == "count" and other:
        model.add_module("extra", nn.Linear(2, 2))
    elif what == "dtype" and other:
        model.norm.to(torch.bfloat16)
    elif what == "shape" and other:
        model.positions = nn.Embedding(16, small.WIDTH)
    elif what == "options":
        options["max_norm"] = 2.0 if other else 1.0
    kind = torch.optim.SGD if what == "optimizer" and other else torch.optim.AdamW
    with pytest.raises(ValueError) as caught:
        capture(model, kind(model.parameters(), lr=0.1), small.loss, **options)
    return str(caught.value)


TOLD = {
    "count": "the number of trained parameters is 30 on rank 1 and 28 on rank 0",
    "dtype": "parameter 'norm.weight' is bfloat16 [32] on rank 1 and float32 [32] on rank 0",
    "shape": "parameter 'positions.weight' is float32 [16, 32] on rank 1 and float32 [32, 32] on rank 0",
    "options": "max_norm is 2.0 on rank 1 and 1.0 on rank 0",
    "optimizer": "optimizer is SGD on rank 1 and AdamW on rank 0",
}


@pytest.mark.parametrize("what", TOLD)
def test_ranks_that_train_something_else(what: str) -> None:
    for rank, text in enumerate(run(_different, what)):
        assert text.startswith(f"ark: [rank {rank}] train.capture: {TOLD[what]}: "), text


def _cannot(rank: Rank, why: str) -> str:
    """Rank 1 cannot capture: all ranks run eagerly and report it."""
    rank.init()
    recorder = fake_graphs.use()
    if rank.rank == 1 and why == "item":
        recorder.refuses = "aten.gelu.default"
    model = small.make("gpt2")

    def loss(model: Any, batch: Any) -> Tensor:
        if rank.rank == 1 and why == "random":
            import random

            random.random()
        return small.loss(model, batch)

    step = capture(model, _adam(model), loss)
    with pytest.warns(UserWarning, match="runs steps eagerly"):
        for number in range(6):
            step(small.batch("gpt2", number, rank.rank))
    assert not step.captured and _same_everywhere(small.weights(model))
    graphs.recorder_for = _REAL
    return step.reason


_REAL = graphs.recorder_for


@pytest.mark.parametrize("why", ["item", "random"])
def test_one_rank_that_cannot_capture(why: str) -> None:
    reasons = run(_cannot, why)
    text = {"item": "makes the host wait", "random": "draws random numbers on the host"}[why]
    assert text in reasons[1] and not reasons[1].startswith("on rank")
    assert reasons[0] == f"on rank 1: {reasons[1]}"


def _shapes(rank: Rank) -> list[bool]:
    """Ranks get new shapes in different calls: in each call all replay, or none."""
    rank.init()
    recorder = fake_graphs.use()
    model = small.make("gpt2")
    step = capture(model, _adam(model), small.loss)
    lengths = [[8] * 5 + [9, 9, 8, 8], [8] * 4 + [10, 8, 10, 10, 8]][rank.rank]
    captured = []
    for number, length in enumerate(lengths):
        step(small.batch("gpt2", number, rank.rank, length=length))
        captured.append(step.captured)
    assert _same_everywhere(small.weights(model)) and recorder.counts["records"] == 2
    graphs.recorder_for = _REAL
    return captured


def test_ranks_with_other_shapes() -> None:
    first, second = run(_shapes)
    assert first == second == [False] * 3 + [True, False, False, True, True, True]


def _numbers(rank: Rank) -> None:
    """Rank 0 has started a collective of the group and rank 1 has not, as when only one of them captures."""
    rank.init()
    agreement, tensor = Agreement(dist.group.WORLD), torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True) if rank.rank == 0 else None
    assert agreement.everyone(rank.rank) == [0, 1]
    assert agreement.share(f"from {rank.rank}") == ["from 0", "from 1"]
    if work is None:
        dist.all_reduce(tensor)
    else:
        work.wait()
    assert tensor.item() == 2
    agreement.close()
    again = Agreement(dist.group.WORLD)  # under the same name
    assert again.everyone(7) == [7, 7]
    dist.destroy_process_group()
    again.close()


def test_agreement_does_not_depend_on_the_groups_collectives() -> None:
    run(_numbers)


def _again_and_again(rank: Rank) -> None:
    """Over a group with only CUDA tensors, like NCCL's: captures come and go, and one rank is late each time."""
    rank.init()
    group = dist.new_group(backend="cuda:gloo")
    for number in range(4):
        if rank.rank == number % 2:
            time.sleep(0.2)
        agreement = Agreement(group)
        assert agreement.everyone(rank.rank) == [0, 1]
        agreement.close()
    dist.destroy_process_group()


def test_agreements_of_a_group_without_cpu_tensors() -> None:
    run(_again_and_again)


def _lengths(rank: Rank) -> str:
    rank.init()
    fake_graphs.use()
    model = small.make("gpt2")
    step = capture(model, _adam(model), small.loss, steps=3)
    graphs.recorder_for = _REAL
    with pytest.raises(ValueError) as caught:
        step([small.batch("gpt2", number) for number in range(3 - rank.rank)])
    return str(caught.value)


def test_ranks_with_other_numbers_of_batches() -> None:
    for rank, text in enumerate(run(_lengths)):
        assert text.startswith(f"ark: [rank {rank}] train.capture: 2 steps in this call on rank 1 and 3 on rank 0")
