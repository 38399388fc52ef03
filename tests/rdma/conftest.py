"""Runs in the guest. The process that forks ranks starts its imports at once, in parallel to this one's own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.start import Zygote

# Everything that ranks need, so that no rank imports anything itself.
PRELOAD = (
    *(
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "torch.nn.parallel.distributed",
        "ark_torch",
        "ark_torch.distributed.group",
    ),
    *("test_carried", "test_rdma", "soft_roce"),
)
_starting = ThreadPoolExecutor(1).submit(Zygote, PRELOAD, 600.0) if "SOFT_ROCE" in os.environ else None


@pytest.fixture(scope="session")
def slowly() -> dict[str, Any]:
    """How jobs start on an emulated processor."""
    if _starting is None:
        pytest.fail("these tests run in the guest: make test-rdma")
    return {"zygote": _starting.result(600), "store_timeout": 300.0}
