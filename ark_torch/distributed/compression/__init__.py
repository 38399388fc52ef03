"""Few bits an element between ranks: asked for by a hook or a function, never done by a plain all_reduce.

`State` and `hook` are for DistributedDataParallel's gradients, `fsdp` for fully_shard; `Rule` and `Auto` say how many
bits a layer gets. `compressed_all_reduce` is a function without state. docs/compression.md has what it costs and when
not to use it. What trains is loaded when it is asked for: this package is loaded with the first group.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ark_torch.distributed.compression.functional import compressed_all_reduce

if TYPE_CHECKING:
    from ark_torch.distributed.compression.auto import Auto
    from ark_torch.distributed.compression.ddp import hook
    from ark_torch.distributed.compression.fsdp2 import fsdp
    from ark_torch.distributed.compression.rules import Rule
    from ark_torch.distributed.compression.state import State

__all__ = ["Auto", "Rule", "State", "compressed_all_reduce", "fsdp", "hook"]

_PLACES = {"Auto": "auto", "Rule": "rules", "State": "state", "fsdp": "fsdp2", "hook": "ddp"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
