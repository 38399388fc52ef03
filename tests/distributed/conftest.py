"""Every distributed test is checked for what it leaves behind (see tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import pretended
from support.pretended import verbs


@pytest.fixture(autouse=True)
def _clean(leaves_nothing: None) -> Iterator[None]:
    yield


@pytest.hookimpl(hookwrapper=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """One worker waits for the compiler; the others have something else to do."""
    grouped = items if config.pluginmanager.hasplugin("xdist") else []
    for item in grouped:
        if isinstance(item, pytest.Function) and "pretended_gpu" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("pretended"))
    yield


@pytest.fixture(scope="session")
def pretended_gpu(shared_folder: Path) -> dict[str, str | None]:
    """The environment of ranks that are to seem to have GPUs."""
    return pretended.build(shared_folder / "pretended")


@pytest.fixture(scope="session")
def pretended_verbs(shared_folder: Path) -> str:
    """The path of a libibverbs without a NIC."""
    return verbs.build(shared_folder / "verbs")
