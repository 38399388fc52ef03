"""Creating ark groups, what a group can tell about itself, and memory that it uses in place."""

from ark_torch.distributed.registration import deregister, register

__all__ = ["deregister", "register"]
