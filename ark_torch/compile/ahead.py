"""A whole graph compiled ahead of time: what AOTAutograd saves and loads in place of Inductor's code.

torch.compile(...).aot_compile saves what a backend's compiler returns if it is an OutputCode, and so does AOTAutograd's
cache (autograd_cache.py). This is one; AOTAutograd pickles it with its own wrappers (mutation, aliases), so this only
needs the regions and how a call passes them (program.py). torch._inductor is imported with this file, so it is imported only when a graph is saved or loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.output_code import OutputCode

from ark_torch.compile.program import Boxed, Program, link
from ark_torch.compile.saved import SavedRegion


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
        if self.run is None:
            self.run = link(self.program, [region.load() for region in self.regions])
            loaded.append(self)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are no Triton kernels."""


loaded: list[AheadOfTime] = []  # since it was cleared


class NotKept(OutputCode):
    """A graph's function in the form that AOTAutograd's cache takes; it cannot be pickled, and so is not kept."""

    def __init__(self, run: Boxed) -> None:
        super().__init__()
        self._boxed_call = True
        self.run = run

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.run(list(inputs))

    def __reduce__(self) -> Any:
        raise TypeError("a graph that ark does not run whole, or has not compiled yet")

    def prepare_for_serialization(self) -> None:
        """Never comes to it."""

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """It is complete."""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are no Triton kernels."""


def callable_of(captured: Callable[..., Any]) -> Any:
    """AOTAutograd's function, in the form that PyTorch saves."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    return BundledAOTAutogradSerializableCallable(captured)
