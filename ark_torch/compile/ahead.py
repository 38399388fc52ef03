"""A whole graph compiled ahead of time: what AOTAutograd saves and loads in place of Inductor's code.

torch.compile(...).aot_compile saves what a backend's compiler returns if it is an OutputCode, and so does AOTAutograd's
cache (autograd_cache.py). This is one; AOTAutograd pickles it with its own wrappers (mutation, aliases), so this only
needs the regions and how a call passes them (program.py). torch._inductor is imported with this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch._inductor.output_code import OutputCode

from ark_torch.compile import saved, tinygemm
from ark_torch.compile.program import Boxed, Program, link
from ark_torch.compile.report import log
from ark_torch.compile.saved import SavedRegion
from ark_torch.errors import CompileError


@dataclass
class Opened:
    """A look into AOTAutograd's cache for a graph of this title, and what was there."""

    title: str
    found: AheadOfTime | None = None


_opened: ContextVar[Opened | None] = ContextVar("_opened", default=None)


@contextlib.contextmanager
def loading(title: str) -> Iterator[Opened]:
    """Within it, on this thread, what AOTAutograd loads comes from its cache."""
    now = Opened(title)
    before = _opened.set(now)
    try:
        yield now
    finally:
        _opened.reset(before)


class AheadOfTime(OutputCode):
    """Regions and how they are joined; `run` is made anew where it is loaded."""

    def __init__(self, program: Program, regions: list[SavedRegion], run: Boxed | None) -> None:
        super().__init__()
        self._boxed_call = True  # AOTAutograd copies the object's attributes, not those of its class
        self.program, self.regions, self.run = program, regions, run
        # What Captured found out while it traced the graph.
        self.certain, self.is_open, self.written = "", False, list[int]()

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.run is not None, "post_compile() was not called"
        return self.run(list(inputs))

    def prepare_for_serialization(self) -> None:
        self.run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        if self.run is not None:
            return
        opened = _opened.get()
        regions = [region.load() if opened is None else _taken(region, opened.title) for region in self.regions]
        runs = [tinygemm.around(run, of.unpacked) for run, of in zip(regions, self.regions, strict=True)]
        self.run = link(self.program, runs)
        if opened is not None:
            opened.found, self.regions = self, []  # PyTorch has another copy of what it may save again

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are no Triton kernels."""


def _taken(region: SavedRegion, title: str) -> Any:
    """A region of AOTAutograd's cache. A damaged one is compiled."""
    name = f"ark::{title} {region.name.rpartition(' ')[2]}"
    try:
        made = region.load(name)
    except CompileError as error:
        log.warning("%s: a region in AOTAutograd's cache is compiled anew: %s", title, error)
        return region.load(name, kernel=False)
    told = saved.Told()
    told.calls = region.calls
    saved.record(saved.key_of(told, region.options), region)
    return made


def callable_of(captured: Callable[..., Any]) -> Any:
    """AOTAutograd's function, in the form that PyTorch saves."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    return BundledAOTAutogradSerializableCallable(captured)
