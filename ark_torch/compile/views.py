"""Views: sizes, strides and offset, found by running the operator on a tensor without memory.

Results are cached: layers repeat, every node is lowered twice, and on such a tensor most views run PyTorch's Python
code (torch._refs), half a millisecond each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ark_torch.compile.ir import Strided, Unsupported


def view_of(
    operator: Any, base: Strided, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Strided | tuple[Strided, ...]:
    """The view of `base` that `operator` (an ATen overload, which may return several) makes; `arguments` are those
    after the tensor. Raises Unsupported if it has no elements or another dtype, and whatever the operator raises."""
    found = _run(operator, base._replace(buffer=0), _hashable(arguments), _hashable(sorted(keywords.items())))
    if isinstance(found, Strided):
        return found._replace(buffer=base.buffer)
    return tuple(one._replace(buffer=base.buffer) for one in found)


def _hashable(value: Any) -> Any:
    return tuple(_hashable(one) for one in value) if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=4096)
def _run(
    operator: Any, base: Strided, arguments: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
) -> Strided | tuple[Strided, ...]:
    storage = torch.empty_strided(base.shape, base.strides, dtype=base.dtype, device="meta")
    storage = storage.as_strided(base.shape, base.strides, base.offset)
    result = operator(storage, *arguments, **dict(keywords))
    return _strided(base, result) if isinstance(result, torch.Tensor) else tuple(_strided(base, one) for one in result)


def _strided(base: Strided, view: torch.Tensor) -> Strided:
    if view.dtype != base.dtype:
        raise Unsupported("a view that changes the element type")
    if view.numel() == 0:
        raise Unsupported("a tensor without elements")
    return base._replace(shape=tuple(view.shape), strides=tuple(view.stride()), offset=int(view.storage_offset()))
