"""The number of workers of a loop kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ark_torch.compile import workers

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


def test_threads_of_the_cpu() -> None:
    assert workers.count(None, CPU) == torch.get_num_threads()
    assert workers.count(3, CPU) == 3


@pytest.mark.usefixtures("ranks")
def test_a_gpu_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARK_SHARE_GPU", raising=False)
    assert workers.count(None, GPU) == workers.count(3, GPU) == 0


@pytest.mark.usefixtures("ranks")
def test_ranks_that_share_a_gpu_have_a_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_SHARE_GPU", "1")
    assert workers.count(None, GPU) == 66, "three ranks on two GPUs: two on one of them"
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert workers.count(None, GPU) == 0
