"""By day what a tool compiles is hardly optimised, as in tests/compile; at night as for users."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _hardly_optimised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--night"):
        monkeypatch.setenv("ARK_OPTIMISE", "1")
