"""Memory registration without a GPU: what is refused with the same error on every rank, and what has no effect.

Then on a pretended device with real memory: from the Python call to the mappings. registration_test.cpp
(tests/csrc/collectives/cuda) shows what peers see there, and tests/gpu/test_registered.py that collectives use it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import pretended
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank

import ark_torch
from ark_torch.distributed import deregister, register

pytestmark = [pytest.mark.skipif(BACKEND != "ark", reason="checks what ark's messages say")]


def _told(call: Callable[[], Any]) -> str:
    try:
        return f"no error, {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _refused(rank: Rank) -> list[str]:
    rank.init()
    others = torch.ones(3)  # wrong as well: the first rank's error is reported
    told = [
        _told(lambda: register(others if rank.rank else torch.ones(2))),
        _told(lambda: register(others if rank.rank else None)),  # type: ignore[arg-type]
        _told(lambda: register(others if rank.rank else torch.eye(3).to_sparse())),
        _told(lambda: deregister(others)),
        _told(lambda: register(others) if rank.rank else deregister(others)),
    ]
    tensor = torch.ones(4)
    dist.all_reduce(tensor)  # the group still works
    assert tensor.tolist() == [rank.world_size] * 4
    return told


@pytest.mark.quick
def test_what_is_no_gpu_memory_is_refused_on_all_ranks_alike() -> None:
    expected = [
        (
            "ValueError",
            "register: ",
            "tensor is on cpu; registered memory is GPU memory. Allocate it there: with torch",
        ),
        ("TypeError", "register: ", "tensor is not a tensor. Pass a CUDA tensor."),
        ("TypeError", "register: ", "tensor has layout torch.Sparse"),
        ("ValueError", "deregister: ", "tensor is on cpu"),
        ("ValueError", "register: ", "tensor is on cpu"),
    ]
    for rank, told in enumerate(run_ranks(_refused, 3)):
        for line, (kind, call, text) in zip(told, expected, strict=True):
            at = f"ark: [rank {rank}] "
            assert line.startswith(f"{kind}: {at}") and call in line, line
            assert ("rank 0: " if rank else "") + text in line, line


def _no_second_try(rank: Rank, met: bool) -> tuple[str, str, str, float] | None:
    rank.init(timeout=2)
    tensor = torch.ones(2)
    if met:
        assert "is on cpu" in _told(lambda: register(tensor))
    if rank.rank == 1:
        time.sleep(4)
        return None
    begun = time.monotonic()
    first, second = _told(lambda: register(tensor)), _told(lambda: register(tensor))
    took = time.monotonic() - begun
    return first, second, _told(lambda: dist.all_reduce(tensor)) if met else "", took


@pytest.mark.by_day("False")
@pytest.mark.parametrize("met", [False, True])
def test_a_rank_that_does_not_register_is_named(met: bool) -> None:
    told = run_ranks(_no_second_try, 2, met)[0]
    assert told is not None
    first, second, then, took = told
    assert first.startswith("DistBackendError: ark: [rank 0] register: ") and "rank 1" in first, told
    assert second.startswith("DistBackendError: ark: [rank 0] register: "), told
    assert not met or "register" in then, told  # the group has failed
    assert 2 <= took < 7, told


def _elsewhere(rank: Rank) -> list[str]:
    """Groups with which ark cannot register."""
    rank.init()
    tensor = torch.ones(2)
    told = [_told(lambda: register(tensor))]
    half = dist.new_group([0])
    told.append(_told(lambda: register(tensor, half)))
    own = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    if hasattr(own, "register_mem_pool"):
        told.append(f"{own.cuda_registered_bytes} {own.supports_tensor_alloc(torch.device('cuda'))}")
        told.append(_told(lambda: own.allocate_tensor(2, dtype=torch.float32, device=torch.device("cpu"))))
    dist.barrier()  # who leaves early ends the connections that the other's Gloo is still making
    return told


@pytest.mark.quick
def test_a_rank_that_is_no_member() -> None:
    told = run_ranks(_elsewhere, 2)[1]
    assert "not a member" in told[1], told
    assert told[2] == "0 False"
    assert told[3].startswith("ValueError: ark: [rank 1] allocate_tensor: device is cpu."), told


@pytest.mark.quick
def test_without_ark_nothing_is_done() -> None:
    """ARK_DISABLE is for debugging, so the program continues."""
    with Job(_elsewhere, 2, env={"ARK_DISABLE": "1"}) as job:
        for told in job.values(60):
            assert told[0] == "no error, False", told


@pytest.mark.quick
def test_groups_that_gloo_carries_check_their_arguments() -> None:
    for told in run_ranks(_elsewhere, 2, env={"ARK_SHARED_MEMORY": "off"}):
        assert "register: tensor is on cpu" in told[0], told


@pytest.mark.quick
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_pool_needs_cuda() -> None:
    for device in (None, 0, "cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(RuntimeError, match=r"needs CUDA.*machines with GPUs only"):
            ark_torch.memory.pool(device)
    with pytest.raises(ValueError, match="device is cpu"):
        ark_torch.memory.pool("cpu")


class Pool:
    """Memory as PyTorch would allocate it, by the extension's functions."""

    def __init__(self, rank: int) -> None:
        from ark_torch import _C

        self._rank, self._library = rank, ctypes.CDLL(_C.__file__)
        self._library.ark_pool_alloc.restype = ctypes.c_void_p
        self._library.ark_pool_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._library.ark_pool_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def take(self, size: int) -> int:
        address = self._library.ark_pool_alloc(size, self._rank, None)
        assert isinstance(address, int)
        return address

    def free(self, address: int, size: int) -> None:
        self._library.ark_pool_free(address, size, self._rank, None)

    def tensor(self, address: int, size: int, rank: int | None = None) -> torch.Tensor:
        host = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        return pretended.on(self._rank if rank is None else rank, host)


def _start(rank: Rank) -> tuple[Pool, Any]:
    pretended.enter()
    pretended.device.set_device(rank.rank)
    rank.init()
    return Pool(rank.rank), dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]


def _on_the_host(rank: Rank) -> None:
    memory, backend = _start(rank)
    dist.all_reduce(pretended.on(rank.rank, torch.ones(8)))
    assert backend.cuda_carrier == "ark"
    assert not register(memory.tensor(memory.take(20 * MB), 20 * MB)), "peers cannot map it"
    assert backend.cuda_registered_bytes == 0


def test_nothing_is_registered_where_ranks_share_memory_of_the_host(pretended_gpu: Any) -> None:
    run_ranks(_on_the_host, 2, env={**pretended_gpu, "ARK_DISABLE_P2P": "1"})


def _held() -> tuple[int, int]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return len(os.listdir("/proc/self/fd")), sum("memfd:pretended" in line for line in maps)


MB = 1 << 20


def _tensors(rank: Rank) -> list[str]:
    memory, backend = _start(rank)
    at = memory.take(20 * MB)
    whole, plain = memory.tensor(at, 20 * MB), pretended.on(rank.rank, torch.ones(8))
    last = rank.rank == rank.world_size - 1
    told = [
        _told(lambda: register(plain if last else whole)),
        _told(lambda: register(memory.tensor(at, 8 * MB - rank.rank))),
    ]
    assert backend.cuda_registered_bytes == 0
    assert register(whole) and backend.cuda_carrier == "ark" and backend.cuda_registered_bytes == 20 * MB
    told.append(_told(lambda: register(memory.tensor(at, 64, rank=0 if last else rank.rank))))  # another rank's device
    half = memory.tensor(at + MB * rank.rank, 10 * MB)
    assert register(half) and backend.cuda_registered_bytes == 20 * MB
    deregister(whole)
    assert backend.cuda_registered_bytes == 10 * MB
    told.append(_told(lambda: deregister(whole)))
    pretended.driver.pretend_capture(7 if last else 0)
    told.append(_told(lambda: register(whole)))
    pretended.driver.pretend_capture(0)
    deregister(half)
    before = _held()
    for _ in range(30):
        register(whole)
        register(half)
        deregister(whole)
        deregister(half)
    assert _held() == before
    register(half)
    memory.free(at, 20 * MB)  # the group still holds it
    dist.all_reduce(half)
    assert backend.cuda_registered_bytes == 10 * MB
    told.append(_told(lambda: register(half)))
    deregister(half)
    assert _held() == (before[0] - 1, before[1] - 1)
    return told


def test_registration_from_end_to_end(pretended_gpu: Any) -> None:
    expected = (
        ("ValueError", "rank 2: ", "tensor is not from ark_torch.memory.pool()"),
        ("DistBackendError", "", "rank 0 gave 8388608 bytes, rank 1 gave 8388607 bytes"),
        ("ValueError", "rank 2: ", "the tensor is on cuda:0, but"),
        ("ValueError", "rank 0: ", "the tensor is not registered with this group"),
        ("ValueError", "rank 2: ", "a graph is being captured"),
        ("ValueError", "rank 0: ", "tensor is not from ark_torch.memory.pool()"),
    )
    for rank, told in enumerate(run_ranks(_tensors, 3, env=pretended_gpu)):
        for line, (kind, whose, text) in zip(told, expected, strict=True):
            named = "" if whose == f"rank {rank}: " else whose
            assert line.startswith(f"{kind}: ark: [rank {rank}] ") and f": {named}{text}" in line, line


def _pools(rank: Rank) -> list[str]:
    memory, backend = _start(rank)
    device = torch.device("cuda", rank.rank)
    sizes = [2 * MB, 20 * MB, 2 * MB]
    segments = [(memory.take(size), size) for size in sizes]
    in_any_order = segments[rank.rank :] + segments[: rank.rank]  # as if sorted by address
    assert backend._register_pool((7, 1), device, in_any_order[:2] if rank.world_size == 1 else in_any_order)
    assert backend.cuda_registered_bytes == 24 * MB
    segments.append((memory.take(4 * MB), 4 * MB))
    assert backend._register_pool((7, 1), device, segments)  # only what is new
    assert backend.cuda_registered_bytes == 28 * MB
    told = [
        _told(lambda: backend._register_pool((7, 2), device, segments[: 1 + rank.rank])),
        _told(lambda: backend._register_pool((7, 3), device, [(1 << 20, 64)] if rank.rank else segments[:1])),
        _told(lambda: backend._deregister_pool((7, 9 if rank.rank else 1))),
    ]
    backend._deregister_pool((7, 1))
    assert backend.cuda_registered_bytes == 0
    return told


def test_pools_from_end_to_end(pretended_gpu: Any) -> None:
    for told in run_ranks(_pools, 2, env=pretended_gpu):
        assert "rank 0 gave 1 segments, rank 1 gave 2 segments" in told[0], told
        assert "of an allocator that cannot share it" in told[1], told
        assert "the pool is not registered with this group" in told[2], told


def _carried(rank: Rank) -> tuple[bool, bool, int]:
    from ark_torch.distributed import group as making

    memory, backend = _start(rank)
    pretended.driver.pretend_reach(0)
    making._make_cuda_carrier = pretended.Carriers([dist.group.WORLD])  # type: ignore[list-item]
    group = dist.new_group()
    tensor = memory.tensor(memory.take(2 * MB), 2 * MB)
    first, second = register(tensor, group), register(tensor, group)
    deregister(tensor, group)
    return first, second, int(backend.cuda_registered_bytes)


def test_where_another_carries_nothing_is_registered(pretended_gpu: Any) -> None:
    assert run_ranks(_carried, 2, env={**pretended_gpu, "ARK_DISABLE_P2P": "0"}) == [(False, False, 0)] * 2
