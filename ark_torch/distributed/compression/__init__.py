"""Collectives that send few bits: quantised on the way out, added at an owner, quantised again."""

from ark_torch.distributed.compression.functional import compressed_all_reduce

__all__ = ["compressed_all_reduce"]
