"""Every operation that writes a tensor increments its version, so that autograd refuses what was saved before.

This includes operations where Gloo forgets it. Tensors that are only read, such as the root's in a broadcast, keep
their version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.launcher import run_ranks
from support.rank import Rank
from torch import Tensor


def _batch(out: Tensor, x: Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out, peer)]):
        work.wait()


def _coalesced(operation: Callable[[Tensor], Any], tensors: list[Tensor]) -> None:
    with dist._coalescing_manager():
        for one in tensors:
            operation(one)


def _all_versions(rank: Rank) -> None:
    rank.init()
    me, peer = rank.rank, 1 - rank.rank
    ones = torch.ones
    # Name, tensors written on this rank, tensors only read, the call.
    cases: list[tuple[str, list[Tensor], list[Tensor], Callable[[list[Tensor], list[Tensor]], Any]]] = [
        ("all_reduce", [ones(4)], [], lambda w, r: dist.all_reduce(w[0])),
        ("all_reduce, strided", [ones(4, 2)[:, 0]], [], lambda w, r: dist.all_reduce(w[0])),
        ("all_reduce, coalesced", [ones(4), ones(3)], [], lambda w, r: _coalesced(dist.all_reduce, w)),
        ("all_gather", [ones(4), ones(4)], [ones(4)], lambda w, r: dist.all_gather(w, r[0])),
        ("all_gather_into_tensor", [ones(8)], [ones(4)], lambda w, r: dist.all_gather_into_tensor(w[0], r[0])),
        ("reduce_scatter", [ones(4)], [ones(4), ones(4)], lambda w, r: dist.reduce_scatter(w[0], r)),
        ("reduce_scatter_tensor", [ones(4)], [ones(8)], lambda w, r: dist.reduce_scatter_tensor(w[0], r[0])),
        ("all_to_all_single", [ones(4)], [ones(4)], lambda w, r: dist.all_to_all_single(w[0], r[0])),
        ("all_to_all", [ones(2), ones(2)], [ones(2), ones(2)], dist.all_to_all),
        ("batch_isend_irecv", [ones(4)], [ones(4)], lambda w, r: _batch(w[0], r[0], peer)),
    ]
    x = ones(4)
    cases.append(("broadcast", [x] if me else [], [] if me else [x], lambda w, r: dist.broadcast((w + r)[0], 0)))
    cases.append(
        ("reduce", [] if me else [x.clone()], [x.clone()] if me else [], lambda w, r: dist.reduce((w + r)[0], 0))
    )
    parts = [ones(4), ones(4)] if me == 0 else []
    cases.append(("scatter", [ones(4)], parts, lambda w, r: dist.scatter(w[0], r or None, src=0)))
    got = [ones(4), ones(4)] if me == 0 else []
    cases.append(("gather", got, [ones(4)], lambda w, r: dist.gather(r[0], w or None, dst=0)))
    for name, written, read, call in cases:
        before = [t._version for t in written], [t._version for t in read]
        call(written, read)
        assert all(t._version > v for t, v in zip(written, before[0], strict=True)), f"{name}: written, version kept"
        assert [t._version for t in read] == before[1], f"{name}: only read, version raised"


def _saved_then_overwritten(rank: Rank) -> None:
    rank.init()
    w = torch.ones(4, requires_grad=True)
    z = torch.ones(4)
    loss = (w * z).sum()
    dist.all_gather_into_tensor(z, torch.full((2,), 5.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)  # an inference tensor, outside of inference mode: it has no version but is still written
    assert tensor.tolist() == [4.0] * 4


def test_versions() -> None:
    run_ranks(_all_versions, 2)


def test_saved_then_overwritten() -> None:
    run_ranks(_saved_then_overwritten, 2)
