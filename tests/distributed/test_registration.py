"""Registering memory where there is no GPU: what is refused, on every rank in the same words, and what does no harm.

That registered memory works is shown by tests/csrc/collectives/registration_test.cpp (on a pretended driver) and
tests/gpu/test_registered.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import BACKEND, Job, run_ranks
from support.rank import Rank

import ark_torch
from ark_torch.distributed import deregister, register

pytestmark = [pytest.mark.quick, pytest.mark.skipif(BACKEND != "ark", reason="checks what ark's messages say")]


def _told(call: Callable[[], Any]) -> str:
    try:
        return f"no error, {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _refused(rank: Rank) -> list[str]:
    rank.init()
    others = torch.ones(3)  # wrong as well: the first rank's fault is told
    told = [
        _told(lambda: register(others if rank.rank else torch.ones(2))),
        _told(lambda: register(others if rank.rank else None)),  # type: ignore[arg-type]
        _told(lambda: register(others if rank.rank else torch.eye(3).to_sparse())),
        _told(lambda: deregister(others)),
        _told(lambda: register(others) if rank.rank else deregister(others)),
    ]
    tensor = torch.ones(4)
    dist.all_reduce(tensor)  # the group is as good as before
    assert tensor.tolist() == [rank.world_size] * 4
    return told


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


def _no_second_try(rank: Rank) -> tuple[str, str, float] | None:
    rank.init(timeout=2)
    if rank.rank == 1:
        time.sleep(4)
        return None
    begun = time.monotonic()
    return _told(lambda: register(torch.ones(2))), _told(lambda: register(torch.ones(2))), time.monotonic() - begun


def test_a_rank_that_does_not_register_is_named() -> None:
    first = run_ranks(_no_second_try, 2)[0]
    assert first is not None
    for line in first[:2]:
        assert "DistBackendError: ark: [rank 0] register: " in line and "rank 1" in line, line
    assert 2 <= first[2] < 7, first


def _elsewhere(rank: Rank) -> list[str]:
    """Groups that are not ark's to register with."""
    rank.init()
    tensor = torch.ones(2)
    told = [_told(lambda: register(tensor))]
    half = dist.new_group([0])
    told.append(_told(lambda: register(tensor, half)))
    own = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    if hasattr(own, "register_mem_pool"):
        told.append(f"{own.cuda_registered_bytes} {own.supports_tensor_alloc(torch.device('cuda'))}")
        told.append(_told(lambda: own.allocate_tensor(2, dtype=torch.float32, device=torch.device("cpu"))))
    return told


def test_a_rank_that_is_no_member() -> None:
    told = run_ranks(_elsewhere, 2)[1]
    assert "not a member" in told[1], told
    assert told[2] == "0 False"
    assert told[3].startswith("ValueError: ark: [rank 1] allocate_tensor: device is cpu."), told


def test_without_ark_nothing_is_done() -> None:
    """ARK_DISABLE is for finding out whether it is ark: the program goes on."""
    with Job(_elsewhere, 2, env={"ARK_DISABLE": "1"}) as job:
        for told in job.values(60):
            assert told[0] == "no error, False", told


def test_groups_that_gloo_carries_check_their_arguments() -> None:
    for told in run_ranks(_elsewhere, 2, env={"ARK_SHARED_MEMORY": "off"}):
        assert "register: tensor is on cpu" in told[0], told


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_pool_needs_cuda() -> None:
    for device in (None, 0, "cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(RuntimeError, match=r"needs CUDA.*machines with GPUs only"):
            ark_torch.memory.pool(device)
    with pytest.raises(ValueError, match="device is cpu"):
        ark_torch.memory.pool("cpu")
