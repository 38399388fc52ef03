"""torch.compile(model, backend="ark"). The compiler is not in this version, and nothing here pretends to compile."""

from __future__ import annotations

from typing import Any, NoReturn

from ark_torch._version import __version__
from ark_torch.errors import CompilerNotAvailable


def ark(graph_module: Any, example_inputs: Any, **options: Any) -> NoReturn:
    """The entry point that torch._dynamo lists as "ark"."""
    raise CompilerNotAvailable(
        f'torch.compile(backend="ark") is not in ark_torch {__version__}: use another compiler backend '
        '(backend="inductor"); the process group "ark" works with it.'
    )
