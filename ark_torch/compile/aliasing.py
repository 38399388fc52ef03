"""Calls whose arguments share memory that the graph writes, where those it was compiled for did not.

AOTAutograd's graph is functional: it computes first and writes last, so what is read of one argument is not what was
written through another. Dynamo's own graph does all in the program's order. It runs such a call, eagerly. (Dynamo
guards how arguments overlap only where some did when it compiled: PyTorch issue 139789.)
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
        places = ways[0].written() if len(ways) == 1 else []
    except AttributeError as error:  # the record is AOTAutograd's own affair, and another version's may differ
        log.debug("every argument counts as written: %s", error)
        places = list(range(ways[0].arguments))
    return [i for i in places if isinstance(example_inputs[i], torch.Tensor)]


def around(
    captured: Callable[..., Any],
    program: Callable[..., Any],
    written: Sequence[int],
    example_inputs: Sequence[Any],
    fallback: bool,
) -> Callable[..., Any]:
    """`captured`, and `program` for calls whose arguments overlap; UnsupportedGraph instead without `fallback`."""
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
