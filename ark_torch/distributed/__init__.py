"""Creation of ark groups, their diagnostics, compressed collectives, registered memory and windows."""

from ark_torch.distributed.compression.functional import compressed_all_reduce
from ark_torch.distributed.registration import deregister, register
from ark_torch.distributed.window import new_window, supports_window

__all__ = ["compressed_all_reduce", "deregister", "new_window", "register", "supports_window"]
