"""Creating ark groups, what a group can tell about itself, compressed collectives, and memory that it uses in place."""

from ark_torch.distributed.compression.functional import compressed_all_reduce
from ark_torch.distributed.registration import deregister, register

__all__ = ["compressed_all_reduce", "deregister", "register"]
