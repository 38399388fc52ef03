"""Calls that go from torch._dynamo straight to a region, without AOTAutograd's wrappers.

The wrappers unwrap subclasses, replay aliases and updates, insert tokens, and count versions, which takes about 40 us
per call with 180 arguments. If a graph is one region whose arguments are the call's, in the same order, and
AOTAutograd's own record says that none of this is needed, the region is called directly (it counts versions itself).
torch._dynamo guards everything that the record depends on: the modes of gradients and autocast, types and sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ark_torch.compile.report import log


class Way:
    """What the compilation of one inference graph keeps of AOTAutograd's record."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.arguments = len(inputs)
        context = torch._guards.TracingContext.try_get()
        self._record = context.fw_metadata if context is not None else None

    def written(self, count: int) -> list[int]:
        """Positions of the arguments that the graph writes, among the `count` ones of Dynamo's graph."""
        everything = list(range(count))
        if self._record is None:
            return everything
        writes = [info.mutates_data for info in self._record.input_info]
        if len(writes) == count:
            return [i for i in everything if writes[i]]
        # The record is of plain tensors, and a subclass (a DTensor) counts for all that it consists of.
        given = self._record.subclass_inp_meta
        ends = list(itertools.accumulate(getattr(one, "arg_count", 1) for one in given))
        if len(given) != count or ends[-1] != len(writes):
            return everything
        return [i for i in everything if any(writes[(ends[i - 1] if i else 0) : ends[i]])]

    def needs_no_wrapper(self, example_inputs: Sequence[Any]) -> bool:
        from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

        record = self._record
        return (
            record is not None
            and self.arguments == len(example_inputs)  # nothing merged, nothing added
            and all(isinstance(one, torch.Tensor) for one in example_inputs)
            and all(isinstance(meta, PlainTensorMeta) for meta in record.subclass_inp_meta)
            and all(isinstance(meta, PlainTensorMeta) for meta in record.subclass_fw_graph_out_meta)
            and all(info.output_type is OutputType.non_alias for info in record.output_info)
            and not any(info.mutates_metadata or info.mutates_storage_metadata for info in record.input_info)
            and record.num_mutated_inp_runtime_indices == 0
            and record.num_intermediate_bases == 0
            and not record.tokens
            and not record.num_graphsafe_rng_states
            and not record.is_rng_op_functionalized
            and record.grad_enabled_mutation is None
            and not torch.is_autocast_enabled("cpu")
        )


def is_open(ways: Sequence[Way], example_inputs: Sequence[Any]) -> bool:
    """Whether a graph that turns out to be one region, with the call's arguments, may be called without AOTAutograd."""
    try:
        return len(ways) == 1 and ways[0].needs_no_wrapper(example_inputs)
    except AttributeError as error:  # AOTAutograd's record is private and may differ in other versions
        log.debug("calls go through AOTAutograd's wrappers: %s", error)
        return False


def around(captured: Callable[..., Any], assembled: Callable[..., Any], is_open: bool) -> Callable[..., Any]:
    """Returns `captured`, or a faster function with the same result; `assembled` is what it calls."""
    function = getattr(getattr(assembled, "runs", None), "function", None) if is_open else None
    # `captured` handles arguments that are not plain: it waits for an AsyncCollectiveTensor, for example.
    return function(captured) if function is not None else captured
