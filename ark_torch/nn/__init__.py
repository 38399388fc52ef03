"""Modules whose parameters are sharded over the ranks of a group of the backend "ark"."""

from ark_torch.nn.embedding import ShardedEmbeddingBags

__all__ = ["ShardedEmbeddingBags"]
