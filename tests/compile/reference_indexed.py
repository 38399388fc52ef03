"""The double's operators with run-time indices, written row by row from their definitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def topk(inputs: list[Tensor], attributes: dict[str, Any], out: Tensor) -> Tensor:
    dim, largest = attributes["dim"], attributes["largest"]
    if attributes["stable"]:
        order = torch.sort(inputs[0], dim=dim, descending=largest, stable=True)[1]
        return order.narrow(dim, 0, out.shape[dim])
    return torch.topk(inputs[0], out.shape[dim], dim, largest)[1]


def scan(name: str) -> Callable[[list[Tensor], dict[str, Any], Tensor], Tensor]:
    def run(inputs: list[Tensor], attributes: dict[str, Any], out: Tensor) -> Tensor:
        assert inputs[0].is_floating_point() == out.is_floating_point()
        wide = inputs[0].double() if out.is_floating_point() else inputs[0].long()
        return getattr(torch, name)(wide, attributes["dim"]).to(out.dtype)

    return run


def embedding_bag(inputs: list[Tensor], attributes: dict[str, Any], out: Tensor) -> Tensor:
    table, index, offsets = inputs[:3]
    ends = [*offsets.tolist(), *([] if attributes["include_last_offset"] else [len(index)])]
    assert ends[0] == 0 and len(ends) == len(out) + 1
    rows = []
    for begin, end in itertools.pairwise(ends):
        kept = [i for i in range(begin, end) if index[i] != attributes["padding_idx"]]
        picked = table[index[kept].long()].float()
        if len(inputs) == 4:
            assert attributes["mode"] == "sum"
            picked = picked * inputs[3][kept].float()[:, None]
        pooled = picked.amax(0) if attributes["mode"] == "max" and kept else picked.sum(0)
        rows.append(pooled / max(len(kept), 1) if attributes["mode"] == "mean" else pooled)
    return torch.stack(rows)


def experts(inputs: list[Tensor], attributes: dict[str, Any], out: Tensor) -> Tensor:
    a, table, index = inputs
    a, table = a.float(), table.float()
    if not attributes.get("runs"):
        assert index.shape == a.shape[:-1]
        return torch.einsum("...k,...kn->...n", a, table[index.long()])
    ends = index.tolist()
    rows = torch.zeros(out.shape)
    for matrix, begin, end in zip(table, [0, *ends], ends, strict=False):
        rows[begin:end] = a[begin:end] @ matrix
    return rows


def check(inputs: list[Tensor], attributes: dict[str, Any], out: Tensor) -> Tensor:
    assert bool(inputs[0]), attributes["message"]
    return inputs[0]


OPERATORS: dict[str, Callable[[list[Tensor], dict[str, Any], Tensor], Tensor]] = {
    "topk": topk,
    "cumsum": scan("cumsum"),
    "cumprod": scan("cumprod"),
    "embedding_bag": embedding_bag,
    "experts": experts,
    "check": check,
}
