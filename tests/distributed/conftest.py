"""Every distributed test is checked for what it leaves behind (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import pretended


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> Iterator[None]:
    yield


@pytest.fixture(scope="session")
def pretended_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The environment of ranks that are to seem to have GPUs."""
    return pretended.build(tmp_path_factory.mktemp("pretended"))
