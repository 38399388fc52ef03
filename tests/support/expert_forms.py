"""Expert-parallel mixtures of experts in the forms that people write. Tests compile them.

Every form is a function of tokens, the router's matrix and a rank's weights: w1 and w3 [experts, ffn, dim] and w2
[experts, dim, ffn], or all of them transposed where stated. Routers and weights are small integers, and so are products
and their sums, so that the result does not depend on the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

WORLD, EXPERTS, DIM, FFN, K = 2, 4, 8, 16, 2
LOCAL = EXPERTS // WORLD
Form = Callable[..., Any]
FORMS: dict[str, tuple[Form, str, dict[str, Any]]] = {}
LEFT: dict[str, tuple[Form, str, dict[str, Any]]] = {}


def given(rank: int, tokens: int, dtype: torch.dtype = torch.bfloat16, gated: Any = "apart", transposed: bool = False,
          experts: int = EXPERTS, k: int = 0) -> tuple[Any, ...]:  # fmt: skip
    """Returns integers, and a router that scores the experts of a token differently."""
    generator = torch.Generator().manual_seed(7 + rank)

    def numbers(*shape: int) -> Any:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)

    local = experts // WORLD
    gate = (torch.randn(DIM, experts, generator=torch.Generator().manual_seed(5))).to(dtype)
    w1, w3 = (numbers(local, (2 if gated == "halves" else 1) * FFN, DIM) for _ in range(2))
    w2 = numbers(local, DIM, FFN)
    weights = [w1, w3, w2] if gated == "apart" else [w1, w2]
    return numbers(tokens, DIM), gate, *((w.transpose(1, 2).contiguous() if transposed else w) for w in weights)


def found(operator: str, **more: Any) -> Callable[[Form], Form]:
    """Marks a form that becomes this operator."""

    def add(form: Form) -> Form:
        FORMS[form.__name__] = (form, operator, more)
        return form

    return add


def left(reason: str, **more: Any) -> Callable[[Form], Form]:
    """Marks a form that is not fused, for this reason."""

    def add(form: Form) -> Form:
        LEFT[form.__name__] = (form, reason, more)
        return form

    return add


def other_group() -> dist.ProcessGroup:
    """Returns another group of the same ranks, created before anything is compiled."""
    return _groups[0]


_groups: list[dist.ProcessGroup] = []


def make_groups() -> None:
    _groups[:] = [dist.new_group([0, 1])]


def top(x: Tensor, gate: Tensor, k: int = K) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk((x @ gate).float(), k, dim=-1)
    return torch.round(weights * 4) / 4, ids


def swiglu(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    return (F.relu(x @ w1.t()) * (x @ w3.t())) @ w2.t()


def exchanged(counts: Tensor) -> Tensor:
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    return theirs


def splits(counts: Tensor) -> list[int]:
    return counts.view(WORLD, -1).sum(1).tolist()


def grouped(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, counts: Tensor) -> Tensor:
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    gate = F.relu(torch._grouped_mm(x, w1.transpose(-2, -1), offs=ends))
    hidden = gate * torch._grouped_mm(x, w3.transpose(-2, -1), offs=ends)
    return torch._grouped_mm(hidden, w2.transpose(-2, -1), offs=ends)


@found("moe_feed_forward")
def torchtitan(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, score_before: bool = False) -> Tensor:
    """TorchTitan's router, reorderer and token dispatcher, with the permutation as PyTorch operators."""
    scores, ids = top(x, gate)
    counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS).long()
    order = torch.argsort(ids.view(-1), stable=True)
    scores = scores.view(-1)[order]
    token = (order // K).reshape(-1, 1).expand(-1, DIM)
    rows = torch.gather(x, 0, token)
    if score_before:
        rows = (rows.float() * scores.reshape(-1, 1)).to(x.dtype)
    theirs = torch.ops._c10d_functional.wait_tensor(funcol.all_to_all_single(counts, None, None, "0"))
    ins, outs = splits(counts.cpu()), splits(theirs.cpu())
    got = funcol.all_to_all_single(rows, outs, ins, "0")
    whose = torch.repeat_interleave(torch.arange(LOCAL, device=x.device).repeat(WORLD), theirs, output_size=sum(outs))
    turned = torch.argsort(whose, stable=True)
    y = grouped(got[turned], w1, w3, w2, theirs.view(WORLD, -1).sum(0))
    back = torch.empty_like(y)
    back[turned] = y
    rows = funcol.all_to_all_single(back, ins, outs, "0")
    if not score_before:
        rows = (rows.float() * scores.reshape(-1, 1)).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, token, rows)


@found("moe_feed_forward")
def torchtitan_scores_before(*given: Tensor) -> Tensor:
    """Rows are weighted before they are sent, so the operator starts with weighted rows."""
    return torchtitan(*given, score_before=True)


@found("moe_feed_forward", dtype=torch.float32, gated="halves")
def megatron(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Megatron's form: chunks sorted by expert with split and cat, a loop over local experts, gate and up in one
    weight.
    """
    weights, ids = top(x, gate)
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    theirs = exchanged(counts)
    ins, outs = splits(counts), splits(theirs)
    got = funcol.all_to_all_single(x.index_select(0, order // K), outs, ins, "0")
    chunks = got.split(theirs.tolist())
    rows = torch.cat([chunks[r * LOCAL + e] for e in range(LOCAL) for r in range(WORLD)])
    ys = []
    for e, part in enumerate(rows.split(theirs.view(WORLD, LOCAL).sum(0).tolist())):
        first, second = (part @ w1[e].t()).chunk(2, -1)
        ys.append((F.relu(first) * second) @ w2[e].t())
    chunks = torch.cat(ys).split(theirs.view(WORLD, LOCAL).t().flatten().tolist())
    back = torch.cat([chunks[e * WORLD + r] for r in range(WORLD) for e in range(LOCAL)])
    rows = funcol.all_to_all_single(back, ins, outs, "0")
    unsorted = torch.empty_like(rows).index_copy(0, order, rows)
    return (unsorted.view(-1, K, DIM) * weights.unsqueeze(-1)).sum(1)


@found("moe_feed_forward", dtype=torch.float32, k=3)
def ids_are_sent(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """Rows travel with their experts' numbers. Three choices are added in the order of the experts."""
    weights, ids = top(x, gate, 3)
    chosen, order = ids.flatten().sort(stable=True)
    counts = F.one_hot(chosen, EXPERTS).sum(0)
    theirs = exchanged(counts)
    ins, outs = splits(counts), splits(theirs)
    got = funcol.all_to_all_single(x[order // 3], outs, ins, "0")
    whose = funcol.all_to_all_single(chosen, outs, ins, "0") % LOCAL
    turned = whose.argsort()
    parts = got[turned].split(theirs.view(WORLD, LOCAL).sum(0).tolist())
    y = torch.cat([swiglu(part, w1[e], w3[e], w2[e]) for e, part in enumerate(parts)])
    rows = funcol.all_to_all_single(y[turned.argsort()], ins, outs, "0")
    rows = rows * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, order // 3, rows)


@found("moe_feed_forward", experts=WORLD, dtype=torch.float32, gated=None)
def one_expert_a_rank(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    weights, ids = top(x, gate, 1)
    order = ids.view(-1).argsort()
    counts = (ids == torch.arange(WORLD, device=x.device)).long().sum(0)
    ins, outs = counts.tolist(), exchanged(counts).tolist()
    got = funcol.all_to_all_single(x[order], outs, ins, "0")
    y = F.gelu(got @ w1[0].t()) @ w2[0].t()
    rows = funcol.all_to_all_single(y, ins, outs, "0")
    return rows[order.argsort()] * weights


@found("moe_feed_forward", dtype=torch.float32, gated=None)
def unlike_ends(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Any:
    """The returned rows and the counts have other readers, and rows are sorted by a scatter."""
    _, ids = top(x, gate)
    order = ids.view(-1).argsort(stable=True)
    counts = torch.histc(ids.view(-1).float(), EXPERTS, 0, EXPERTS - 1).to(torch.int32)
    theirs = exchanged(counts)
    ins, outs = splits(counts), splits(theirs)
    got = funcol.all_to_all_single(x[order // K] * 2, outs, ins, "0")
    whose = torch.arange(LOCAL, device=x.device).repeat(WORLD).repeat_interleave(theirs)
    turned = whose.argsort(stable=True)
    rows = got.index_select(0, turned)
    ends = theirs.view(WORLD, LOCAL).sum(0).cumsum(0).tolist()
    y = torch.cat(
        [F.relu(rows[a:b] @ w1[e].t()) @ w2[e].t() for e, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
    )
    rows = funcol.all_to_all_single(y[turned.argsort()], ins, outs, "0")
    return rows.view(-1, 2, DIM).amax(1), theirs * 2


@found("moe_layer", dtype=torch.float32, gated=None)
def slots_sorted(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return slots_with_bmm(x, gate, w1.transpose(1, 2), w2.transpose(1, 2))


@found("moe_feed_forward", dtype=torch.float32, gated=None, transposed=True)
def slots_with_bmm(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Slots for every choice, and one bmm over all slots."""
    weights, ids = top(x, gate)
    chosen, order = ids.flatten().sort(stable=True)
    counts = F.one_hot(ids.flatten(), EXPERTS).sum(0)
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(chosen), device=x.device) - starts[chosen]
    buffer = x.new_zeros(EXPERTS, len(chosen), DIM)
    buffer[chosen, place] = x[order // K]
    got = funcol.all_to_all_single(buffer.view(WORLD, -1, DIM), None, None, "0")
    got = got.view(WORLD, LOCAL, -1, DIM).transpose(0, 1).reshape(LOCAL, -1, DIM)
    y = torch.bmm(F.gelu(torch.bmm(got, w1)), w2)
    back = funcol.all_to_all_single(y.view(LOCAL, WORLD, -1, DIM).transpose(0, 1).contiguous(), None, None, "0")
    rows = back.view(EXPERTS, -1, DIM)[chosen, place] * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, order // K, rows)


@left("no feed-forward networks", dtype=torch.float32, gated=None, transposed=True)
def slots_with_biases(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Each token has a slot in each expert."""
    _, ids = top(x, gate)
    flat, token = ids.flatten(), torch.arange(len(x), device=x.device).repeat_interleave(K)
    buffer = x.new_zeros(EXPERTS, len(x), DIM)
    buffer[flat, token] = x.repeat_interleave(K, 0)
    got = exchanged(buffer).view(WORLD, LOCAL, -1, DIM).transpose(0, 1).flatten(1, 2)
    y = torch.bmm(F.relu(torch.bmm(got, w1) + 1), w2)
    back = exchanged(y.view(LOCAL, WORLD, -1, DIM).transpose(0, 1).reshape(EXPERTS, -1, DIM))
    return back[flat, token].view(-1, K, DIM).amax(1)


@found("moe_feed_forward", dtype=torch.float32, transposed=True)
def slots_by_one_hot(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, each: int = 0) -> Tensor:
    """Places are running sums of one-hot choices, slots are numbered, experts are a loop."""
    weights, ids = top(x, gate)
    flat, each = ids.flatten(), each or len(x)  # topk names an expert at most once per token
    hot = F.one_hot(flat, EXPERTS)
    slot = flat * each + (hot.cumsum(0) * hot).sum(-1) - 1
    buffer = x.new_zeros(EXPERTS * each, DIM).index_copy_(0, slot, x.repeat_interleave(K, 0))
    got = exchanged(buffer)
    got = got.view(WORLD, LOCAL, each, DIM).permute(1, 0, 2, 3).reshape(LOCAL, WORLD * each, DIM)
    y = torch.stack([swiglu(got[e], w1[e].t(), w3[e].t(), w2[e].t()) for e in range(LOCAL)])
    back = exchanged(y.view(LOCAL, WORLD, each, DIM).permute(1, 0, 2, 3).reshape(EXPERTS * each, DIM))
    return (back[slot].view(-1, K, DIM) * weights.unsqueeze(-1)).sum(1)


@found("moe_feed_forward", dtype=torch.float32, transposed=True)
def slots_of_tokens(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, change: Any = None) -> Tensor:
    """The token's number is its place, which is sufficient for topk's choices."""
    _, ids = top(x, gate)
    ids = ids if change is None else change(ids)
    flat, place = ids.flatten(), torch.arange(len(x), device=x.device).repeat_interleave(K)
    buffer = x.new_zeros(EXPERTS, len(x), DIM)
    buffer[flat, place] = x.repeat_interleave(K, 0)
    got = exchanged(buffer).view(WORLD, LOCAL, -1, DIM).transpose(0, 1).flatten(1, 2)
    y = torch.stack([swiglu(got[e], w1[e].t(), w3[e].t(), w2[e].t()) for e in range(LOCAL)])
    return exchanged(y.view(LOCAL, WORLD, -1, DIM).transpose(0, 1).reshape(EXPERTS, -1, DIM))[flat, place]


def _one_expert(x: Tensor, gate: Tensor, sent: Any, network: Any, back: Any = None) -> Tensor:
    """One expert per rank. The caller says what is sent, what the expert computes, and what is sent back."""
    _, ids = top(x, gate, 1)
    order = ids.view(-1).argsort(stable=True)
    counts = F.one_hot(ids.view(-1), WORLD).sum(0)
    ins, outs = counts.tolist(), exchanged(counts).tolist()
    rows = x[order]
    got = funcol.all_to_all_single(sent(rows), outs, ins, "0")
    y = network(got)
    return funcol.all_to_all_single(y if back is None else back(y), ins, outs, "0") * 2


@left("no feed-forward networks", experts=WORLD, dtype=torch.float32, gated=None)
def bias(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return _one_expert(x, gate, lambda rows: rows, lambda got: (F.relu(got @ w1[0].t()) + 1) @ w2[0].t())


@left("no feed-forward networks", experts=WORLD, dtype=torch.float32, gated=None)
def another_activation(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return _one_expert(x, gate, lambda rows: rows, lambda got: F.relu6(got @ w1[0].t()) @ w2[0].t())


@left("no feed-forward networks", experts=WORLD, gated="apart")
def rounded_elsewhere(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The product of gate and up is float32, and rounded once."""

    def network(got: Tensor) -> Tensor:
        hidden = F.silu((got @ w1[0].t()).float()) * (got @ w3[0].t())
        return hidden.to(got.dtype) @ w2[0].t()

    return _one_expert(x, gate, lambda rows: rows, network)


@left("read by others, too", experts=WORLD, dtype=torch.float32, gated=None)
def received_rows_read_too(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Any:
    kept = []
    out = _one_expert(x, gate, lambda rows: rows, lambda got: kept.append(got) or F.relu(got @ w1[0].t()) @ w2[0].t())
    return out, kept[0]


@left("another group", experts=WORLD, dtype=torch.float32, gated=None)
def back_over_another_group(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    _, ids = top(x, gate, 1)
    order = ids.view(-1).sort(stable=True)[1]
    counts = F.one_hot(ids.view(-1), WORLD).sum(0)
    ins, outs = counts.tolist(), exchanged(counts).tolist()
    y = F.relu(funcol.all_to_all_single(x[order], outs, ins, "0") @ w1[0].t()) @ w2[0].t()
    return funcol.all_to_all_single(y, ins, outs, other_group())


@left("split sizes are not known", experts=WORLD, dtype=torch.float32, gated=None)
def sizes_from_elsewhere(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Split sizes count rows of x that are positive. No known sort of choices produces them."""
    first = (x[:, 0] > 0).long()
    order = first.argsort(stable=True)
    counts = torch.stack([(1 - first).sum(), first.sum()])
    ins, outs = counts.tolist(), exchanged(counts).tolist()
    y = F.relu(funcol.all_to_all_single(x[order], outs, ins, "0") @ w1[0].t()) @ w2[0].t()
    return funcol.all_to_all_single(y, ins, outs, "0")


@left("multiplies rows of several experts", dtype=torch.float32, gated=None)
def experts_mixed_up(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Received rows are split by ranks instead of experts."""
    _, ids = top(x, gate, 1)
    order = ids.view(-1).argsort(stable=True)
    counts = F.one_hot(ids.view(-1), EXPERTS).sum(0)
    ins, outs = splits(counts), splits(exchanged(counts))
    got = funcol.all_to_all_single(x[order], outs, ins, "0")
    y = torch.cat([F.relu(part @ w1[e].t()) @ w2[e].t() for e, part in enumerate(got.split(outs))])
    return funcol.all_to_all_single(y, ins, outs, "0")


def _sorted_and_sent(x: Tensor, gate: Tensor) -> Any:
    """Returns received rows, counts sent and received, and a function that sends rows back."""
    _, ids = top(x, gate)
    order = ids.view(-1).argsort(stable=True)
    counts = F.one_hot(ids.view(-1), EXPERTS).sum(0)
    theirs = exchanged(counts)
    ins, outs = splits(counts), splits(theirs)
    got = funcol.all_to_all_single(x[order // K], outs, ins, "0")
    return got, counts, theirs, lambda y: funcol.all_to_all_single(y, ins, outs, "0")


@left("takes its rows in an order that is not known", dtype=torch.float32, gated=None)
def sorted_twice(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Rows go back in the order that brought them to their experts, instead of its inverse."""
    got, _, theirs, back = _sorted_and_sent(x, gate)
    turned = torch.arange(LOCAL, device=x.device).repeat(WORLD).repeat_interleave(theirs).argsort(stable=True)
    parts = got[turned].split(theirs.view(WORLD, LOCAL).sum(0).tolist())
    y = torch.cat([F.relu(part @ w1[e].t()) @ w2[e].t() for e, part in enumerate(parts)])
    return back(y[turned])


@left("splits its rows at places that are not known", dtype=torch.float32, gated=None)
def chunks_in_another_order(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Chunks are concatenated from the last rank to the first, and split as if they were sorted by expert."""
    got, _, theirs, back = _sorted_and_sent(x, gate)
    chunks = got.split(theirs.tolist())
    rows = torch.cat([chunks[r * LOCAL + e] for r in reversed(range(WORLD)) for e in range(LOCAL)])
    parts = rows.split(theirs.view(WORLD, LOCAL).flip(0).sum(1).tolist())
    y = torch.cat([F.relu(part @ w1[e].t()) @ w2[e].t() for e, part in enumerate(parts)])
    pieces = y.split(theirs.view(WORLD, LOCAL).flip(0).flatten().tolist())
    return back(torch.cat([pieces[(WORLD - 1 - r) * LOCAL + e] for r in range(WORLD) for e in range(LOCAL)]))


@left("the ends of groups of", gated=None)
def ends_that_are_not_the_rows(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The first group ends one row early, if it has any."""
    got, _, theirs, back = _sorted_and_sent(x, gate)
    turned = torch.arange(LOCAL, device=x.device).repeat(WORLD).repeat_interleave(theirs).argsort(stable=True)
    each = theirs.view(WORLD, LOCAL).sum(0)
    ends = each.cumsum(0).sub((each > 0).long() * torch.tensor([1, 0], device=x.device)).to(torch.int32)
    hidden = F.relu(torch._grouped_mm(got[turned], w1.transpose(-2, -1), offs=ends))
    y = torch._grouped_mm(hidden, w2.transpose(-2, -1), offs=ends)
    return back(y[turned.argsort()])


@left("two of its rows could be put into the same slot", dtype=torch.float32, transposed=True)
def slots_of_anybody(x: Tensor, gate: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The experts do not come from topk: a token could name one twice."""
    return slots_of_tokens(x, gate, w1, w3, w2, lambda ids: ids.clamp(max=EXPERTS - 1))


@left("some could be dropped", dtype=torch.float32, transposed=True)
def slots_that_may_not_do(*given: Tensor) -> Tensor:
    return slots_by_one_hot(*given, each=3)
