"""Bucket quantisation and the collectives based on it, in plain torch: the oracle of csrc/collectives/compressed.

It follows the description in ark_torch/kernels/protocol/quantize.hpp, but not its code. All arithmetic is float32, and
each operation is rounded separately, as torch does on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = torch.tensor(2.0**-126)


@dataclass(frozen=True)
class Settings:
    format: str = "uniform"
    rounding: str = "nearest"
    seed: int = 0


@dataclass(frozen=True)
class Segment:
    numel: int
    bits: int = 4
    bucket: int = 512

    @property
    def buckets(self) -> int:
        return -(-self.numel // self.bucket)


def philox(seed: int, counters: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10. The int64 tensors hold 32 bits each."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, seed >> 32 & low
    c0, c1, c2, c3 = counters
    for _ in range(10):
        # 64-bit products would overflow int64, so halves of 16 bits keep them exact.
        high_a, low_a = _multiply(c0, 0xD2511F53)
        high_b, low_b = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    small, large = a * (b & 0xFFFF), a * (b >> 16)  # 48 bits each
    middle = (small >> 16) + large
    return middle >> 16, (middle & 0xFFFF) << 16 | small & 0xFFFF


def chances(shape: torch.Size, settings: Settings, number: int, rank: int, stage: int) -> Tensor:
    """Returns 16 random bits for each element of the buckets from `number` on."""
    count, width = shape
    groups = torch.arange(-(-width // 8)).expand(count, -1)
    buckets = torch.arange(number, number + count).unsqueeze(1).expand_as(groups)
    words = philox(settings.seed, (groups, buckets, torch.full_like(groups, rank), torch.full_like(groups, stage)))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, 2).flatten(1)[:, :width]


def code(x: Tensor, bits: int, settings: Settings, number: int, rank: int, stage: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns heads ([buckets, 2], float32), codes and values of buckets, a row each. NaN makes codes arbitrary."""
    chance = chances(x.shape, settings, number, rank, stage) if settings.rounding == "stochastic" else None
    fraction = None if chance is None else chance.float() / 65536
    finite = x.isfinite().all(1, keepdim=True)
    if settings.format == "uniform":
        levels = float(2**bits - 1)
        low = x.amin(1, keepdim=True) + 0.0
        reach = x.amax(1, keepdim=True) - low
        finite &= reach.isfinite()
        low = torch.where(finite, low, torch.nan)
        step = torch.where(finite, torch.maximum(reach / levels, SMALLEST), 0.0)
        t = (x - low) * (1 / step)
        t = t if fraction is None else t + fraction
        t = t.nan_to_num(0).clamp(0, levels)
        codes = t.round() if fraction is None else t.floor()
        return torch.cat([low, step], 1), codes.to(torch.int64), low + codes * step
    scale = torch.where(finite, torch.maximum(x.abs().amax(1, keepdim=True) / 448, SMALLEST), torch.nan)
    y = x * (1 / scale)
    if fraction is None or chance is None:
        small = y.to(torch.float8_e4m3fn)
    else:
        fine = (y.abs() * 512 + fraction).floor() / 512
        bits_of = (y.abs().view(torch.int32) + (chance << 4).int()) >> 20 << 20
        coarse = bits_of.view(torch.float32).clamp(max=448)
        small = torch.where(y.abs() < 2**-6, fine, coarse).copysign(y).to(torch.float8_e4m3fn)
    head = torch.cat([scale, torch.zeros_like(scale)], 1)
    return head, small.view(torch.uint8).to(torch.int64), small.float() * scale


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs little-endian, in whole groups of eight codes, with zeros up to a multiple of eight bytes."""
    filled = torch.zeros(-(-codes.numel() // 8) * 8, dtype=torch.int64)
    filled[: codes.numel()] = codes
    each = (filled.unsqueeze(1) >> torch.arange(bits) & 1).flatten().view(-1, 8)
    packed = (each << torch.arange(8)).sum(1).to(torch.uint8)
    return torch.cat([packed, packed.new_zeros(-packed.numel() % 8)])


def _buckets(x: Tensor, bucket: int) -> list[tuple[int, Tensor]]:
    """Returns the whole buckets, then the short one: the number of the first, and a row for each."""
    whole = x.numel() // bucket
    parts = [(0, x[: whole * bucket].view(whole, bucket)), (whole, x[whole * bucket :].unsqueeze(0))]
    return [(number, part) for number, part in parts if part.numel()]


def records(x: Tensor, segment: Segment, settings: Settings) -> Tensor:
    """Returns the bytes of a tensor's buckets."""
    made = [torch.empty(0, dtype=torch.uint8)]
    for number, rows in _buckets(x.float(), segment.bucket):
        heads, codes, _ = code(rows, segment.bits, settings, number, 0, 0)
        for head, row in zip(heads, codes, strict=True):
            made += [head.view(torch.uint8), pack(row, segment.bits)]
    return torch.cat(made)


def coded(x: Tensor, segments: list[Segment], settings: Settings, rank: int, stage: int) -> Tensor:
    """Returns all segments' elements after quantisation. Exact segments are unchanged."""
    values, at, first = [x[:0]], 0, 0
    for segment in segments:
        mine = x[at : at + segment.numel]
        if segment.bits == 0:
            values.append(mine)
        else:
            for number, rows in _buckets(mine, segment.bucket):
                values.append(code(rows, segment.bits, settings, first + number, rank, stage)[2].flatten())
        at, first = at + segment.numel, first + segment.buckets
    return torch.cat(values)


def _exact(segments: list[Segment]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.bool), *(torch.full((s.numel,), s.bits == 0) for s in segments)])


def _first(
    inputs: list[Tensor], residuals: list[Tensor] | None, segments: list[Segment], settings: Settings
) -> list[Tensor]:
    """Returns what ranks send. Residuals are replaced by the loss."""
    sent = []
    for rank, given in enumerate(inputs):
        x = given.float() if residuals is None else given.float() + residuals[rank]
        values = coded(x, segments, settings, rank, 0)
        exact = _exact(segments)
        values = torch.where(exact, x.to(given.dtype).float(), values)
        if residuals is not None:
            lost = x - values
            residuals[rank].copy_(torch.where(values.isfinite(), lost, 0))
        sent.append(values)
    return sent


def _add(values: list[Tensor], op: str) -> Tensor:
    total = values[0].clone()
    for more in values[1:]:
        total = total + more
    return total / len(values) if op == "avg" else total


def all_reduce(
    inputs: list[Tensor],
    residuals: list[Tensor] | None,
    segments: list[Segment],
    settings: Settings,
    op: str,
    owners: Tensor,
) -> Tensor:
    """Returns the result on all ranks. `owners` has each element's owner."""
    if len(inputs) == 1:
        segments = [Segment(s.numel, 0, s.bucket) for s in segments]
    total = _add(_first(inputs, residuals, segments, settings), op)
    values = total.clone()
    for rank in range(len(inputs)):
        mine = owners == rank
        values[mine] = coded(total, segments, settings, rank, 1)[mine]
        if residuals is not None:
            lost = (total - values) * (len(inputs) if op == "avg" else 1)
            residuals[rank] += torch.where(mine & ~_exact(segments) & values.isfinite(), lost, 0)
    return values.to(inputs[0].dtype)


def reduce_scatter(
    inputs: list[Tensor], residuals: list[Tensor] | None, segments: list[Segment], settings: Settings, op: str
) -> Tensor:
    """Returns the results of all ranks, concatenated."""
    shares = [segment for _ in inputs for segment in segments]
    if len(inputs) == 1:
        shares = [Segment(s.numel, 0, s.bucket) for s in shares]
    return _add(_first(inputs, residuals, shares, settings), op).to(inputs[0].dtype)


def all_gather(inputs: list[Tensor], segments: list[Segment], settings: Settings) -> Tensor:
    if len(inputs) == 1:
        segments = [Segment(s.numel, 0, s.bucket) for s in segments]
    parts = [coded(x.float(), segments, settings, rank, 0) for rank, x in enumerate(inputs)]
    return torch.cat(parts).to(inputs[0].dtype)


def record_bytes(numel: int, bits: int, element_bytes: int) -> int:
    if bits == 0:
        return (numel * element_bytes + 7) // 8 * 8
    groups = (numel + 7) // 8  # eight codes each, in `bits` bytes
    return 8 + (groups * bits + 7) // 8 * 8


def owners(segments: list[Segment], element_bytes: int, world: int) -> Tensor:
    """Returns each element's owner: the rank whose share of all bytes contains the start of its bucket."""
    sizes, counts = [], []
    for s in segments:
        for i in range(0, s.numel, s.bucket):
            counts.append(min(s.bucket, s.numel - i))
            sizes.append(record_bytes(counts[-1], s.bits, element_bytes))
    total, at, of = sum(sizes), 0, []
    for size, count in zip(sizes, counts, strict=True):
        owner = max(r for r in range(world) if total * r // world <= at)
        of.append(torch.full((count,), owner))
        at += size
    return torch.cat(of) if of else torch.empty(0, dtype=torch.int64)
