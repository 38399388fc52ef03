"""ark::moe_feed_forward, which the compiler puts in the place of all-to-all, experts, all-to-all.

More than `moe_layer` takes: weights of a gate and of its factor apart, rows that are not summed, ranks of which nobody
knows when a graph is made how many tokens they have. Of no user's concern, and without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ark_torch.ops.moe import _world_of

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def feed_forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    w1: Tensor,
    w3: Tensor | None,
    w2: Tensor,
    group_name: str,
    num_experts: int,
    activation: str,
    max_tokens: int,
    max_rows: int,
) -> Tensor:
    """As `moe_layer`, with `w3` the weights of what the activation of `w1`'s rows is multiplied by; without weights of
    the choices [tokens, k, dim]. A `max_tokens` of -1: ranks tell each other."""
    ark: Any = torch.ops.ark
    layer = (topk_weights, w1, w2, activation) if topk_weights is not None and w3 is None else (None, None, None, "")
    met = max_tokens < 0
    if met:
        max_tokens = max(ark.moe_layout(x, topk_ids, group_name, num_experts, -1, 0, *layer))
        max_rows = _world_of(group_name) * max_tokens * topk_ids.shape[1]
    rest = (max_tokens, max_rows, met, 0)
    if layer[0] is not None:
        out: Tensor = ark.moe_layer(x, topk_ids, topk_weights, w1, w2, group_name, num_experts, activation, *rest)[0]
        return out
    rows, counts, places, rank_counts = ark.moe_dispatch(x, topk_ids, group_name, num_experts, *rest)
    y = (
        ark.moe_experts(rows, counts, w1, w2, activation)
        if w3 is None
        else _gated(rows, counts, w1, w3, w2, activation)
    )
    summed = topk_weights is not None
    out = ark.moe_gather(y, places, rank_counts, topk_weights, group_name, max_tokens, summed, 0)
    return out


def _gated(rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, activation: str) -> Tensor:
    """The experts' networks, each step rounded to the dtype."""
    through = _ACTIVATIONS[activation]
    if _grouped_on_device(rows, w1, w2):
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, factor = (torch._grouped_mm(rows, w.transpose(1, 2), offs=ends) for w in (w1, w3))
        return torch._grouped_mm(through(gate) * factor, w2.transpose(1, 2), offs=ends)
    y = torch.zeros_like(rows)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            part = rows[first : first + count]
            hidden = through(part @ w1[expert].t()) * (part @ w3[expert].t())
            torch.mm(hidden, w2[expert].t(), out=y[first : first + count])
        first += count
    return y


def _grouped_on_device(rows: Tensor, w1: Tensor, w2: Tensor) -> bool:
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (9, 0):
        return False
    aligned = all(
        w.data_ptr() % 16 == 0 and 1 in w.stride()[1:] and all(n % 8 == 0 for n in w.stride() if n != 1)
        for w in (w1, w2)
    )
    return aligned and rows.shape[1] % 8 == 0 and w1.shape[1] % 8 == 0


def _fake(x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(x.shape if topk_weights is not None else (*topk_ids.shape, x.shape[1]))


_library: Any = torch.library.Library("ark", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "moe_feed_forward(Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor w1, Tensor? w3, Tensor w2, "
    "str group_name, int num_experts, str activation, "
    "int max_tokens, int max_rows) -> Tensor"
)
_library.impl("moe_feed_forward", feed_forward, "CompositeExplicitAutograd")
torch.library.register_fake("ark::moe_feed_forward", _fake)
