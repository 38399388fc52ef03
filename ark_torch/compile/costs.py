"""The costs that plans are based on, measured on this machine: a CPU's by csrc/compiler/runtime/costs.hpp at the first
region, a GPU's by `ark tune --costs` (tools/_tune_costs.py), kept in the cache folder."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ark_torch import _cost_files, _jit, env

if TYPE_CHECKING:
    from ark_torch.compile.ir import LoweredGraph


def are_measured() -> bool:
    return env.read().costs == "measured"


_instead: list[_cost_files.Record] = []


@contextlib.contextmanager
def instead(record: _cost_files.Record) -> Iterator[None]:
    """Within it all of the process's plans for GPUs have these figures: for measurements that compare plans."""
    _instead.append(record)
    try:
        yield
    finally:
        _instead.pop()


@functools.cache
def _kept(cache: str, device: int) -> _cost_files.Record:
    """Once per process, so that all of a program's plans have the same figures."""
    try:
        properties = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError):  # the region says what is wrong with the device
        return _cost_files.Record()
    found = _cost_files.recall(properties.name, properties.multi_processor_count)
    return _cost_files.Record() if found is None else found


def of_gpu(device: int, graph: LoweredGraph | None = None) -> _cost_files.Record:
    """What was measured on this GPU; without any figures: plans take the built-in ones. So do graphs with collectives
    of several machines, each of which has a cache folder of its own: ranks must plan alike."""
    if _instead:
        return _instead[-1]
    settings = env.read()
    if settings.costs != "measured" or (graph is not None and _over_nodes(graph)):
        return _cost_files.Record()
    return _kept(settings.cache or "", device)


def _over_nodes(graph: LoweredGraph) -> bool:
    return any(node.attributes.get("nodes", 1) != 1 for node in graph.nodes)


def of_caches(record: _cost_files.Record) -> dict[str, Any]:
    """The measured gains of a GPU's cache policies (CacheCosts of csrc/compiler/schedule/plan.hpp); absent ones gain
    nothing."""
    return dict(record.caches)


@functools.cache
def prepare() -> None:
    """Compiles the measurement of the CPU on a thread, once per process, while the first graph is captured, which takes
    longer."""
    from ark_torch import _C

    # An invalid variable or a thread that cannot start: the region reports it, or does without.
    with contextlib.suppress(ValueError, RuntimeError):
        if hasattr(_C, "plan") and are_measured():
            _jit.configure()
            threading.Thread(target=_C.plan.prepare_costs, name="ark-costs").start()
