"""Operators that overlap computation and communication on groups of the backend "ark".

Each returns the same bits as its unfused form over the same group, is differentiable, can be captured in CUDA graphs,
and works under torch.compile with any backend.
"""

from ark_torch.ops import moe_compiled  # noqa: F401  (defines an operator)
from ark_torch.ops.embedding import embedding_bag_all_to_all
from ark_torch.ops.matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from ark_torch.ops.moe import MoeHandle, moe_combine, moe_dispatch, moe_layer
from ark_torch.ops.optimizers import SGD, RowwiseAdagrad

__all__ = [
    "SGD",
    "MoeHandle",
    "RowwiseAdagrad",
    "all_gather_matmul",
    "embedding_bag_all_to_all",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "moe_combine",
    "moe_dispatch",
    "moe_layer",
]
