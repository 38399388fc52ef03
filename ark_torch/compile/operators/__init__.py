"""The lowerings of ATen's operators, one file a family; importing the package registers them all."""

from ark_torch.compile.operators import (
    activations,
    collectives,
    contractions,
    indexing,
    layout,
    loop,
    pointwise,
    reductions,
)

__all__ = ["activations", "collectives", "contractions", "indexing", "layout", "loop", "pointwise", "reductions"]
