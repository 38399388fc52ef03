"""Creation of ark groups, their diagnostics, compressed collectives, and registered memory."""

from ark_torch.distributed.compression.functional import compressed_all_reduce
from ark_torch.distributed.registration import deregister, register

__all__ = ["compressed_all_reduce", "deregister", "register"]
