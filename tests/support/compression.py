"""Compressed collectives in plain PyTorch, the tests' oracle: the arithmetic of torch.ops.ark.compressed_*.

Every rank gets all ranks' data by an exact all_gather and simulates all of them. Parts, and the random bits of
stochastic rounding, may differ from the operators': with nearest rounding, a value differs only if another bucket's
limits decide.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ark_torch.distributed import compression


def quantised(values: Tensor, bits: int, bucket: int, format: str, rounding: str, seed: int) -> Tensor:
    """Returns float32 `values` [n] after quantisation."""
    whole = len(values) // bucket * bucket
    noise = torch.rand(len(values), generator=torch.Generator().manual_seed(seed & (2**62 - 1)))
    noise = noise if rounding == "stochastic" else torch.full_like(noise, 0.5)
    parts = [
        _rows(values[part].view(-1, width), noise[part].view(-1, width), bits, format)
        for part, width in ((slice(0, whole), bucket), (slice(whole, None), len(values) - whole))
        if width and values[part].numel()
    ]
    return torch.cat([part.reshape(-1) for part in parts])


def _rows(rows: Tensor, noise: Tensor, bits: int, format: str) -> Tensor:
    """Quantises rows, one bucket each."""
    if format == "fp8":
        scale = rows.abs().amax(1, keepdim=True) / 448
        scale = scale.where(scale > 0, 1.0)
        return (rows / scale).to(torch.float8_e4m3fn).float() * scale
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    codes = ((rows - low) / step.where(step > 0, 1.0) + noise).floor().clamp(0, 2**bits - 1)
    return (low + codes * step).where((high - low).isfinite(), float("nan"))


def segments(values: Tensor, numel: Sequence[int], bits: Sequence[int], bucket: Sequence[int], *rest: object) -> Tensor:
    """Like `quantised`, segment by segment. 0 bits means exact."""
    parts = values.split(list(numel))
    each = zip(parts, bits, bucket, strict=True)
    return torch.cat([quantised(p, b, size, *rest) if b else p.clone() for p, b, size in each])  # type: ignore


def _everywhere(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    result = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(result, tensor.contiguous(), group=group)
    return result


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _taken(input: Tensor, residual: Tensor | None, numel: list[int], bits: list[int], rows: int, args: tuple) -> Tensor:
    """Returns what this rank sends, [rows * sum(numel)] in float32, and updates the residual."""
    full = input.float() if residual is None else input.float() + residual
    sent = torch.cat([segments(row, numel, bits, *args) for row in full.view(rows, -1)])
    if residual is not None:
        residual.copy_((full - sent).nan_to_num(0.0, 0.0, 0.0))
    return sent


def compressed_all_reduce(
    input: Tensor, residual: Tensor | None, numel: list[int], bits: list[int], bucket: list[int], format: str,
    rounding: str, seed: int, op: str, group: str,
) -> Tensor:  # fmt: skip
    of = _group(group)
    sent = _taken(input, residual, numel, bits, 1, (bucket, format, rounding, seed * 1000 + of.rank()))
    total = torch.zeros_like(sent)
    for one in _everywhere(sent, of):
        total += one
    mean = total / of.size() if op == "avg" else total
    back = segments(mean, numel, bits, bucket, format, rounding, seed * 1000 + of.size())
    if residual is not None:
        lost = (mean - back).nan_to_num(0.0, 0.0, 0.0) * (of.size() if op == "avg" else 1)
        first, last = (len(lost) * part // of.size() for part in (of.rank(), of.rank() + 1))
        residual[first:last] += lost[first:last]
    return back.to(input.dtype)


def compressed_reduce_scatter(
    input: Tensor, residual: Tensor | None, numel: list[int], bits: list[int], bucket: list[int], format: str,
    rounding: str, seed: int, op: str, group: str,
) -> Tensor:  # fmt: skip
    of = _group(group)
    sent = _taken(input, residual, numel, bits, of.size(), (bucket, format, rounding, seed * 1000 + of.rank()))
    total = torch.zeros(sum(numel))
    for one in _everywhere(sent, of):
        total += one.view(of.size(), -1)[of.rank()]
    return (total / of.size() if op == "avg" else total).to(input.dtype)


def compressed_all_gather(
    input: Tensor, numel: list[int], bits: list[int], bucket: list[int], format: str, rounding: str, seed: int,
    group: str,
) -> Tensor:  # fmt: skip
    of = _group(group)
    sent = segments(input.float(), numel, bits, bucket, format, rounding, seed * 1000 + of.rank())
    return torch.cat(_everywhere(sent, of)).to(input.dtype)


class Heard(logging.Handler):
    """Collects what the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("ark_torch").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def of(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]


def hooked(model: nn.Module, options: dict[str, Any] | None = None, **settings: Any) -> tuple[DDP, compression.State]:
    ddp = DDP(model, **(options or {}))
    state = compression.State(module=ddp, **settings)
    ddp.register_comm_hook(state, compression.hook)
    return ddp, state


def mean(gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
