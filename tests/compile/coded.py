"""Products of quantised weights in every supported form of decoding.

test_low_bits.py, test_cuda_coded.py and tests/gpu/test_compile_low_bits.py compile them. `decoded` is the exact value
of torchao's weights, for test_torchao.py and benchmarks/low_bits.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EIGHT, FOUR, FLOAT = "int8 weights", "int4 weights", "float8 weights"
Decode = Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


class Coded(nn.Module):
    """A product with decoded weights [n, k]. `decode` takes codes, scales, zeros and the rows' type."""

    def __init__(self, decode: Decode, n: int, k: int, codes: torch.dtype, groups: int = 1) -> None:
        super().__init__()
        self.decode = decode
        if codes == torch.float8_e4m3fn:
            self.register_buffer("codes", torch.randn(n, k).to(codes))
        else:
            least, most = (-128, 128) if codes == torch.int8 else (0, 256)
            self.register_buffer("codes", torch.randint(least, most, (n, k), dtype=codes))
        self.register_buffer("scales", torch.rand(n, groups) + 0.1)
        self.register_buffer("zeros", torch.randint(0, 16, (n, groups)).float())

    def forward(self, x: Tensor) -> Tensor:
        scales, zeros = self.scales.to(x.dtype), self.zeros.to(x.dtype)
        return F.linear(x, self.decode(self.codes, scales, zeros, x.dtype))


def low_first(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def high_first(codes: Tensor) -> Tensor:
    return torch.stack((codes >> 4, codes & 0xF), 2).view(codes.shape[0], -1)


def signed(codes: Tensor) -> Tensor:
    return torch.stack(((codes << 4) >> 4, codes >> 4), -1).flatten(1)


def grouped(w: Tensor, of: Tensor) -> Tensor:
    return w.view(w.shape[0], of.shape[1], -1)


# Decoding of codes, scales, zeros and the compute type; type of the codes; the report's name; groups in a depth of 256.
FORMS: dict[str, tuple[Decode, torch.dtype, str, int]] = {
    "int8, scaled": (lambda w, s, z, t: w.to(t) * s, torch.int8, f"{EIGHT}, scale a channel", 1),
    "int8, no scale": (lambda w, s, z, t: w.to(t), torch.int8, f"{EIGHT}, no scale", 1),
    "int8, zeros": (lambda w, s, z, t: (w.to(t) - z) * s, torch.int8, f"{EIGHT}, scale a channel, and a zero", 1),
    "int8, zeros, no scale": (lambda w, s, z, t: w.to(t) - z, torch.int8, f"{EIGHT}, no scale, and a zero", 1),
    "int8, a number": (lambda w, s, z, t: (w.to(t) + 3) * s, torch.int8, f"{EIGHT}, scale a channel", 1),
    "int8, groups": (
        lambda w, s, z, t: ((grouped(w, s).to(t) - z[:, :, None]) * s[:, :, None]).flatten(1),
        torch.int8,
        f"{EIGHT}, scale a group of 64, and a zero",
        4,
    ),
    "int8, transposed": (
        lambda w, s, z, t: (w.t().to(t) * s.view(1, -1)).t().contiguous(),
        torch.int8,
        f"{EIGHT}, scale a channel",
        1,
    ),
    "int8, one scale": (lambda w, s, z, t: s[:1] * w.to(t), torch.int8, f"{EIGHT}, scale a tensor", 1),
    "float8, scaled": (lambda w, s, z, t: (w.float() * s).to(t), torch.float8_e4m3fn, f"{FLOAT}, scale a channel", 1),
    "float8, one scale": (lambda w, s, z, t: w.to(t) * s[0, 0], torch.float8_e4m3fn, f"{FLOAT}, scale a tensor", 1),
    "float8, zeros": (
        lambda w, s, z, t: (w.to(t) - z) * s,
        torch.float8_e4m3fn,
        f"{FLOAT}, scale a channel, and a zero",
        1,
    ),
    "float8, groups": (
        lambda w, s, z, t: (grouped(w.to(t), s) * s.unsqueeze(2)).view(w.shape),
        torch.float8_e4m3fn,
        f"{FLOAT}, scale a group of 128",
        2,
    ),
    "int4, zeros": (
        lambda w, s, z, t: ((grouped(low_first(w), s).to(t) - z[:, :, None]) * s[:, :, None]).flatten(1),
        torch.uint8,
        f"{FOUR}, scale a group of 128, and a zero",
        2,
    ),
    "int4, eight, and zeros behind": (
        lambda w, s, z, t: ((grouped(low_first(w).to(t), s) - 8) * s[:, :, None] + z[:, :, None]).flatten(1),
        torch.uint8,
        f"{FOUR}, scale a group of 32, and a zero",
        8,
    ),
    "int4, behind a group of 128": (
        lambda w, s, z, t: (z[:, :, None] + (grouped(low_first(w).to(t), s) - 8) * s[:, :, None]).flatten(1),
        torch.uint8,
        f"{FOUR}, scale a group of 128, and a zero",
        2,
    ),
    "int4, high first": (
        lambda w, s, z, t: (grouped(high_first(w).to(torch.int8) - 8, s).to(t) * s[:, :, None]).flatten(1),
        torch.uint8,
        f"{FOUR}, scale a group of 128",
        2,
    ),
    "int4, channels": (
        lambda w, s, z, t: (low_first(w).to(t) - z) * s,
        torch.uint8,
        f"{FOUR}, scale a channel, and a zero",
        1,
    ),
    "int4, signed": (
        lambda w, s, z, t: (grouped(signed(w).to(t), s) * s[:, :, None]).flatten(1),
        torch.int8,
        f"{FOUR}, scale a group of 128",
        2,
    ),
}


def coded(name: str, n: int, k: int = 256) -> tuple[Coded, str]:
    """Returns the product, and the report's name of its weights if k is 256."""
    decode, codes, told, groups = FORMS[name]
    return Coded(decode, n, k // 2 if told.startswith(FOUR) else k, codes, groups * k // 256 if groups > 1 else 1), told


LAYOUTS = ("columns", "groups", "pairs")


def laid_out(product: Coded, layout: str, scales: torch.dtype, zeros: torch.dtype) -> Coded:
    """Changes types and strides of scales and zeros: in memory the groups of a column lie side by side, or the columns
    of a group, or its columns with a scale and a zero each ("pairs", of one type)."""
    scale, zero = product.scales.to(scales), product.zeros.to(zeros)
    if layout == "groups":
        scale, zero = (one.t().contiguous().t() for one in (scale, zero))
    if layout == "pairs":
        both = torch.stack((scale.t(), zero.t().to(scales)), 2).transpose(0, 1)
        scale, zero = both.unbind(2)
    product.scales, product.zeros = scale, zero
    return product


def in_tiles(codes: Tensor, inner: int) -> Tensor:
    """Packs codes [n, k] as the loops of PyTorch's CUDA kernel do, number by number."""
    n, k = codes.shape
    packed = torch.zeros(n // 8, k // (inner * 16), 32, inner // 2, dtype=torch.int64)
    for tile, outer, lane, word in itertools.product(*map(range, packed.shape)):
        first = (outer * inner + 2 * word) * 16 + lane % 4 * 2
        depths = [first, first + 1, first + 8, first + 9, first + 16, first + 17, first + 24, first + 25]
        v = [int(codes[tile * 8 + lane // 4, depth]) for depth in depths]
        halves = (v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7])  # from the lowest bits on
        packed[tile, outer, lane, word] = sum(half << 4 * i for i, half in enumerate(halves))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


class Tiles(nn.Module):
    """A product, without negative results, with int4 weights in PyTorch's order for GPUs. `right` is in float64."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.codes = torch.randint(0, 16, (24, 256))
        self.register_buffer("packed", in_tiles(self.codes, 8))
        self.register_buffer("scales", torch.rand(2, 24, 2).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.ops.aten._weight_int4pack_mm(x, self.packed, 128, self.scales))

    def right(self, x: Tensor) -> Tensor:
        scale, zero = (self.scales[..., i].double().repeat_interleave(128, 0) for i in range(2))
        return F.relu(x.double() @ ((self.codes.t() - 8) * scale + zero))


def decoded(weight: Any) -> Tensor:
    """Returns a weight of torchao [n, k] in float64, from its codes, scales and zeros."""
    if hasattr(weight, "scale_and_zero"):
        # Only PyTorch's kernel knows the order of packed codes. With scales of 1 and zeros of 0, its product with the
        # unit matrix is code - 8, which is exact.
        plain = torch.zeros_like(weight.scale_and_zero)
        plain[..., 0] = 1
        unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        codes = F.linear(unit, type(weight)(weight.qdata, plain, weight.block_size, weight.shape)).t().double()
        groups = codes.reshape(codes.shape[0], -1, weight.block_size[-1])
        scale, zero = weight.scale_and_zero[: groups.shape[1]].double().transpose(0, 1).unbind(2)  # the depth is padded
        return (groups * scale[:, :, None] + zero[:, :, None]).flatten(1)
    codes, scale = weight.qdata.double(), weight.scale.double()
    zero = getattr(weight, "zero_point", None)
    zero = torch.zeros_like(scale) if zero is None else zero.double()
    groups = codes.view(codes.shape[0], scale.shape[1], -1)
    return ((groups - zero[:, :, None]) * scale[:, :, None]).flatten(1)
