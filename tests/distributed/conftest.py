"""Every distributed test is checked for what it leaves behind (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> Iterator[None]:
    yield
