"""Collectives that send few bits per element. Only a hook or a function compresses; a plain all_reduce never does.

`State` and `hook` serve DistributedDataParallel's gradients, `fsdp` serves fully_shard; `Rule` and `Auto` set the bits
of each layer. `compressed_all_reduce` is a stateless function. docs/compression.md describes the cost and when not to
use it. The training parts are imported on first use, because the first group imports this package.
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
