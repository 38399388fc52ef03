"""In the guest: the process that forks ranks begins its imports at once, beside this one's own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.start import Zygote

# All that ranks need, so that none imports anything itself.
PRELOAD = (
    *("torch", "torch.distributed", "torch.nn.parallel.distributed", "ark_torch", "ark_torch.distributed.group"),
    *("test_carried", "test_rdma", "soft_roce"),
)
_starting = ThreadPoolExecutor(1).submit(Zygote, PRELOAD, 600.0) if "SOFT_ROCE" in os.environ else None


@pytest.fixture(scope="session")
def slowly() -> dict[str, Any]:
    """How jobs are started where the processor is one in software."""
    if _starting is None:
        pytest.fail("these tests run in the guest: make test-rdma")
    return {"zygote": _starting.result(600), "store_timeout": 300.0}
