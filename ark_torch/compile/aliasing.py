"""Calls whose arguments share memory that the graph writes, although those of its compilation did not.

AOTAutograd's graph is functional: it computes first and writes last, so a read of one argument does not see a write
through another. Dynamo's own graph keeps the program's order, so it runs such calls, eagerly. (Dynamo guards the
overlap of arguments only if some overlapped at compilation: PyTorch issue 139789.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ark_torch.compile.fast_call import Way
from ark_torch.compile.report import log
from ark_torch.errors import UnsupportedGraph

SHARED = "arguments share memory that the graph writes, and those that it was compiled for did not"


def written(ways: Sequence[Way], example_inputs: Sequence[Any]) -> list[int]:
    """Positions of the tensors that the graph writes."""
    try:
        places = ways[0].written(len(example_inputs)) if len(ways) == 1 else []
    except AttributeError as error:  # AOTAutograd's record is private and may differ in other versions
        log.debug("every argument counts as written: %s", error)
        places = list(range(len(example_inputs)))
    return [i for i in places if isinstance(example_inputs[i], torch.Tensor)]


def around(
    captured: Callable[..., Any],
    program: Callable[..., Any],
    written: Sequence[int],
    example_inputs: Sequence[Any],
    fallback: bool,
) -> Callable[..., Any]:
    """Returns `captured`, with `program` for calls whose arguments overlap; without `fallback` these raise
    UnsupportedGraph."""
    tensors = [i for i, one in enumerate(example_inputs) if isinstance(one, torch.Tensor)]
    places = [tensors.index(i) for i in written]
    if not places or len(tensors) < 2:
        return captured
    from ark_torch import _C

    def call(*arguments: Any) -> Any:
        if not _C._overlapping([arguments[i] for i in tensors], places):
            return captured(*arguments)
        if not fallback:
            raise UnsupportedGraph(f"{SHARED}: give it tensors of their own, or options={{'fallback': True}}.")
        log.info("a call runs eagerly: %s", SHARED)
        with torch.no_grad():
            return program(*arguments)

    return call
