"""Compressed gradients: few bits an element between ranks, asked for by a hook and never done by a plain all_reduce.

`State` and `hook` are for DistributedDataParallel, `fsdp` for fully_shard; `Rule` and `Auto` say how many bits a layer
gets. docs/compression.md has what it costs and when not to use it.
"""

from ark_torch.distributed.compression.auto import Auto
from ark_torch.distributed.compression.ddp import hook
from ark_torch.distributed.compression.fsdp2 import fsdp
from ark_torch.distributed.compression.rules import Rule
from ark_torch.distributed.compression.state import State

__all__ = ["Auto", "Rule", "State", "fsdp", "hook"]
