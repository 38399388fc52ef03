"""ark::moe_feed_forward, by which the compiler replaces an all-to-all, experts, all-to-all sequence.

It is more general than `moe_layer`: separate gate weights, unsummed rows, and ranks whose numbers of tokens are unknown
when the graph is built. It is internal and has no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

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
    """Like `moe_layer`; `w3`, if given, holds the weights of the gate's second factor. Without `topk_weights` it
    returns [tokens, k, dim]. If `max_tokens` is -1, the ranks exchange their counts, and the host waits."""
    ark: Any = torch.ops.ark
    met = max_tokens < 0
    if met:
        max_tokens, max_rows = _bounds(topk_ids, group_name, num_experts)
    rest = (max_tokens, max_rows, met, 0)
    plain = w3 is None and w1.is_contiguous() and w2.is_contiguous()  # else the experts' own kernel would copy them
    if plain and topk_weights is not None:
        layer: Tensor = ark.moe_layer(x, topk_ids, topk_weights, w1, w2, group_name, num_experts, activation, *rest)[0]
        return layer
    rows, counts, places, rank_counts = ark.moe_dispatch(x, topk_ids, group_name, num_experts, *rest)
    y = ark.moe_experts(rows, counts, w1, w2, activation) if plain else _networks(rows, counts, w1, w3, w2, activation)
    summed = topk_weights is not None
    out: Tensor = ark.moe_gather(y, places, rank_counts, topk_weights, group_name, max_tokens, summed, 0)
    return out


def _bounds(topk_ids: Tensor, group_name: Any, num_experts: int) -> tuple[int, int]:
    """The maximum number of tokens of any rank, and of rows that any rank receives."""
    flat = topk_ids.flatten().long()
    counts = flat.new_zeros(num_experts + 2)
    counts.scatter_add_(0, torch.where(flat < 0, num_experts, flat), torch.ones_like(flat))
    counts[-1] = topk_ids.shape[0]
    world = _world_of(group_name)
    every = counts.new_empty(world * len(counts))
    dist.all_gather_into_tensor(every, counts, group=_resolve_process_group(group_name))
    every = every.view(world, -1)
    rows = every[:, :num_experts].view(world, world, -1).sum((0, 2)).amax()
    most_tokens, most_rows = torch.stack([every[:, -1].amax(), rows]).tolist()
    return int(most_tokens), int(most_rows)


def _networks(rows: Tensor, counts: Tensor, w1: Tensor, w3: Tensor | None, w2: Tensor, activation: str) -> Tensor:
    """The experts' networks with PyTorch's products, each step rounded to the dtype."""
    through = _ACTIVATIONS[activation]
    if w3 is None and w1.shape[1] != w2.shape[2]:
        w1, w3 = w1.chunk(2, 1)
    if _grouped_on_device(rows, w1, w2, *([] if w3 is None else [w3])):
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = through(torch._grouped_mm(rows, w1.transpose(1, 2), offs=ends))
        if w3 is not None:
            hidden = hidden * torch._grouped_mm(rows, w3.transpose(1, 2), offs=ends)
        return torch._grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    y = torch.zeros_like(rows)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            part = rows[first : first + count]
            hidden = through(part @ w1[expert].t())
            if w3 is not None:
                hidden = hidden * (part @ w3[expert].t())
            torch.mm(hidden, w2[expert].t(), out=y[first : first + count])
        first += count
    return y


def _grouped_on_device(rows: Tensor, *weights: Tensor) -> bool:
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (9, 0):
        return False
    aligned = all(
        w.data_ptr() % 16 == 0 and 1 in w.stride()[1:] and all(n % 8 == 0 for n in w.stride() if n != 1)
        for w in weights
    )
    return aligned and all(n % 8 == 0 for w in weights for n in w.shape[1:])


def _fake(x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, *_: Any) -> Tensor:
    return x.new_empty(x.shape if topk_weights is not None else (*topk_ids.shape, x.shape[1]))


_library: Any = torch.library.Library("ark", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "moe_feed_forward(Tensor x, Tensor topk_ids, Tensor? topk_weights, Tensor w1, Tensor? w3, Tensor w2, "
    "str group_name, int num_experts, str activation, "
    "SymInt max_tokens, SymInt max_rows) -> Tensor"
)
_library.impl("moe_feed_forward", feed_forward, "CompositeExplicitAutograd")
torch.library.register_fake("ark::moe_feed_forward", _fake)
