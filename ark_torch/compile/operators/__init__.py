"""The lowerings of ATen's operators, one file a family; importing the package registers them all."""

from ark_torch.compile.operators import activations, contractions, indexing, layout, pointwise, reductions

__all__ = ["activations", "contractions", "indexing", "layout", "pointwise", "reductions"]
