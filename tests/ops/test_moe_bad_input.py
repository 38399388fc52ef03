"""moe_dispatch, moe_combine, moe_layer on CPU ranks: refused input, with errors on all ranks at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.groups import ark_only
from support.launcher import run_ranks
from support.products import same
from support.rank import Rank

from ark_torch.ops import moe_combine, moe_dispatch, moe_layer

pytestmark = [ark_only]


def _arguments(what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of moe_layer, and of moe_dispatch alone."""
    x, ids, weights = torch.ones(4, 3), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    w1, w2 = torch.ones(1, 10, 3), torch.ones(1, 3, 5)
    of = {"x": x, "topk_ids": ids, "topk_weights": weights, "w1": w1, "w2": w2}
    wrong = ids.clone()
    wrong[2, 1] = -2 if what == "below" else 2
    of |= {
        "": {},
        "id": {"topk_ids": wrong},
        "below": {"topk_ids": wrong},
        "ids": {"topk_ids": ids.float()},
        "shape": {"topk_ids": ids[:3]},
        "flat": {"topk_ids": ids[:, 0]},
        "dims": {"x": x[None]},
        "dtype": {"x": x.long()},
        "device": {"topk_ids": ids.to("meta")},
        "tokens": {"max_tokens": 3},
        "w1": {"w1": w1[..., :2]},
        "w2": {"w2": w2.double()},
        "half": {"w1": w1[:, :7]},
        "activation": {"activation": "swish"},
        "weights": {"topk_weights": weights[:, :1]},
        "integers": {"topk_weights": weights.long()},
    }[what]
    return of, {}


BAD: dict[str, tuple[str, type[Exception]]] = {
    "id": (r"topk_ids\[2\]\[1\] is 2, and there are 2 experts", IndexError),
    "below": (r"topk_ids\[2\]\[1\] is -2, and there are 2 experts", IndexError),
    "ids": (r"topk_ids is torch.float32", TypeError),
    "shape": (r"topk_ids is \[3, 2\] and x is \[4, 3\]", ValueError),
    "flat": (r"topk_ids is \[4\]", ValueError),
    "dims": (r"x is \[1, 4, 3\], not a matrix", ValueError),
    "dtype": (r"x is torch.int64 on cpu", TypeError),
    "tokens": (r"x has 4 rows, and max_tokens is 3", ValueError),
    "w1": (r"w1 is \[1, 10, 2\]", ValueError),
    "w2": (r"w2 is torch.float64 but x is torch.float32", TypeError),
    "half": (r"w1 is \[1, 7, 3\] and w2 is \[1, 3, 5\]", ValueError),
    "activation": (r"activation is 'swish'", ValueError),
    "weights": (r"topk_weights is \[4, 1\] on cpu, and topk_ids is \[4, 2\]", ValueError),
    "integers": (r"topk_weights is torch.int64", TypeError),
}
OF_THE_LAYER = ("w1", "w2", "half", "activation", "weights", "integers")


def _bad(rank: Rank) -> None:
    """One rank's mistake is an error on all ranks at once, and the group still works."""
    rank.init(timeout=20)
    for what, (text, kind) in BAD.items():
        for name in ("moe_layer",) if what in OF_THE_LAYER else ("moe_layer", "moe_dispatch"):
            culprit = rank.rank == 1
            of, _ = _arguments(what if culprit else "")
            if what == "tokens":
                of["max_tokens"] = 3 if culprit else 4
            with pytest.raises(kind if culprit else dist.DistBackendError) as caught:
                if name == "moe_layer":
                    moe_layer(**of)
                else:
                    moe_dispatch(
                        **{key: of[key] for key in of if key in ("x", "topk_ids", "max_tokens")}, num_experts=2
                    )
            assert name in str(caught.value) and f"[rank {rank.rank}]" in str(caught.value), caught.value
            assert re.search(text if culprit else "rank 1 refused its arguments", str(caught.value)), caught.value
            of, _ = _arguments("")
            assert moe_layer(**of, activation="relu").unique().tolist() == [2 * 5 * 9.0]


def test_bad_input() -> None:
    run_ranks(_bad, 2)


def _bad_combine(rank: Rank) -> None:
    rank.init(timeout=20)
    culprit = rank.rank == 1
    x, ids, weights = torch.ones(4, 3), torch.tensor([[0, 1]] * 4), torch.ones(4, 2)
    rows, _, handle = moe_dispatch(x, ids, num_experts=2)
    other = moe_dispatch(x, torch.zeros_like(ids), num_experts=2)[2]
    of_more = handle._replace(places=torch.cat([handle.places] * 2, 1))
    cases: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
        "weights": ((rows, handle, weights[:2]), ValueError, r"topk_weights is \[2, 2\] on cpu, and topk_ids is"),
        "few": ((rows[:3], handle, weights), dist.DistBackendError, "another number of rows of y"),
        "dims": ((rows[0], handle, weights), ValueError, r"y is \[3\]"),
        "dtype": ((rows.long(), handle, weights), TypeError, "y is torch.int64"),
        "handle": ((rows, other, weights), dist.DistBackendError, "another handle"),
        "places": ((rows, handle._replace(places=ids), weights), ValueError, r"the handle \(places \[4, 2\]"),
        "tokens": ((rows, of_more, weights), ValueError, "8 tokens and a max_tokens of 4"),
    }  # fmt: skip
    for what, (arguments, kind, text) in cases.items():
        expected = kind if culprit else dist.DistBackendError
        with pytest.raises(expected) as caught:
            moe_combine(*(arguments if culprit else (rows, handle, weights)))
        wanted = text if culprit or kind is dist.DistBackendError else "rank 1 refused its arguments"
        assert "moe_combine" in str(caught.value) and re.search(wanted, str(caught.value)), (what, caught.value)
    mixed = handle._replace(places=torch.zeros_like(handle.places))
    with pytest.raises(ValueError, match="places and rank_counts are not of one dispatch"):
        moe_combine(rows, mixed, weights)
    with pytest.raises(ValueError, match="get 8 rows, and max_rows is 7"):
        moe_dispatch(x, ids, num_experts=2, max_rows=7)
    with pytest.raises(ValueError, match="the experts of rank 0 get 16 rows, and max_rows is 8"):
        moe_dispatch(x, torch.zeros_like(ids), num_experts=2, max_rows=8)
    pair = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="of a dispatch over another group"):
        moe_combine(rows, handle, weights, pair)
    same(moe_combine(rows, handle, weights, dist.group.WORLD), x * 2, "the group goes on")


def test_bad_input_of_combine() -> None:
    run_ranks(_bad_combine, 2)


def _disagree(rank: Rank) -> None:
    rank.init(timeout=20)
    odd = rank.rank == 1
    ids = torch.tensor([[0, 1]] * 4)
    texts: dict[str, dict[str, Any]] = {
        "dtype": {"x": torch.ones(4, 3, dtype=torch.float16 if odd else torch.float32)},
        "number of columns of x": {"x": torch.ones(4, 4 if odd else 3)},
        "number of choices": {"topk_ids": ids[:, :1] if odd else ids},
        "num_experts": {"num_experts": 4 if odd else 2},
        "max_rows": {"max_rows": 20 if odd else 16},
        "max_tokens": {"max_tokens": 9 if odd else 8, "max_rows": 16},
        "gradients": {"x": torch.ones(4, 3).requires_grad_(odd)},
    }
    for text, more in texts.items():
        of = {"x": torch.ones(4, 3), "topk_ids": ids, "num_experts": 2} | more
        with pytest.raises(dist.DistBackendError, match=f"moe_dispatch.*rank 1 has another .*{text}"):
            moe_dispatch(**of)
    with pytest.raises(dist.DistBackendError, match=r"another (way of meeting|max_tokens)"):
        moe_dispatch(torch.ones(4, 3), ids, num_experts=2, max_tokens=4 if odd else None)


def test_ranks_that_disagree() -> None:
    run_ranks(_disagree, 2)


def _no_such_group(rank: Rank) -> None:
    rank.init("gloo")
    with pytest.raises(ValueError, match="backend is not 'ark'"):
        moe_dispatch(torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.int64), num_experts=2)


def test_another_backend() -> None:
    run_ranks(_no_such_group, 2)


def test_ways_to_multiply() -> None:
    rows, counts, w1, w2 = torch.ones(4, 8), torch.tensor([1, 2]), torch.ones(2, 6, 8), torch.ones(2, 8, 3)
    by = torch.ops.ark.moe_experts_by
    wanted = torch.ops.ark.moe_experts(rows, counts, w1, w2, "relu")
    assert wanted[:3].unique().tolist() == [3 * 64.0]
    for products in ("auto", "library"):
        assert torch.equal(by(rows, counts, w1, w2, "relu", products), wanted)
    for products in ("kernel", "mixed", "fast"):
        with pytest.raises(ValueError, match=f"products is '{products}' for torch.float32 on cpu.*Pass 'auto' or"):
            by(rows, counts, w1, w2, "relu", products)
