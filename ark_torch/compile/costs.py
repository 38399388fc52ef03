"""What plans reckon with: what work costs on this machine, measured by csrc/compiler/runtime/costs.hpp at the first
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
    """What a GPU's caches were measured to gain (CacheCosts of csrc/compiler/schedule/plan.hpp); what is not there
    gains nothing."""
    return {}


@functools.cache
def prepare() -> None:
    """Once a process: what measures is compiled on a thread, while the first graph is captured, which takes longer."""
    from ark_torch import _C

    # A variable that holds nothing allowed, a thread that cannot start: the region says so, or does without.
    with contextlib.suppress(ValueError, RuntimeError):
        if hasattr(_C, "plan") and are_measured():
            _jit.configure()
            threading.Thread(target=_C.plan.prepare_costs, name="ark-costs").start()
