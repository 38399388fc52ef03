"""Small helpers for tests of process groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.launcher import BACKEND

ark_only = pytest.mark.skipif(BACKEND != "ark", reason="what only ark promises")


def backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cpu"))


def total(group: Any, value: float) -> float:
    tensor = torch.full((3,), value)
    dist.all_reduce(tensor, group=group)
    assert tensor.unique().numel() == 1
    return tensor[0].item()
