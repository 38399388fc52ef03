"""Tests of the captured step on CPUs: they leave nothing behind, and share ranks that start once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import crew


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> Iterator[None]:
    yield


@pytest.fixture(scope="session", autouse=True)
def _crews() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # like the ranks: small models do not benefit from more
    yield
    torch.set_num_threads(threads)
    crew.finish_all()
