"""Tests of the captured step on CPUs: nothing is left behind, and ranks are started once for all that need them."""

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
    torch.set_num_threads(1)  # as the ranks have: small models gain nothing from more
    yield
    torch.set_num_threads(threads)
    crew.finish_all()
