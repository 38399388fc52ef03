"""Programs over many rows: norms, reductions, a rotary embedding, a mask, pointwise operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def inputs(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    x, y = (torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(2))
    weight, bias = (torch.randn(columns, dtype=dtype, device=device) for _ in range(2))
    return x, y, weight, bias, torch.randint(0, rows, (columns,), device=device)


def programs(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    rows, columns = x.shape
    residual = x + y
    heads = x.view(rows, 2, columns // 2)
    a, b = heads.chunk(2, -1)
    turned = heads * weight[: columns // 2] + torch.cat((-b, a), -1) * bias[: columns // 2]
    return (
        residual,
        F.layer_norm(residual, (columns,), weight, bias),
        F.rms_norm(y, (columns,), weight, 1e-5),
        (x * 2).softmax(-1),
        x.amax(-1),
        y.argmax(-1),
        (x > y).any(-1),
        turned,
        F.gelu(x) * torch.sigmoid(y),
        F.silu(y) + bias,
        places[None, :] <= torch.arange(rows, device=x.device)[:, None],
        torch.where(x > 0, x, y.abs()),
    )
