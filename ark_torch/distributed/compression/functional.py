"""A compressed all-reduce as a function, and the fake kernels of the compressed operators.

The operators are C++ (csrc/ops/compressed.hpp). Training needs a residual and stochastic rounding, which hooks provide;
a stateless function rounds to the nearest code, for activations of tensor-parallel inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ark_torch import _C  # noqa: F401  (defines torch.ops.ark)

_OPS = ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "avg"))


def compressed_all_reduce(
    tensor: Tensor,
    *,
    bits: int = 8,
    bucket: int = 512,
    format: str = "uniform",
    op: Any = dist.ReduceOp.SUM,
    where: str = "everywhere",
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The sum or average of all ranks' tensors, quantized twice on the way: about bits / 16 of bfloat16's bytes.

    Every rank quantizes the tensor bucket by bucket. Each bucket's owner adds the ranks' values in float32 in rank
    order and quantizes the sum. All ranks get the same bits. Each of the two roundings has an error of at most half a
    step per element: with "uniform", (largest - smallest of its bucket) / (2**bits - 1) / 2. A NaN or an infinity makes
    its whole bucket NaN; nothing is clipped. A group of one rank returns a copy of the tensor.

    For inference: the function has no gradient and keeps no residual; gradients need a hook with error feedback. A
    plain `all_reduce` of the same group stays exact. Collective: all ranks call it, in the same order. A CUDA graph can
    capture it only after an earlier call, in which the ranks compare its settings.

    Args:
        tensor: any shape and strides, the same shape on all ranks; float32, bfloat16 or float16, on the CPU or a CUDA
            device. It is not modified.
        bits: bits per code, 1 to 8.
        bucket: number of elements that share a scale: a multiple of 32 from 128 to 4096. A smaller bucket is more exact
            and costs 8 bytes each.
        format: "uniform": codes are steps from the bucket's smallest element to its largest. "fp8": float8_e4m3fn times
            the bucket's scale, for values of very different magnitude; bits must be 8.
        op: `torch.distributed.ReduceOp.SUM` or `AVG`.
        where: "everywhere"; or "between": the ranks of a node add in float32, and only what goes between nodes is
            quantized, on one rank of each node; a group on one node is exact. It breaks the graph of torch.compile.
        group: a group of the backend "ark"; None: the default group.

    Returns:
        A contiguous tensor with the shape, dtype and device of `tensor`.

    Raises:
        ValueError, TypeError: an argument is invalid, the tensor requires grad, or the group is not ark's.
        torch.distributed.DistBackendError: ranks differ in shape, dtype or settings (found at the first such call), or
            the group has failed.

    Example:
        >>> hidden = ark_torch.distributed.compressed_all_reduce(partial, bits=8, group=group)
    """
    # By identity first: Dynamo of PyTorch 2.11 can neither compare nor hash a ReduceOp.
    name = next((name for known, name in _OPS if op is known), None)
    name = name or next((name for known, name in _OPS if op == known), None)
    if name is None:
        raise ValueError(f"ark: compressed_all_reduce: op is {op}. Pass ReduceOp.SUM or ReduceOp.AVG.")
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(
            "ark: compressed_all_reduce: tensor requires grad, and the operation has no gradient. Call it under "
            "torch.no_grad(), or compress gradients with a hook."
        )
    if where != "everywhere":
        return _between(tensor, bits, bucket, format, name, where, group)
    # Imported here because the first group imports this module.
    from torch.distributed._functional_collectives import _resolve_group_name

    flat = tensor.contiguous().flatten()
    group_name = _resolve_group_name(group or dist.distributed_c10d._get_default_group(), "")
    result: Tensor = torch.ops.ark.compressed_all_reduce.without_residual(
        flat, [flat.shape[0]], [bits], [bucket], format, "nearest", 0, name, group_name
    )
    return result.view(tensor.shape)


def _between(tensor: Tensor, bits: int, bucket: int, format: str, op: str, where: str, group: Any) -> Tensor:
    """Checks what ranks without a rail do not pass to the operator."""
    from ark_torch.distributed.compression import agree, between, rules
    from ark_torch.distributed.compression.state import COMPRESSED_DTYPES

    rules.check_choice("compressed_all_reduce: where", where, rules.PLACES)
    rules.check_choice("compressed_all_reduce: format", format, rules.FORMATS)
    rules.check_bits("compressed_all_reduce: bits", bits, format)
    rules.check_bucket("compressed_all_reduce: bucket", bucket)
    if tensor.dtype not in COMPRESSED_DTYPES:
        raise TypeError(f"ark: compressed_all_reduce: tensor is {tensor.dtype}: pass float32, bfloat16 or float16.")
    result: Tensor = between.compressed_all_reduce(tensor.contiguous(), bits, bucket, format, op, agree.member(group))
    return result


def _coded_bytes(numel: Any, bits: int, bucket: int) -> Any:
    whole, rest = numel // bucket, numel % bucket
    each = 8 + (bucket // 8 * bits + 7) // 8 * 8
    last = ((rest + 7) // 8 * bits + 7) // 8 * 8
    return whole * each + last + 8 * ((rest + bucket - 1) // bucket)


def _fake_quantize(input: Tensor, bits: int, bucket: int, format: str, rounding: str, seed: int) -> Tensor:
    return input.new_empty((_coded_bytes(input.shape[0], bits, bucket),), dtype=torch.uint8)


def _fake_dequantize(codes: Tensor, numel: Any, dtype: torch.dtype, bits: int, bucket: int, format: str) -> Tensor:
    return codes.new_empty((numel,), dtype=dtype)


def _fake_all_reduce(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


def _fake_reduce_scatter(
    input: Tensor,
    residual: Tensor | None,
    numel: Sequence[Any],
    bits: Sequence[int],
    bucket: Sequence[int],
    format: str,
    rounding: str,
    seed: int,
    op: str,
    group: Any,
    nonfinite: Tensor | None = None,
) -> Tensor:
    return input.new_empty((input.shape[0] // dist.distributed_c10d._get_group_size_by_name(group),))


def _fake_all_gather(
    input: Tensor,
    numel: Sequence[Any],
    bits: Sequence[int],
    bucket: Sequence[int],
    format: str,
    rounding: str,
    seed: int,
    group: Any,
) -> Tensor:
    return input.new_empty((input.shape[0] * dist.distributed_c10d._get_group_size_by_name(group),))


for _operator, _fake in (
    ("ark::quantize", _fake_quantize),
    ("ark::dequantize", _fake_dequantize),
    ("ark::compressed_all_reduce", _fake_all_reduce),
    ("ark::compressed_all_reduce.without_residual", _fake_all_reduce),
    ("ark::compressed_reduce_scatter", _fake_reduce_scatter),
    ("ark::compressed_all_gather", _fake_all_gather),
):
    torch.library.register_fake(_operator, _fake)
