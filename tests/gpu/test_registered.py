"""Registered memory: tensors of the shareable pool, mapped by all ranks and used in place, with unchanged bits.

`_EARLY` uses the in-place path from small sizes on, to test every operation at many sizes. The measured table uses it
from the sizes at which it is faster.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_gpu import WORLD, device_of, resources, run, same, start
from support.rank import Rank
from torch import nn

import ark_torch
from ark_torch.distributed import deregister, register
from ark_torch.distributed.group import complete
from ark_torch.memory import allocator, pool

MB = 1 << 20
_EARLY = [(8, {"one_shot_to": 0, "landings_from": 1024, "copy_engine_from": (1 << 63) - 1})]


def _begin(rank: Rank, early: bool) -> tuple[torch.device, Any]:
    device = device_of(rank)
    torch.cuda.set_device(device)
    options = complete(ark_torch.Options())
    if early:
        options.cuda_dispatch = _EARLY
    rank.init(pg_options=options)
    return device, dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]


def _pooled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.cuda.use_mem_pool(pool(device)):
        return torch.empty(count, dtype=dtype, device=device)


def _values(count: int, dtype: torch.dtype, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(count, generator=generator).to(dtype)


def _every_operation(
    out: torch.Tensor, source: torch.Tensor, rank: Rank, what: str, captured: bool = False, but: Sequence[str] = ()
) -> None:
    """`out` and `source` have world * n elements each and are overwritten. `but` names operations to skip."""
    world, n = rank.world_size, out.numel() // rank.world_size
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "all_reduce": lambda o, s: dist.all_reduce(o),
        "all_gather": lambda o, s: dist.all_gather_into_tensor(o, s[:n]),
        "reduce_scatter": lambda o, s: dist.reduce_scatter_tensor(o[:n], s),
        "all_to_all": dist.all_to_all_single,
        "broadcast": lambda o, s: dist.broadcast(o, world - 1),
        "reduce": lambda o, s: dist.reduce(o, world - 1),
        "gather": lambda o, s: dist.gather(s[:n], list(o.chunk(world)) if rank.rank == 0 else None),
    }
    for seed, (name, call) in enumerate(calls.items()):
        if name in but:
            continue
        outs, sources = (_values(out.numel(), out.dtype, rank.rank, seed + k) for k in (0, 50))
        source.copy_(sources)
        if captured:
            graph = torch.cuda.CUDAGraph()
            out.copy_(outs)
            torch.cuda.synchronize()
            dist.barrier()
            with torch.cuda.graph(graph):
                call(out, source)
            for _ in range(2):
                out.copy_(outs)
                graph.replay()
            torch.cuda.synchronize()
        else:
            out.copy_(outs)
            call(out, source)
        call(outs, sources)
        # reduce defines its result only on the destination.
        if name != "reduce" or rank.rank == world - 1:
            same(out, outs, f"{name}, {what}, {out.numel()} of {out.dtype}")
        dist.barrier()


def _operations(rank: Rank, early: bool) -> None:
    device, backend = _begin(rank, early)
    world = rank.world_size
    counts = (
        (world * 700, world * 33333, world * (3 * MB // 2 + 8)) if early else (world * (33 if world <= 2 else 7) * MB,)
    )
    dtype = torch.bfloat16
    most = max(counts) + 4096
    mine, other = (_pooled(most, dtype, device) for _ in range(2))
    assert register(mine) and register(other)
    assert backend.cuda_carrier == "ark" and backend.cuda_registered_bytes == 4 * most
    plain = torch.empty(most, dtype=dtype, device=device)
    for count in counts:
        for offset in (0, 24 + 8 * rank.rank, 3) if early else (8,):  # the same offset, another on each rank, unaligned
            _every_operation(mine[offset : offset + count], other[offset : offset + count], rank, f"at {offset}")
        mixed = mine if rank.rank % 2 == 0 else plain
        # The measured table uses copy engines for these two at this size, and they refuse mixed memory:
        # test_copy_engines.py.
        large = () if early else ("all_reduce", "all_gather")
        _every_operation(mixed[:count], other[:count], rank, "some ranks' out is registered", but=large)
        _every_operation(mine[:count], mine[:count].clone(), rank, "in a graph", captured=True)
        if not early:
            continue
        _every_operation(plain[:count], other[:count], rank, "the source is registered")
        _every_operation(mine[:count], plain[:count], rank, "out is registered")
        swapped = (mine, other) if rank.rank % 2 == 0 else (other, mine)
        _every_operation(swapped[0][:count], swapped[1][:count], rank, "of different registrations")
    deregister(mine)
    _every_operation(mine[: counts[0]], other[: counts[0]], rank, "out is registered no more")
    deregister(other)
    assert backend.cuda_registered_bytes == 0
    _every_operation(mine[: counts[-1]], other[: counts[-1]], rank, "nothing is registered any more")


@pytest.mark.parametrize("early", [True, False], ids=["early", "measured"])
def test_every_operation_in_place(early: bool) -> None:
    run(_operations, early, own=True)


def _dtypes(rank: Rank) -> None:
    device, _ = _begin(rank, True)
    memory = _pooled(8 * MB, torch.uint8, device)
    register(memory)
    for dtype, op in (
        (torch.float32, dist.ReduceOp.SUM),
        (torch.float16, dist.ReduceOp.AVG),
        (torch.float64, dist.ReduceOp.MAX),
        (torch.int64, dist.ReduceOp.SUM),
        (torch.int8, dist.ReduceOp.BXOR),
    ):
        for count in (4097, 100003):
            values = (100 * _values(count, torch.float64, rank.rank, count)).to(dtype)
            tensor = memory[16 : 16 + count * values.element_size()].view(dtype)
            tensor.copy_(values)
            dist.all_reduce(tensor, op)
            dist.all_reduce(values, op)
            same(tensor, values, f"{dtype} {op} {count}")


def test_dtypes() -> None:
    run(_dtypes, own=True)


def _raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=text):
        call()


def _errors(rank: Rank) -> None:
    device = start(rank)
    last = rank.world_size - 1
    good = _pooled(1000, torch.float32, device)

    def one(bad: Any) -> Any:  # only the last rank's argument is bad; all get the error
        return bad if rank.rank == last else good

    told = f"rank {last}.*"
    _raises(ValueError, told + "is on cpu.*ark_torch.memory.pool", lambda: register(one(torch.ones(1000))))
    _raises(ValueError, told + "not from ark_torch.memory.pool", lambda: register(one(torch.ones(1000, device=device))))
    _raises(ValueError, told + "not contiguous", lambda: register(one(good.view(10, 100).t())))
    _raises(ValueError, told + "empty", lambda: register(one(good[:0])))
    _raises(TypeError, told + "not a tensor", lambda: register(one([1.0])))
    if rank.world_size > 1:
        _raises(dist.DistBackendError, f"4000 bytes.*rank {last} gave 3996", lambda: register(one(good[1:])))
    _raises(ValueError, "not registered with this group", lambda: deregister(good))
    graph, sink = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
    with torch.cuda.graph(graph):
        sink += 1
        _raises(ValueError, "graph is being captured", lambda: register(good))
    graph.replay()
    assert sink.item() == 1  # the capture survived
    if rank.world_size > 1:
        some = dist.new_group([0])
        if rank.rank == 0:
            assert register(good, some)  # several groups may map the same memory
            deregister(good, some)
        else:
            _raises(ValueError, "not a member", lambda: register(good, some))
    assert register(good)
    good.fill_(rank.rank + 1)
    dist.all_reduce(good)
    assert good.unique().tolist() == [sum(range(1, rank.world_size + 1))]
    deregister(good)


def test_errors_on_every_rank_alike() -> None:
    run(_errors)


def _out_of_memory(rank: Rank) -> None:
    device = start(rank)
    total = torch.cuda.get_device_properties(device).total_memory
    with torch.cuda.use_mem_pool(pool()), pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + (1 << 30), dtype=torch.uint8, device=device)
    assert pool() is pool(device) is pool(device.index) is pool(str(device))
    assert register(_pooled(1000, torch.float32, device))


def test_too_large_a_tensor_is_pytorchs_error() -> None:
    run(_out_of_memory)


def _flat(rank: Rank) -> None:
    device = start(rank)
    tensor = torch.ones(MB, device=device)
    dist.all_reduce(tensor)
    seen = []
    for step in range(1, 101):
        own = torch.cuda.MemPool(allocator())
        with torch.cuda.use_mem_pool(own):
            registered = [torch.empty(20 * MB, dtype=torch.uint8, device=device) for _ in range(2)]
        for one in registered:
            assert register(one)
        if step % 3 == 0:
            whole = registered[0].view(torch.float32)
            whole.fill_(1)
            dist.all_reduce(whole)
            del whole
        if step % 5 == 0:  # a registration in another group ends with that group
            group = dist.new_group()
            assert register(registered[0], group)
            dist.destroy_process_group(group)
            del group
        for one in registered:
            deregister(one)
        del one, registered, own
        if step in (20, 60, 100):
            dist.barrier()
            seen.append(resources())
            dist.barrier()
    first, *later = seen
    for held in later:
        assert abs(held["device"] - first["device"]) < 8 * MB, seen
        assert held["descriptors"] <= first["descriptors"] + 1, seen
        assert held["mappings"] <= first["mappings"] + 20, seen


@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_a_hundred_registrations_leave_nothing() -> None:
    run(_flat, own=True)


def _freed(rank: Rank) -> None:
    """Memory freed while registered stays the group's until its end. No other memory takes its place."""
    device, backend = _begin(rank, True)
    own = torch.cuda.MemPool(allocator())
    with torch.cuda.use_mem_pool(own):
        tensor = torch.empty(20 * MB, dtype=torch.uint8, device=device)
    at = tensor.data_ptr()
    assert register(tensor)
    del tensor, own
    assert backend.cuda_registered_bytes == 20 * MB
    later = [torch.empty(20 * MB, dtype=torch.uint8, device=device) for _ in range(8)]
    later.append(_pooled(20 * MB, torch.uint8, device))
    for one in later:
        assert not (at <= one.data_ptr() < at + 20 * MB)
        one.fill_(rank.rank)
        dist.all_reduce(one)
        assert one.unique().tolist() == [sum(range(rank.world_size))]
    del later, one
    before = resources()["device"]
    dist.destroy_process_group()
    until = time.monotonic() + 10  # the peers map it too
    while resources()["device"] > before - 20 * MB:
        assert time.monotonic() < until, (before, resources())
        time.sleep(0.01)


@pytest.mark.nightly
@pytest.mark.alone
def test_memory_that_goes_while_it_is_registered() -> None:
    run(_freed, own=True)


def _allocation(rank: Rank) -> None:
    device, backend = _begin(rank, True)
    assert backend.supports_tensor_alloc(device)
    tensor = backend.allocate_tensor(3 * MB, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert tensor.shape == (3 * MB,) and tensor.dtype is torch.bfloat16 and tensor.device == device
    if rank.rank == 0:  # not a collective
        backend.allocate_tensor(5, dtype=torch.float32, device=device)
    assert register(tensor)
    deregister(tensor)
    own = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(own):
        tensors = [torch.empty(3 * MB, dtype=torch.float32, device=device) for _ in range(3)]
    backend.register_mem_pool(own)
    first = backend.cuda_registered_bytes
    assert first >= 36 * MB
    with torch.cuda.use_mem_pool(own):
        tensors += [torch.empty(12 * MB, dtype=torch.float32, device=device)]
    backend.register_mem_pool(own)  # only what has been added
    assert backend.cuda_registered_bytes >= first + 48 * MB
    for seed, one in enumerate(tensors):
        values = _values(one.numel(), one.dtype, rank.rank, seed)
        one.copy_(values)
        dist.all_reduce(one)
        dist.all_reduce(values)
        same(one, values, f"tensor {seed} of a registered pool")
    backend.deregister_mem_pool(own)
    assert backend.cuda_registered_bytes == 0
    _raises(ValueError, "the pool is not registered", lambda: backend.deregister_mem_pool(own))
    foreign = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(foreign):
        keep = torch.empty(MB, device=device)
    _raises(ValueError, "mem_allocator", lambda: backend.register_mem_pool(foreign))
    del keep


def test_allocation_and_pools_as_with_nccl() -> None:
    run(_allocation, own=True)


def _fsdp2(rank: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    device, backend = _begin(rank, True)
    mesh = init_device_mesh("cuda", (rank.world_size,))
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).to(device)

    def train(allocate: bool) -> torch.Tensor:
        model = copy.deepcopy(plain)
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if allocate and isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            batch = torch.randn(32, 512, generator=torch.Generator().manual_seed(1000 * step + rank.rank)).to(device)
            model(batch).square().mean().backward()
            optimizer.step()
            if allocate and step == 1:
                backend.register_mem_pool(pool())  # what FSDP has allocated by now
                assert backend.cuda_registered_bytes >= 512 * 512 * 4
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])  # type: ignore[attr-defined]

    same(train(True), train(False).cpu(), "parameters with and without allocation by the group")


def test_fsdp2_with_memory_from_the_group() -> None:
    assert WORLD >= 2
    run(_fsdp2, own=True, world=min(WORLD, 2))
