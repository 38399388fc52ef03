"""Captured steps of further models on GPUs: tensor parallelism, Transformers, losses with gradients of the batch,
parameters that are frozen for a while, tensors that are replaced, and buckets whose size is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, run
from support import training as small
from support.rank import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from training_support import WORLDS, adam, assert_equal_runs, batch_of, begin, model_of, seed

from ark_torch.train import capture


def _through(module: nn.Module, step: Callable[[Any], Tensor], batches: list[Any]) -> tuple[Tensor, Tensor]:
    """Losses and weights of a step on each of the batches, or of a loop."""
    losses = torch.stack([step(batch) for batch in batches]).cpu()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return losses, torch.cat([p.detach().reshape(-1).cpu() for p in whole])


def _looped(model: Any, optimizer: Any, loss: Any, average: Callable[[], None] = lambda: None) -> Any:
    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(model, batch)
        value.backward()
        average()
        optimizer.step()
        return value.detach()

    return step


# --- tensor parallelism ---


def _tensor_parallel(rank: Rank, replicas: int) -> None:
    """DTensors over the inner dimension of a mesh; gradients are averaged over the outer one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device = begin(rank, WORLD)
    mesh = init_device_mesh("cuda", (replicas, WORLD // replicas), mesh_dim_names=("data", "tensor"))
    group = mesh["data"].get_group() if replicas > 1 else None
    width = 8 * WORLD

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)}).to(device)
        return parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def loss(model: Any, x: Tensor) -> Tensor:
        value: Tensor = model["down"](model["up"](x).relu()).square().mean()
        return value

    replica = mesh.get_local_rank("data")
    generators = [torch.Generator().manual_seed(100 * number + replica) for number in range(10)]
    batches = [torch.randn(4, width, generator=one).to(device) for one in generators]
    other = fresh()

    def average() -> None:
        if group is None:
            return
        for p in other.parameters():
            dist.all_reduce(p.grad.to_local(), dist.ReduceOp.AVG, group)  # type: ignore[union-attr]

    expected = _through(other, _looped(other, adam(other, device, same_form=True), loss, average), batches)
    model = fresh()
    step = capture(model, adam(model, device), loss, group=group)
    assert_equal_runs(_through(model, step, batches), expected, "tensor parallel")
    assert step.captured, step.reason
    step.close()


@pytest.mark.skipif(WORLD < 2, reason="needs several ranks")
@pytest.mark.parametrize("replicas", [1, 2])
def test_tensor_parallel(replicas: int) -> None:
    if WORLD // replicas < 2:
        pytest.skip("needs two ranks for each replica")
    run(_tensor_parallel, replicas, own=True)  # DTensor's caches keep meshes


# --- Transformers ---


def _hugging_face(rank: Rank, world: int, name: str) -> None:
    """Unchanged, with their dropout. A mask is left out: with one they compute otherwise during captures."""
    import transformers

    device = begin(rank, world)
    sizes = {"vocab_size": small.TOKENS, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    without = {"bos_token_id": 0, "eos_token_id": 0}
    make: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=32, **sizes, **without)),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(intermediate_size=64, max_position_embeddings=32, **sizes, **without)
        ),
        "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(intermediate_size=64, **sizes)),
    }

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        model = make[name]().train().to(device)
        seed(rank.rank)
        return model

    def loss(model: Any, batch: Any) -> Tensor:
        value: Tensor = model(input_ids=batch["inputs"], labels=batch["labels"]).loss
        return value

    batches = [batch_of("gpt2", number, rank.rank, device) for number in range(10)]
    model = fresh()
    wrapped: nn.Module = DDP(model, device_ids=[device.index]) if world > 1 else model
    seed(rank.rank)
    expected = _through(model, _looped(wrapped, adam(model, device, same_form=True), loss), batches)
    model = fresh()
    step = capture(DDP(model, device_ids=[device.index]) if world > 1 else model, adam(model, device), loss)
    seed(rank.rank)
    assert_equal_runs(_through(model, step, batches), expected, name)
    assert step.captured, step.reason
    step.close()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_hugging_faces_models(name: str, world: int) -> None:
    pytest.importorskip("transformers")
    run(_hugging_face, world, name, world=world)


# --- gradients of the batch ---


def _forces(rank: Rank, world: int, who: str, host: bool) -> None:
    """An energy's forces are gradients of the batch; loss() asks for them, or the caller's tensor does."""
    device = begin(rank, world)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)

    def loss(model: Any, x: Tensor) -> Tensor:
        if who == "loss":
            x.requires_grad_()
        energy = model(x).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        value: Tensor = energy + forces.square().sum()
        return value

    def positions(number: int, host: bool) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank.rank))
        return (x if host else x.to(device)).requires_grad_(who == "caller")

    model = fresh()
    wrapped: nn.Module = DDP(model, device_ids=[device.index]) if world > 1 else model
    loop = _looped(wrapped, adam(model, device, same_form=True), loss)
    expected = _through(model, loop, [positions(number, False) for number in range(10)])
    model = fresh()
    step = capture(model, adam(model, device), loss)
    batches = [positions(number, host) for number in range(10)]
    assert_equal_runs(_through(model, step, batches), expected, who)
    assert step.captured, step.reason
    assert all(x.grad is None for x in batches)
    step.close()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("who", ["loss", "caller"])
def test_gradients_of_the_batch(who: str, host: bool, world: int) -> None:
    run(_forces, world, who, host, world=world)


# --- parameters that are frozen for a while ---


def _unfreezes(rank: Rank, world: int, wrapped: bool) -> list[bool]:
    """The loop wraps the model anew at each change, since DDP looks at requires_grad once."""
    device = begin(rank, world)
    changes = {0: (1, False), 6: (1, True), 13: (0, False)}

    def change(model: Any, number: int) -> None:
        if number in changes:
            block, trained = changes[number]
            model.blocks[block].requires_grad_(trained)

    results, captured = [], []
    for stepped in (False, True):
        model = model_of("gpt2", device)
        change(model, 0)
        optimizer = adam(model, device, same_form=not stepped)
        subject: nn.Module = DDP(model, device_ids=[device.index]) if wrapped else model
        step = capture(subject, optimizer, small.loss, bucket_mb=0.02) if stepped else None
        losses = []
        for number in range(20):
            if number:
                change(model, number)
            batch = batch_of("gpt2", number, rank.rank, device)
            if step is not None:
                losses.append(step(batch))
                captured.append(step.captured)
                continue
            if world > 1 and number in changes:
                subject = DDP(model, device_ids=[device.index])
            losses.append(_looped(subject, optimizer, small.loss)(batch))
        results.append((torch.stack(losses).cpu(), small.weights(model)))
        if step is not None:
            step.close()
    assert_equal_runs(results[1], results[0], "unfrozen")
    return captured


@pytest.mark.parametrize("world, wrapped", [(world, wrapped) for world in WORLDS for wrapped in {False, world > 1}])
def test_unfreezing(world: int, wrapped: bool) -> None:
    replays = [False] * 3 + [True] * 3 + [False] * 3 + [True] * 4 + [False] * 3 + [True] * 4
    assert run(_unfreezes, world, wrapped, world=world) == [replays] * world


def _unfreezes_shards(rank: Rank) -> None:
    """With fully_shard, and an evaluation before each step, which leaves the root's parameters gathered."""
    from torch.distributed.fsdp import fully_shard

    device = begin(rank, WORLD)
    results = []
    for stepped in (False, True):
        model: Any = model_of("gpt2", device)
        model.blocks[0].requires_grad_(False)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = adam(model, device, same_form=not stepped)
        step = capture(model, optimizer, small.loss) if stepped else None
        loop = _looped(model, optimizer, small.loss)
        values = []
        for number in range(14):
            if number == 6:
                model.blocks[0].requires_grad_(True)
            with torch.no_grad():
                values.append(small.loss(model, batch_of("gpt2", 99, 0, device)))
            values.append((step or loop)(batch_of("gpt2", number, rank.rank, device)))
        assert step is None or step.captured, step and step.reason
        whole = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
        results.append((torch.stack(values).cpu(), whole.cpu()))
    assert_equal_runs(results[1], results[0], "fully_shard")


@pytest.mark.skipif(WORLD < 2, reason="needs several ranks")
def test_unfreezing_and_evaluations_with_fully_shard() -> None:
    run(_unfreezes_shards, own=True)  # DTensor's caches keep meshes


def _replaced(rank: Rank) -> None:
    """A buffer and the optimizer's state are other tensors: graphs of the old ones are not replayed."""
    device = begin(rank, 1)
    results = []
    for stepped in (False, True):
        model: Any = model_of("vit", device)
        optimizer = adam(model, device, same_form=not stepped)
        step = capture(model, optimizer, small.loss) if stepped else None
        loop = _looped(model, optimizer, small.loss)
        losses = []
        for number in range(16):
            if number == 6:
                model.norm.running_mean = torch.zeros_like(model.norm.running_mean)
            if number == 11:
                optimizer.state.clear()
            losses.append((step or loop)(batch_of("vit", number, 0, device)))
            assert step is None or step.captured == (number not in (0, 1, 2, 6, 11)), (number, step.reason)
        results.append((torch.stack(losses).cpu(), torch.cat([small.weights(model), model.norm.running_mean.cpu()])))
    assert_equal_runs(results[1], results[0], "replaced")


def test_tensors_that_are_replaced() -> None:
    run(_replaced, world=1)


# --- buckets ---


def _auto(rank: Rank) -> float:
    """The measurement ends, and changes no bits."""
    device = begin(rank, WORLD)
    results, mb = [], 0.0
    for bucket_mb in (50.0, "auto"):
        torch.manual_seed(0)
        model = nn.Sequential(*(m for _ in range(16) for m in (nn.Linear(1024, 1024), nn.GELU()))).to(device)
        batches = [torch.randn(16, 1024, device=device) for _ in range(40)]
        step = capture(model, adam(model, device), lambda m, x: m(x).square().mean(), bucket_mb=bucket_mb)  # type: ignore[arg-type]
        assert (step._sizing is not None) == (bucket_mb == "auto")
        sizes = step._sizing
        results.append(_through(model, step, batches))
        assert step.captured and step._sizing is None, step.reason
        if sizes is not None:
            assert sizes.done and len(sizes._taken) == 3
            mb = sizes.mb
        step.close()
    assert_equal_runs(results[1], results[0], "auto")
    return mb


@pytest.mark.skipif(WORLD < 2, reason="needs several ranks")
def test_buckets_of_a_measured_size() -> None:
    chosen = run(_auto)
    print(f"\nbuckets of {chosen[0]:g} MB")
    assert len(set(chosen)) == 1 and chosen[0] in (25.0, 50.0, 100.0)
