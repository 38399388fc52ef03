"""The lowerings of ATen's operators, one file per family; importing the package registers all of them."""

from ark_torch.compile.operators import (
    activations,
    collectives,
    contractions,
    convolutions,
    experts,
    indexing,
    layout,
    loop,
    pointwise,
    pooling,
    reductions,
    selecting,
)

__all__ = [
    "activations",
    "collectives",
    "contractions",
    "convolutions",
    "experts",
    "indexing",
    "layout",
    "loop",
    "pointwise",
    "pooling",
    "reductions",
    "selecting",
]
