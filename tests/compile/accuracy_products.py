"""Cases of products, attention and pooled embeddings (accuracy_cases.py)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accuracy_inputs import Case, at, bf16, bound, case, first, normal
from torch import Tensor

aten = torch.ops.aten
attend = torch.nn.functional.scaled_dot_product_attention


def products() -> Iterator[Case]:
    mm = aten.mm.default
    for depth in (5, 64, 1021, 4096):
        yield case(mm, f"depth {depth}", normal(33, depth), normal(depth, 47))
        yield case(mm, f"depth {depth} one row", normal(1, depth), normal(depth, 301))
        turned = (normal(depth, 33), normal(47, depth))
        yield case(mm, f"depth {depth} transposed", *turned, call=lambda a, b: mm(a.t(), b.t()))
    yield case(aten.addmm.default, "odd", normal(47), normal(33, 1021), normal(1021, 47))
    scaled = bound(aten.addmm.default, beta=0.375, alpha=1.75)
    yield case(aten.addmm.default, "scaled", normal(33, 47), normal(33, 300), normal(300, 47), call=scaled)
    yield case(aten.bmm.default, "odd", normal(3, 17, 301), normal(3, 301, 19))
    yield case(aten.baddbmm.default, "odd", normal(3, 5, 7), normal(3, 5, 301), normal(3, 301, 7))
    yield case(aten.mv.default, "odd", normal(131, 1021), normal(1021))
    yield case(aten.dot.default, "of 1021", normal(24, 1021), normal(24, 1021), call=_dots)
    runs = (normal(33, 128), normal(4, 48, 128), lambda _: torch.tensor([3, 3, 20, 33], dtype=torch.int32))
    grouped = aten._grouped_mm.default
    yield case(
        grouped, "runs", *runs, call=lambda a, w, ends: grouped(a, w.mT, ends), dtypes=(bf16,), exact=_products_of_runs
    )
    yield from _attention()
    offsets = (normal(99, 33), at(99, 600), lambda _: torch.arange(0, 600, 25))
    bag = aten._embedding_bag_forward_only.default
    for mode in range(3):
        yield case(bag, f"mode {mode}", *offsets, call=first(bound(bag, False, mode)))
    yield case(aten._embedding_bag.default, "sum", *offsets, call=first(aten._embedding_bag.default))


def averages() -> Iterator[Case]:
    average = aten.avg_pool2d.default
    yield case(average, "square", normal(2, 5, 12, 8), call=bound(average, [2, 2]))
    yield case(average, "overlapping", normal(3, 17, 11), call=bound(average, [3, 4], [2, 1]))


def convolutions() -> Iterator[Case]:
    convolution = aten.convolution.default
    wide = bound(convolution, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield case(convolution, "odd", normal(2, 19, 13, 11), normal(17, 19, 3, 3), normal(17), call=wide)
    alone = bound(convolution, [1], [4], [1], False, [0], 33)
    yield case(convolution, "depthwise", normal(1, 33, 101), normal(33, 1, 9), normal(33), call=alone)


def _dots(a: Tensor, b: Tensor) -> list[Tensor]:
    return [aten.dot.default(x, y) for x, y in zip(a.unbind(0), b.unbind(0), strict=True)]


def _products_of_runs(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    bounds = [0, *ends.tolist()]
    return torch.cat([a[b:e] @ m.t() for b, e, m in zip(bounds[:-1], bounds[1:], w, strict=True)])


def _attention() -> Iterator[Case]:
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    shapes = {"odd": (3, 7, 37, 24), "decode": (8, 1, 1021, 64), "prefill": (2, 130, 130, 40)}
    for name, (heads, queries, keys, size) in shapes.items():
        q, kv = normal(1, heads, queries, size), normal(1, heads, keys, size)
        yield case(operator, name, q, kv, kv, call=attend)
        if queries == keys:
            yield case(operator, f"{name} causal", q, kv, kv, call=bound(attend, is_causal=True))
    q, kv, mask = normal(2, 4, 9, 16), normal(2, 4, 37, 16), normal(2, 1, 9, 37)
    yield case(operator, "mask", q, kv, kv, mask, call=attend)
