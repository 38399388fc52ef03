"""Every distributed test is checked for leaks (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import pretended
from support.pretended import verbs


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> Iterator[None]:
    yield


@pytest.hookimpl(hookwrapper=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Puts tests with a pretended GPU on one worker, which waits for the compiler while the others do other work."""
    grouped = items if config.pluginmanager.hasplugin("xdist") else []
    for item in grouped:
        if isinstance(item, pytest.Function) and "pretended_gpu" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("pretended"))
    yield


@pytest.fixture(scope="session")
def pretended_gpu(shared_folder: Path) -> dict[str, str | None]:
    """Returns the environment of ranks that appear to have GPUs."""
    return pretended.build(shared_folder / "pretended")


@pytest.fixture(scope="session")
def pretended_verbs(shared_folder: Path) -> str:
    """Returns the path of a libibverbs that works without a NIC."""
    return verbs.build(shared_folder / "verbs")
