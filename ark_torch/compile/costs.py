"""The costs that plans are based on: measured on this machine by csrc/compiler/runtime/costs.hpp at the first
region."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

from ark_torch import _jit, env


def are_measured() -> bool:
    return env.read().costs == "measured"


def of_caches() -> dict[str, Any]:
    """The measured gains of a GPU's cache policies (CacheCosts of csrc/compiler/schedule/plan.hpp); absent ones gain
    nothing."""
    return {}


@functools.cache
def prepare() -> None:
    """Compiles the measurement on a thread, once per process, while the first graph is captured, which takes longer."""
    from ark_torch import _C

    # An invalid variable or a thread that cannot start: the region reports it, or does without.
    with contextlib.suppress(ValueError, RuntimeError):
        if hasattr(_C, "plan") and are_measured():
            _jit.configure()
            threading.Thread(target=_C.plan.prepare_costs, name="ark-costs").start()
