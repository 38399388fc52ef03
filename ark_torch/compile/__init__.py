"""The entry point of torch.compile(model, backend="ark"), which torch._dynamo lists as "ark".

Nothing here imports torch._inductor or torch._dynamo before a graph arrives: tools and torch._dynamo.list_backends()
load this module in programs that never compile anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ark"]


def ark(
    graph_module: Any,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles one graph of torch._dynamo. ark_torch.compile.options defines the contents of `mode` and `options`."""
    from ark_torch.compile import backend
    from ark_torch.compile import options as table

    return backend.compile_graph(graph_module, example_inputs, table.parse(mode, options))


def __getattr__(name: str) -> Any:
    """torch.compile(backend="ark_torch") loads this name as an entry point of its own; the error names the right
    one."""
    if name == "ark_torch":
        from ark_torch.errors import InvalidOption

        raise InvalidOption('There is no backend "ark_torch"; did you mean "ark"? torch.compile(model, backend="ark")')
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
